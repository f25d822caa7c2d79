// The table of tabs. A tab is a component of its own folder; it is shown for the runs that have such a thing.

import type { FunctionComponent } from "preact";

import type { RunOverview, Tick } from "./api";
import { CompareTab } from "./compare/tab";
import { LiveTab } from "./live/tab";
import { RolloutsTab } from "./rollouts/tab";
import type { Route } from "./routes";
import { RunTab } from "./run/tab";
import { TimelineTab } from "./timeline/tab";
import { WeightsTab } from "./weights/tab";

export interface TabProps {
  readonly run: RunOverview;
  readonly runs: readonly RunOverview[];
  readonly route: Route;
  /** The newest news of the run; null until there are some. Ask again for data when its cursor changes. */
  readonly tick: Tick | null;
}

export interface Tab {
  readonly name: string;
  readonly title: string;
  readonly component: FunctionComponent<TabProps>;
  readonly isThere?: (run: RunOverview) => boolean;
}

export const TABS: readonly Tab[] = [
  { name: "run", title: "Run", component: RunTab },
  { name: "timeline", title: "Timeline", component: TimelineTab },
  { name: "rollouts", title: "Rollouts", component: RolloutsTab },
  { name: "weights", title: "Weights", component: WeightsTab },
  { name: "compare", title: "Compare", component: CompareTab },
  { name: "live", title: "Live", component: LiveTab, isThere: (run) => run.live },
];

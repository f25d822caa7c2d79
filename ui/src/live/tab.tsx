// The tab "Live": what users have, the test that is under way, what users said and what it was worth.

import { useState } from "preact/hooks";

import { percent } from "../format";
import { useJson } from "../resource";
import { useSlowly } from "../slowly";
import type { TabProps } from "../tabs";
import { ArmTestCard } from "./arm_test";
import { stages, type Live, type Releases } from "./data";
import { History } from "./history";
import { Rollback } from "./rollback";
import { Flow, Newest, Worth } from "./sessions";
import "./style.css";

const REFRESH_MS = 3000;
const PAGE = 25;

export function LiveTab({ run, tick }: TabProps) {
  const [offset, setOffset] = useState(0), [again, setAgain] = useState(0);
  const news = useSlowly(tick?.cursor ?? 0, REFRESH_MS);
  const { data, error } = useJson<Live>(`/runs/${encodeURIComponent(run.id)}/live?limit=${PAGE}&offset=${offset}`, `${news}/${again}`);
  const reload = () => [300, 1500, 4000].forEach((ms) => setTimeout(() => setAgain((number) => number + 1), ms));
  if (data === null) return error === null ? <p class="note">Reading what users said …</p> : <p role="alert">{error}</p>;
  const hasSessions = !data.sessions.problem;
  return (
    <div class="live">
      <h1 class="hidden">Live</h1>
      {error !== null && <p role="alert">{error}</p>}
      {data.releases.problem ? <p class="note">{data.releases.problem}</p> : <Now run={run.id} releases={data.releases} onDone={reload} />}
      {data.test !== null && <ArmTestCard test={data.test} />}
      {hasSessions ? <Flow live={data} /> : <p class="note">{data.sessions.problem}</p>}
      {hasSessions && <Worth live={data} />}
      {hasSessions && data.sessions.total > 0 && <Newest run={run.id} live={data} offset={offset} onOffset={setOffset} />}
      {!data.releases.problem && <History moves={data.releases.moves} />}
    </div>
  );
}

function Now({ run, releases, onDone }: { run: string; releases: Releases; onDone: () => void }) {
  const way = releases.way;
  return (
    <section class="live-now" aria-labelledby="now-title">
      <div>
        <h2 id="now-title" class="live-label">
          users have
        </h2>
        <p class="live-version">{releases.live === null ? "nothing yet" : `version ${releases.live}`}</p>
        {releases.table !== null && (
          <p class="note">{releases.table.arms.map((arm) => `${arm.name} v${arm.version}${arm.share > 0 ? ` ${percent(arm.share, 0)}` : ""}`).join(" · ")}</p>
        )}
      </div>
      <div class="live-way">
        <p class="live-label">{way === null ? `on its way: nothing, a candidate every ${releases.every_steps} steps` : `on its way: version ${way.version}`}</p>
        <ol>
          {stages(releases).map(({ name, state }) => (
            <li key={name} class={`is-${state.replace(" ", "-")}`} aria-current={state === "now" ? "step" : undefined}>
              {name}
            </li>
          ))}
        </ol>
      </div>
      <Rollback run={run} releases={releases} onDone={onDone} />
    </section>
  );
}

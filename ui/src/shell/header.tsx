// The header: which run, how far it is, the tabs, the theme.

import { useEffect, useRef, useState } from "preact/hooks";

import type { RunOverview } from "../api";
import { ago, count } from "../format";
import { routeTo, type Route } from "../routes";
import type { Tab } from "../tabs";
import { nextTheme, theme } from "./theme";

interface HeaderProps {
  readonly runs: readonly RunOverview[];
  readonly run: RunOverview;
  readonly route: Route;
  readonly tabs: readonly Tab[];
  readonly tab: Tab | undefined;
  readonly isConnected: boolean;
  /** True once the server has said that it ends. */
  readonly isClosed: boolean;
}

export function Header({ runs, run, tabs, tab, isConnected, isClosed }: HeaderProps) {
  const nav = useRef<HTMLElement>(null);
  useEffect(() => nav.current?.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" }), [tab]);
  return (
    <header class="top">
      <div class="top-row">
        <span class="brand">étude</span>
        <label class="picker">
          <span class="hidden">Run</span>
          <select value={run.id} onChange={(event) => (location.hash = routeTo(event.currentTarget.value, tab?.name ?? "run"))}>
            {runs.map((each) => (
              <option key={each.id} value={each.id}>
                {each.id}
              </option>
            ))}
          </select>
        </label>
        <Progress run={run} isConnected={isConnected} isClosed={isClosed} />
        <ThemeButton />
      </div>
      <nav class="tabs" aria-label="Views of the run" ref={nav}>
        {tabs.map((each) => (
          <a key={each.name} href={routeTo(run.id, each.name)} aria-current={each === tab ? "page" : undefined}>
            {each.title}
          </a>
        ))}
      </nav>
    </header>
  );
}

/** The state of a run in a few words. */
function Progress({ run, isConnected, isClosed }: { run: RunOverview; isConnected: boolean; isClosed: boolean }) {
  const state = isClosed ? "closed" : !isConnected ? "lost" : run.alive ? "alive" : run.phase === "done" ? "done" : "idle";
  const words = {
    closed: `${run.phase === "done" ? "finished" : "stopped"}, and this page with it; see more with: etude ui ${run.path}`,
    lost: "connection lost, trying again",
    alive: run.phase ?? "starting",
    done: "finished",
    idle: run.updated_s == null ? "not started" : `stopped, last heard ${ago(Date.now() / 1000 - run.updated_s)}`,
  }[state];
  return (
    <p class={`progress ${state}`}>
      <span class="dot" aria-hidden="true" />
      <span role="status">{words}</span>
      {run.step != null && (
        <span class="steps">
          step {count(run.step)} of {count(run.steps)}
        </span>
      )}
    </p>
  );
}

function ThemeButton() {
  const [chosen, setChosen] = useState(theme());
  const words = { auto: "as the system", light: "light", dark: "dark" }[chosen];
  return (
    <button type="button" class="theme" title={`Theme: ${words}`} aria-label={`Theme: ${words}. Change`} onClick={() => setChosen(nextTheme())}>
      {{ auto: "◐", light: "○", dark: "●" }[chosen]}
    </button>
  );
}

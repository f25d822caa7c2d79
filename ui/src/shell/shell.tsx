// The frame of the page: header, run picker, tabs, and the tab that the address names.

import { useEffect, useState } from "preact/hooks";

import { follow, getJson, type RunOverview, type Tick } from "../api";
import { messageOf } from "../resource";
import { parseRoute, routeTo, type Route } from "../routes";
import { TABS, type Tab } from "../tabs";
import { Header } from "./header";

export function Shell() {
  const route = useRoute();
  const [runs, error] = useRuns();
  const run = runs.find((each) => each.id === route.run) ?? (route.run === "" ? runs[0] : undefined);
  const [tick, isConnected] = useTicks(run?.id);
  if (run === undefined) return <Nothing error={error} runs={runs} route={route} />;
  const newest = tick?.id === run.id ? tick : null;
  const tabs = TABS.filter((tab) => tab.isThere?.(run) ?? true);
  const tab = tabs.find((each) => each.name === route.tab) ?? tabs[0];
  document.title = `${run.name} · ${tab?.title ?? ""} · étude`;
  return (
    <>
      <a class="skip" href="#content" onClick={skipToContent}>
        Skip to content
      </a>
      <Header runs={runs} run={newest ?? run} route={route} tabs={tabs} tab={tab} isConnected={isConnected} isClosed={newest?.closed ?? false} />
      <main id="content" tabIndex={-1} aria-label={tab?.title}>
        {run.error !== undefined && <p role="alert" class="unreadable">{run.error}</p>}
        {tab && run.error === undefined && <TabView key={`${run.id}/${tab.name}`} tab={tab} run={newest ?? run} runs={runs} route={route} tick={newest} />}
      </main>
    </>
  );
}

function TabView({ tab, ...props }: { tab: Tab; run: RunOverview; runs: readonly RunOverview[]; route: Route; tick: Tick | null }) {
  const Component = tab.component;
  return <Component {...props} />;
}

function Nothing({ error, runs, route }: { error: string | null; runs: readonly RunOverview[]; route: Route }) {
  const first = runs[0];
  return (
    <main id="content" class="nothing">
      <h1>étude</h1>
      {error !== null && <p role="alert">{error}</p>}
      {error === null && first !== undefined && (
        <p>
          There is no run “{route.run}” here. <a href={routeTo(first.id, "run")}>Open {first.name}</a>
        </p>
      )}
      {error === null && first === undefined && <p>No run yet. This page shows one as soon as there is.</p>}
    </main>
  );
}

function skipToContent(event: Event) {
  event.preventDefault();
  document.getElementById("content")?.focus();
}

function useRoute(): Route {
  const [route, setRoute] = useState(() => parseRoute(location.hash));
  useEffect(() => {
    const update = () => setRoute(parseRoute(location.hash));
    addEventListener("hashchange", update);
    return () => removeEventListener("hashchange", update);
  }, []);
  return route;
}

const LIST_MS = 10_000;

/** The list of runs, asked for again while the page is seen. */
function useRuns(): [readonly RunOverview[], string | null] {
  const [state, setState] = useState<[readonly RunOverview[], string | null]>([[], null]);
  useEffect(() => {
    const load = () => {
      if (document.visibilityState !== "visible") return;
      getJson<RunOverview[]>("/runs").then(
        (runs) => setState([runs, null]),
        (error: unknown) => setState(([runs]) => [runs, messageOf(error)]),
      );
    };
    load();
    const timer = setInterval(load, LIST_MS);
    document.addEventListener("visibilitychange", load);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", load);
    };
  }, []);
  return state;
}

function useTicks(run: string | undefined): [Tick | null, boolean] {
  const [tick, setTick] = useState<Tick | null>(null);
  const [isConnected, setConnected] = useState(true);
  useEffect(() => {
    if (run === undefined) return;
    const abort = new AbortController();
    follow(run, setTick, setConnected, abort.signal).catch(() => setConnected(false));
    return () => abort.abort();
  }, [run]);
  return [tick, isConnected];
}

// The tab "Rollouts": the table, one rollout, or a group, as the address says.
//
//     #/RUN/rollouts?reward=>=0.5&sort=tokens        the table
//     #/RUN/rollouts/ID/turn/3/token/17              one rollout, at a turn or a token
//     #/RUN/rollouts/group/train/12                  a group side by side

import { useEffect, useLayoutEffect } from "preact/hooks";

import { download } from "../api";
import { useJson } from "../resource";
import { routeTo } from "../routes";
import type { TabProps } from "../tabs";
import { FilterBar } from "./filter_bar";
import { parseQuery, toOptions, type TableQuery } from "./filters";
import { GroupPage } from "./group";
import { RolloutPage } from "./rollout";
import "./style.css";
import { RolloutTable } from "./table";
import type { Census } from "./types";

export function RolloutsTab({ run, route, tick }: TabProps) {
  const [first, purpose, number] = route.rest;
  const place = first === "group" ? `group/${purpose}/${number}` : (first ?? "");
  useLayoutEffect(() => scrollTo(0, 0), [place]);
  useHeaderHeight();
  if (first === "group" && purpose !== undefined && number !== undefined) {
    return <GroupPage run={run.id} purpose={purpose} number={number} cursor={tick?.cursor ?? 0} />;
  }
  if (first !== undefined) return <RolloutPage key={first} run={run.id} rolloutId={first} place={route.rest.slice(1)} options={route.options} cursor={tick?.cursor ?? 0} />;
  return <Table run={run.id} query={parseQuery(route.options)} tick={tick} />;
}

/** The height of the page's header, below which things stick, as a variable of the style sheet. */
function useHeaderHeight() {
  useLayoutEffect(() => {
    const header = document.querySelector(".top");
    if (!header) return;
    const observer = new ResizeObserver(() => document.documentElement.style.setProperty("--header", `${header.clientHeight + 1}px`));
    observer.observe(header);
    return () => observer.disconnect();
  }, []);
}

let lastTable = "";

/** The address of the table as it was seen last, with its filters. */
export function tablePlace(run: string): string {
  return lastTable.startsWith(routeTo(run, "rollouts")) ? lastTable : routeTo(run, "rollouts");
}

function Table({ run, query, tick }: { run: string; query: TableQuery; tick: TabProps["tick"] }) {
  const options = toOptions(query);
  const place = routeTo(run, "rollouts", [], options);
  const base = `/runs/${encodeURIComponent(run)}`;
  const census = useJson<Census>(`${base}/rollouts/census?purpose=${encodeURIComponent(query.filters.purpose ?? "train")}`, tick?.step ?? 0);
  useEffect(() => {
    lastTable = place;
  }, [place]);
  const onQuery = (next: TableQuery) => history.replaceState(null, "", routeTo(run, "rollouts", [], toOptions(next)));
  const go = (next: TableQuery) => {
    onQuery(next);
    dispatchEvent(new HashChangeEvent("hashchange"));
  };
  const save = () => void download(`${base}/rollouts.jsonl?${new URLSearchParams(options)}`, `${run}-rollouts.jsonl`);
  return (
    <section class="rollouts-list" aria-label="Rollouts">
      <h1 class="hidden">Rollouts</h1>
      <FilterBar query={query} census={census.data} exportUrl={save} onQuery={go} />
      <RolloutTable run={run} query={query} tick={tick} onQuery={go} />
    </section>
  );
}

// What the server says of a run's curves, and what is new added to what there was.

import { useEffect, useRef, useState } from "preact/hooks";

import { getJson } from "../api";
import type { Values } from "../components/chart_data";
import { messageOf } from "../resource";

export interface Interval {
  readonly value: number | null;
  readonly low: number | null;
  readonly high: number | null;
  readonly tried: number;
}

/** One held-out evaluation; `…_reward` where rewards are fractions, whose mean is looked at then. */
export interface Measured {
  readonly step: number;
  readonly label: string;
  readonly tasks: number;
  readonly at_s: number;
  readonly sampled: Interval;
  readonly greedy: Interval;
  readonly sampled_reward: Interval | null;
  readonly greedy_reward: Interval | null;
}

export type Way = "sampled" | "greedy";

export interface Loss {
  readonly step: number;
  readonly loss: number | null;
  readonly action_loss: number | null;
}

export interface CurvesData {
  readonly revision: number;
  readonly since: number;
  readonly step: readonly number[];
  readonly at_s: readonly number[];
  readonly columns: Readonly<Record<string, Values>>;
  readonly heldout: readonly Measured[];
  readonly gain: Readonly<Record<Way, Interval | null>> | null;
  readonly losses: readonly (Loss & { readonly phase: string })[];
  readonly imitation: Readonly<Record<string, readonly Loss[]>>;
  readonly phases: readonly { readonly at_s: number; readonly phase: string }[];
  readonly lineage: readonly { readonly phase: string; readonly steps: number; readonly tokens: number; readonly loss: number | null; readonly digest: string }[];
}

/** Add steps that came since; an answer with another revision, or since −1, is the whole. */
export function merged(old: CurvesData | undefined, fresh: CurvesData): CurvesData {
  if (old === undefined || fresh.since < 0 || fresh.revision !== old.revision) return fresh;
  const kept = old.step.filter((step) => step <= fresh.since).length;
  const names = new Set([...Object.keys(old.columns), ...Object.keys(fresh.columns)]);
  const column = (name: string): Values => [
    ...(old.columns[name] ?? new Array<null>(kept).fill(null)).slice(0, kept),
    ...(fresh.columns[name] ?? new Array<null>(fresh.step.length).fill(null)),
  ];
  return {
    ...fresh,
    since: -1,
    step: [...old.step.slice(0, kept), ...fresh.step],
    at_s: [...old.at_s.slice(0, kept), ...fresh.at_s],
    columns: Object.fromEntries([...names].map((name) => [name, column(name)])),
  };
}

/** Sums over rollouts by weight version. */
export interface RolloutSums {
  readonly version: readonly number[];
  readonly columns: Readonly<Record<string, readonly number[]>>;
}

/** Put newer sums in the place of those of the same versions and later ones. */
export function mergedSums(old: RolloutSums | null, fresh: RolloutSums): RolloutSums {
  const first = fresh.version[0];
  if (old === null || first === undefined) return old ?? fresh;
  const kept = old.version.filter((version) => version < first).length;
  const column = (name: string) => [...(old.columns[name] ?? []).slice(0, kept), ...(fresh.columns[name] ?? [])];
  return { version: [...old.version.slice(0, kept), ...fresh.version], columns: Object.fromEntries(Object.keys(fresh.columns).map((name) => [name, column(name)])) };
}

/** Versions before the newest of which rollouts may still be under way. */
const OPEN_VERSIONS = 20;

export function useRolloutSums(run: string | null, version: number): RolloutSums | null {
  const [sums, setSums] = useState<RolloutSums | null>(null);
  useEffect(() => {
    if (run === null) return;
    const since = Math.max(0, (sums?.version[sums.version.length - 1] ?? 0) - OPEN_VERSIONS);
    getJson<RolloutSums>(`/runs/${run}/rollout-curves?since=${since}`).then(
      (fresh) => setSums((old) => mergedSums(old, fresh)),
      () => undefined, // the next time, then
    );
  }, [run, version]);
  return sums;
}

/** The curves of some runs; each is asked again, for what is new alone, when its version changes. */
export function useCurves(wanted: readonly { readonly id: string; readonly version: string }[], columns: readonly string[]): [ReadonlyMap<string, CurvesData>, string | null] {
  const [data, setData] = useState<ReadonlyMap<string, CurvesData>>(new Map());
  const [error, setError] = useState<string | null>(null);
  const known = useRef(data);
  const asked = useRef(new Map<string, string>());
  known.current = data;
  useEffect(() => {
    for (const { id, version } of wanted) {
      if (asked.current.get(id) === version) continue;
      asked.current.set(id, version);
      const old = known.current.get(id);
      const since = old?.step[old.step.length - 1] ?? -1;
      getJson<CurvesData>(`/runs/${id}/curves?since=${since}&revision=${old?.revision ?? -1}&names=${columns.join(",")}`).then(
        (fresh) => {
          setError(null);
          setData((before) => new Map(before).set(id, merged(before.get(id), fresh)));
        },
        (failure: unknown) => {
          asked.current.delete(id);
          setError(messageOf(failure));
        },
      );
    }
  });
  return [data, error];
}

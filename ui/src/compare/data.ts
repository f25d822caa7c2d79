// What the server says of a comparison, and how its rows are picked and ordered.

import { points } from "../format";

export interface Estimate {
  readonly value: number;
  readonly low: number;
  readonly high: number;
  readonly method: string;
}

export interface Try {
  readonly run: string;
  readonly reward: number;
  readonly passed: boolean;
  readonly rollout: string | null;
  readonly reason: string | null;
  readonly turns: number | null;
  readonly tokens: number | null;
}

export interface TaskRow {
  readonly task: string;
  readonly template: string;
  readonly prompt: string;
  readonly a: number;
  readonly b: number;
  readonly a_tries: readonly Try[];
  readonly b_tries: readonly Try[];
}

export interface TemplateRow {
  readonly template: string;
  readonly tasks: number;
  readonly a: number;
  readonly b: number;
  readonly low: number | null;
  readonly high: number | null;
}

export interface Comparison {
  readonly measure: "pass" | "reward";
  readonly tasks: number;
  readonly untried: number;
  readonly a: Estimate;
  readonly b: Estimate;
  readonly difference: Estimate;
  readonly sign: { readonly wins: number; readonly losses: number; readonly ties: number; readonly p: number };
  readonly templates: readonly TemplateRow[];
  readonly rows: readonly TaskRow[];
}

export interface Evaluation {
  readonly label: string;
  readonly version: number;
  readonly tasks: number | null;
}

export type Pick = "differ" | "better" | "worse" | "same" | "all";

/** The tasks of a pick whose id, template or prompt has a text; the largest differences first. */
export function picked(rows: readonly TaskRow[], pick: Pick, text: string): TaskRow[] {
  const low = text.trim().toLowerCase();
  const holds: Readonly<Record<Pick, (row: TaskRow) => boolean>> = {
    differ: (row) => row.a !== row.b,
    better: (row) => row.b > row.a,
    worse: (row) => row.b < row.a,
    same: (row) => row.a === row.b,
    all: () => true,
  };
  return rows
    .filter((row) => holds[pick](row) && `${row.task} ${row.template} ${row.prompt}`.toLowerCase().includes(low))
    .sort((one, other) => Math.abs(other.b - other.a) - Math.abs(one.b - one.a) || one.b - one.a - (other.b - other.a));
}

/** The difference in one sentence, which says when it may be none. */
export function verdict({ difference, measure }: Comparison): string {
  const isSure = difference.low > 0 || difference.high < 0;
  const size = measure === "pass" ? `${points(Math.abs(difference.value)).slice(1)} points` : Math.abs(difference.value).toFixed(3);
  if (difference.value === 0) return "Both do the same";
  const which = difference.value > 0 ? "better" : "worse";
  return isSure ? `B is ${size} ${which}` : `B is ${size} ${which}, which may be chance`;
}

/** A chance as people say it: 0.0312 → 0.031, 6e-8 → below 0.0001. */
export const chance = (p: number): string => (p < 1e-4 ? "below 0.0001" : p >= 0.1 ? p.toFixed(2) : p.toFixed(4).replace(/0+$/, ""));

// The table of charts over steps: which columns, in which notation. What a run has not is not drawn.

import type { Curve, Notation, Tone, Values } from "../components/chart_data";
import { stacked } from "../components/chart_data";
import type { CurvesData, RolloutSums } from "./curves";

export interface MetricChart {
  readonly title: string;
  readonly section: "Learning" | "Rollouts" | "Health";
  readonly notation: Notation;
  readonly unit?: string;
  /** Column → its name; the last one is the one to look at, and the only one where several runs are. */
  readonly lines: Readonly<Record<string, string>>;
  readonly isLog?: boolean;
  /** Drawn only where some value is not 0. */
  readonly onlyIfAny?: boolean;
}

export const CHARTS: readonly MetricChart[] = [
  { title: "Groups with a signal", section: "Learning", notation: "percent", lines: { signal_share: "signal" } },
  { title: "Entropy", section: "Learning", notation: "decimal", unit: "nats per token", lines: { entropy: "entropy" } },
  { title: "Norm of the gradient", section: "Learning", notation: "significant", lines: { grad_norm: "norm" } },
  { title: "Learning rate", section: "Learning", notation: "significant", lines: { learning_rate: "rate" } },
  { title: "Spread of rewards within a group", section: "Learning", notation: "decimal", lines: { reward_std: "spread" } },
  { title: "Groups without a signal, sampled again", section: "Learning", notation: "count", lines: { groups_resampled: "groups" }, onlyIfAny: true },
  { title: "Tasks drawn against all alike", section: "Learning", notation: "decimal", unit: "total variation", lines: { selection_distance: "distance" }, onlyIfAny: true },
  { title: "Reward of live sessions", section: "Learning", notation: "decimal", lines: { live_reward: "live" } },
  { title: "Divergence from the hinted policy", section: "Learning", notation: "decimal", unit: "nats per token", lines: { hint_kl: "divergence" } },
  { title: "Rollouts that a limit cut short", section: "Rollouts", notation: "percent", lines: { cut_short: "cut short" } },
  { title: "Tokens with a truncated weight", section: "Health", notation: "percent", lines: { masked_share: "masked", truncated_share: "truncated" } },
  { title: "Mismatch k3, trainer against engine", section: "Health", notation: "significant", unit: "nats per token", lines: { k3: "k3" }, isLog: true },
  { title: "A step’s seconds", section: "Health", notation: "significant", unit: "s", lines: { wait_s: "waiting for rollouts", busy_s: "computing" } },
];

/** True where a logarithmic axis can show something: trainer and engine may agree to the last bit. */
export const canBeLog = (curves: readonly Curve[]): boolean => curves.some((curve) => curve.y.some((value) => value !== null && value > 0));

/** The curves of one run for a chart; empty where it has none of it. */
export function linesOf(chart: MetricChart, data: CurvesData, x: readonly number[]): Curve[] {
  const there = Object.entries(chart.lines).filter(([column]) => isThere(data.columns[column], chart.onlyIfAny ?? false));
  return there.map(([column, name], index) => {
    const y = data.columns[column] ?? [];
    return { name, tone: index === there.length - 1 ? "main" : "side", x, y };
  });
}

function isThere(values: Values | undefined, onlyIfAny: boolean): boolean {
  return values !== undefined && values.some((value) => value !== null && (!onlyIfAny || value !== 0));
}

const PART = "part:", END = "end:", AGE = "age:";

/** All columns that the tab draws; those that end in a colon are beginnings of names. */
export const COLUMNS: readonly string[] = [
  ...["reward_mean", "reward_std", "reward_low", "reward_high", "staleness_max", "staleness_mean", PART, END, AGE],
  ...CHARTS.flatMap((chart) => Object.keys(chart.lines)),
];

/** Columns that begin so, by the rest of their names. */
function columnsOf(data: CurvesData, prefix: string): [string, Values][] {
  return Object.entries(data.columns).flatMap(([name, values]) => (name.startsWith(prefix) ? [[name.slice(prefix.length), values] as [string, Values]] : []));
}

/** Means of the reward's parts, each a line. */
export function partsOf(data: CurvesData, x: readonly number[]): Curve[] {
  return columnsOf(data, PART).slice(0, 6).map(([name, y], index) => ({ name, tone: index as Tone, x, y }));
}

/** How the rollouts of each step ended, as areas. */
export function endsOf(data: CurvesData, x: readonly number[]): Curve[] {
  const sum = (values: Values) => values.reduce<number>((total, value) => total + (value ?? 0), 0);
  const ordered = columnsOf(data, END).sort(([, a], [, b]) => sum(b) - sum(a));
  const rest = ordered.slice(5);
  const other: Values = data.step.map((_, index) => rest.reduce((total, [, values]) => total + (values[index] ?? 0), 0));
  const parts = ordered.slice(0, 5).map(([name, values]) => ({ name, values }));
  return stacked(x, rest.length > 0 ? [...parts, { name: "other", values: other }] : parts);
}

/** Sampled tokens by age in weight versions, summed over the steps between two x. */
export function agesOf(data: CurvesData, x: readonly number[], zoom: readonly [number, number] | null): { age: number; tokens: number }[] {
  const sums = columnsOf(data, AGE).map(([name, values]) => {
    const tokens = values.reduce<number>((total, value, index) => {
      const at = x[index] ?? 0;
      return zoom === null || (at >= zoom[0] && at <= zoom[1]) ? total + (value ?? 0) : total;
    }, 0);
    return { age: Number(name), tokens };
  });
  const oldest = Math.max(0, ...sums.filter(({ tokens }) => tokens > 0).map(({ age }) => age));
  return Array.from({ length: sums.length > 0 ? oldest + 1 : 0 }, (_, age) => ({ age, tokens: sums.find((each) => each.age === age)?.tokens ?? 0 }));
}

const BINS = 400;

/** A mean per rollout over versions; of very many versions, neighbours together. */
export function meanOf(sums: RolloutSums, column: string, name: string): Curve {
  const width = Math.max(1, Math.ceil(sums.version.length / BINS));
  const x: number[] = [], y: (number | null)[] = [];
  for (let first = 0; first < sums.version.length; first += width) {
    const total = (values: readonly number[] | undefined) => (values ?? []).slice(first, first + width).reduce((sum, value) => sum + value, 0);
    const rollouts = total(sums.columns.rollouts);
    x.push(sums.version[first] ?? 0);
    y.push(rollouts > 0 ? total(sums.columns[column]) / rollouts : null);
  }
  return { name, tone: "main", x, y };
}

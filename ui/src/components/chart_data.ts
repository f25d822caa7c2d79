// The pure half of charts: curves → columns over one shared x, ranges of axes, words for who cannot see them.

import { decimal, count, percent, small } from "../format";

export type Notation = "percent" | "count" | "decimal" | "significant";
/** Place of a curve in the palette: the one to look at, its companion, or one of several runs. */
export type Tone = "main" | "side" | "warn" | 0 | 1 | 2 | 3 | 4 | 5;

export interface Curve {
  readonly name: string;
  readonly tone: Tone;
  /** Ascending. */
  readonly x: readonly number[];
  readonly y: readonly (number | null)[];
  /** Ends of an interval at each point. */
  readonly low?: readonly (number | null)[];
  readonly high?: readonly (number | null)[];
  /** Points with a thin line are measurements; a line is everything else. */
  readonly style?: "line" | "points" | "faint";
}

export type Column = (number | null)[];

/** All curves over the union of their x: what uPlot draws. A step that a curve has not is undefined, and is bridged. */
export function align(curves: readonly Curve[]): { x: number[]; columns: (number | null | undefined)[][] } {
  const x = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const place = new Map(x.map((value, index) => [value, index]));
  const spread = (curve: Curve, values: readonly (number | null)[]) => {
    const column: (number | null | undefined)[] = new Array<undefined>(x.length).fill(undefined);
    curve.x.forEach((value, index) => (column[place.get(value) ?? 0] = values[index] ?? null));
    return column;
  };
  return { x, columns: curves.flatMap((curve) => [curve.y, ...(curve.low && curve.high ? [curve.low, curve.high] : [])].map((values) => spread(curve, values))) };
}

/** Centred moving average over `radius` neighbours on both sides, fewer at the ends; what is unknown is left out. */
export function smooth(values: readonly (number | null)[], radius: number): Column {
  if (radius <= 0) return [...values];
  const sums = [0], counts = [0];
  values.forEach((value, index) => {
    sums.push((sums[index] ?? 0) + (value ?? 0));
    counts.push((counts[index] ?? 0) + (value === null ? 0 : 1));
  });
  return values.map((value, index) => {
    const first = Math.max(0, index - radius), last = Math.min(values.length, index + radius + 1);
    const known = (counts[last] ?? 0) - (counts[first] ?? 0);
    return value === null || known === 0 ? null : ((sums[last] ?? 0) - (sums[first] ?? 0)) / known;
  });
}

/** The range of a y axis: from 0 unless the data are far above it, a little room above; shares end at 1. */
export function range(low: number, high: number, notation: Notation): [number, number] {
  if (!(low <= high)) return [0, 1];
  if (notation === "percent") return [Math.min(0, low), Math.max(high, Math.min(1, high * 1.1 || 1))];
  const from = low >= 0 && low < 0.5 * high ? 0 : low;
  const room = high === from ? Math.abs(high) || 1 : (high - from) * 0.08;
  return [from === 0 ? 0 : from - room, high + room];
}

export function write(value: number | null | undefined, notation: Notation): string {
  switch (notation) {
    case "percent":
      return percent(value);
    case "count":
      return count(value);
    case "decimal":
      return decimal(value, value !== null && value !== undefined && Math.abs(value) >= 100 ? 1 : 3);
    case "significant":
      return small(value, 3);
  }
}

/** A chart in words: where each curve begins and ends, its least and its most. */
export function describe(title: string, curves: readonly Curve[], notation: Notation, across: string): string {
  const parts = curves.flatMap((curve) => {
    const known = curve.y.flatMap((value, index) => (value === null ? [] : [[curve.x[index] ?? 0, value] as const]));
    const first = known[0], last = known[known.length - 1];
    if (!first || !last) return [];
    const values = known.map(([, value]) => value);
    const least = values.reduce((a, b) => Math.min(a, b)), most = values.reduce((a, b) => Math.max(a, b));
    const say = (value: number) => write(value, notation);
    return [`${curve.name}: ${say(first[1])} at ${across} ${first[0]}, ${say(last[1])} at ${across} ${last[0]}, between ${say(least)} and ${say(most)}`];
  });
  return `${title}. ${parts.join("; ") || "Nothing measured yet"}.`;
}

// The pure half of charts: curves → columns over one shared x, ranges of axes, words for who cannot see them.

import { count, decimal, percent, small } from "../format";

export type Notation = "percent" | "count" | "decimal" | "significant";
/** Place of a curve in the palette: the one to look at, its companion, or one of several. */
export type Tone = "main" | "side" | "warn" | 0 | 1 | 2 | 3 | 4 | 5;
export type Values = readonly (number | null)[];

export interface Curve {
  readonly name: string;
  readonly tone: Tone;
  /** Ascending. */
  readonly x: readonly number[];
  readonly y: Values;
  /** Ends of an interval at each point. */
  readonly low?: Values;
  readonly high?: Values;
  /** `points` are measurements, `faint` is what lies behind a smooth line, an `area` is filled down to the curve before it. */
  readonly style?: "line" | "points" | "faint" | "area";
  /** What is said of a point, where that is not y: an area's own share. */
  readonly shown?: Values;
}

type Column = (number | null | undefined)[];

/** All curves over the union of their x, as uPlot draws them. A place that a curve has not is undefined, and bridged. */
export function align(curves: readonly Curve[]): { x: number[]; columns: Column[] } {
  const first = curves[0]?.x ?? [];
  const parts = (curve: Curve) => [curve.y, ...(curve.low && curve.high ? [curve.low, curve.high] : [])];
  if (curves.every((curve) => curve.x === first)) {
    return { x: [...first], columns: curves.flatMap((curve) => parts(curve).map((values) => [...values])) };
  }
  const x = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const place = new Map(x.map((value, index) => [value, index]));
  const spread = (curve: Curve, values: Values) => {
    const column: Column = new Array<undefined>(x.length).fill(undefined);
    curve.x.forEach((value, index) => (column[place.get(value) ?? 0] = values[index] ?? null));
    return column;
  };
  return { x, columns: curves.flatMap((curve) => parts(curve).map((values) => spread(curve, values))) };
}

/** Centred moving average over `radius` neighbours on both sides, fewer at the ends; what is unknown stays so. */
export function smooth(values: Values, radius: number): Values {
  if (radius <= 0) return values;
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

/** As many neighbours as the width of the page wants: none of few points, a hundredth of very many. */
export const AUTO = -1;

/** A curve as a smooth line over its faint self. */
export function smoothed(curve: Curve, chosen: number): Curve[] {
  const radius = chosen === AUTO ? (curve.y.length < 80 ? 0 : Math.ceil(curve.y.length / 100)) : chosen;
  if (radius <= 0 || curve.style === "points" || curve.style === "area" || curve.y.length < 5) return [curve];
  const { low: _low, high: _high, ...bare } = curve;
  const edges = curve.low && curve.high ? { low: smooth(curve.low, radius), high: smooth(curve.high, radius) } : {};
  return [{ ...bare, name: `${curve.name}, each`, style: "faint" }, { ...curve, ...edges, y: smooth(curve.y, radius) }];
}

/** Areas, each on top of the one before it, as shares of their sum. */
export function stacked(x: readonly number[], parts: readonly { readonly name: string; readonly values: Values }[]): Curve[] {
  const totals = x.map((_, index) => parts.reduce((sum, part) => sum + (part.values[index] ?? 0), 0));
  const below = x.map(() => 0);
  return parts.map(({ name, values }, number) => {
    const shown = totals.map((total, index) => (total > 0 ? (values[index] ?? 0) / total : null));
    const y = shown.map((share, index) => (share === null ? null : (below[index] = (below[index] ?? 0) + share)));
    return { name, tone: (number % 6) as Tone, x, y, shown, style: "area" as const };
  });
}

const STUDENT = [12.71, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.2, 2.18, 2.16, 2.14, 2.13];
/** Half width of Student's 95 % interval in standard errors, by degrees of freedom from 1. */
export const student = (freedom: number): number => STUDENT[freedom - 1] ?? 1.96 + 2.4 / freedom;

/** Curves of several seeds as one: their mean at each x that all have, with Student's interval for other seeds. */
export function overSeeds(name: string, tone: Tone, seeds: readonly Curve[]): Curve {
  const tables = seeds.map((curve) => new Map(curve.x.map((x, index) => [x, curve.y[index] ?? null])));
  const rows = (seeds[0]?.x ?? []).flatMap((x) => {
    const values = tables.map((table) => table.get(x) ?? null).filter((value) => value !== null);
    return values.length === seeds.length ? [[x, values] as const] : [];
  });
  const mean = (values: readonly number[]) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const half = (values: readonly number[]) => {
    const middle = mean(values), freedom = values.length - 1;
    const squares = values.reduce((sum, value) => sum + (value - middle) ** 2, 0);
    return student(freedom) * Math.sqrt(squares / freedom / values.length);
  };
  return {
    name: `${name}, ${seeds.length} seeds`,
    tone,
    x: rows.map(([x]) => x),
    y: rows.map(([, values]) => mean(values)),
    low: rows.map(([, values]) => mean(values) - half(values)),
    high: rows.map(([, values]) => mean(values) + half(values)),
    style: seeds[0]?.style ?? "line",
  };
}

/** The range of a y axis: from 0 unless the data are far from it; a share never goes beyond 0 and 1. */
export function range(low: number, high: number, notation: Notation): [number, number] {
  if (!(low <= high)) return [0, 1];
  if (high - low <= 1e-6 * Math.abs(high)) return high === 0 ? [0, 1] : high > 0 ? [0, 2 * high] : [2 * low, 0];
  const from = low >= 0 && low < 0.75 * high ? 0 : low;
  const to = high <= 0 && high > 0.75 * low ? 0 : high;
  const room = (to - from) * 0.08;
  const [bottom, top] = [from === 0 ? 0 : from - room, to === 0 ? (from === 0 ? room : 0) : to + room];
  return notation === "percent" ? [Math.max(low < 0 ? bottom : 0, bottom), high <= 1 ? Math.min(1, top) : top] : [bottom, top];
}

export function write(value: number | null | undefined, notation: Notation): string {
  switch (notation) {
    case "percent":
      return percent(value);
    case "count":
      return count(value);
    case "decimal":
      return decimal(value, Math.abs(value ?? 0) >= 100 ? 1 : 3);
    case "significant":
      return small(value, 3);
  }
}

/** The newest value of a curve that is known. */
export function newest(curve: Curve): number | null {
  const values = curve.shown ?? curve.y;
  for (let index = values.length - 1; index >= 0; index--) if (values[index] != null) return values[index] ?? null;
  return null;
}

/** A chart in words: where each curve begins and ends, its least and its most. */
export function describe(title: string, curves: readonly Curve[], notation: Notation, across: string): string {
  const say = (value: number) => write(value, notation);
  const parts = curves.filter((curve) => curve.style !== "faint").flatMap((curve) => {
    const known = (curve.shown ?? curve.y).flatMap((value, index) => (value === null ? [] : [[curve.x[index] ?? 0, value] as const]));
    const first = known[0], last = known[known.length - 1];
    if (!first || !last) return [];
    const values = known.map(([, value]) => value);
    const least = values.reduce((a, b) => Math.min(a, b)), most = values.reduce((a, b) => Math.max(a, b));
    return [`${curve.name}: ${say(first[1])} at ${across} ${small(first[0], 4)}, ${say(last[1])} at ${across} ${small(last[0], 4)}, between ${say(least)} and ${say(most)}`];
  });
  return `${title}. ${parts.join("; ") || "Nothing measured yet"}.`;
}

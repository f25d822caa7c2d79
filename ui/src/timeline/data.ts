// The pure half of the timeline: its nouns, windows of time, paths of stacked states, words.

import { count, percent } from "../format";

export interface State {
  readonly state: string;
  readonly seconds: number;
  /** By bin: a share of the lane, or a mean number in it. */
  readonly values: readonly number[];
}

export interface Lane {
  readonly group: string;
  readonly name: string;
  readonly region: string;
  readonly seconds: number;
  readonly states: readonly State[];
}

export interface Mark {
  readonly at_s: number;
  readonly kind: string;
  readonly text: string;
  readonly lane: string;
  readonly number: number;
  readonly facts: Readonly<Record<string, number>>;
}

export interface Waits {
  readonly seconds: number;
  readonly trainer: Readonly<Record<string, number>>;
  readonly engines_busy: number | null;
  readonly engines_busy_meanwhile: number | null;
  readonly engines: number;
  readonly in_flight: number | null;
  readonly in_flight_meanwhile: number | null;
  readonly stages: Readonly<Record<string, number>>;
}

export interface Timeline {
  readonly origin_s: number;
  readonly end_s: number;
  readonly from_s: number;
  readonly to_s: number;
  readonly bins: number;
  readonly words: string;
  readonly phases: readonly { readonly at_s: number; readonly phase: string }[];
  readonly gaps: readonly (readonly [number, number])[];
  readonly lanes: readonly Lane[];
  readonly waits: Waits;
  readonly marks: readonly Mark[];
  readonly counted: Readonly<Record<string, readonly number[]>>;
}

export type Span = readonly [number, number];

/** Lanes that stack numbers, not shares of one process's time. */
const NUMBERS = new Set(["rollouts", "evaluations", "gateways"]);
/** States in which nothing is done. */
const IDLE = new Set(["waiting", "idle", "other", "not told"]);

export const isNumber = (lane: Lane): boolean => NUMBERS.has(lane.group);
export const isIdle = (state: string): boolean => IDLE.has(state);
export const toneOf = (state: string): string => `tl-${state.replaceAll(" ", "-")}`;

/** The sum of all states by bin. */
export function sums(lane: Lane, bins: number): number[] {
  return Array.from({ length: bins }, (_, bin) => lane.states.reduce((sum, { values }) => sum + (values[bin] ?? 0), 0));
}

/** A state as an SVG path over [0, bins] × [0, 1], upwards from what is below it; bins of one height are one run. */
export function area(below: readonly number[], values: readonly number[], top: number): string {
  const height = (value: number) => (1 - Math.min(1, value / top)).toFixed(3);
  const runs: { from: number; to: number; low: string; high: string }[] = [];
  values.forEach((value, bin) => {
    if (value <= 0) return;
    const low = height(below[bin] ?? 0), high = height((below[bin] ?? 0) + value), last = runs[runs.length - 1];
    if (last?.to === bin && last.low === low && last.high === high) last.to = bin + 1;
    else runs.push({ from: bin, to: bin + 1, low, high });
  });
  return runs.map(({ from, to, low, high }) => `M${from} ${low}V${high}H${to}V${low}Z`).join("");
}

/** All states of a lane as paths, stacked. */
export function paths(lane: Lane, bins: number): { state: string; path: string }[] {
  const top = isNumber(lane) ? Math.max(1e-9, ...sums(lane, bins)) : 1;
  const below = new Array<number>(bins).fill(0);
  return lane.states.map(({ state, values }) => {
    const path = area(below, values, top);
    values.forEach((value, bin) => (below[bin] = (below[bin] ?? 0) + value));
    return { state, path };
  });
}

/** A window that is `factor` times as long, with the same time at `place`, a share of it. */
export function zoom([from, to]: Span, factor: number, place: number, [first, last]: Span): Span {
  const length = Math.min(last - first, Math.max(0.2, (to - from) * factor));
  const start = Math.min(last - length, Math.max(first, from + (to - from) * place - length * place));
  return [start, start + length];
}

/** The window moved by a share of its length, as far as there is anything. */
export function pan([from, to]: Span, share: number, [first, last]: Span): Span {
  const by = Math.min(last - to, Math.max(first - from, (to - from) * share));
  return [from + by, to + by];
}

const STEPS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** Times of an axis, at most `most` of them, on even seconds, minutes and hours. */
export function ticks([from, to]: Span, most: number): number[] {
  const step = STEPS.find((each) => (to - from) / each <= most) ?? 86400;
  const first = Math.ceil(from / step);
  return Array.from({ length: Math.max(0, Math.floor(to / step) - first + 1) }, (_, index) => (first + index) * step);
}

/** A time since the run's first event, as finely as a window of that length needs it: 1:02:03, 2:03.4. */
export function clock(seconds: number, length: number): string {
  const digits = length < 5 ? 2 : length < 60 ? 1 : 0;
  const scale = 10 ** digits, rounded = Math.round(seconds * scale) / scale;
  const hours = Math.floor(rounded / 3600), minutes = Math.floor(rounded / 60) % 60, rest = rounded % 60;
  const pad = (value: number, fixed = 0) => value.toFixed(fixed).padStart(fixed ? 3 + fixed : 2, "0");
  return hours > 0 ? `${hours}:${pad(minutes)}:${pad(rest, digits)}` : `${minutes}:${pad(rest, digits)}`;
}

/** A value of a state in words: a share of the time, or how many. */
export function amount(lane: Lane, value: number): string {
  return isNumber(lane) ? (value >= 10 ? count(value) : value.toFixed(1)) : percent(value, 0);
}

/** A lane at one bin: what is going on there, most first. */
export function at(lane: Lane, bin: number): string {
  const busy = lane.states.map(({ state, values }) => ({ state, value: values[bin] ?? 0 })).filter(({ value }) => value >= 0.005);
  if (busy.length === 0) return "nothing";
  return busy.sort((a, b) => b.value - a.value).map(({ state, value }) => `${state} ${amount(lane, value)}`).join(", ");
}

/** A lane over the window in words, for who cannot see it. */
export function describe(lane: Lane, length: number): string {
  const mean = lane.states.map(({ state, seconds }) => `${state} ${amount(lane, seconds / length)}`).join(", ");
  return `${title(lane)}: on average ${mean}`;
}

export function title(lane: Lane): string {
  return lane.group === "trainer" ? "trainer" : lane.name;
}

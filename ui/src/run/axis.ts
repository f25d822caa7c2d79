// The x axis of the tab: steps, or hours since RL began.

import type { CurvesData, Measured } from "./curves";

export type Across = "step" | "hour";

/** When RL began; measurements before are at 0. */
function begin(data: CurvesData): number {
  return data.phases.find(({ phase }) => phase === "rl")?.at_s ?? data.at_s[0] ?? 0;
}

const hours = (from: number, at: number): number => Math.max(0, Math.round((at - from) / 0.36) / 1e4);

/** The x of every step; the very same array as long as the data are, so that charts need not look for a union. */
export function stepsOf(data: CurvesData, across: Across): readonly number[] {
  return across === "step" ? data.step : data.at_s.map((at) => hours(begin(data), at));
}

export function placeOf(data: CurvesData, measured: Measured, across: Across): number {
  return across === "step" ? measured.step : hours(begin(data), measured.at_s);
}

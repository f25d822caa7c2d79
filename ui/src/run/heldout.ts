// The curve: held-out evaluations over steps with their intervals, of one run, of several, or over seeds.

import { overSeeds, type Curve, type Notation, type Tone } from "../components/chart_data";
import { count, decimal, percent, points } from "../format";
import { placeOf, type Across } from "./axis";
import type { CurvesData, Interval, Way } from "./curves";

/** True where rewards are fractions, so that their mean is looked at, not how many pass. */
export const hasFractions = (data: CurvesData): boolean => data.heldout.some((each) => each.sampled_reward !== null);

export function measuredCurve(data: CurvesData, way: Way, name: string, tone: Tone, across: Across): Curve {
  const kept = data.heldout.map((each) => [each, each[`${way}_reward`] ?? each[way]] as const);
  return {
    name,
    tone,
    style: "points",
    x: kept.map(([each]) => placeOf(data, each, across)),
    y: kept.map(([, interval]) => interval.value),
    low: kept.map(([, interval]) => interval.low),
    high: kept.map(([, interval]) => interval.high),
  };
}

/** Of one run both ways of sampling; the greedy one without its interval, lest the two hide each other. */
export function ofOneRun(data: CurvesData, across: Across): Curve[] {
  const { low: _low, high: _high, ...greedy } = measuredCurve(data, "greedy", "greedy", "side", across);
  return [greedy, measuredCurve(data, "sampled", "sampled", "main", across)];
}

export interface NamedData {
  /** Id of the run. */
  readonly id: string;
  /** Name of its recipe: runs of one name are seeds of it. */
  readonly name: string;
  readonly data: CurvesData;
}

/** One curve for each run, or for all seeds of a recipe together. `pick` makes the curve of one run. */
export function ofRuns(runs: readonly NamedData[], asSeeds: boolean, pick: (data: CurvesData, name: string, tone: Tone) => Curve): Curve[] {
  const names = [...new Set(runs.map((run) => (asSeeds ? run.name : run.id)))];
  return names.map((name, index) => {
    const tone = (index % 6) as Tone;
    const same = runs.filter((run) => (asSeeds ? run.name : run.id) === name);
    const curves = same.map((run) => pick(run.data, name, tone));
    return curves.length > 1 ? overSeeds(name, tone, curves) : (curves[0] ?? { name, tone, x: [], y: [] });
  });
}

export const notationOf = (data: CurvesData | undefined): Notation => (data && hasFractions(data) ? "decimal" : "percent");

/** The result in one sentence. */
export function headline(data: CurvesData): string {
  const first = data.heldout[0], last = data.heldout[data.heldout.length - 1];
  if (!first || !last) return "Not evaluated yet";
  const tasks = `${count(last.tasks)} held‑out tasks`;
  if (hasFractions(data)) {
    const [before, after] = [first, last].map((each) => decimal(each.sampled_reward?.value, 3));
    return first === last ? `Mean reward ${before} on ${tasks}` : `Mean reward ${before} → ${after} on ${tasks}`;
  }
  const [before, after] = [percent(first.sampled.value), percent(last.sampled.value)];
  return first === last ? `${before} of ${tasks} solved ${first.label === "before" ? "before RL" : ""}` : `From ${before} to ${after} of ${tasks} solved`;
}

/** A gain with its interval: +33.1 points, 95 % interval +25.0 to +41.2. */
export function gainText(gain: Interval | null | undefined, isRate: boolean): string {
  if (gain == null) return "";
  const say = (value: number | null) => (isRate ? points(value) : `${(value ?? 0) < 0 ? "−" : "+"}${Math.abs(value ?? 0).toFixed(3)}`);
  return `${say(gain.value)}${isRate ? " points" : ""}, 95 % interval ${say(gain.low)} to ${say(gain.high)}`;
}

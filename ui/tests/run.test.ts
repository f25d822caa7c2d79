// Pure functions of the tabs Run and Compare, of addresses and of notation.

import assert from "node:assert/strict";
import { test } from "node:test";

import { picked, verdict, type Comparison, type TaskRow } from "../src/compare/data";
import { ago, brief, count, duration, percent, points, small } from "../src/format";
import { parseRoute, routeTo } from "../src/routes";
import { agesOf } from "../src/run/charts";
import { merged, mergedSums, type CurvesData } from "../src/run/curves";
import { partsOfTime } from "../src/run/phases";

const data = (since: number, revision: number, step: number[], columns: CurvesData["columns"]): CurvesData => ({
  revision, since, step, at_s: step, columns, heldout: [], gain: null, losses: [], imitation: {}, phases: [], lineage: [],
});

test("new steps are added, and another revision replaces all", () => {
  const old = data(-1, 0, [1, 2], { a: [10, 20] });
  const more = merged(old, data(2, 0, [3], { b: [33] }));
  assert.deepEqual(more.step, [1, 2, 3]);
  assert.deepEqual(more.columns, { a: [10, 20, null], b: [null, null, 33] });
  assert.deepEqual(merged(more, data(-1, 1, [1], { a: [7] })).step, [1]);
});

test("sums of versions under way are replaced by newer ones", () => {
  const old = { version: [0, 1, 2], columns: { rollouts: [8, 8, 3] } };
  assert.deepEqual(mergedSums(old, { version: [2, 3], columns: { rollouts: [8, 1] } }), { version: [0, 1, 2, 3], columns: { rollouts: [8, 8, 8, 1] } });
  assert.equal(mergedSums(old, { version: [], columns: {} }), old);
});

test("ages are summed over what is in view", () => {
  const run = data(-1, 0, [1, 2], { "age:0": [5, 7], "age:2": [1, null] });
  assert.deepEqual(agesOf(run, run.step, null), [{ age: 0, tokens: 12 }, { age: 1, tokens: 0 }, { age: 2, tokens: 1 }]);
  assert.deepEqual(agesOf(run, run.step, [2, 9]), [{ age: 0, tokens: 7 }]);
});

test("phases of a run that was begun again are added up", () => {
  const phases = [{ at_s: 0, phase: "rl" }, { at_s: 10, phase: "eval-after" }, { at_s: 12, phase: "rl" }, { at_s: 20, phase: "done" }];
  assert.deepEqual(partsOfTime(phases, 99), [{ phase: "rl", seconds: 18 }, { phase: "eval-after", seconds: 2 }]);
});

test("addresses come back as they were, whatever is in them", () => {
  const hash = routeTo("a run/β", "rollouts", ["id#1", "turn", "3"], { reward: ">=0.5", empty: "" });
  assert.deepEqual(parseRoute(hash), { run: "a run/β", tab: "rollouts", rest: ["id#1", "turn", "3"], options: { reward: ">=0.5" } });
  assert.deepEqual(parseRoute("#/%E0%A4%A/run").run, "%E0%A4%A");
});

test("numbers are written as in the terminal and on the report", () => {
  assert.deepEqual([percent(0.4264), points(-0.05), count(1234567), brief(1234567), duration(4000), small(0.0000031)], ["42.6%", "−5.0", "1\u202f234\u202f567", "1.23M", "1:06:40", "3.1×10⁻⁶"]);
  assert.deepEqual([percent(null), ago(7200)], ["–", "2 h ago"]);
});

test("tasks are picked by who does better, the largest differences first", () => {
  const row = (task: string, a: number, b: number): TaskRow => ({ task, template: "t", prompt: "", a, b, a_tries: [], b_tries: [] });
  const rows = [row("one", 0, 1), row("two", 1, 1), row("three", 0.5, 0)];
  assert.deepEqual(picked(rows, "differ", "").map(({ task }) => task), ["one", "three"]);
  assert.deepEqual(picked(rows, "worse", "").map(({ task }) => task), ["three"]);
  assert.deepEqual(picked(rows, "all", "TW").map(({ task }) => task), ["two"]);
});

test("a difference that may be chance is called so", () => {
  const of = (value: number, low: number, high: number) => ({ measure: "pass", difference: { value, low, high, method: "" } }) as Comparison;
  assert.equal(verdict(of(0.12, 0.02, 0.22)), "B is 12.0 points better");
  assert.equal(verdict(of(-0.12, -0.3, 0.06)), "B is 12.0 points worse, which may be chance");
});

// Pure functions of charts: what is drawn is what was measured.

import assert from "node:assert/strict";
import { test } from "node:test";

import { align, describe, overSeeds, range, smooth, smoothed, stacked, type Curve } from "../src/components/chart_data";

const curve = (x: number[], y: (number | null)[], more: Partial<Curve> = {}): Curve => ({ name: "a", tone: "main", x, y, ...more });

test("curves with other steps share one axis and keep their values", () => {
  const { x, columns } = align([curve([1, 3], [10, 30]), curve([2, 3], [20, null])]);
  assert.deepEqual(x, [1, 2, 3]);
  assert.deepEqual(columns, [[10, undefined, 30], [undefined, 20, null]]);
});

test("an axis begins at 0 unless the values are far from it, and a share stays between 0 and 1", () => {
  assert.deepEqual(range(0.1, 0.5, "decimal")[0], 0);
  assert.ok(range(99, 100, "decimal")[0] > 90);
  assert.deepEqual(range(0.05, 0.99, "percent"), [0, 1]);
  assert.deepEqual(range(4e-4, 4e-4 * (1 + 1e-12), "significant"), [0, 8e-4 * (1 + 1e-12)]);
});

test("smoothing keeps a constant, leaves gaps, and hides no raw value", () => {
  assert.deepEqual(smooth([2, 2, null, 2], 1), [2, 2, null, 2]);
  assert.deepEqual(smooth([0, 3, 0], 1), [1.5, 1, 1.5]);
  const [raw, line] = smoothed(curve([1, 2, 3, 4, 5], [0, 1, 0, 1, 0]), 1);
  assert.equal(raw?.style, "faint");
  assert.deepEqual(raw?.y, [0, 1, 0, 1, 0]);
  assert.notDeepEqual(line?.y, raw?.y);
});

test("areas are shares that add up, and each says its own", () => {
  const areas = stacked([1, 2], [{ name: "submit", values: [3, 1] }, { name: "length", values: [1, null] }]);
  assert.deepEqual(areas.map(({ shown }) => shown), [[0.75, 1], [0.25, 0]]);
  assert.deepEqual(areas.map(({ y }) => y), [[0.75, 1], [1, 1]]);
});

test("seeds are one curve, with Student's interval, where all have a value", () => {
  const band = overSeeds("loop", 0, [curve([1, 2], [1, 2]), curve([1, 2, 3], [3, null, 4])]);
  assert.deepEqual(band.x, [1]);
  assert.deepEqual(band.y, [2]);
  assert.ok(Math.abs((band.high?.[0] ?? 0) - (2 + 12.71)) < 1e-9);
});

test("a chart says in words where it begins and ends", () => {
  assert.equal(
    describe("Reward", [curve([1, 2, 3], [0.1, null, 0.5])], "percent", "step"),
    "Reward. a: 10.0% at step 1, 50.0% at step 3, between 10.0% and 50.0%.",
  );
  assert.equal(describe("Reward", [curve([1], [null])], "percent", "step"), "Reward. Nothing measured yet.");
});

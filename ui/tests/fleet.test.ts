// Pure functions of the Timeline, Weights and Live tabs.

import assert from "node:assert/strict";
import { test } from "node:test";

import { gain, stages, verdict, type ArmTest, type Releases } from "../src/live/data";
import { area, at, clock, pan, paths, ticks, zoom, type Lane } from "../src/timeline/data";
import { placed, scale, WIDE, type Region } from "../src/weights/data";

const lane: Lane = {
  group: "trainer",
  name: "train",
  region: "",
  seconds: 3,
  states: [
    { state: "computing", seconds: 1, values: [1, 0, 0.25] },
    { state: "waiting", seconds: 2, values: [0, 1, 0.75] },
  ],
};

test("states are stacked, and bins of one height are one run", () => {
  assert.equal(area([0, 0, 0], [0.5, 0.5, 0], 1), "M0 1.000V0.500H2V1.000Z");
  const [below, above] = paths(lane, 3);
  assert.ok(below?.path.endsWith("M2 1.000V0.750H3V1.000Z"));
  assert.ok(above?.path.endsWith("M2 0.750V0.000H3V0.750Z"), "what waits stands on what computes");
  assert.equal(at(lane, 2), "waiting 75%, computing 25%");
});

test("a window is zoomed around a place and never leaves the run", () => {
  assert.deepEqual(zoom([0, 100], 0.5, 0.5, [0, 100]), [25, 75]);
  assert.deepEqual(zoom([25, 75], 10, 0.5, [0, 100]), [0, 100]);
  assert.deepEqual(zoom([0, 100], 1e-9, 0, [0, 100]), [0, 0.2]);
  assert.deepEqual(pan([0, 10], -1, [0, 100]), [0, 10]);
  assert.deepEqual(pan([80, 90], 5, [0, 100]), [90, 100]);
});

test("times stand on even seconds, and are as fine as the window needs", () => {
  assert.deepEqual(ticks([61, 119], 7), [70, 80, 90, 100, 110]);
  assert.equal(clock(3723.4, 30), "1:02:03.4");
  assert.equal(clock(59.999, 100), "1:00");
});

const region = (name: string, lag_s: number | null): Region => ({
  name, lag_s, is_home: name === "home", store: "", remark: "", version: 1, behind: 0, sessions: 1, is_away: false, sandboxes: "local", sandbox_hosts: 0, processes: [],
});

test("a region is as far from home as its weights come late", () => {
  const regions = [region("home", 0.01), region("near", 0.1), region("far", 3), region("unknown", null)];
  const [home, ...others] = placed(regions, WIDE).map(({ x, y }) => [(x - WIDE.home[0]) / WIDE.reach[0], (y - WIDE.home[1]) / WIDE.reach[1]] as const);
  assert.deepEqual(home, [0, 0]);
  const far = others.map(([x, y]) => Math.hypot(x, y));
  assert.ok((far[0] ?? 0) < (far[1] ?? 0) && (far[1] ?? 0) <= (far[2] ?? 0) + 1e-9);
  assert.ok(scale(regions).orbits.includes(1));
  assert.deepEqual(scale([region("home", null)]).orbits, []);
});

const releases = (way: Releases["way"], has_shadow = false): Releases => ({
  problem: "", every_steps: 1, shares: [0.05, 0.5], has_shadow, live: 1, former: 0, way, due: 2, releases: [], moves: [], requests: [], table: null,
});

test("a candidate is in the stage that its state says", () => {
  const now = (way: Releases["way"], has_shadow = false) => stages(releases(way, has_shadow)).find(({ state }) => state === "now")?.name;
  assert.equal(now({ version: 2, state: "canary", stage: 1 }), "canary 50%");
  assert.equal(now({ version: 2, state: "canary", stage: 0 }, true), "canary 5%");
  assert.equal(now({ version: 2, state: "shadow", stage: 0 }, true), "shadow");
  assert.equal(now(null), undefined);
});

const armTest = (low: number, sessions: number, p = 1): ArmTest => ({
  version: 2, against: 1,
  evidence: { stage: 0, share: 0.5, users: [40, 40], sessions: [sessions, sessions], sample_ratio_p: p, alpha_of_each_test: 0.01, differences: {} },
  proof: { value: 0.1, low, high: 0.3, users: [40, 40] },
  metrics: [{ name: "reward", direction: "up", margin: 0.1, decides: true, means: [0, 0] }],
  path: [], needs: { min_sessions: 50, min_users: 20, max_sessions: 500, alpha: 0.05, stages: 1 },
});

test("a test says no more than its figures do", () => {
  assert.match(verdict(armTest(-0.05, 100)), /^Proven: reward is no more than 0.1 worse/);
  assert.match(verdict(armTest(-0.2, 100)), /^Not proven yet/);
  assert.match(verdict(armTest(-0.05, 20)), /^Too early to tell: it needs 30 sessions/);
  assert.match(verdict(armTest(-0.05, 100, 0.001)), /another ratio than was drawn/);
  assert.deepEqual(gain({ value: 1, low: -1, high: 2, users: [1, 1] }, "down"), [-2, 1]);
});

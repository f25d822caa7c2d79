// The pure functions of the tab "Rollouts".

import assert from "node:assert/strict";
import { test } from "node:test";

import { contextsOf, gist, inTreeOrder } from "../src/rollouts/contexts";
import { readDiff } from "../src/rollouts/diff_text";
import { comparison, parseQuery, toOptions, withFilter, withSort } from "../src/rollouts/filters";
import { pagesOf, rowsInSight } from "../src/rollouts/windowing";
import { colouring, describe } from "../src/rollouts/token_colours";
import type { Rollout, TokenColumns, Turn } from "../src/rollouts/types";
import { cut, inline, pieces } from "../src/rollouts/visible";

test("whatever hides, moves or colours text is spelt out; breaks, tabs and other scripts stay", () => {
  assert.deepEqual(pieces("a\x1b[31m\u202eb\0"), [
    { text: "a", isSpelt: false },
    { text: "ESC", isSpelt: true },
    { text: "[31m", isSpelt: false },
    { text: "U+202E", isSpelt: true },
    { text: "b", isSpelt: false },
    { text: "NUL", isSpelt: true },
  ]);
  assert.deepEqual(pieces("a\tb\nשלום 漢字 🙂"), [{ text: "a\tb\nשלום 漢字 🙂", isSpelt: false }]);
  assert.equal(inline("a\n\tb\u200b"), "a b⟨U+200B⟩");
  assert.deepEqual(pieces("\ud800x")[0], { text: "U+D800", isSpelt: true });
});

test("a text is cut by lines and by characters, never within a pair", () => {
  assert.deepEqual(cut("a\nb\nc", 2, 99), { text: "a\nb\n", missing: 1 });
  assert.deepEqual(cut("a\nb", 2, 99), { text: "a\nb", missing: 0 });
  assert.deepEqual(cut("x".repeat(10_000_000), 9, 4), { text: "xxxx", missing: 9_999_996 });
  assert.deepEqual(cut("ab🙂", 9, 3), { text: "ab", missing: 2 });
  assert.deepEqual(cut("", 9, 3), { text: "", missing: 0 });
});

test("filters stand in the address and are read back", () => {
  const query = withSort(withFilter(parseQuery({ reward: ">=0.5", nonsense: "1" }), "task", "off"), "tokens");
  assert.deepEqual(toOptions(query), { reward: ">=0.5", task: "off", sort: "tokens" });
  assert.deepEqual(parseQuery(toOptions(query)), query);
  assert.deepEqual(toOptions(withSort(query, "tokens")), { reward: ">=0.5", task: "off", sort: "tokens", reversed: "1" });
  assert.deepEqual(toOptions(withFilter(query, "task", "")), { reward: ">=0.5", sort: "tokens" });
});

test("a comparison is one, or not yet", () => {
  assert.deepEqual([">= 0.5", "1", "<-2e3", " ", ">", "x", "=="].map(comparison), [">= 0.5", "=1", "<-2e3", "", null, null, null]);
});

test("as many rows are drawn as are in sight", () => {
  assert.deepEqual(rowsInSight(0, 340, 34, 100_000, 2), [0, 12]);
  assert.deepEqual(rowsInSight(34_000, 340, 34, 100_000, 2), [998, 1012]);
  assert.deepEqual(rowsInSight(34_000, 340, 34, 5, 2), [5, 5]);
  assert.deepEqual(pagesOf(95, 105, 100_000), [0, 1]);
  assert.deepEqual(pagesOf(0, 0, 0), [0]);
});

function turn(number: number, continues: number | null, more: Partial<Turn> = {}): Turn {
  const empty = { heard: "", said: "", thinking: "", content: "", calls: [], finish: "stop", temperature: 1, prompt_tokens: 0, new_tokens: 0 };
  return { number, continues, kind: "act", ...empty, sampled_tokens: 1, versions: {}, reward: null, hint: null, advantage: null, loss_tokens: null, summary: null, ...more };
}

test("turns form contexts: grown, begun from a summary, branched, begun anew", () => {
  const turns = [turn(0, null), turn(1, 0, { kind: "summary" }), turn(2, null), turn(3, 0), turn(4, 2), turn(5, null)];
  assert.deepEqual(
    contextsOf(turns).map((context) => [context.origin, context.from, context.turns.map((each) => each.number)]),
    [
      ["first", null, [0, 1]],
      ["summary", 1, [2, 4]],
      ["branch", 0, [3]],
      ["new", null, [5]],
    ],
  );
});

test("a turn in a few words", () => {
  assert.equal(gist(turn(0, null, { calls: [{ tool: "read", arguments: { path: "f.py" }, path: "", diff: [] }] })), "read f.py");
  assert.equal(gist(turn(0, null, { content: "\nhello\nworld" })), "hello");
  assert.equal(gist(turn(0, null)), "nothing");
});

test("branches stand below what they left, and none is lost", () => {
  const rollout = (rollout_id: string, branch_of: string | null) => ({ rollout_id, branch_of }) as Rollout;
  const order = inTreeOrder([rollout("a", null), rollout("b", null), rollout("c", "a"), rollout("d", "gone"), rollout("e", "c")]);
  assert.deepEqual(order.map((each) => each.rollout_id), ["a", "c", "e", "b", "d"]);
});

const COLUMNS: TokenColumns = {
  number: 0,
  token_id: [1, 2, 3],
  text: ["a", "b", "c"],
  logprob: [-0.01, -1.2, -9],
  version: [3, 3, 4],
  mismatch: [null, 0.3, -0.9],
  kept: [null, 1, 40],
  advantage: [0.5, 0.5, -0.5],
  has_loss: [true, false, true],
  routes: [[[7, 1]], [[7, 2]], [[5, 1]]],
};

test("tokens are coloured by what is known of them", () => {
  const tones = (mode: Parameters<typeof colouring>[0]) => [0, 1, 2].map((index) => colouring(mode, [COLUMNS], 5, 0).tone(COLUMNS, index));
  assert.deepEqual(tones("logprob"), ["s0", "s2", "s5"]);
  assert.deepEqual(tones("version"), ["c0", "c0", "c1"]);
  assert.deepEqual(tones("mismatch"), ["", "p2", "n3"]);
  assert.deepEqual(tones("advantage"), ["p3", "", "n3"]);
  assert.deepEqual(tones("loss"), ["p2", "off", "p2"]);
  assert.deepEqual(tones("kept"), ["", "s1", "s4"]);
  assert.deepEqual(tones("expert"), ["c0", "c0", "c1"]);
  assert.equal(colouring("version", [COLUMNS], 5, 0).legend[0]?.label, "v3, 1 behind");
  assert.match(colouring("kept", [{ ...COLUMNS, kept: null }], 5, 0).note, /Nothing was cut/);
});

test("a token is described with the trainer’s logprob", () => {
  const pairs = Object.fromEntries(describe(COLUMNS, 1, 5));
  assert.equal(pairs["trainer’s"], "−0.9000");
  assert.equal(pairs["drawn from"], "1 token");
  assert.equal(pairs["experts, layer 0"], "7, 2");
});

test("an output that is a diff is read as one", () => {
  assert.equal(readDiff("no diff\n-1 is a number"), null);
  assert.deepEqual(readDiff("--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y")?.map((line) => line.mark), [" ", " ", " ", "-", "+"]);
});

// The contexts of a rollout: which turns go on from which, where a summary took the place of a context, where one branched.

import type { Rollout, Turn } from "./types";

export interface Context {
  /** From 1. */
  readonly number: number;
  readonly turns: readonly Turn[];
  /** How it began: as the first one, from a summary, as a branch behind a turn, or anew. */
  readonly origin: "first" | "summary" | "branch" | "new";
  /** The turn that it began from; null for the first one and for a new one. */
  readonly from: number | null;
}

/** Turns in contexts, in the order in which these began; every turn is in exactly one. */
export function contextsOf(turns: readonly Turn[]): Context[] {
  const found: { turns: Turn[]; origin: Context["origin"]; from: number | null }[] = [];
  for (const turn of turns) {
    const goingOn = found.find((context) => context.turns.at(-1)?.number === turn.continues);
    if (turn.continues !== null && goingOn) goingOn.turns.push(turn);
    else if (turn.continues !== null) found.push({ turns: [turn], origin: "branch", from: turn.continues });
    else if (turns[turn.number - 1]?.kind === "summary") found.push({ turns: [turn], origin: "summary", from: turn.number - 1 });
    else found.push({ turns: [turn], origin: found.length === 0 ? "first" : "new", from: null });
  }
  return found.map((context, index) => ({ ...context, number: index + 1 }));
}

/** What a turn did, in a few words: its calls, or the beginning of what it said. */
export function gist(turn: Turn): string {
  if (turn.kind === "summary") return "summary";
  if (turn.calls.length === 0) return turn.content.trim().split("\n")[0]?.slice(0, 60) || "nothing";
  return turn.calls.map((call) => [call.tool, call.arguments["path"] ?? call.arguments["command"]?.split("\n")[0] ?? ""].join(" ").trim()).join(", ");
}

/** Rollouts with each branch below the one that it left. */
export function inTreeOrder(rollouts: readonly Rollout[]): Rollout[] {
  const ids = new Set(rollouts.map((rollout) => rollout.rollout_id));
  const roots = rollouts.filter((rollout) => rollout.branch_of === null || !ids.has(rollout.branch_of));
  const below = (rollout: Rollout): Rollout[] => [rollout, ...rollouts.filter((each) => each.branch_of === rollout.rollout_id).flatMap(below)];
  return roots.flatMap(below);
}

// Small marks that rows, pages and groups share: a reward, what is special about a rollout.

import { MISSING } from "../format";
import { inline } from "./visible";

/** A reward as a number with a bar from 0 to 1. */
export function RewardMark({ reward }: { reward: number | null }) {
  if (reward === null) return <span class="rollouts-reward">{MISSING}</span>;
  const share = Math.max(0, Math.min(1, reward));
  return (
    <span class={`rollouts-reward ${reward > 0 ? "is-good" : ""}`}>
      <span class="rollouts-bar" aria-hidden="true">
        <span style={{ width: `${100 * share}%` }} />
      </span>
      {reward.toFixed(Number.isInteger(reward) ? 0 : 2).replace("-", "−")}
    </span>
  );
}

interface Special {
  readonly status: string;
  readonly disposition: string | null;
  readonly cause: string;
  readonly summaries?: number;
  readonly hints?: number;
}

/** What is special about a rollout, in words and not by colour alone. */
export function Badges({ row }: { row: Special }) {
  return (
    <>
      {row.status !== "graded" && <span class="rollouts-badge is-warn">{row.status === "failed_infra" ? "machine failed" : row.status}</span>}
      {row.disposition === "quarantine" && <span class="rollouts-badge is-warn">quarantined: {inline(row.cause)}</span>}
      {row.disposition === "zero" && <span class="rollouts-badge is-warn">zeroed: {inline(row.cause)}</span>}
      {(row.summaries ?? 0) > 0 && <span class="rollouts-badge">{plural(row.summaries ?? 0, "summary", "summaries")}</span>}
      {(row.hints ?? 0) > 0 && <span class="rollouts-badge">{plural(row.hints ?? 0, "hint", "hints")}</span>}
    </>
  );
}

function plural(number: number, one: string, more: string): string {
  return number === 1 ? one : `${number} ${more}`;
}

// A group side by side: what its rollouts came to, how they branch, and their turns next to each other.

import { count, decimal } from "../format";
import { useGrowing } from "../resource";
import { routeTo } from "../routes";
import { useSlow } from "../run/slow";
import { GroupTree } from "./group_tree";
import { Badges, RewardMark } from "./marks";
import { tablePlace } from "./tab";
import { TextBlock } from "./text_block";
import { Reply, TurnFacts } from "./turn";
import type { Rollout } from "./types";
import { inline } from "./visible";

/** States of a group in which nothing of its rollouts changes any more. */
const ENDED = ["consumed", "dropped"];

export function isSettled(rollout: Rollout | undefined): boolean {
  return rollout !== undefined && ENDED.includes(rollout.group_state);
}

export function GroupPage({ run, purpose, number, cursor }: { run: string; purpose: string; number: string; cursor: number }) {
  const place = `/runs/${encodeURIComponent(run)}/groups/${encodeURIComponent(purpose)}/${encodeURIComponent(number)}`;
  const { data, error } = useGrowing<readonly Rollout[]>(place, useSlow(cursor), (rollouts) => isSettled(rollouts[0]));
  const first = data?.[0];
  if (data === null || first === undefined) return error === null ? <p class="note">…</p> : <p role="alert">{error}</p>;
  const compared = data.find((rollout) => rollout.comparison)?.comparison;
  return (
    <div class="rollouts-group">
      <header class="rollouts-head">
        <p class="rollouts-trail">
          <a href={tablePlace(run)}>Rollouts</a> <span aria-hidden="true">/</span> {inline(purpose)} group {number}
        </p>
        <h1>{inline(first.template)}</h1>
        <p class="rollouts-facts">
          <span>{first.group_state}</span>
          <span>{first.step === null ? "no step yet" : `step ${first.step}`}</span>
          {compared && <span>{compared.rollouts} compared</span>}
          {compared && !compared.has_signal && <span class="is-warn">no signal: nothing is trained on</span>}
          {compared && compared.lost > 0 && <span class="is-warn">{compared.lost} lost</span>}
        </p>
        <TextBlock text={first.prompt} kind="heard" label="Task" />
      </header>
      <Comparison run={run} rollouts={data} />
      <GroupTree run={run} rollouts={data} />
      <h2>Side by side</h2>
      <Columns run={run} rollouts={data} />
    </div>
  );
}

function Comparison({ run, rollouts }: { run: string; rollouts: readonly Rollout[] }) {
  return (
    <div class="rollouts-scroll" tabIndex={0} role="group" aria-label="Comparison">
      <table class="rollouts-comparison">
        <caption class="hidden">The rollouts of the group</caption>
        <thead>
          <tr>
            {["Slot", "Reward", "Penalty", "Compared", "Advantage", "Turns", "Tokens", "Seconds", "Ended"].map((title) => (
              <th key={title} scope="col" class={title === "Ended" ? "" : "is-number"}>
                {title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rollouts.map((rollout) => (
            <tr key={rollout.rollout_id}>
              <th scope="row" class="is-number">
                <a href={routeTo(run, "rollouts", [rollout.rollout_id])}>{name(rollout)}</a>
              </th>
              <td class="is-number">
                <RewardMark reward={rollout.reward} />
              </td>
              <td class="is-number">{decimal(rollout.comparison?.penalty, 3)}</td>
              <td class="is-number">{decimal(rollout.comparison?.compared, 3)}</td>
              <td class={`is-number ${tone(advantage(rollout))}`}>{decimal(advantage(rollout), 3)}</td>
              <td class="is-number">{count(rollout.turns.length)}</td>
              <td class="is-number">{count(tokens(rollout))}</td>
              <td class="is-number">{decimal(rollout.seconds, 1)}</td>
              <td>
                {inline(rollout.reason).slice(0, 60)} <Badges row={special(rollout)} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const MOST_TURNS = 60;

/** A row for each turn, a column for each rollout. */
function Columns({ run, rollouts }: { run: string; rollouts: readonly Rollout[] }) {
  const played = rollouts.filter((rollout) => rollout.turns.length > 0);
  const turns = Math.min(MOST_TURNS, Math.max(0, ...played.map((rollout) => rollout.turns.length)));
  return (
    <div class="rollouts-scroll rollouts-columns" tabIndex={0} role="group" aria-label="Turns side by side" style={{ gridTemplateColumns: `repeat(${played.length}, minmax(280px, 1fr))` }}>
      {played.map((rollout) => (
        <p key={rollout.rollout_id} class="rollouts-column-head">
          <a href={routeTo(run, "rollouts", [rollout.rollout_id])}>slot {name(rollout)}</a> <RewardMark reward={rollout.reward} />
        </p>
      ))}
      {Array.from({ length: turns }, (_, number) =>
        played.map((rollout) => {
          const turn = rollout.turns[number];
          if (turn === undefined) return <div key={`${rollout.rollout_id}${number}`} class="rollouts-cell is-over" />;
          return (
            <div key={`${rollout.rollout_id}${number}`} class={`rollouts-cell ${number < rollout.branch_turns ? "is-shared" : ""}`}>
              <p class="rollouts-cell-head">
                <a href={routeTo(run, "rollouts", [rollout.rollout_id, "turn", String(number)])}>{turn.kind === "summary" ? "summary" : "turn"} {number}</a>
                <TurnFacts turn={turn} step={null} isShared={number < rollout.branch_turns} />
              </p>
              {number > 0 && <TextBlock text={turn.heard} kind="heard" label="New in the context" />}
              <Reply turn={turn} />
            </div>
          );
        }),
      )}
    </div>
  ); // prettier-ignore
}

function name(rollout: Rollout): string {
  return `${rollout.slot}${rollout.attempt > 0 ? `.${rollout.attempt}` : ""}`;
}

function tokens(rollout: Rollout): number {
  return rollout.turns.reduce((sum, turn) => sum + turn.sampled_tokens, 0);
}

/** The advantage of its first turn that is its own; null where nothing is trained on. */
function advantage(rollout: Rollout): number | null {
  return rollout.turns.find((turn) => turn.number >= rollout.branch_turns && turn.loss_tokens !== 0)?.advantage ?? null;
}

function tone(value: number | null): string {
  return value === null || Math.abs(value) < 0.0005 ? "" : value > 0 ? "is-good" : "is-bad";
}

function special(rollout: Rollout) {
  return {
    status: rollout.status,
    disposition: rollout.verdict?.disposition ?? null,
    cause: rollout.verdict?.reason ?? "",
    summaries: rollout.turns.filter((turn) => turn.kind === "summary").length,
    hints: rollout.turns.filter((turn) => turn.hint !== null).length,
  };
}

// The rollouts of a group as a tree: a line for each, with a mark for each turn; a branch begins where it left another one.

import { routeTo } from "../routes";
import { contextsOf, gist, inTreeOrder } from "./contexts";
import type { Rollout, Turn } from "./types";
import { inline } from "./visible";

const STEP = 16;
const ROW = 24;
const LEFT = 64;

export function GroupTree({ run, rollouts }: { run: string; rollouts: readonly Rollout[] }) {
  const rows = inTreeOrder(rollouts.filter((rollout) => rollout.turns.length > 0));
  const isTree = rows.some((rollout) => rollout.branch_of !== null || contextsOf(rollout.turns).length > 1);
  if (!isTree) return null;
  const width = LEFT + STEP * Math.max(...rows.map((rollout) => rollout.turns.length)) + 8;
  return (
    <section aria-label="Branches and summaries">
      <h2>Branches and summaries</h2>
      <div class="rollouts-scroll" tabIndex={0} role="group" aria-label="Tree of turns">
        <svg class="rollouts-tree" width={width} height={ROW * rows.length} role="group" aria-label={inWords(rows)}>
          {rows.map((rollout, row) => (
            <Line key={rollout.rollout_id} run={run} rollout={rollout} row={row} parent={rows.findIndex((each) => each.rollout_id === rollout.branch_of)} />
          ))}
        </svg>
      </div>
      <p class="rollouts-key note">
        <span class="rollouts-dot" /> turn <span class="rollouts-dot is-edit" /> edit <span class="rollouts-dot is-hint" /> hint <span class="rollouts-dot is-summary" /> summary, after which the context begins anew
      </p>
    </section>
  );
}

function Line({ run, rollout, row, parent }: { run: string; rollout: Rollout; row: number; parent: number }) {
  const y = ROW * row + ROW / 2;
  const x = (number: number) => LEFT + STEP * number + STEP / 2;
  const own = rollout.turns.filter((turn) => turn.number >= rollout.branch_turns);
  const last = rollout.turns.at(-1)?.number ?? 0;
  const start = rollout.branch_turns;
  return (
    <g>
      <text x={0} y={y + 4} class={rollout.reward !== null && rollout.reward > 0 ? "is-good" : ""}>
        {rollout.slot} · {rollout.reward === null ? "×" : Number(rollout.reward.toFixed(2))}
      </text>
      {parent >= 0 && start > 0 && <path d={`M${x(start - 1)} ${ROW * parent + ROW / 2}V${y - 6}q0 6 6 6H${x(start)}`} />}
      {own.length > 1 && <path d={`M${x(start)} ${y}H${x(last)}`} class={gaps(own)} />}
      {own.map((turn) => (
        <a key={turn.number} href={routeTo(run, "rollouts", [rollout.rollout_id, "turn", String(turn.number)])} aria-label={`Slot ${rollout.slot}, turn ${turn.number}: ${inline(gist(turn))}`}>
          <title>
            {turn.number}: {inline(gist(turn))}
          </title>
          <Mark turn={turn} x={x(turn.number)} y={y} />
        </a>
      ))}
    </g>
  );
}

function Mark({ turn, x, y }: { turn: Turn; x: number; y: number }) {
  if (turn.kind === "summary") return <rect x={x - 5} y={y - 5} width={10} height={10} transform={`rotate(45 ${x} ${y})`} class="is-summary" />;
  const isEdit = turn.calls.some((call) => call.diff.length > 0);
  return <circle cx={x} cy={y} r={isEdit ? 5 : 4} class={turn.hint ? "is-hint" : isEdit ? "is-edit" : ""} />;
}

function gaps(turns: readonly Turn[]): string {
  return turns.some((turn) => turn.kind === "summary") ? "has-summary" : "";
}

function inWords(rows: readonly Rollout[]): string {
  return rows
    .map((rollout) => {
      const summaries = rollout.turns.filter((turn) => turn.kind === "summary").length;
      const branch = rollout.branch_of === null ? "" : `, a branch from turn ${rollout.branch_turns} on`;
      return `slot ${rollout.slot}: ${rollout.turns.length} turns${summaries > 0 ? `, ${summaries} summaries` : ""}${branch}`;
    })
    .join("; ");
}

// A rollout at a glance: its contexts as a tree, a row for each turn.

import { count } from "../format";
import { routeTo } from "../routes";
import { contextsOf, gist, type Context } from "./contexts";
import type { Rollout, Turn } from "./types";
import { inline } from "./visible";

interface OutlineProps {
  readonly run: string;
  readonly rollout: Rollout;
  readonly chosen: number | null;
  readonly options: Readonly<Record<string, string>>;
}

export function Outline({ run, rollout, chosen, options }: OutlineProps) {
  const contexts = contextsOf(rollout.turns);
  return (
    <nav class="rollouts-outline" aria-label="Turns">
      <ol>
        {contexts.map((context) => (
          <li key={context.number} class={context.origin === "first" ? "" : "is-child"}>
            {contexts.length > 1 && <p class="rollouts-origin">{origin(context, rollout.turns)}</p>}
            <ol>
              {context.turns.map((turn) => (
                <li key={turn.number}>
                  <a href={routeTo(run, "rollouts", [rollout.rollout_id, "turn", String(turn.number)], options)} aria-current={turn.number === chosen ? "true" : undefined}>
                    <span class={`rollouts-dot ${tone(turn)}`} aria-hidden="true" />
                    <span class="rollouts-turn-number">{turn.number}</span>
                    <span class="rollouts-gist">{inline(gist(turn))}</span>
                    <span class="rollouts-size">{count(turn.sampled_tokens)}</span>
                  </a>
                </li>
              ))}
            </ol>
          </li>
        ))}
      </ol>
    </nav>
  );
}

function origin(context: Context, turns: readonly Turn[]): string {
  const name = `Context ${context.number}`;
  if (context.origin === "branch") return `${name}: branches off behind turn ${context.from}`;
  if (context.origin === "new") return `${name}: began anew`;
  const summary = context.from === null ? null : turns[context.from]?.summary;
  if (context.origin === "summary" && summary) {
    const facts = Object.values(summary.facts).filter((isKept) => isKept !== null);
    const kept = facts.length > 0 ? `, ${facts.filter(Boolean).length} of ${facts.length} facts kept` : "";
    return `${name}: ${count(summary.tokens_before)} → ${count(summary.tokens_after)} tokens${kept}`;
  }
  return context.origin === "summary" ? `${name}: from the summary of turn ${context.from}` : name;
}

/** The shape of a turn's mark: a summary, a hint, a change to a file, anything else. */
function tone(turn: Turn): string {
  if (turn.kind === "summary") return "is-summary";
  if (turn.hint) return "is-hint";
  return turn.calls.some((call) => call.diff.length > 0) ? "is-edit" : "";
}

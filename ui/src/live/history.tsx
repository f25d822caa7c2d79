// Every move of every release, with the evidence that it rests on.

import { small } from "../format";
import { signed, type Evidence, type Move } from "./data";

const MOST = 60;

export function History({ moves }: { moves: readonly Move[] }) {
  if (moves.length === 0) return <p class="note">No version has been a candidate yet.</p>;
  return (
    <section aria-labelledby="history-title">
      <h2 id="history-title">Moves, and why</h2>
      <ol class="live-moves">
        {moves.slice(0, MOST).map((move) => (
          <li key={`${move.version}${move.to_state}${move.at}`} class={`is-${move.to_state}`}>
            <MoveRow move={move} />
          </li>
        ))}
      </ol>
      {moves.length > MOST && <p class="note">{moves.length - MOST} earlier ones: `etude release status`.</p>}
    </section>
  );
}

function MoveRow({ move }: { move: Move }) {
  const hasEvidence = Object.values(move.evidence).some((value) => !(Array.isArray(value) && value.length === 0));
  const head = (
    <>
      <time dateTime={new Date(1000 * move.at).toISOString()}>{new Date(1000 * move.at).toLocaleString([], { dateStyle: "short", timeStyle: "medium" })}</time>
      <b>v{move.version}</b>
      <span class="live-to-state">{move.to_state.replaceAll("_", " ")}</span>
      <span class="live-reason">
        {move.reason}
        {move.by && ` (${move.by})`}
      </span>
    </>
  );
  if (!hasEvidence) return <div class="live-move">{head}</div>;
  return (
    <details>
      <summary class="live-move">{head}</summary>
      <Proof evidence={move.evidence} />
    </details>
  );
}

/** Checks of a gate as a table; everything else as names and values. */
function Proof({ evidence }: { evidence: Move["evidence"] }) {
  const { checks, measured, ...others } = evidence;
  return (
    <div class="live-proof">
      {Array.isArray(checks) && <Checks checks={checks} />}
      {isObject(measured) && <Facts facts={withoutNothing({ reward: measured.reward ?? null, tries: measured.tries ?? null, cheats: measured.cheats ?? null })} />}
      <Facts facts={others} />
    </div>
  );
}

function Checks({ checks }: { checks: readonly Evidence[] }) {
  return (
    <table>
      <caption class="hidden">Checks of the gate</caption>
      <thead>
        <tr>
          <th scope="col">check</th>
          <th scope="col">passed</th>
          <th scope="col">what was measured</th>
        </tr>
      </thead>
      <tbody>
        {checks.filter(isObject).map((check) => (
          <tr key={String(check.name)}>
            <th scope="row">{String(check.name)}</th>
            <td>
              <b class={check.passed === true ? "is-good" : "is-bad"}>{check.passed === true ? "yes" : "no"}</b>
            </td>
            <td>{String(check.says)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Facts({ facts }: { facts: { readonly [key: string]: Evidence } }) {
  const entries = Object.entries(facts);
  if (entries.length === 0) return null;
  return (
    <dl class="live-facts">
      {entries.map(([name, value]) => (
        <div key={name}>
          <dt>{name.replaceAll("_", " ")}</dt>
          <dd>{words(value)}</dd>
        </div>
      ))}
    </dl>
  );
}

/** A piece of evidence as text: an interval as such, a list by commas, the rest by its names. */
function words(value: Evidence): string {
  if (value === null) return "–";
  if (typeof value === "number") return small(value, 4);
  if (Array.isArray(value)) return value.map(words).join(", ") || "nobody";
  if (!isObject(value)) return String(value);
  if (typeof value.value === "number" && "low" in value) return `${signed(value.value)} [${bound(value.low)}, ${bound(value.high)}]`;
  return Object.entries(value).map(([name, each]) => `${name.replaceAll("_", " ")} ${words(each)}`).join("; ");
}

const bound = (value: Evidence | undefined): string => signed(typeof value === "number" ? value : null);

function withoutNothing(facts: { readonly [key: string]: Evidence }): { readonly [key: string]: Evidence } {
  return Object.fromEntries(Object.entries(facts).filter(([, value]) => value !== null));
}

function isObject(value: Evidence | undefined): value is { readonly [key: string]: Evidence } {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

// Users' sessions: how far they are, what was said of them, and how that became a reward.

import { useState } from "preact/hooks";

import { ago, count, decimal, percent, small } from "../format";
import { useJson } from "../resource";
import { routeTo } from "../routes";
import { signed, type Live, type Part, type Session } from "./data";

export function Flow({ live }: { live: Live }) {
  const { states, counts } = live.sessions;
  const results = Object.entries(counts).filter(([name]) => name.startsWith("session_"));
  const lost = Object.entries(counts).filter(([name, number]) => name.startsWith("left_out_") && number > 0);
  const steps: [string, number, string][] = [
    ["open", states.open ?? 0, "calls may follow"],
    ["ended", states.ended ?? 0, `signals count for ${live.window_s} s`],
    ["closed", states.closed ?? 0, "wait to be joined"],
    ["taken", states.taken ?? 0, "handed to learning"],
  ];
  return (
    <section aria-labelledby="flow-title">
      <h2 id="flow-title">Sessions</h2>
      <ol class="live-flow">
        {steps.map(([name, number, note]) => (
          <li key={name}>
            <b>{count(number)}</b> {name}
            <small>{note}</small>
          </li>
        ))}
        <li class="live-results">
          {results.map(([name, number]) => (
            <span key={name}>
              <b>{count(number)}</b> {name.slice("session_".length).replaceAll("_", " ")}
            </span>
          ))}
        </li>
      </ol>
      {lost.length > 0 && (
        <p class="note">Signals left out: {lost.map(([name, number]) => `${count(number)} ${name.slice("left_out_".length).replaceAll("_", " ")}`).join(", ")}.</p>
      )}
    </section>
  );
}

export function Worth({ live }: { live: Live }) {
  const most = Math.max(1, ...live.sessions.signals.map(({ number }) => number));
  const quarantined = Object.entries(live.poisoning.quarantined);
  return (
    <div class="live-columns">
      <section aria-labelledby="signals-title">
        <h2 id="signals-title">Signals</h2>
        <table>
          <thead>
            <tr>
              <th scope="col">kind</th>
              <th scope="col">number</th>
              <th scope="col" class="number">mean</th>
              <th scope="col" class="number">late</th>
            </tr>
          </thead>
          <tbody>
            {live.sessions.signals.map((signal) => (
              <tr key={signal.kind}>
                <th scope="row">{signal.kind.replaceAll("_", " ")}</th>
                <td>
                  <span class="live-bar">
                    <i style={{ width: `${(100 * signal.number) / most}%` }} aria-hidden="true" />
                    {count(signal.number)}
                  </span>
                </td>
                <td class="number">{small(signal.mean, 3)}</td>
                <td class="number">{signal.late || ""}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </section>
      <section aria-labelledby="formula-title">
        <h2 id="formula-title">What a session is worth</h2>
        <table>
          <thead>
            <tr>
              <th scope="col">part</th>
              <th scope="col">of</th>
              <th scope="col" class="number">weight</th>
              <th scope="col">range</th>
              <th scope="col">silence</th>
            </tr>
          </thead>
          <tbody>
            {live.formula.map((part) => (
              <FormulaRow key={part.name} part={part} />
            ))}
          </tbody>
        </table>
      </section>
      <section aria-labelledby="protection-title">
        <h2 id="protection-title">Protection</h2>
        <p>
          {quarantined.length === 0
            ? "No session was kept out of learning."
            : `Kept out of learning: ${quarantined.map(([rule, number]) => `${count(number)} sessions for ${rule}`).join(", ")}.`}
        </p>
        <p>
          {live.poisoning.capped_users === 0
            ? `No cap holds anybody down in the newest ${count(live.poisoning.looked_at)} sessions`
            : `${count(live.poisoning.capped_users)} users of the newest ${count(live.poisoning.looked_at)} sessions count for less than each session in full`}
          : no user is more than {percent(live.poisoning.limits.largest_share, 0)} of what is learnt.
        </p>
      </section>
    </div>
  );
}

function FormulaRow({ part }: { part: Part }) {
  return (
    <tr>
      <th scope="row">{part.name}</th>
      <td>
        {part.signal.replaceAll("_", " ")} per {part.per}
      </td>
      <td class="number">{signed(part.weight)}</td>
      <td>
        {part.range[0]} to {part.range[1]}
      </td>
      <td>{part.missing === "estimate" ? "is estimated" : `is ${part.missing}`}</td>
    </tr>
  );
}

export function Newest({ run, live, offset, onOffset }: { run: string; live: Live; offset: number; onOffset: (offset: number) => void }) {
  const [open, setOpen] = useState<string | null>(null);
  const { rows, total } = live.sessions;
  const most = Math.max(1e-9, ...rows.map(({ reward }) => Math.abs(reward ?? 0)));
  return (
    <section aria-labelledby="newest-title">
      <h2 id="newest-title">Newest sessions</h2>
      <div class="live-scroll" tabIndex={0} role="region" aria-label="Table of sessions">
        <table class="live-sessions">
          <thead>
            <tr>
              <th scope="col">opened</th>
              <th scope="col">user</th>
              <th scope="col">request</th>
              <th scope="col">arm</th>
              <th scope="col" class="number">turns</th>
              <th scope="col">said</th>
              <th scope="col">worth</th>
              <th scope="col" class="number">propensity</th>
              <th scope="col" class="number">weight</th>
              <th scope="col">state</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((session) => (
              <SessionRows key={session.id} {...{ run, session, most, now_s: live.now_s }} isOpen={open === session.id} onToggle={() => setOpen(open === session.id ? null : session.id)} />
            ))}
          </tbody>
        </table>
      </div>
      <p class="live-pages">
        {offset > 0 && (
          <button type="button" onClick={() => onOffset(0)}>
            newest
          </button>
        )}
        {offset + rows.length < total && (
          <button type="button" onClick={() => onOffset(offset + rows.length)}>
            older
          </button>
        )}
        <span class="note">
          {count(offset + 1)} to {count(offset + rows.length)} of {count(total)}
        </span>
      </p>
    </section>
  );
}

interface SessionRowsProps {
  readonly run: string;
  readonly session: Session;
  readonly most: number;
  readonly now_s: number;
  readonly isOpen: boolean;
  readonly onToggle: () => void;
}

function SessionRows({ run, session, most, now_s, isOpen, onToggle }: SessionRowsProps) {
  return (
    <>
      <tr>
        <th scope="row">
          <button type="button" class="live-open" aria-expanded={isOpen} onClick={onToggle}>
            {ago(now_s - session.opened_s)}
          </button>
        </th>
        <td>
          <code>{session.user || "–"}</code>
        </td>
        <td class="live-template">{session.template || "–"}</td>
        <td>
          {session.arm.split(".")[0] || "–"} <small>v{session.versions[1] ?? "–"}</small>
        </td>
        <td class="number">{session.turns}</td>
        <td>
          {session.signals.map((said, index) => (
            <small key={index} class={said.late ? "live-chip is-late" : "live-chip"}>
              {said.kind.replaceAll("_", " ")} {small(said.value, 2)}
            </small>
          ))}
        </td>
        <td>
          <Reward value={session.reward} most={most} />
        </td>
        <td class="number">{small(session.propensity)}</td>
        <td class={session.weight !== null && session.weight < 1 ? "number is-held" : "number"}>{decimal(session.weight, 2)}</td>
        <td>{session.result || session.state}</td>
      </tr>
      {isOpen && (
        <tr class="live-detail">
          <td colSpan={10}>
            <Detail run={run} session={session} />
          </td>
        </tr>
      )}
    </>
  );
}

function Reward({ value, most }: { value: number | null; most: number }) {
  if (value === null) return <span>–</span>;
  const share = (50 * Math.abs(value)) / most;
  return (
    <span class="live-reward">
      <b>{signed(value)}</b>
      <span aria-hidden="true">
        <i class={value < 0 ? "is-less" : "is-more"} style={value < 0 ? { right: "50%", width: `${share}%` } : { left: "50%", width: `${share}%` }} />
      </span>
    </span>
  );
}

interface DetailData {
  readonly parts: readonly { readonly name: string; readonly signal: string; readonly weight: number; readonly answers: readonly (number | null)[]; readonly silence: string; readonly value: number | null; readonly worth: number | null }[];
  readonly bounded: number | null;
  readonly reward: number | null;
  readonly turn_rewards: readonly number[];
  readonly rollout: string | null;
  readonly dropped: string;
}

/** How what was said of one session became its reward. */
function Detail({ run, session }: { run: string; session: Session }) {
  const { data, error } = useJson<DetailData>(`/runs/${encodeURIComponent(run)}/live/sessions/${encodeURIComponent(session.id)}`);
  if (error !== null) return <p role="alert">{error}</p>;
  if (data === null) return <p class="note">…</p>;
  return (
    <div class="live-sum">
      {data.parts.map((part) => (
        <p key={part.name}>
          <b>{part.name}</b> {answered(part.answers)}
          {part.silence && `, ${part.silence}`}
          {part.value !== null && `; counts as ${small(part.value, 3)}${inverse(part, session)}, × ${part.weight} = ${signed(part.worth)}`}
        </p>
      ))}
      <p>
        <b>reward</b> {data.reward === null ? "none yet" : signed(data.reward)}
        {data.turn_rewards.length > 0 && `, of turns ${data.turn_rewards.map(signed).join(", ")}`}
        {data.bounded ? `; the weight of ${data.bounded} answers was bounded` : ""}
        {data.dropped && `; not learnt from: ${data.dropped}`}
      </p>
      {data.rollout !== null && <a href={routeTo(run, "rollouts", [data.rollout])}>Read the session</a>}
    </div>
  );
}

/** Why an answer counts for more than it says: it stands for the silent sessions that are like it. */
function inverse(part: DetailData["parts"][number], session: Session): string {
  const answer = part.answers.length === 1 ? part.answers[0] : null;
  const isOther = answer !== null && answer !== undefined && part.value !== null && Math.abs(answer - part.value) > 1e-6;
  return isOther && session.propensity !== null ? ` since only ${small(session.propensity)} of such sessions are answered` : "";
}

function answered(answers: readonly (number | null)[]): string {
  if (answers.length === 0) return "is looked at when the session’s window is over";
  const given = answers.filter((answer) => answer !== null).map((answer) => small(answer, 3));
  return given.length === 0 ? "nothing was said" : `${given.join(", ")}${given.length < answers.length ? ` (of ${answers.length} turns)` : ""} was said`;
}

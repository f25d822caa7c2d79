// What came of a rollout: its reward and the parts of it, verdicts, comparison with its group, files.

import type { ComponentChildren } from "preact";

import { count, decimal, percent } from "../format";
import { Diff } from "./diff";
import { TextBlock } from "./text_block";
import type { Part, Rollout } from "./types";
import { inline } from "./visible";

export function RewardView({ rollout }: { rollout: Rollout }) {
  const summed = rollout.parts.filter((part) => part.worth !== null);
  const measured = rollout.parts.filter((part) => part.worth === null);
  const shown = measured.filter((part) => part.value !== 0);
  if (rollout.parts.length === 0) return null;
  return (
    <section aria-label="Reward">
      <h2>Reward</h2>
      {summed.length > 0 && (
        <table class="rollouts-parts">
          <caption class="hidden">Parts that the reward is the sum of</caption>
          <tbody>
            {summed.map((part) => (
              <PartRow key={part.name} part={part} />
            ))}
          </tbody>
        </table>
      )}
      {shown.length > 0 && (
        <dl class="rollouts-pairs">
          {shown.map((part) => (
            <Pair key={part.name} name={inline(part.name)}>
              {decimal(part.value, Number.isInteger(part.value) ? 0 : 3)}
              {isJudge(part) && <span class="rollouts-badge">judge</span>}
            </Pair>
          ))}
        </dl>
      )}
      {measured.length > shown.length && <p class="note">{shown.length > 0 ? "All else" : "All"} that was measured is 0.</p>}
    </section>
  );
}

function PartRow({ part }: { part: Part }) {
  const worth = part.worth ?? 0;
  return (
    <tr>
      <th scope="row">
        {inline(part.name)} {isJudge(part) && <span class="rollouts-badge">judge</span>}
      </th>
      <td title="As its source gave it">{decimal(part.value, 3)}</td>
      <td class={worth > 0 ? "is-good" : worth < 0 ? "is-bad" : ""} title="What it adds">
        {worth >= 0 ? "+" : ""}
        {decimal(worth, 3)}
      </td>
    </tr>
  );
}

function isJudge(part: Part): boolean {
  return part.source.startsWith("judge.");
}

export function VerdictView({ rollout }: { rollout: Rollout }) {
  const { verdict } = rollout;
  if (!verdict || (verdict.disposition === "keep" && verdict.flags.length === 0)) return null;
  const words: Readonly<Record<string, string>> = { keep: "kept", zero: "worth nothing", quarantine: "quarantined, not trained on" };
  return (
    <section class="rollouts-verdict" aria-label="Verdict on cheating">
      <h2>{verdict.hacked ? "Hacked" : "Verdict"}</h2>
      <p>
        <b>{words[verdict.disposition] ?? verdict.disposition}</b>
        {verdict.reason && `, by ${inline(verdict.reason)}`}; graded {decimal(verdict.graded, 2)}
        {verdict.impossible && "; the task cannot be passed honestly"}
      </p>
      <p>
        {verdict.flags.map((flag) => (
          <span key={flag} class="rollouts-badge is-warn">
            {inline(flag)}
          </span>
        ))}
      </p>
    </section>
  );
}

/** Letters of a pseudonym that tell users apart. */
const SHORT = 12;

/** Who asked for the work of a live session, and what they said of it. */
export function UserView({ rollout }: { rollout: Rollout }) {
  const { observed } = rollout;
  if (!observed) return null;
  const { user, arm, template, weight, propensity } = observed.observation;
  const answers = Object.entries(observed.answers);
  return (
    <section aria-label="User">
      <h2>User</h2>
      <dl class="rollouts-pairs">
        <Pair name="pseudonym">
          <span title={inline(user)}>{inline(user).slice(0, SHORT)}</span>
        </Pair>
        <Pair name="arm">{inline(arm)}</Pair>
        {template && <Pair name="asked for">{inline(template)}</Pair>}
        {answers.map(([part, values]) => (
          <Pair key={part} name={inline(part)}>
            {values.map((value) => (value === null ? "no answer" : decimal(value, 2))).join(", ")}
          </Pair>
        ))}
        {propensity < 1 && <Pair name="answers come">{percent(propensity)} of the time</Pair>}
        {weight !== 1 && <Pair name="weight">× {decimal(weight, 3)}</Pair>}
      </dl>
    </section>
  );
}

/** What the run's judge said, vote by vote. */
export function VotesView({ rollout }: { rollout: Rollout }) {
  if (rollout.votes.length === 0) return null;
  return (
    <section aria-label="Votes of the judge">
      <h2>Judge</h2>
      {rollout.votes.map((vote, index) => (
        <div key={index} class="rollouts-vote">
          <p>
            {inline(vote.aspect)} <b>{vote.score === null ? "cannot tell" : vote.score}</b>
            {vote.score !== null && ` of ${vote.lowest}–${vote.highest}`}
          </p>
          <TextBlock text={vote.reason} kind="plain" label={`Reason, ${inline(vote.aspect)}`} />
        </div>
      ))}
    </section>
  );
}

export function ComparisonView({ rollout }: { rollout: Rollout }) {
  const compared = rollout.comparison;
  if (!compared) return null;
  const loss = rollout.turns.reduce((sum, turn) => sum + (turn.loss_tokens ?? 0), 0);
  const advantages = [...new Set(rollout.turns.map((turn) => turn.advantage).filter((value) => value !== null))].sort((a, b) => a - b);
  const span = advantages.length > 1 ? `${decimal(advantages[0], 3)} … ${decimal(advantages.at(-1), 3)}` : decimal(advantages[0], 3);
  return (
    <section aria-label="Comparison with its group">
      <h2>Compared</h2>
      <dl class="rollouts-pairs">
        <Pair name="value">
          {decimal(compared.compared, 3)}
          {compared.penalty !== 0 && <small> after −{decimal(compared.penalty, 3)} for effort</small>}
        </Pair>
        <Pair name="advantage">{compared.has_signal ? span : "no signal"}</Pair>
        <Pair name="among">
          {count(compared.rollouts)}
          {compared.quarantined > 0 && `, ${compared.quarantined} quarantined`}
          {compared.lost > 0 && `, ${compared.lost} lost`}
        </Pair>
        {compared.weight !== 1 && <Pair name="weight">× {decimal(compared.weight, 3)}</Pair>}
        {compared.has_signal && (
          <Pair name="loss tokens">
            {count(loss)}
            {compared.step_tokens !== null && ` of ${count(compared.step_tokens)}`}
          </Pair>
        )}
      </dl>
    </section>
  );
}

/** True on a phone, where what is beside the turns stands before them. */
export function isNarrow(): boolean {
  return matchMedia("(max-width: 960px)").matches;
}

export function FilesView({ rollout }: { rollout: Rollout }) {
  if (rollout.files.length === 0) return null;
  return (
    <section class="rollouts-files" aria-label="Files">
      <h2>Files</h2>
      {rollout.files.map((file) => (
        <details key={file.path} open={file.diff.length > 0 && rollout.files.length < 4 && !isNarrow()}>
          <summary>
            <code>{inline(file.path)}</code> <span class="note">{file.diff.length > 0 ? "changed" : "as it was"}</span>
          </summary>
          {file.diff.length > 0 ? <Diff lines={file.diff} path={file.path} /> : <TextBlock text={file.before} kind="plain" label={`File ${inline(file.path)}`} />}
        </details>
      ))}
    </section>
  );
}

export function Pair({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

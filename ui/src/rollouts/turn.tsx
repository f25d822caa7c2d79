// One turn: what was new in its context, what the model said and called, what a hint or a summary made of it.

import type { ComponentChildren } from "preact";

import { count, decimal } from "../format";
import { Diff } from "./diff";
import { readDiff } from "./diff_text";
import { TextBlock, Visible } from "./text_block";
import { TokenText } from "./tokens";
import type { Colouring } from "./token_colours";
import type { Call, Summary, TokenColumns, Turn } from "./types";
import { inline } from "./visible";

export interface TurnProps {
  readonly turn: Turn;
  readonly step: number | null;
  readonly place: string;
  readonly isChosen: boolean;
  /** Sampled by the rollout that this one branched off from. */
  readonly isShared: boolean;
  readonly columns: TokenColumns | undefined;
  readonly colours: Colouring | null;
  readonly token: number | null;
  readonly onToken: (token: number) => void;
}

export function TurnView({ turn, step, place, isChosen, isShared, columns, colours, token, onToken }: TurnProps) {
  const isDiff = readDiff(turn.heard);
  return (
    <article class={`rollouts-turn ${isChosen ? "is-chosen" : ""}`} id={`turn-${turn.number}`} aria-labelledby={`turn-${turn.number}-title`}>
      <header>
        <h2 id={`turn-${turn.number}-title`}>
          <a href={place} title="Link to this turn">
            {turn.kind === "summary" ? "Summary" : "Turn"} {turn.number}
          </a>
        </h2>
        <TurnFacts turn={turn} step={step} isShared={isShared} />
      </header>
      {isDiff ? <Diff lines={isDiff} path="output" /> : <TextBlock text={turn.heard} kind="heard" label={turn.continues === null ? "Context" : "New in the context"} />}
      {turn.hint && <TextBlock text={`${turn.hint.text}\n— ${turn.hint.source}`} kind="hint" label="Hint" />}
      {colours && columns ? (
        <TokenText columns={columns} colours={colours} step={step} chosen={token} onChoose={onToken} />
      ) : turn.summary ? (
        <SummaryView summary={turn.summary} />
      ) : (
        <Reply turn={turn} />
      )}
      {colours && turn.calls.some((call) => call.diff.length > 0) && turn.calls.map((call, index) => call.diff.length > 0 && <Diff key={index} lines={call.diff} path={call.path} />)}
    </article>
  );
}

export function TurnFacts({ turn, step, isShared }: { turn: Turn; step: number | null; isShared: boolean }) {
  const versions = Object.keys(turn.versions).map((version) => `v${version}`);
  const oldest = Math.min(...Object.keys(turn.versions).map(Number));
  const behind = step === null || versions.length === 0 ? "" : ` · ${step - 1 - oldest} behind`;
  return (
    <p class="rollouts-facts">
      <Fact title={`${count(turn.prompt_tokens)} tokens of prompt, ${count(turn.new_tokens)} of them new; ${count(turn.sampled_tokens)} sampled`}>
        {count(turn.new_tokens)} in → {count(turn.sampled_tokens)} out
      </Fact>
      {versions.length > 0 && <Fact title={`Sampled by weight version ${versions.join(", ")}${behind}`}>{versions.length > 2 ? `${versions[0]}…${versions.at(-1)}` : versions.join(", ")}{behind}</Fact>}
      {turn.advantage !== null && (
        <Fact title={`Advantage; ${count(turn.loss_tokens)} of its tokens carry loss`} tone={turn.loss_tokens === 0 ? "" : turn.advantage > 0.0005 ? "is-good" : turn.advantage < -0.0005 ? "is-bad" : ""}>
          {turn.loss_tokens === 0 ? "no loss" : `A ${turn.advantage >= 0 ? "+" : ""}${decimal(turn.advantage, 3)}`}
        </Fact>
      )}
      {turn.reward !== null && <Fact title="Reward of this turn by itself">reward {decimal(turn.reward, 2)}</Fact>}
      {turn.finish !== "stop" && <Fact tone="is-warn">cut: {turn.finish}</Fact>}
      {isShared && <Fact title="Sampled once, by the rollout that this one branched off from">shared</Fact>}
    </p>
  ); // prettier-ignore
}

function Fact({ children, title, tone = "" }: { children: ComponentChildren; title?: string; tone?: string }) {
  return (
    <span class={tone} title={title}>
      {children}
    </span>
  );
}

/** Reasoning, text and calls. */
export function Reply({ turn }: { turn: Turn }) {
  const hasCalls = turn.calls.length > 0;
  // The built-in tools are called by the words of the reply themselves.
  const isAllCall = hasCalls && !turn.thinking && turn.said.trim() === turn.content.trim();
  return (
    <>
      <TextBlock text={turn.thinking} kind="thought" label="Reasoning" />
      {!isAllCall && <TextBlock text={turn.content} kind="said" label="Reply" />}
      {!hasCalls && turn.content === "" && turn.thinking === "" && <p class="rollouts-none">It said nothing.</p>}
      {turn.calls.map((call, index) => (
        <CallView key={index} call={call} />
      ))}
    </>
  );
}

function CallView({ call }: { call: Call }) {
  // What a diff shows is not shown twice.
  const all = Object.entries(call.arguments).filter(([, value]) => !call.diff.some((line) => line.mark !== " " && line.text !== "" && value.includes(line.text)));
  const isShort = (value: string) => value.length <= 80 && !value.includes("\n");
  const short = all.filter(([, value]) => isShort(value));
  const long = all.filter(([, value]) => !isShort(value));
  return (
    <div class="rollouts-call">
      <p>
        <b>
          <Visible text={call.tool} />
        </b>
        {short.map(([name, value]) => (
          <span key={name}>
            {name && <i>{inline(name)}</i>}
            <code>{inline(value)}</code>
          </span>
        ))}
      </p>
      {long.map(([name, value]) => (
        <TextBlock key={name} text={value} kind="plain" label={`Argument ${inline(name)}`} />
      ))}
      {call.diff.length > 0 && <Diff lines={call.diff} path={call.path} />}
    </div>
  );
}

/** A context's end: what was thought, what was kept, what was lost. */
function SummaryView({ summary }: { summary: Summary }) {
  const facts = Object.entries(summary.facts);
  return (
    <div class="rollouts-summary">
      <p class="rollouts-shrink">
        <b>{count(summary.tokens_before)}</b> tokens of context → {summary.tokens_after === null ? "no context follows" : <b>{count(summary.tokens_after)}</b>}
        {summary.tokens_after !== null && (
          <span class="rollouts-meter" aria-hidden="true">
            <span style={{ width: `${Math.min(100, (100 * summary.tokens_after) / Math.max(1, summary.tokens_before))}%` }} />
          </span>
        )}
      </p>
      {summary.scratch !== "" && (
        <>
          <h3>Forgotten</h3>
          <TextBlock text={summary.scratch} kind="thought" label="Thoughts that were not carried over" />
        </>
      )}
      <h3>Kept</h3>
      <TextBlock text={summary.text} kind="said" label="Summary" />
      {facts.length > 0 && (
        <ul class="rollouts-kept" aria-label="Facts that the answer takes">
          {facts.map(([fact, isKept]) => (
            <li key={fact} class={isKept === null ? "" : isKept ? "is-good" : "is-warn"}>
              <span aria-hidden="true">{isKept === null ? "·" : isKept ? "✓" : "✗"}</span> <Visible text={fact} />
              <span class="rollouts-kept-word">{isKept === null ? "not seen yet" : isKept ? "kept" : "lost"}</span>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

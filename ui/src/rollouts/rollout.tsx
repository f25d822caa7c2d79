// The page of one rollout: what came of it, and turn by turn how.

import { useEffect, useMemo, useState } from "preact/hooks";

import { download } from "../api";
import { decimal } from "../format";
import { messageOf, useGrowing, useJson } from "../resource";
import { routeTo } from "../routes";
import { useSlow } from "../run/slow";
import { ComparisonView, FilesView, isNarrow, RewardView, UserView, VerdictView, VotesView } from "./facts";
import { onShortcut } from "./filter_bar";
import { isSettled } from "./group";
import { GroupStrip } from "./group_strip";
import { ColourBar } from "./colour_bar";
import { Outline } from "./outline";
import { tablePlace } from "./tab";
import { TextBlock } from "./text_block";
import { colouring, MODES, type Mode } from "./token_colours";
import { TurnView } from "./turn";
import type { Rollout, Tokens } from "./types";
import { inline } from "./visible";

interface RolloutPageProps {
  readonly run: string;
  readonly rolloutId: string;
  /** ["turn", "3", "token", "17"], as far as the address says. */
  readonly place: readonly string[];
  readonly options: Readonly<Record<string, string>>;
  /** Another one whenever there may be news of the run. */
  readonly cursor: number;
}

const MOST_TURNS = 40;
/** Letters of a reason beyond which it is a text of its own. */
const LONG = 160;

export function RolloutPage({ run, rolloutId, place, options, cursor }: RolloutPageProps) {
  const base = `/runs/${encodeURIComponent(run)}/rollouts/${encodeURIComponent(rolloutId)}`;
  const { data, error } = useGrowing<Rollout>(base, useSlow(cursor), isSettled);
  if (data === null) return error === null ? <p class="note">…</p> : <p role="alert">{error}</p>;
  return <Loaded run={run} base={base} rollout={data} place={place} options={options} />;
}

interface LoadedProps extends Omit<RolloutPageProps, "rolloutId" | "cursor"> {
  readonly base: string;
  readonly rollout: Rollout;
}

function Loaded({ run, base, rollout, place, options }: LoadedProps) {
  const turn = numberAt(place, "turn");
  const token = numberAt(place, "token");
  const mode = MODES.find((each) => each === options["colour"]) ?? (token === null ? null : "logprob");
  const layer = Number(options["layer"] ?? 0) || 0;
  const tokens = useTokens(base, mode, mode === "expert" ? turn : null);
  const [most, setMost] = useState(Math.max(MOST_TURNS, (turn ?? 0) + 10));
  const go = (rest: readonly string[], changed: Readonly<Record<string, string>> = options) => (location.hash = routeTo(run, "rollouts", [rollout.rollout_id, ...rest], changed));
  const colours = useMemo(() => (mode && tokens.data ? colouring(mode, tokens.data.turns, rollout.step, layer) : null), [mode, tokens.data, rollout.step, layer]);
  useTurnKeys(turn, rollout.turns.length, (next) => go(["turn", String(next)]));
  useEffect(() => {
    if (turn !== null && token === null) document.getElementById(`turn-${turn}`)?.scrollIntoView({ block: "start" });
  }, [turn, token, rollout.rollout_id]);
  const onMode = (next: Mode | null) => go(token === null || next === null ? place.slice(0, 2) : place, { ...options, colour: next ?? "" });
  return (
    <div class="rollouts-page">
      <Head run={run} base={base} rollout={rollout} />
      <aside class="rollouts-aside">
        <VerdictView rollout={rollout} />
        <UserView rollout={rollout} />
        <RewardView rollout={rollout} />
        <VotesView rollout={rollout} />
        <ComparisonView rollout={rollout} />
        <FilesView rollout={rollout} />
        <details class="rollouts-turn-list" open={!isNarrow()}>
          <summary>Turns</summary>
          <Outline run={run} rollout={rollout} chosen={turn} options={options} />
        </details>
      </aside>
      <div class="rollouts-turns">
        <ColourBar mode={mode} colours={colours} layers={layersOf(tokens.data)} layer={layer} onMode={onMode} onLayer={(next) => go(place, { ...options, layer: String(next) })}
          isLoading={tokens.isLoading} error={tokens.error} notes={mode === "mismatch" ? (tokens.data?.notes ?? []).filter((note) => note.includes("mismatch")) : []} />
        {rollout.turns.slice(0, most).map((each) => (
          <TurnView key={each.number} turn={each} step={rollout.step} place={routeTo(run, "rollouts", [rollout.rollout_id, "turn", String(each.number)], options)}
            isChosen={each.number === turn} isShared={each.number < rollout.branch_turns} colours={colours}
            columns={tokens.data?.turns.find((columns) => columns.number === each.number)} token={each.number === turn ? token : null}
            onToken={(next) => go(["turn", String(each.number), "token", String(next)], { ...options, colour: mode ?? "" })} />
        ))}
        {rollout.turns.length > most && (
          <p class="rollouts-more">
            <button type="button" onClick={() => setMost(most * 4)}>
              Show more turns
            </button>
            <span>{rollout.turns.length - most} more</span>
          </p>
        )}
        {rollout.turns.length === 0 && <p class="note">It ended before its first turn.</p>}
      </div>
    </div>
  ); // prettier-ignore
}

function Head({ run, base, rollout }: { run: string; base: string; rollout: Rollout }) {
  const group = routeTo(run, "rollouts", ["group", rollout.purpose, String(rollout.group)]);
  return (
    <header class="rollouts-head">
      <p class="rollouts-trail">
        <a href={tablePlace(run)}>Rollouts</a> <span aria-hidden="true">/</span>{" "}
        <a href={group}>
          {inline(rollout.purpose)} group {rollout.group}
        </a>{" "}
        <span aria-hidden="true">/</span> slot {rollout.slot}
        {rollout.attempt > 0 && `, attempt ${rollout.attempt}`}
      </p>
      <h1>
        <span class={`rollouts-score ${rollout.reward !== null && rollout.reward > 0 ? "is-good" : ""}`}>{decimal(rollout.reward, 2)}</span> {inline(rollout.template)}
      </h1>
      <p class="rollouts-facts">
        <span class={rollout.status === "graded" ? "" : "is-warn"}>
          {rollout.status === "graded" ? "" : `${rollout.status}: `}
          {rollout.reason.length > LONG ? "for a reason" : inline(rollout.reason)}
        </span>
        <span>{decimal(rollout.seconds, 1)} s</span>
        <span>{rollout.step === null ? `no step yet (${rollout.group_state})` : `step ${rollout.step}`}</span>
        {rollout.epoch > 1 && <span>epoch {rollout.epoch}</span>}
        {Object.entries(rollout.counts).map(([name, calls]) => (
          <span key={name}>
            {calls} {inline(name)}
          </span>
        ))}
        {rollout.branch_of !== null && (
          <span>
            branch of <a href={routeTo(run, "rollouts", [rollout.branch_of])}>{inline(rollout.branch_of).slice(0, 8)}</a> from turn {rollout.branch_turns} on
          </span>
        )}
      </p>
      {rollout.reason.length > LONG && <TextBlock text={rollout.reason} kind="plain" label="Reason of its end" />}
      <GroupStrip run={run} purpose={rollout.purpose} group={rollout.group} chosen={rollout.rollout_id} />
      <p class="rollouts-actions">
        <code title="Its id; the task’s">
          {inline(rollout.rollout_id)} · {inline(rollout.task_id)}
        </code>
        <Save base={base} rollout={rollout} />
      </p>
      {rollout.notes.length > 0 && (
        <details class="rollouts-notes">
          <summary>
            {rollout.notes.length} note{rollout.notes.length === 1 ? "" : "s"}
          </summary>
          <TextBlock text={rollout.notes.join("\n")} kind="plain" label="Notes" />
        </details>
      )}
    </header>
  );
}

const FORMS = [
  ["jsonl", "JSONL", ".jsonl"],
  ["harbor", "Harbor (ATIF)", ".trajectory.json"],
  ["html", "HTML", ".html"],
] as const;

function Save({ base, rollout }: { base: string; rollout: Rollout }) {
  const [error, setError] = useState("");
  const save = (form: string, ending: string) => {
    setError("");
    download(`${base}/export?as=${form}`, `${rollout.rollout_id}${ending}`).catch((failure: unknown) => setError(messageOf(failure)));
  };
  return (
    <span class="rollouts-save">
      <span>Save as</span>
      {FORMS.map(([form, title, ending]) => (
        <button key={form} type="button" onClick={() => save(form, ending)}>
          {title}
        </button>
      ))}
      {error !== "" && <span role="alert">{error}</span>}
    </span>
  );
}

/** Tokens of all turns; with experts those of one turn, where all together are too many. */
function useTokens(base: string, mode: Mode | null, turn: number | null) {
  const all = useJson<Tokens>(mode === null ? null : `${base}/tokens${mode === "mismatch" ? "?mismatch=1" : ""}`);
  const isCut = mode === "expert" && all.data !== null && all.data.has_routes && all.data.turns.every((columns) => !columns.routes);
  const one = useJson<Tokens>(isCut ? `${base}/tokens?turn=${turn ?? 0}` : null);
  return isCut && one.data !== null ? { ...one, data: { ...one.data, turns: all.data?.turns.map((columns) => one.data?.turns.find((each) => each.number === columns.number) ?? columns) ?? [] } } : all;
}

function layersOf(tokens: Tokens | null): number {
  return Math.max(0, ...(tokens?.turns.map((columns) => columns.routes?.find((routes) => routes !== null)?.length ?? 0) ?? []));
}

function numberAt(place: readonly string[], name: string): number | null {
  const index = place.indexOf(name);
  const text = index < 0 ? undefined : place[index + 1];
  return text !== undefined && /^\d+$/.test(text) ? Number(text) : null;
}

/** j and k go to the next and the previous turn. */
function useTurnKeys(turn: number | null, turns: number, go: (turn: number) => void) {
  useEffect(() => {
    const next = onShortcut("j", () => go(Math.min(turns - 1, (turn ?? -1) + 1)));
    const previous = onShortcut("k", () => go(Math.max(0, (turn ?? 1) - 1)));
    return () => {
      next();
      previous();
    };
  }, [turn, turns]);
}

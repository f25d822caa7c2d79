// The sampled tokens of a turn, coloured, with what is known of each: by pointer, and by arrow keys.

import type { RefObject } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { count } from "../format";
import { describe, type Colouring } from "./token_colours";
import type { TokenColumns } from "./types";
import { inline, pieces } from "./visible";

const MOST_TOKENS = 1_500;

interface TokenTextProps {
  readonly columns: TokenColumns;
  readonly colours: Colouring;
  readonly step: number | null;
  /** The token that the address names. */
  readonly chosen: number | null;
  readonly onChoose: (token: number) => void;
}

export function TokenText({ columns, colours, step, chosen, onChoose }: TokenTextProps) {
  const total = columns.token_id?.length ?? 0;
  const [most, setMost] = useState(Math.max(MOST_TOKENS, (chosen ?? 0) + 200));
  const [at, setAt] = useState<number | null>(chosen);
  const frame = useRef<HTMLDivElement>(null);
  const shown = Math.min(total, most);
  useEffect(() => setAt(chosen), [chosen]);
  useEffect(() => {
    if (chosen !== null) frame.current?.querySelector(`[data-token="${chosen}"]`)?.scrollIntoView({ block: "center" });
  }, [chosen]);
  const spans = useMemo(
    () => Array.from({ length: shown }, (_, index) => <TokenSpan key={index} index={index} text={columns.text?.[index] ?? ""} tone={colours.tone(columns, index)} />),
    [columns, colours, shown],
  );
  const point = (event: Event) => {
    const index = tokenOf(event);
    if (index !== null) setAt(index);
  };
  return (
    <div class="rollouts-tokens-frame" ref={frame} onPointerLeave={() => setAt(chosen)}>
      <div class="rollouts-tokens" role="group" tabIndex={0} aria-label={`${count(total)} tokens of turn ${columns.number}. Arrow keys move, Enter links to one.`}
        onPointerOver={point} onClick={(event) => choose(event, onChoose)} onKeyDown={(event) => move(event, at, total, setAt, onChoose)}
        onFocus={() => setAt((old) => old ?? 0)}>
        {spans}
      </div>
      {shown < total && (
        <p class="rollouts-more">
          <button type="button" onClick={() => setMost(most * 10)}>
            Show more
          </button>
          <span>{count(total - shown)} more tokens</span>
        </p>
      )}
      {at !== null && at < total && <TokenCard columns={columns} index={at} step={step} frame={frame} />}
    </div>
  ); // prettier-ignore
}

function TokenSpan({ index, text, tone }: { index: number; text: string; tone: string }) {
  const isBreak = text.endsWith("\n");
  return (
    <span class={`rollouts-token ${tone && `rollouts-${tone}`}`} data-token={index}>
      {pieces(text).map((piece) => (piece.isSpelt ? `⟨${piece.text}⟩` : piece.text.replace(/\n$/, ""))).join("")}
      {isBreak && "⏎\n"}
    </span>
  );
}

/** The card about one token, below it; the last one said is read out. */
function TokenCard({ columns, index, step, frame }: { columns: TokenColumns; index: number; step: number | null; frame: RefObject<HTMLElement | null> }) {
  const card = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const outer = frame.current?.getBoundingClientRect();
    const span = frame.current?.querySelector<HTMLElement>(`[data-token="${index}"]`);
    if (!span || !card.current || !outer) return;
    span.classList.add("is-at");
    const box = span.getClientRects()[0];
    if (!box) return;
    card.current.style.top = `${box.bottom - outer.top + 6}px`;
    card.current.style.left = `${Math.max(0, Math.min(box.left - outer.left, outer.width - card.current.offsetWidth))}px`;
    return () => span.classList.remove("is-at");
  }, [index, columns, frame]);
  return (
    <div class="rollouts-card" ref={card} role="status">
      <p>
        <b>{spelling(columns.text?.[index] ?? "")}</b> token {index}
      </p>
      <dl>
        {describe(columns, index, step).map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}

function spelling(text: string): string {
  return `“${inline(text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣"))}”`;
}

function tokenOf(event: Event): number | null {
  const span = event.target instanceof Element ? event.target.closest("[data-token]") : null;
  return span === null ? null : Number(span.getAttribute("data-token"));
}

function choose(event: Event, onChoose: (token: number) => void) {
  const index = tokenOf(event);
  if (index !== null && (getSelection()?.toString() ?? "") === "") onChoose(index);
}

function move(event: KeyboardEvent, at: number | null, total: number, setAt: (token: number) => void, onChoose: (token: number) => void) {
  const now = at ?? 0;
  const places: Record<string, number> = { ArrowRight: now + 1, ArrowLeft: now - 1, ArrowDown: now + 10, ArrowUp: now - 10, Home: 0, End: total - 1 };
  if (event.key === "Enter") return onChoose(now);
  const place = places[event.key];
  if (place === undefined) return;
  event.preventDefault();
  setAt(Math.max(0, Math.min(total - 1, place)));
}

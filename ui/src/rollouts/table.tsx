// The table of rollouts: as many rows as there are, of which those in sight are drawn.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import type { Tick } from "../api";
import { count, decimal, MISSING } from "../format";
import { routeTo } from "../routes";
import { withSort, toOptions, type SortName, type TableQuery } from "./filters";
import { usePages } from "./pages";
import { Badges, RewardMark } from "./marks";
import type { RolloutRow } from "./types";
import { inline } from "./visible";
import { rowsInSight } from "./windowing";

const REFRESH_MS = 3_000;

interface Column {
  readonly name: string;
  readonly title: string;
  readonly sort?: SortName;
  readonly isNumber?: boolean;
}

const COLUMNS: readonly Column[] = [
  { name: "reward", title: "Reward", sort: "reward", isNumber: true },
  { name: "task", title: "Task" },
  { name: "ended", title: "Ended" },
  { name: "turns", title: "Turns", sort: "turns", isNumber: true },
  { name: "tokens", title: "Tokens", sort: "tokens", isNumber: true },
  { name: "versions", title: "Versions", isNumber: true },
  { name: "behind", title: "Behind", sort: "staleness", isNumber: true },
  { name: "seconds", title: "Seconds", sort: "seconds", isNumber: true },
  { name: "group", title: "Group", sort: "newest", isNumber: true },
  { name: "id", title: "Rollout" },
];

interface TableProps {
  readonly run: string;
  readonly query: TableQuery;
  readonly tick: Tick | null;
  readonly onQuery: (query: TableQuery) => void;
}

export function RolloutTable({ run, query, tick, onQuery }: TableProps) {
  const frame = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const [focused, setFocused] = useState(0);
  const rowHeight = useRowHeight();
  const path = `/runs/${encodeURIComponent(run)}/rollouts?${new URLSearchParams(toOptions(query))}`;
  const rows = usePages(path, useQuietVersion(tick, view.top === 0));
  const [first, last] = rowsInSight(view.top, view.height, rowHeight, rows.total);
  useEffect(() => rows.want(first, last));
  useEffect(() => {
    frame.current?.scrollTo({ top: 0 });
    setFocused(0);
  }, [path]);
  useLayoutEffect(() => {
    const element = frame.current;
    if (!element) return;
    const measure = () => setView({ top: element.scrollTop, height: element.clientHeight });
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    element.addEventListener("scroll", measure, { passive: true });
    return () => {
      observer.disconnect();
      element.removeEventListener("scroll", measure);
    };
  }, []);
  const focusRow = (index: number) => {
    const next = Math.max(0, Math.min(rows.total - 1, index));
    setFocused(next);
    const element = frame.current;
    if (!element) return;
    const head = element.querySelector("thead")?.clientHeight ?? 0;
    if (next * rowHeight < element.scrollTop) element.scrollTop = next * rowHeight;
    const below = (next + 1) * rowHeight + head - element.clientHeight;
    if (below > element.scrollTop) element.scrollTop = below;
    requestAnimationFrame(() => element.querySelector<HTMLElement>(`[data-row="${next}"] a`)?.focus({ preventScroll: true }));
  };
  const shown = Array.from({ length: last - first }, (_, index) => first + index);
  return (
    <>
    <div class="rollouts-frame" ref={frame} onKeyDown={(event) => onKey(event, focused, Math.floor(view.height / rowHeight) - 1, focusRow, rows.total)}>
      <table class={rows.isFresh ? "rollouts-table" : "rollouts-table is-old"} aria-rowcount={rows.total + 1} aria-busy={!rows.isFresh}>
        <caption class="hidden">Rollouts, {count(rows.total)} in all. Arrow keys move from row to row, Enter opens one.</caption>
        <thead>
          <tr aria-rowindex={1}>
            {COLUMNS.map((column) => (
              <HeadCell key={column.name} column={column} query={query} onQuery={onQuery} />
            ))}
          </tr>
        </thead>
        <tbody>
          <Gap height={first * rowHeight} />
          {shown.map((index) => (
            <Row key={index} run={run} index={index} row={rows.row(index)} isFocused={index === focused} onFocus={setFocused} />
          ))}
          <Gap height={(rows.total - last) * rowHeight} />
        </tbody>
      </table>
      {rows.error !== null && <p role="alert">{rows.error}</p>}
      {rows.error === null && rows.isFresh && rows.total === 0 && <p class="rollouts-none">No rollout is like that.</p>}
    </div>
    <p class="rollouts-count" role="status">
      {rows.isFresh ? `${count(rows.total)} rollout${rows.total === 1 ? "" : "s"}` : "…"}
    </p>
    </>
  );
}

function HeadCell({ column, query, onQuery }: { column: Column; query: TableQuery; onQuery: (query: TableQuery) => void }) {
  const { sort } = column;
  const isSorted = sort !== undefined && query.sort === sort;
  const way = query.isReversed ? "ascending" : "descending";
  return (
    <th scope="col" class={`rollouts-c-${column.name}${column.isNumber ? " is-number" : ""}`} aria-sort={isSorted ? way : undefined}>
      {sort === undefined ? (
        column.title
      ) : (
        <button type="button" onClick={() => onQuery(withSort(query, sort))}>
          {column.title}
          <span aria-hidden="true">{isSorted ? (query.isReversed ? " ↑" : " ↓") : ""}</span>
        </button>
      )}
    </th>
  );
}

interface RowProps {
  readonly run: string;
  readonly index: number;
  readonly row: RolloutRow | undefined;
  readonly isFocused: boolean;
  readonly onFocus: (index: number) => void;
}

function Row({ run, index, row, isFocused, onFocus }: RowProps) {
  if (row === undefined) {
    return (
      <tr aria-rowindex={index + 2} data-row={index} class="is-empty">
        <td colSpan={COLUMNS.length}>…</td>
      </tr>
    );
  }
  const place = routeTo(run, "rollouts", [row.rollout_id]);
  const name = `${inline(row.template || row.task_id)}, group ${row.group}, slot ${row.slot}`;
  return (
    <tr aria-rowindex={index + 2} data-row={index} class={row.status === "graded" ? "" : "is-failed"} onClick={(event) => open(event, place)}>
      <td class="rollouts-c-reward is-number">
        <RewardMark reward={row.reward} />
      </td>
      <td class="rollouts-c-task">
        <a href={place} tabIndex={isFocused ? 0 : -1} aria-label={name} onFocus={() => onFocus(index)}>
          {inline(row.template || row.task_id)}
        </a>
      </td>
      <td class="rollouts-c-ended">
        <span>{inline(row.reason) || row.status}</span> <Badges row={row} />
      </td>
      <td class="rollouts-c-turns is-number">{count(row.turns)}</td>
      <td class="rollouts-c-tokens is-number">{count(row.sampled_tokens)}</td>
      <td class="rollouts-c-versions is-number">{versions(row)}</td>
      <td class="rollouts-c-behind is-number">{row.step === null ? MISSING : count(behind(row))}</td>
      <td class="rollouts-c-seconds is-number">{decimal(row.seconds, 1)}</td>
      <td class="rollouts-c-group is-number">
        {row.group} · {row.slot}
        {row.attempt > 0 ? `.${row.attempt}` : ""}
      </td>
      <td class="rollouts-c-id">{inline(row.rollout_id).slice(0, 8)}</td>
    </tr>
  );
}

function Gap({ height }: { height: number }) {
  return height > 0 ? (
    <tr class="rollouts-gap" aria-hidden="true">
      <td colSpan={COLUMNS.length} style={{ height: `${height}px` }} />
    </tr>
  ) : null;
}

function versions(row: RolloutRow): string {
  const { first_version: oldest, last_version: newest } = row;
  if (oldest === undefined || oldest === null || newest === undefined || newest === null) return MISSING;
  return oldest === newest ? `v${oldest}` : `v${oldest}–${newest}`;
}

function behind(row: RolloutRow): number | null {
  return row.step === null || row.first_version === undefined || row.first_version === null ? null : row.step - 1 - row.first_version;
}

function open(event: MouseEvent, place: string) {
  if (event.defaultPrevented || event.metaKey || event.ctrlKey || (getSelection()?.toString() ?? "") !== "") return;
  location.hash = place;
}

function onKey(event: KeyboardEvent, focused: number, page: number, go: (index: number) => void, total: number) {
  if (event.target instanceof HTMLButtonElement || event.metaKey || event.ctrlKey || event.altKey) return;
  const places: Record<string, number> = {
    ArrowDown: focused + 1, j: focused + 1, ArrowUp: focused - 1, k: focused - 1,
    PageDown: focused + page, PageUp: focused - page, Home: 0, End: total - 1,
  }; // prettier-ignore
  const place = places[event.key];
  if (place === undefined) return;
  event.preventDefault();
  go(place);
}

/** The height of a row in pixels, as the style sheet has it: rows are higher on phones. */
function useRowHeight(): number {
  const [height, setHeight] = useState(34);
  useEffect(() => {
    const narrow = matchMedia("(max-width: 720px)");
    const update = () => setHeight(narrow.matches ? 62 : 34);
    update();
    narrow.addEventListener("change", update);
    return () => narrow.removeEventListener("change", update);
  }, []);
  return height;
}

/** A number that changes when the run has news, not more often than people can read, and not while they scroll. */
function useQuietVersion(tick: Tick | null, isAtTop: boolean): number {
  const [version, setVersion] = useState(0);
  const last = useRef(Date.now());
  const cursor = tick?.cursor ?? 0;
  useEffect(() => {
    if (cursor === 0 || !isAtTop) return;
    const timer = setTimeout(() => {
      last.current = Date.now();
      setVersion(cursor);
    }, Math.max(0, last.current + REFRESH_MS - Date.now()));
    return () => clearTimeout(timer);
  }, [cursor, isAtTop]);
  return version;
}

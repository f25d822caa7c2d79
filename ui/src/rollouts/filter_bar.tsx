// The filters above the table: each takes effect as it is typed, and stands in the address.

import { useEffect, useRef, useState } from "preact/hooks";

import { count } from "../format";
import { comparison, isFiltered, OUTCOMES, withFilter, type FilterName, type TableQuery } from "./filters";
import type { Census } from "./types";
import { inline } from "./visible";

const TYPING_MS = 120;
const FLAGS: readonly (readonly [FilterName, string])[] = [
  ["has_summary", "summaries"],
  ["has_hint", "hints"],
  ["hacked", "hacked"],
];

interface FilterBarProps {
  readonly query: TableQuery;
  readonly census: Census | null;
  readonly exportUrl: () => void;
  readonly onQuery: (query: TableQuery) => void;
}

export function FilterBar({ query, census, exportUrl, onQuery }: FilterBarProps) {
  const set = (name: FilterName) => (value: string) => onQuery(withFilter(query, name, value));
  const { filters } = query;
  const purpose = filters.purpose ?? "train";
  const purposes = census?.purposes.map((each) => each.purpose) ?? [];
  const versions = census?.purposes.find((each) => each.purpose === purpose)?.versions;
  return (
    <form class="rollouts-filters" role="search" aria-label="Filter rollouts" onSubmit={(event) => event.preventDefault()}>
      <Choice label="Of" value={purpose} onValue={(value) => set("purpose")(value === "train" ? "" : value)} any={null}>
        {[...new Set([purpose, ...purposes])].map((name) => [name, inline(name)] as const)}
      </Choice>
      <TextFilter label="Task" value={filters.task ?? ""} onValue={set("task")} placeholder="template or id" shortcut="/" wide />
      <TextFilter label="Reward" value={filters.reward ?? ""} onValue={set("reward")} placeholder="≥ 0.5" read={comparison} />
      <Choice label="Outcome" value={filters.outcome ?? ""} onValue={set("outcome")} any="any">
        {OUTCOMES.map((name) => [name, name] as const)}
      </Choice>
      <TextFilter label="Reason" value={filters.reason ?? ""} onValue={set("reason")} placeholder="submit" list="rollouts-reasons" wide />
      <datalist id="rollouts-reasons">
        {census?.reasons.map((each) => (
          <option key={`${each.status}${each.reason}`} value={inline(each.reason)}>
            {count(each.count)} {each.status}
          </option>
        ))}
      </datalist>
      <TextFilter label="Version" value={filters.version ?? ""} onValue={set("version")} placeholder={versions ? `${versions[0]}–${versions[1]}` : "3"} read={wholeNumber} />
      <fieldset class="rollouts-flags">
        <legend class="hidden">With</legend>
        {FLAGS.map(([name, title]) => (
          <button key={name} type="button" aria-pressed={filters[name] === "1"} onClick={() => set(name)(filters[name] === "1" ? "" : "1")}>
            {title}
          </button>
        ))}
      </fieldset>
      <span class="rollouts-end">
        {isFiltered(query) && (
          <button type="button" onClick={() => onQuery({ ...query, filters: filters.purpose ? { purpose: filters.purpose } : {} })}>
            Clear
          </button>
        )}
        <button type="button" onClick={exportUrl} title="Every rollout that matches, with its turns, one a line">
          Save as JSONL
        </button>
      </span>
    </form>
  );
}

interface TextFilterProps {
  readonly label: string;
  readonly value: string;
  readonly placeholder: string;
  readonly onValue: (value: string) => void;
  /** What is typed as a filter; null while it is none. */
  readonly read?: (text: string) => string | null;
  readonly list?: string;
  /** A key that brings one here. */
  readonly shortcut?: string;
  readonly wide?: boolean;
}

function TextFilter({ label, value, placeholder, onValue, read, list, shortcut, wide }: TextFilterProps) {
  const [text, setText] = useState(value);
  const input = useRef<HTMLInputElement>(null);
  const timer = useRef(0);
  useEffect(() => {
    if (document.activeElement !== input.current) setText(value);
  }, [value]);
  useEffect(() => (shortcut ? onShortcut(shortcut, () => input.current?.focus()) : undefined), [shortcut]);
  const isWrong = read !== undefined && read(text) === null;
  const type = (next: string) => {
    setText(next);
    clearTimeout(timer.current);
    const filter = read ? read(next) : next.trim();
    if (filter !== null) timer.current = window.setTimeout(() => onValue(filter), TYPING_MS);
  };
  return (
    <label class={wide ? "rollouts-field is-wide" : "rollouts-field"}>
      <span>{label}</span>
      <input ref={input} value={text} placeholder={placeholder} list={list} aria-invalid={isWrong} aria-keyshortcuts={shortcut}
        autocomplete="off" spellcheck={false} onInput={(event) => type(event.currentTarget.value)} />
    </label>
  ); // prettier-ignore
}

interface ChoiceProps {
  readonly label: string;
  readonly value: string;
  readonly any: string | null;
  readonly onValue: (value: string) => void;
  readonly children: readonly (readonly [string, string])[];
}

function Choice({ label, value, any, onValue, children }: ChoiceProps) {
  return (
    <label class="rollouts-field">
      <span>{label}</span>
      <select value={value} onChange={(event) => onValue(event.currentTarget.value)}>
        {any !== null && <option value="">{any}</option>}
        {children.map(([name, title]) => (
          <option key={name} value={name}>
            {title}
          </option>
        ))}
      </select>
    </label>
  );
}

function wholeNumber(text: string): string | null {
  return /^\s*\d*\s*$/.test(text) ? text.trim() : null;
}

/** Do something when a key is pressed outside of any field. */
export function onShortcut(key: string, act: () => void): () => void {
  const listen = (event: KeyboardEvent) => {
    const target = event.target;
    if (event.key !== key || event.metaKey || event.ctrlKey || event.altKey) return;
    if (target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName))) return;
    event.preventDefault();
    act();
  };
  document.addEventListener("keydown", listen);
  return () => document.removeEventListener("keydown", listen);
}

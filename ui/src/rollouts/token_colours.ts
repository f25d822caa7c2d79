// Colours of tokens: what each may be coloured by, the class of each token, and the legend.

import { count, decimal, percent, small } from "../format";
import type { TokenColumns } from "./types";

export const MODES = ["logprob", "advantage", "mismatch", "version", "expert", "loss", "kept"] as const;
export type Mode = (typeof MODES)[number];

export const MODE_TITLES: Readonly<Record<Mode, string>> = {
  logprob: "probability",
  advantage: "advantage",
  mismatch: "mismatch",
  version: "weight version",
  expert: "expert",
  loss: "loss mask",
  kept: "sampling mask",
};

export interface Swatch {
  readonly tone: string;
  readonly label: string;
}

export interface Colouring {
  /** The class of a token; empty where nothing is known of it. */
  tone(columns: TokenColumns, index: number): string;
  readonly legend: readonly Swatch[];
  /** Why there is nothing to see; empty where there is. */
  readonly note: string;
}

const UNKNOWN = "";
const HUES = 8;
const PROBABILITIES = [0.9, 0.5, 0.2, 0.05, 0.01];
const NATS = [0.01, 0.1, 0.5];
const KEPT = [1, 5, 20, 100];

/** Colours of all tokens of a rollout, so that turns can be compared. */
export function colouring(mode: Mode, turns: readonly TokenColumns[], step: number | null, layer: number): Colouring {
  switch (mode) {
    case "logprob":
      return bySequence((columns, index) => columns.logprob?.[index], (value) => PROBABILITIES.findIndex((bound) => Math.exp(value) >= bound), probabilityLegend());
    case "kept":
      return byKept(turns);
    case "advantage":
      return byAdvantage(turns);
    case "mismatch":
      return byMismatch(turns);
    case "version":
      return byVersion(turns, step);
    case "expert":
      return byExpert(turns, layer);
    case "loss":
      return byLoss(turns);
  }
}

type Read = (columns: TokenColumns, index: number) => number | null | undefined;

function bySequence(read: Read, level: (value: number) => number, legend: readonly Swatch[]): Colouring {
  const tone = (columns: TokenColumns, index: number) => {
    const value = read(columns, index);
    if (value === null || value === undefined) return UNKNOWN;
    const found = level(value);
    return `s${found < 0 ? PROBABILITIES.length : found}`;
  };
  return { tone, legend, note: "" };
}

function probabilityLegend(): Swatch[] {
  const bounds = PROBABILITIES.map((bound, index) => ({ tone: `s${index}`, label: `≥ ${percent(bound, 0)}` }));
  return [...bounds, { tone: `s${PROBABILITIES.length}`, label: `less: a surprise` }];
}

function byKept(turns: readonly TokenColumns[]): Colouring {
  const level = (value: number) => 1 + KEPT.findIndex((bound) => value <= bound);
  const tone = (columns: TokenColumns, index: number) => {
    const value = columns.kept?.[index];
    return value === null || value === undefined ? UNKNOWN : `s${level(value) === 0 ? 5 : level(value)}`;
  };
  const legend = [
    { tone: "s1", label: "drawn from 1 token" },
    { tone: "s2", label: "2–5" },
    { tone: "s3", label: "6–20" },
    { tone: "s4", label: "21–100" },
    { tone: "s5", label: "more" },
    { tone: UNKNOWN, label: "from all" },
  ];
  const isKnown = turns.some((columns) => columns.kept !== null);
  return { tone, legend, note: isKnown ? "" : "Nothing was cut from the vocabulary, or masks are gone, as they are once a step is committed." };
}

function byAdvantage(turns: readonly TokenColumns[]): Colouring {
  const largest = Math.max(0, ...turns.flatMap((columns) => (columns.advantage ?? []).map((value) => Math.abs(value ?? 0))));
  const tone = (columns: TokenColumns, index: number) => {
    const value = columns.advantage?.[index];
    if (value === null || value === undefined) return UNKNOWN;
    return columns.has_loss?.[index] === false ? UNKNOWN : diverging(largest === 0 ? 0 : (value / largest) * 3, [0.02, 1, 2]);
  };
  const known = turns.some((columns) => columns.advantage !== null);
  const bound = (share: number) => decimal((largest * share) / 3, 3);
  const legend = [
    { tone: "n3", label: `−${bound(3)}` },
    { tone: "n1", label: "worse than its group" },
    { tone: "z", label: "0" },
    { tone: "p1", label: "better" },
    { tone: "p3", label: `+${bound(3)}` },
    { tone: UNKNOWN, label: "no loss" },
  ];
  const note = !known ? "Nothing is trained on: there is no advantage." : largest === 0 ? "Rewards of the group are alike: there is no signal." : "";
  return { tone, legend, note };
}

function byMismatch(turns: readonly TokenColumns[]): Colouring {
  const tone = (columns: TokenColumns, index: number) => {
    const value = columns.mismatch?.[index];
    return value === null || value === undefined ? UNKNOWN : diverging(value, NATS);
  };
  const [fine = 0, medium = 0, large = 0] = NATS;
  const legend = [
    { tone: "n3", label: `trainer below by ${large} nats` },
    { tone: "n2", label: `${medium}` },
    { tone: "z", label: `within ${fine}` },
    { tone: "p2", label: `${medium}` },
    { tone: "p3", label: `above by ${large}` },
    { tone: UNKNOWN, label: "not known" },
  ];
  return { tone, legend, note: turns.some((columns) => columns.mismatch !== null) ? "" : "No mismatch is known." };
}

/** −3 … 3 by three bounds: within the first is none. */
function diverging(value: number, bounds: readonly number[]): string {
  const level = bounds.filter((bound) => Math.abs(value) > bound).length;
  return level === 0 ? "z" : `${value < 0 ? "n" : "p"}${level}`;
}

function byVersion(turns: readonly TokenColumns[], step: number | null): Colouring {
  const versions = [...new Set(turns.flatMap((columns) => columns.version ?? []))].sort((a, b) => a - b);
  const tone = (columns: TokenColumns, index: number) => `c${versions.indexOf(columns.version?.[index] ?? -1) % HUES}`;
  const behind = (version: number) => (step === null ? "" : `, ${step - 1 - version} behind`);
  return { tone, legend: versions.map((version, index) => ({ tone: `c${index % HUES}`, label: `v${version}${behind(version)}` })), note: "" };
}

function byExpert(turns: readonly TokenColumns[], layer: number): Colouring {
  const chosen = (columns: TokenColumns, index: number) => columns.routes?.[index]?.[layer]?.[0];
  const numbers = new Map<number, number>();
  for (const columns of turns) {
    for (let index = 0; index < (columns.token_id?.length ?? 0); index += 1) {
      const expert = chosen(columns, index);
      if (expert !== undefined) numbers.set(expert, (numbers.get(expert) ?? 0) + 1);
    }
  }
  const frequent = [...numbers].sort((a, b) => b[1] - a[1]).slice(0, HUES - 1).map(([expert]) => expert);
  const tone = (columns: TokenColumns, index: number) => {
    const expert = chosen(columns, index);
    if (expert === undefined) return UNKNOWN;
    return frequent.includes(expert) ? `c${frequent.indexOf(expert)}` : `c${HUES - 1}`;
  };
  const legend = frequent.map((expert, index) => ({ tone: `c${index}`, label: `expert ${expert} · ${count(numbers.get(expert))}` }));
  if (numbers.size > frequent.length) legend.push({ tone: `c${HUES - 1}`, label: `${numbers.size - frequent.length} others` });
  return { tone, legend, note: numbers.size > 0 ? "" : "No routes: the model has no experts, or they are gone, as they are once a step is committed." };
}

function byLoss(turns: readonly TokenColumns[]): Colouring {
  const tone = (columns: TokenColumns, index: number) => {
    const value = columns.has_loss?.[index];
    return value === null || value === undefined ? UNKNOWN : value ? "p2" : "off";
  };
  const legend = [
    { tone: "p2", label: "carries loss" },
    { tone: "off", label: "masked" },
  ];
  return { tone, legend, note: turns.some((columns) => columns.has_loss !== null) ? "" : "Nothing is trained on." };
}

/** What is known of one token, as pairs of name and value. */
export function describe(columns: TokenColumns, index: number, step: number | null): [string, string][] {
  const logprob = columns.logprob?.[index] ?? null;
  const version = columns.version?.[index] ?? null;
  const mismatch = columns.mismatch?.[index] ?? null;
  const advantage = columns.advantage?.[index] ?? null;
  const hasLoss = columns.has_loss?.[index] ?? null;
  const kept = columns.kept?.[index] ?? null;
  const routes = columns.routes?.[index] ?? null;
  const pairs: [string, string][] = [["id", String(columns.token_id?.[index] ?? "")]];
  if (logprob !== null) pairs.push(["logprob", decimal(logprob, 4)], ["probability", percent(Math.min(1, Math.exp(logprob)), 2)]);
  if (mismatch !== null && logprob !== null) pairs.push(["trainer’s", decimal(logprob + mismatch, 4)], ["mismatch", small(mismatch)]);
  if (advantage !== null) pairs.push(["advantage", decimal(advantage, 4)]);
  if (hasLoss !== null) pairs.push(["loss", hasLoss ? "yes" : "masked"]);
  if (version !== null) pairs.push(["version", `v${version}${step === null ? "" : ` · ${step - 1 - version} behind`}`]);
  if (kept !== null) pairs.push(["drawn from", kept === 1 ? "1 token" : `${count(kept)} tokens`]);
  routes?.slice(0, 6).forEach((experts, layer) => pairs.push([`experts, layer ${layer}`, experts.join(", ")]));
  return pairs;
}

// Filters of the table: options of its address, and of the server's query, by the same names.

export const FILTERS = ["purpose", "task", "reward", "outcome", "reason", "version", "has_summary", "has_hint", "hacked"] as const;
export type FilterName = (typeof FILTERS)[number];
export const OUTCOMES = ["graded", "failed", "dropped", "quarantined"] as const;

export type SortName = "newest" | "reward" | "tokens" | "turns" | "staleness" | "seconds";

export interface TableQuery {
  readonly filters: Readonly<Partial<Record<FilterName, string>>>;
  readonly sort: SortName;
  readonly isReversed: boolean;
}

const SORTS: readonly SortName[] = ["newest", "reward", "tokens", "turns", "staleness", "seconds"];
const COMPARISON = /^\s*(<=|>=|!=|<|>|=)\s*[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?\s*$/i;

export function parseQuery(options: Readonly<Record<string, string>>): TableQuery {
  const filters: Partial<Record<FilterName, string>> = {};
  for (const name of FILTERS) if (options[name]) filters[name] = options[name];
  const sort = SORTS.find((each) => each === options["sort"]) ?? "newest";
  return { filters, sort, isReversed: options["reversed"] === "1" };
}

/** The options of an address, and of a query; what is as usual is left out. */
export function toOptions(query: TableQuery): Record<string, string> {
  const sort = query.sort === "newest" ? "" : query.sort;
  return clean({ ...query.filters, sort, reversed: query.isReversed ? "1" : "" });
}

/** A filter set, or taken away by an empty value. */
export function withFilter(query: TableQuery, name: FilterName, value: string): TableQuery {
  const { [name]: _, ...rest } = query.filters;
  return { ...query, filters: value === "" ? rest : { ...rest, [name]: value } };
}

/** Sorted by a column; by the same once more: the other way round. */
export function withSort(query: TableQuery, sort: SortName): TableQuery {
  return { ...query, sort, isReversed: query.sort === sort ? !query.isReversed : false };
}

/** A comparison as the server reads it: a plain number means `=`. Null where it is none, or not yet whole. */
export function comparison(text: string): string | null {
  if (text.trim() === "") return "";
  if (COMPARISON.test(text)) return text.trim();
  return COMPARISON.test(`=${text}`) ? `=${text.trim()}` : null;
}

export function isFiltered(query: TableQuery): boolean {
  return Object.keys(query.filters).some((name) => name !== "purpose");
}

function clean(options: Record<string, string | undefined>): Record<string, string> {
  return Object.fromEntries(Object.entries(options).filter((pair): pair is [string, string] => !!pair[1]));
}

// Rows of a long table, fetched in pages as they come into sight.

import { useEffect, useRef, useState } from "preact/hooks";

import { getJson } from "../api";
import { messageOf } from "../resource";
import type { RolloutRow, TablePage } from "./types";
import { PAGE_ROWS, pagesOf } from "./windowing";


export interface PagedRows {
  readonly total: number;
  /** True until the first page of this query is there. */
  readonly isFresh: boolean;
  readonly error: string | null;
  row(index: number): RolloutRow | undefined;
  /** Fetch what is missing of these rows. */
  want(first: number, last: number): void;
}

interface Loaded {
  readonly path: string;
  readonly pages: ReadonlyMap<number, readonly RolloutRow[]>;
  readonly total: number;
}

/** `path` is the query without offset and limit; `version` changes when rows may have changed. */
export function usePages(path: string, version: number): PagedRows {
  const [loaded, setLoaded] = useState<Loaded>({ path: "", pages: new Map(), total: 0 });
  const [error, setError] = useState<string | null>(null);
  const asked = useRef(new Set<number>());
  const current = useRef("");
  const load = (page: number, isFirst: boolean) => {
    if (!isFirst && asked.current.has(page)) return;
    asked.current.add(page);
    const query = `${path}${path.includes("?") ? "&" : "?"}offset=${page * PAGE_ROWS}&limit=${PAGE_ROWS}${isFirst ? "" : "&count=0"}`;
    const key = current.current;
    getJson<TablePage>(query).then(
      (answer) => {
        if (current.current !== key) return;
        setError(null);
        setLoaded((old) => {
          const pages = new Map(isFirst ? [] : old.pages);
          return { path, pages: pages.set(page, answer.rows), total: answer.total ?? old.total };
        });
      },
      (failure: unknown) => {
        asked.current.delete(page);
        if (current.current === key) setError(messageOf(failure));
      },
    );
  };
  useEffect(() => {
    current.current = `${path} ${version}`;
    asked.current = new Set();
    load(0, true);
  }, [path, version]);
  return {
    total: loaded.total,
    isFresh: loaded.path === path,
    error,
    row: (index) => loaded.pages.get(Math.floor(index / PAGE_ROWS))?.[index % PAGE_ROWS],
    want: (first, last) => {
      if (loaded.path === path) pagesOf(first, last, loaded.total).forEach((page) => load(page, false));
    },
  };
}

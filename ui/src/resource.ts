// Data of the server as a hook: asked for when a path or a version changes; what was there stays while it is on its way.

import { useEffect, useRef, useState } from "preact/hooks";

import { getJson } from "./api";

export interface Resource<T> {
  readonly data: T | null;
  readonly error: string | null;
  readonly isLoading: boolean;
}

/** `path` null: nothing is asked for. `version` is any value that changes when there may be news, such as a cursor. */
export function useJson<T>(path: string | null, version: number | string = 0): Resource<T> {
  const [state, setState] = useState<Resource<T> & { path: string | null }>({ path: null, data: null, error: null, isLoading: false });
  const busy = useRef<AbortController | null>(null);
  useEffect(() => {
    if (path === null) return;
    const abort = new AbortController();
    busy.current = abort;
    setState((old) => ({ ...old, isLoading: true }));
    getJson<T>(path, abort.signal).then(
      (data) => setState({ path, data, error: null, isLoading: false }),
      (error: unknown) => {
        if (!abort.signal.aborted) setState((old) => ({ ...old, error: messageOf(error), isLoading: false }));
      },
    );
    return () => abort.abort();
  }, [path, version]);
  return state.path === path || state.data === null ? state : { data: null, error: null, isLoading: true };
}

/** As `useJson`, and asked again whenever there may be news, until `isSettled` says that the data will stay as it is. */
export function useGrowing<T>(path: string, cursor: number, isSettled: (data: T) => boolean): Resource<T> {
  const asked = useRef(cursor);
  const resource = useJson<T>(path, asked.current);
  if (resource.data !== null && !isSettled(resource.data)) asked.current = cursor;
  return resource;
}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

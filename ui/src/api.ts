// The server's JSON API: the token, one way to ask, one way to hear that there is more.

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

export interface RunOverview {
  readonly id: string;
  readonly name: string;
  readonly seed: number;
  readonly path: string;
  readonly phase: string | null;
  readonly step: number | null;
  readonly steps: number;
  readonly started_s: number | null;
  readonly updated_s: number | null;
  readonly alive: boolean;
  /** True for a recipe with users. */
  readonly live: boolean;
  /** Why nothing else is known of it. */
  readonly error?: string;
}

/** What the stream says of a run; `cursor` is another one whenever there is more to ask for. */
export interface Tick extends RunOverview {
  readonly cursor: number;
  /** True of the last one: the server ends, as it does with `etude run`. */
  readonly closed: boolean;
}

const TOKEN = "etude-token";
const RETRY_MS = 2000;

/** Move the token out of the address, where it would be copied with a link, into the session of this tab. */
export function takeToken(): void {
  const match = /^#token=([^&]+)&?(.*)$/.exec(location.hash);
  if (match === null) return;
  sessionStorage.setItem(TOKEN, decodeURIComponent(match[1] ?? ""));
  history.replaceState(null, "", `${location.pathname}#${match[2] ?? ""}`);
}

function headers(): Record<string, string> {
  return { Authorization: `Bearer ${sessionStorage.getItem(TOKEN) ?? ""}` };
}

/** An answer of the server that is none: `status` is HTTP's, the message is for people. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

async function call(path: string, init: RequestInit): Promise<Response> {
  const response = await fetch(`api${path}`, { ...init, headers: { ...headers(), ...init.headers } });
  if (response.ok) return response;
  const body: unknown = await response.json().catch(() => null);
  const text = typeof body === "object" && body !== null && "error" in body ? String(body.error) : response.statusText;
  throw new ApiError(response.status, text);
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await (await call(path, signal ? { signal } : {})).json()) as T;
}

/** `key` is one of the run's, for what the page's token does not open; it is kept nowhere. */
export async function postJson<T>(path: string, body: Json, key = ""): Promise<T> {
  const init = { method: "POST", body: JSON.stringify(body), headers: key ? { "X-Etude-Key": key } : {} };
  return (await (await call(path, init as RequestInit)).json()) as T;
}

/** Let the browser save what a path answers with. */
export async function download(path: string, name: string): Promise<void> {
  const url = URL.createObjectURL(await (await call(path, {})).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), RETRY_MS);
}

/** Hear of every change of a run until `signal` is aborted; a stream that breaks is opened again. */
export async function follow(
  run: string,
  onTick: (tick: Tick) => void,
  onState: (isConnected: boolean) => void,
  signal: AbortSignal,
): Promise<void> {
  while (!signal.aborted) {
    try {
      const response = await call(`/runs/${encodeURIComponent(run)}/stream`, { signal });
      onState(true);
      for await (const data of events(response)) onTick(JSON.parse(data) as Tick);
    } catch (error) {
      if (error instanceof ApiError && error.status < 500) throw error;
    }
    if (signal.aborted) return;
    onState(false);
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** The data of server-sent events, one after another. */
async function* events(response: Response): AsyncGenerator<string> {
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (reader) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop() ?? "";
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: "));
      if (data.length > 0) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}

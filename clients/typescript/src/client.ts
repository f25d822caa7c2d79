/**
 * A client by which a product reports what its users did with what the model wrote.
 *
 *     const feedback = new FeedbackClient({ url: "https://gateway.example", apiKey });
 *     feedback.report({ kind: "edited", value: 0.25, completion: answer.id });   // returns at once
 *     await feedback.close();                                                    // sends what waits
 *
 * Events wait in memory and are sent together. A gateway that is away is tried again with the same event ids, so that
 * none counts twice; when more wait than may, the oldest are dropped and counted. Runs in browsers, editors' extensions
 * and Node; no dependencies.
 */

export type SignalKind =
  | "kept" | "reverted" | "edited" | "follow_up" | "tests" | "thumbs" | "latency" | "abandoned";

/** What an event is about: a session or one turn of it, or the answer to one call. */
export type Subject =
  | { session: string; turn?: number; completion?: never }
  | { completion: string; session?: never; turn?: never };

/** One event. */
export type FeedbackEvent = Subject & {
  kind: SignalKind;
  /** Needed by all kinds but `kept`, `reverted` and `abandoned`, which have 1 without. */
  value?: number;
  /** Characters of the reply, from and up to. */
  span?: readonly [number, number];
  /** The product's name of its user; kept as a pseudonym only. */
  user?: string;
  /** Your own id, unique among all events of the product; one is made where there is none. */
  event_id?: string;
  /** Seconds since 1970 by this clock; by default now. */
  sent_at?: number;
};

export type Result = "accepted" | "duplicate" | "late" | "unknown_session" | "refused";

/** An event that the gateway refused for good. */
export interface RefusedReport {
  event_id: string;
  reason: string;
}

export interface Options {
  /** The gateway, e.g. `https://gateway.example`. */
  url: string;
  /** A feedback key; never ship a production key to users. */
  apiKey: string;
  /** Events that may wait; by default 1000. */
  maxBuffered?: number;
  /** Milliseconds for which events wait for others; by default 500. */
  intervalMs?: number;
  /** In place of the global `fetch`. */
  fetch?: typeof fetch;
}

type Sent = Record<string, unknown> & { event_id: string };
interface Answer {
  results: { event_id: string; result: Result; why?: string }[];
}

/** Events of one request: a browser sends 64 KiB at most once its page is closed. */
const MAX_BATCH = 200;
/** Milliseconds between two tries, doubled up to the second, less a random half. */
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 30_000;
const REQUEST_MS = 40_000;
/** Refused events whose reasons are kept. */
const REMEMBERED = 100;
/** Statuses with which the same request may succeed later. */
const RETRYABLE = new Set([408, 425, 429, 500, 502, 503, 504]);

/** Reports signals to a gateway. */
export class FeedbackClient {
  /** Result → events; `dropped`: more waited than may. */
  readonly counts = new Map<Result | "dropped", number>();
  /** The newest refused events. */
  readonly refused: RefusedReport[] = [];

  readonly #url: string;
  readonly #apiKey: string;
  readonly #maxBuffered: number;
  readonly #intervalMs: number;
  readonly #fetch: typeof fetch;
  #waiting: Sent[] = [];
  #sending: Sent[] = [];
  #running: Promise<void> | undefined;
  #closing = false;
  #stopped = false;
  #wake: (() => void) | undefined;

  constructor(options: Options) {
    if (!/^https?:\/\//.test(options.url)) {
      throw new TypeError(`url ${JSON.stringify(options.url)}: expected http://HOST:PORT or https://HOST:PORT of a gateway`);
    }
    this.#url = `${options.url.replace(/\/+$/, "")}/feedback`;
    this.#apiKey = options.apiKey;
    this.#maxBuffered = options.maxBuffered ?? 1000;
    this.#intervalMs = options.intervalMs ?? 500;
    this.#fetch = options.fetch ?? ((input, init) => fetch(input, init));
  }

  /** Events that are not yet answered. */
  get pending(): number {
    return this.#waiting.length + this.#sending.length;
  }

  /** Report one event and return its id; it is sent later. */
  report(event: FeedbackEvent): string {
    if (this.#closing) throw new Error("the client is closed: make another one");
    const sent: Sent = { sent_at: Date.now() / 1000, ...event, event_id: event.event_id ?? crypto.randomUUID() };
    this.#waiting.push(sent);
    if (this.pending > this.#maxBuffered && this.#waiting.length > 0) {
      this.#waiting.shift();
      this.#count("dropped");
    }
    this.#running ??= this.#run();
    return sent.event_id;
  }

  /** Wait until nothing waits any more; false after `timeoutMs`. */
  async flush(timeoutMs = 10_000): Promise<boolean> {
    this.#wake?.();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<void>((resolve) => { timer = setTimeout(resolve, timeoutMs); });
    await Promise.race([this.#running, late]);
    clearTimeout(timer);
    return this.pending === 0;
  }

  /** Send what waits, at most for `timeoutMs`, and take no more; says whether all was sent. */
  async close(timeoutMs = 10_000): Promise<boolean> {
    this.#closing = true;
    const sent = await this.flush(timeoutMs);
    this.#stopped = true;
    this.#wake?.();
    return sent;
  }

  async #run(): Promise<void> {
    if (this.#waiting.length < MAX_BATCH && !this.#closing) await this.#pause(this.#intervalMs);
    for (let failures = 0; this.pending > 0 && !this.#stopped; ) {
      if (this.#sending.length === 0) this.#sending = this.#waiting.splice(0, MAX_BATCH);
      const retryAfterMs = await this.#send(this.#sending);
      if (retryAfterMs === undefined) {
        this.#sending = [];
        failures = 0;
        continue;
      }
      const pauseMs = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** failures++);
      await this.#pause(Math.max(retryAfterMs, pauseMs * (1 - Math.random() / 2)));
    }
    this.#running = undefined;
  }

  /** Send a batch once; undefined when it is done with, else the milliseconds that the gateway asks to wait. */
  async #send(batch: Sent[]): Promise<number | undefined> {
    try {
      const response = await this.#fetch(this.#url, {
        method: "POST",
        headers: { Authorization: `Bearer ${this.#apiKey}`, "Content-Type": "application/json" },
        body: JSON.stringify(batch),
        keepalive: typeof document !== "undefined",  // it is sent although the page is closed
        signal: AbortSignal.timeout(REQUEST_MS),
      });
      if (RETRYABLE.has(response.status)) return 1000 * (Number(response.headers.get("Retry-After")) || 0);
      if (!response.ok) {
        const reason = `HTTP ${response.status}: ${(await response.text()).slice(0, 2000)}`;
        for (const one of batch) this.#refuse(one.event_id, reason);
        return undefined;
      }
      const { results } = (await response.json()) as Answer;
      for (const one of results) {
        if (one.result === "refused") this.#refuse(one.event_id, one.why ?? "");
        else this.#count(one.result);
      }
      return undefined;
    } catch {
      return 0;  // the gateway is away, or something else answered in its place
    }
  }

  #refuse(eventId: string, reason: string): void {
    this.#count("refused");
    this.refused.push({ event_id: eventId, reason });
    if (this.refused.length > REMEMBERED) this.refused.shift();
  }

  #count(result: Result | "dropped"): void {
    this.counts.set(result, (this.counts.get(result) ?? 0) + 1);
  }

  #pause(milliseconds: number): Promise<void> {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, milliseconds);
      this.#wake = () => { clearTimeout(timer); resolve(); };
    });
  }
}

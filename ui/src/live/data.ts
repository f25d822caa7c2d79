// Nouns of the tab "Live", and the pure half of its drawings.

export interface Said {
  readonly kind: string;
  readonly value: number;
  readonly turn: number | null;
  readonly late: boolean;
}

export interface Session {
  readonly id: string;
  readonly user: string;
  readonly template: string;
  readonly region: string;
  readonly arm: string;
  readonly turns: number;
  readonly versions: readonly [number | null, number | null];
  readonly opened_s: number;
  readonly ended_s: number | null;
  readonly state: "open" | "ended" | "closed" | "taken";
  readonly result: string;
  readonly signals: readonly Said[];
  readonly reward: number | null;
  readonly propensity: number | null;
  readonly weight: number | null;
  readonly answered: number | null;
}

export interface Sessions {
  readonly problem: string;
  readonly states: Readonly<Record<string, number>>;
  readonly counts: Readonly<Record<string, number>>;
  readonly signals: readonly { readonly kind: string; readonly number: number; readonly late: number; readonly unmatched: number; readonly mean: number }[];
  readonly total: number;
  readonly rows: readonly Session[];
}

export interface Part {
  readonly name: string;
  readonly signal: string;
  readonly weight: number;
  readonly range: readonly [number, number];
  readonly per: string;
  readonly missing: string | number;
}

export interface Release {
  readonly version: number;
  readonly digest: string;
  readonly state: string;
  readonly stage: number;
  readonly since: number;
  readonly replaces: number | null;
}

export type Evidence = null | boolean | number | string | readonly Evidence[] | { readonly [key: string]: Evidence };

export interface Move {
  readonly version: number;
  readonly from_state: string;
  readonly to_state: string;
  readonly stage: number;
  readonly at: number;
  readonly by: string;
  readonly reason: string;
  readonly evidence: { readonly [key: string]: Evidence };
}

export interface Releases {
  readonly problem: string;
  readonly every_steps: number;
  readonly shares: readonly number[];
  readonly has_shadow: boolean;
  readonly live: number | null;
  readonly former: number | null;
  readonly way: { readonly version: number; readonly state: string; readonly stage: number } | null;
  /** The version that a rollback takes back; null where there is nothing to go back to. */
  readonly due: number | null;
  readonly releases: readonly Release[];
  readonly moves: readonly Move[];
  readonly requests: readonly { readonly number: number; readonly kind: string; readonly by: string; readonly at: number; readonly version: number | null; readonly outcome: string }[];
  readonly table: { readonly generation: number; readonly arms: readonly { readonly name: string; readonly version: number; readonly share: number }[] } | null;
}

export interface Difference {
  readonly value: number;
  readonly low: number | null;
  readonly high: number | null;
  readonly users: readonly [number, number];
}

export interface ArmTest {
  readonly version: number;
  readonly against: number;
  readonly evidence: {
    readonly stage: number;
    readonly share: number;
    readonly users: readonly [number, number];
    readonly sessions: readonly [number, number];
    readonly sample_ratio_p: number;
    readonly alpha_of_each_test: number;
    readonly differences: Readonly<Record<string, Difference | null>>;
  };
  readonly proof: Difference | null;
  readonly metrics: readonly { readonly name: string; readonly direction: "up" | "down"; readonly margin: number; readonly decides: boolean; readonly means: readonly [number | null, number | null] }[];
  readonly path: readonly (Difference & { readonly sessions: number })[];
  readonly needs: { readonly min_sessions: number; readonly min_users: number; readonly max_sessions: number; readonly alpha: number; readonly stages: number };
}

export interface Live {
  readonly now_s: number;
  readonly sessions: Sessions;
  readonly formula: readonly Part[];
  readonly window_s: number;
  readonly poisoning: { readonly quarantined: Readonly<Record<string, number>>; readonly capped_users: number; readonly looked_at: number; readonly limits: Readonly<Record<string, number>> };
  readonly releases: Releases;
  readonly test: ArmTest | null;
}

/** The stages that a candidate passes, with the one that it is in. */
export function stages(releases: Releases): { name: string; state: "done" | "now" | "to come" }[] {
  const names = ["candidate", "gated", ...(releases.has_shadow ? ["shadow"] : []), ...releases.shares.map((share) => `canary ${Math.round(100 * share)}%`), "released"];
  const way = releases.way;
  if (way === null) return names.map((name) => ({ name, state: "to come" }));
  const place = way.state === "canary" ? names.length - 1 - releases.shares.length + way.stage : names.indexOf(way.state);
  return names.map((name, index) => ({ name, state: index < place ? "done" : index === place ? "now" : "to come" }));
}

/** What the test says so far, in a sentence. */
export function verdict(test: ArmTest): string {
  const metric = test.metrics.find(({ decides }) => decides);
  const { sessions, users, sample_ratio_p, alpha_of_each_test } = test.evidence;
  if (metric === undefined) return "";
  if (sample_ratio_p < alpha_of_each_test) return "The arms have users in another ratio than was drawn: it says nothing, and is rolled back.";
  const left = Math.max(0, test.needs.min_sessions - sessions[1]), missing = Math.max(0, test.needs.min_users - Math.min(...users));
  if (left > 0 || missing > 0) {
    const wanted = [...(left > 0 ? [`${left} sessions of the canary`] : []), ...(missing > 0 ? [`${missing} users in its smaller arm`] : [])];
    return `Too early to tell: it needs ${wanted.join(" and ")} more.`;
  }
  const low = gain(test.proof, metric.direction)[0];
  const bound = metric.margin === 0 ? "better" : `no more than ${metric.margin} worse`;
  if (low !== null && low > -metric.margin) return `Proven: ${metric.name} is ${bound}.`;
  return `Not proven yet that ${metric.name} is ${bound}; at most ${Math.max(0, test.needs.max_sessions - sessions[1])} sessions of the canary are left.`;
}

/** The interval of what the candidate gains, in the better direction. */
export function gain(difference: Difference | null, direction: "up" | "down"): [number | null, number | null] {
  if (difference === null) return [null, null];
  const { low, high } = difference;
  return direction === "up" ? [low, high] : [high === null ? null : -high, low === null ? null : -low];
}

/** A signed number with three digits. */
export function signed(value: number | null): string {
  if (value === null) return "∞";
  const text = Math.abs(value) >= 100 ? Math.abs(value).toFixed(0) : Math.abs(value).toPrecision(3).replace(/\.?0+$/, "");
  return `${value < 0 ? "−" : "+"}${text || "0"}`;
}

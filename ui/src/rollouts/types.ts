// Rollouts as the server describes them: etude.dashboard.rollouts, and the rows of etude.ui.rollouts_view.

export interface RolloutRow {
  readonly rollout_id: string;
  readonly purpose: string;
  readonly group: number;
  readonly slot: number;
  readonly attempt: number;
  readonly task_id: string;
  readonly template: string;
  readonly status: string;
  readonly reward: number | null;
  readonly reason: string;
  readonly step: number | null;
  readonly disposition: string | null;
  readonly cause: string;
  readonly turns?: number;
  readonly summaries?: number;
  readonly hints?: number;
  readonly sampled_tokens?: number;
  readonly first_version?: number | null;
  readonly last_version?: number | null;
  readonly seconds?: number;
}

export interface TablePage {
  readonly total: number | null;
  readonly offset: number;
  readonly rows: readonly RolloutRow[];
}

export interface Census {
  readonly purposes: readonly {
    readonly purpose: string;
    readonly outcomes: Readonly<Record<string, number>>;
    readonly mean_reward: number | null;
    readonly summaries: number;
    readonly hints: number;
    readonly versions: readonly [number, number] | null;
    readonly unlisted: number;
  }[];
  readonly reasons: readonly { readonly status: string; readonly reason: string; readonly count: number }[];
}

export interface DiffLine {
  readonly mark: string;
  readonly number: number | null;
  readonly text: string;
}

export interface Call {
  readonly tool: string;
  readonly arguments: Readonly<Record<string, string>>;
  readonly path: string;
  readonly diff: readonly DiffLine[];
}

export interface Summary {
  readonly scratch: string;
  readonly text: string;
  readonly tokens_before: number;
  readonly tokens_after: number | null;
  readonly facts: Readonly<Record<string, boolean | null>>;
}

export interface Turn {
  readonly number: number;
  readonly kind: string;
  readonly continues: number | null;
  readonly heard: string;
  readonly said: string;
  readonly thinking: string;
  readonly content: string;
  readonly calls: readonly Call[];
  readonly finish: string;
  readonly temperature: number;
  readonly prompt_tokens: number;
  readonly new_tokens: number;
  readonly sampled_tokens: number;
  readonly versions: Readonly<Record<string, number>>;
  readonly reward: number | null;
  readonly hint: { readonly turn: number; readonly text: string; readonly source: string } | null;
  readonly advantage: number | null;
  readonly loss_tokens: number | null;
  readonly summary: Summary | null;
}

export interface Part {
  readonly name: string;
  readonly value: number;
  readonly worth: number | null;
  readonly source: string;
}

export interface Rollout {
  readonly rollout_id: string;
  readonly purpose: string;
  readonly group: number;
  readonly slot: number;
  readonly attempt: number;
  readonly step: number | null;
  readonly group_state: string;
  readonly task_id: string;
  readonly epoch: number;
  readonly template: string;
  readonly prompt: string;
  readonly files: readonly { readonly path: string; readonly before: string; readonly diff: readonly DiffLine[] }[];
  readonly status: string;
  readonly reason: string;
  readonly reward: number | null;
  readonly parts: readonly Part[];
  readonly counts: Readonly<Record<string, number>>;
  readonly seconds: number;
  readonly verdict: {
    readonly disposition: string;
    readonly reason: string;
    readonly flags: readonly string[];
    readonly hacked: boolean;
    readonly graded: number;
    readonly impossible: boolean;
  } | null;
  readonly votes: readonly {
    readonly aspect: string;
    readonly score: number | null;
    readonly lowest: number;
    readonly highest: number;
    readonly reason: string;
  }[];
  readonly branch_of: string | null;
  readonly branch_turns: number;
  readonly comparison: {
    readonly penalty: number;
    readonly compared: number;
    readonly rollouts: number;
    readonly quarantined: number;
    readonly lost: number;
    readonly weight: number;
    readonly has_signal: boolean;
    readonly step_tokens: number | null;
  } | null;
  readonly turns: readonly Turn[];
  readonly notes: readonly string[];
  /** Of a live session. */
  readonly observed: {
    readonly observation: { readonly user: string; readonly arm: string; readonly template: string; readonly weight: number; readonly propensity: number };
    /** Part of the reward → answers, of the session or of each turn. */
    readonly answers: Readonly<Record<string, readonly (number | null)[]>>;
  } | null;
}

/** The sampled tokens of a turn in columns; a column of which nothing is known is null. */
export interface TokenColumns {
  readonly number: number;
  readonly token_id: readonly number[] | null;
  readonly text: readonly string[] | null;
  readonly logprob: readonly number[] | null;
  readonly version: readonly number[] | null;
  readonly mismatch: readonly (number | null)[] | null;
  readonly kept: readonly (number | null)[] | null;
  readonly advantage: readonly (number | null)[] | null;
  readonly has_loss: readonly (boolean | null)[] | null;
  readonly routes?: readonly (readonly (readonly number[])[] | null)[] | null;
}

export interface Tokens {
  readonly turns: readonly TokenColumns[];
  readonly has_routes: boolean;
  readonly notes: readonly string[];
}

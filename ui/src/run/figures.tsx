// Figures that are no curves: token ages, what it cost, everything else of the report.

import { brief, count, duration, percent } from "../format";

export interface Report {
  readonly warnings: readonly string[];
  readonly summary: readonly (readonly [string, string])[];
  readonly seconds: { readonly total: number | null };
  readonly busy: { readonly trainer: number | null; readonly engine: number | null };
  readonly rollouts: Readonly<Record<string, number | null>>;
  readonly tokens: { readonly generated: number | null };
  readonly judges: Readonly<Record<string, number>> | null;
  readonly staleness: { readonly bound: number | null };
  readonly cheating: { readonly hack_rate: number | null; readonly by_detector: Readonly<Record<string, number>> };
  readonly config: { readonly numerics?: { readonly warn_k3?: number } };
}

/** A few figures beside the headline. */
export function Stats({ report }: { report: Report }) {
  const failed = report.rollouts.failed_infra;
  const rows: [string, string][] = [
    ["time", duration(report.seconds.total)],
    ["rollouts", count(report.rollouts.graded) + (failed ? `, ${count(failed)} failed` : "")],
    ["tokens sampled", brief(report.tokens.generated)],
    ["trainer busy", percent(report.busy.trainer, 0)],
    ["engines busy", percent(report.busy.engine, 0)],
  ];
  return (
    <dl class="run-stats">
      {rows.map(([name, text]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{text}</dd>
        </div>
      ))}
    </dl>
  );
}

/** The histogram of token ages. */
export function Ages({ ages, isZoomed, across }: { ages: readonly { age: number; tokens: number }[]; isZoomed: boolean; across: string }) {
  const total = ages.reduce((sum, { tokens }) => sum + tokens, 0);
  if (total === 0) return null;
  return (
    <table class="run-bars">
      <caption>
        Ages of sampled tokens <span class="chart-unit">weight versions, {isZoomed ? `the ${across}s in view` : `all ${across}s`}</span>
      </caption>
      <thead class="hidden">
        <tr>
          <th scope="col">age</th>
          <th scope="col">share</th>
          <th scope="col">tokens</th>
        </tr>
      </thead>
      <tbody>
        {ages.map(({ age, tokens }) => (
          <tr key={age}>
            <th scope="row">{age}</th>
            <td>
              <span class="run-bar" style={{ width: `${(100 * tokens) / total}%` }} aria-hidden="true" />
              <span class="run-share">{percent(tokens / total)}</span>
            </td>
            <td>{count(tokens)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

export function Figures({ report }: { report: Report }) {
  const detectors = Object.entries(report.cheating.by_detector);
  return (
    <section aria-label="Everything">
      <h2>Everything</h2>
      <div class="run-everything">
        <Rows rows={report.summary} />
        {report.judges && <Rows title="Cost of judges" rows={Object.entries(report.judges).map(([name, value]) => [name.replaceAll("_", " "), count(value)])} />}
        {detectors.length > 0 && <Rows title="Signs of cheating" rows={detectors.map(([name, share]) => [name, `${percent(share, 2)} of rollouts`])} />}
      </div>
    </section>
  );
}

function Rows({ title, rows }: { title?: string; rows: readonly (readonly [string, string])[] }) {
  return (
    <table class="run-rows">
      {title && <caption>{title}</caption>}
      <tbody>
        {rows.map(([name, text]) => (
          <tr key={name}>
            <th scope="row">{name}</th>
            <td>{text}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

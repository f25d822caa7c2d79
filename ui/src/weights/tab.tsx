// The tab "Weights": versions, who serves what where, and the fleet as a map.

import { useMemo, useState } from "preact/hooks";

import { Chart } from "../components/chart";
import type { Curve, Tone } from "../components/chart_data";
import { count, decimal, size } from "../format";
import { useJson } from "../resource";
import { useSlowly } from "../slowly";
import type { TabProps } from "../tabs";
import { regionName, seconds, type Fleet, type History, type Weights } from "./data";
import { FleetMap } from "./fleet_map";
import { Serving } from "./serving";
import { Versions } from "./versions";
import "./style.css";

const REFRESH_MS = 4000;
/** Versions of which the history is so large that it is asked for rarely. */
const MANY = 1000, MANY_MS = 60_000;

export function WeightsTab({ run, tick }: TabProps) {
  const [before, setBefore] = useState<number | null>(null);
  const news = useSlowly(tick?.cursor ?? 0, REFRESH_MS);
  const base = `/runs/${encodeURIComponent(run.id)}`;
  const weights = useJson<Weights>(`${base}/weights?limit=20${before === null ? "" : `&before=${before}`}`, news);
  const step = useSlowly(tick?.step ?? 0, (weights.data?.total ?? 0) > MANY ? MANY_MS : REFRESH_MS);
  const history = useJson<History>(`${base}/weights/history`, step);
  const fleet = useJson<Fleet>(`${base}/fleet`, news);
  const error = weights.error ?? fleet.error;
  return (
    <div class="weights">
      <h1 class="hidden">Weights</h1>
      {error !== null && <p role="alert">{error}</p>}
      {weights.data !== null && <Head weights={weights.data} history={history.data} />}
      {fleet.data !== null && fleet.data.kind === "fleet" && <FleetMap fleet={fleet.data} />}
      {weights.data !== null && <Serving engines={weights.data.engines} newest={weights.data.newest} />}
      {history.data !== null && history.data.version.length > 1 && <Charts history={history.data} />}
      {fleet.data !== null && fleet.data.kind === "machine" && <FleetMap fleet={fleet.data} />}
      {weights.data !== null && <Versions weights={weights.data} before={before} onBefore={setBefore} />}
    </div>
  );
}

function Head({ weights, history }: { weights: Weights; history: History | null }) {
  const deltas = history === null ? [] : history.size_bytes.filter((_, index) => history.kind[index] === "delta");
  const mean = deltas.length > 0 ? deltas.reduce((a, b) => a + b, 0) / deltas.length : null;
  const late = weights.engines.filter(({ behind }) => (behind ?? 0) > 0).length;
  const worst = weights.regions.reduce<Weights["regions"][number] | null>((a, b) => (a !== null && a.last_s >= b.last_s ? a : b), null);
  const figures: [string, string, string][] = [
    ["newest version", weights.newest === null ? "–" : String(weights.newest), `${count(weights.total)} in the log`],
    ["delta, mean", size(mean), weights.state_bytes === null || mean === null ? "" : `1 / ${decimal(weights.state_bytes / mean, 1)} of ${size(weights.state_bytes)}`],
    ["lag of the last", worst === null ? "–" : seconds(worst.last_s), worst === null ? "" : `step’s end to the last engine, ${regionName(worst.region)}`],
    ["engines", String(weights.engines.length), late === 0 ? "all serve the newest" : `${late} behind the newest`],
  ];
  return (
    <dl class="weights-head">
      {figures.map(([name, value, note]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
          <dd class="note">{note}</dd>
        </div>
      ))}
    </dl>
  );
}

function Charts({ history }: { history: History }) {
  const x = history.version;
  const sizes = useMemo<Curve[]>(() => {
    const of = (kind: string) => history.size_bytes.map((bytes, index) => (history.kind[index] === kind ? bytes / 1e6 : null));
    return [
      { name: "delta", tone: "main", x, y: of("delta") },
      { name: "whole", tone: "warn", x, y: of("full"), style: "points" },
    ];
  }, [history]);
  const lags = useMemo<Curve[]>(
    () => Object.entries(history.lags).map(([region, y], index) => ({ name: regionName(region), tone: (index % 6) as Tone, x, y: [...y] })),
    [history],
  );
  const times = useMemo<Curve[]>(
    () => [
      { name: "to the commit", tone: "main", x, y: [...history.seconds] },
      { name: "trainer stood still", tone: "warn", x, y: [...history.blocked_s] },
    ],
    [history],
  );
  return (
    <div class="weights-charts">
      <Chart title="Size of a version" unit="MB" curves={sizes} notation="significant" across="version" group="versions" />
      <Chart title="Lag by region" unit="s from the step’s end" curves={lags} notation="significant" across="version" group="versions" />
      <Chart title="Publishing" unit="s" curves={times} notation="significant" across="version" group="versions" />
    </div>
  );
}

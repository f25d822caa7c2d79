// The tab "Run": how well it does, and how it fares.

import { useMemo, useState } from "preact/hooks";

import { Chart, type Zoom } from "../components/chart";
import { AUTO, smoothed, type Curve } from "../components/chart_data";
import { useJson } from "../resource";
import type { TabProps } from "../tabs";
import { stepsOf } from "./axis";
import { agesOf, canBeLog, CHARTS, COLUMNS, endsOf, linesOf, meanOf, partsOf, type MetricChart } from "./charts";
import { Controls, type Options } from "./controls";
import { useCurves, useRolloutSums, type CurvesData, type RolloutSums } from "./curves";
import { Ages, Figures, Stats, type Report } from "./figures";
import { gainText, headline, measuredCurve, notationOf, ofOneRun, ofRuns, type NamedData } from "./heldout";
import { Imitation, Phases } from "./phases";
import { useLater, useSlow } from "./slow";
import "./style.css";

export function RunTab({ run, runs, route, tick }: TabProps) {
  const others = (route.options.with ?? "").split(",").filter((id) => id !== run.id && runs.some((each) => each.id === id));
  const [options, setOptions] = useState<Options>({ across: "step", radius: AUTO, asSeeds: false });
  const [zoom, setZoom] = useState<Zoom>(null);
  const slow = useSlow(tick?.cursor ?? 0);
  const version = `${tick?.step ?? run.step}|${tick?.phase ?? run.phase}|${slow}|${tick?.closed ?? false}`;
  const wanted = [{ id: run.id, version }, ...others.map((id) => ({ id, version: String(runs.find((each) => each.id === id)?.step) }))];
  const [curves, error] = useCurves(wanted, COLUMNS);
  const data = curves.get(run.id);
  const isLater = useLater(curves.has(run.id));
  const { data: report } = useJson<Report>(isLater ? `/runs/${run.id}/report?phase=${run.phase}` : null, slow);
  const sums = useRolloutSums(isLater ? run.id : null, slow);
  if (data === undefined) return error === null ? <p class="note" role="status">Reading the run …</p> : <p role="alert">{error}</p>;
  const shown = wanted.flatMap(({ id }): NamedData[] => {
    const its = curves.get(id);
    return its ? [{ id, name: runs.find((each) => each.id === id)?.name ?? id, data: its }] : [];
  });
  const view = { shown, options, zoom, onZoom: setZoom };
  return (
    <div class="run">
      <Headline data={data} report={report} />
      <Controls run={run} runs={runs} others={others} options={options} onOptions={(changed) => (setOptions(changed), setZoom(null))} />
      <div class="run-hero">
        <Heldout {...view} />
        <Reward {...view} />
      </div>
      <Phases data={data} updatedS={run.updated_s} isAlive={run.alive} />
      {isLater && (
        <>
      <Section title="Learning" {...view}>
        <PlainChart title="Parts of the reward" notation="decimal" {...view} curves={partsOf(data, stepsOf(data, options.across))} />
      </Section>
      <Section title="Rollouts" {...view}>
        <PlainChart title="How rollouts ended" notation="percent" {...view} curves={endsOf(data, stepsOf(data, options.across))} />
        {sums !== null && <Lengths sums={sums} {...view} />}
      </Section>
      <Section title="Health" {...view} report={report}>
        <Staleness data={data} report={report} {...view} />
        <Ages ages={agesOf(data, stepsOf(data, options.across), zoom)} isZoomed={zoom !== null} across={options.across} />
      </Section>
      <Imitation data={data} />
      {report && <Figures report={report} />}
        </>
      )}
    </div>
  );
}

interface ViewProps {
  readonly shown: readonly NamedData[];
  readonly options: Options;
  readonly zoom: Zoom;
  readonly onZoom: (zoom: Zoom) => void;
}

function Headline({ data, report }: { data: CurvesData; report: Report | null }) {
  const isRate = notationOf(data) === "percent";
  const gain = gainText(data.gain?.sampled, isRate);
  return (
    <div class="run-head">
      <h1 class="headline">{headline(data)}</h1>
      {gain && <p class="run-gain">{gain}</p>}
      {report && <Stats report={report} />}
      {report?.warnings.map((warning) => (
        <p class="run-warning" key={warning} role="alert">
          {warning}
        </p>
      ))}
    </div>
  );
}

function Heldout({ shown, options, zoom, onZoom }: ViewProps) {
  const curves = useMemo(() => {
    const only = shown[0];
    if (shown.length === 1 && only) return ofOneRun(only.data, options.across);
    return ofRuns(shown, options.asSeeds, (data, name, tone) => measuredCurve(data, "sampled", name, tone, options.across));
  }, [shown.map((each) => each.data), options].flat());
  const notation = notationOf(shown[0]?.data);
  return <Chart title={notation === "percent" ? "Held-out tasks solved" : "Held-out mean reward"} unit={`95 % intervals over ${options.asSeeds ? "seeds, or templates" : "templates"}`} curves={curves} notation={notation} height={300} across={options.across} zoom={zoom} onZoom={onZoom} empty="no held-out evaluation yet: eval.every_steps says how often" />;
}

function Reward({ shown, options, zoom, onZoom }: ViewProps) {
  const curves = useMemo(
    () =>
      shown.length > 1
        ? overlay(shown, options, "reward_mean")
        : shown.flatMap(({ data }) => {
            const mean = data.columns.reward_mean ?? [], spread = data.columns.reward_std ?? [];
            const [least, most] = [data.columns.reward_low ?? [], data.columns.reward_high ?? []];
            const edge = (sign: number) =>
              mean.map((value, index) => {
                const end = (value ?? 0) + sign * (spread[index] ?? 0);
                return value === null ? null : Math.min(most[index] ?? end, Math.max(least[index] ?? end, end));
              });
            return smoothed({ name: "mean ± spread within a group", tone: "main", x: stepsOf(data, options.across), y: mean, low: edge(-1), high: edge(1) }, options.radius);
          }),
    [shown.map((each) => each.data), options].flat(),
  );
  return <Chart title="Reward of each step’s rollouts" curves={curves} notation="decimal" height={300} across={options.across} zoom={zoom} onZoom={onZoom} />;
}

/** A metric of several runs, a curve for each or over seeds. */
function overlay(shown: readonly NamedData[], options: Options, column: string): Curve[] {
  const curves = ofRuns(shown, options.asSeeds, (data, name, tone) => ({ name, tone, x: stepsOf(data, options.across), y: data.columns[column] ?? [] }));
  return curves.filter((curve) => curve.y.some((value) => value !== null)).flatMap((curve) => smoothed(curve, options.radius));
}

function Section({ title, children, report, ...view }: ViewProps & { title: MetricChart["section"]; children: preact.ComponentChildren; report?: Report | null }) {
  return (
    <section aria-label={title}>
      <h2>{title}</h2>
      <div class="run-grid">
        {CHARTS.filter((chart) => chart.section === title).map((chart) => (
          <Metric key={chart.title} chart={chart} bound={chart.lines.k3 ? report?.config.numerics?.warn_k3 : undefined} {...view} />
        ))}
        {children}
      </div>
    </section>
  );
}

function Metric({ chart, shown, options, bound, zoom, onZoom }: ViewProps & { chart: MetricChart; bound?: number | undefined }) {
  const curves = useMemo(() => {
    const columns = Object.keys(chart.lines);
    if (shown.length > 1) return overlay(shown, options, columns[columns.length - 1] ?? "");
    return shown.flatMap(({ data }) => linesOf(chart, data, stepsOf(data, options.across))).flatMap((curve) => smoothed(curve, options.radius));
  }, [chart, shown.map((each) => each.data), options].flat());
  if (curves.length === 0) return null;
  return <Chart title={chart.title} unit={chart.unit ?? ""} curves={curves} notation={chart.notation} isLog={(chart.isLog ?? false) && canBeLog(curves)} across={options.across} zoom={zoom} onZoom={onZoom} bound={bound ? { value: bound, label: "warn" } : undefined} />;
}

/** A chart of one run alone, whatever others are laid over the rest. */
function PlainChart({ title, notation, curves, options, zoom, onZoom }: ViewProps & { title: string; notation: "decimal" | "percent"; curves: Curve[] }) {
  if (curves.length === 0) return null;
  return <Chart title={title} notation={notation} curves={curves.flatMap((curve) => smoothed(curve, options.radius))} across={options.across} zoom={zoom} onZoom={onZoom} />;
}

function Lengths({ sums, options }: { sums: RolloutSums } & ViewProps) {
  const curve = (column: string, name: string) => smoothed(meanOf(sums, column, name), options.radius);
  const common = { across: "version", group: "versions" } as const;
  return (
    <>
      <Chart title="Turns of a rollout" notation="decimal" curves={curve("turns", "mean")} {...common} />
      <Chart title="Sampled tokens of a rollout" notation="count" curves={curve("sampled_tokens", "mean")} {...common} />
      <Chart title="Seconds of a rollout" notation="decimal" unit="s" curves={curve("seconds", "mean")} {...common} />
      <Chart title="Rollouts that look like cheating" notation="percent" curves={curve("hacked", "share")} {...common} />
    </>
  );
}

function Staleness({ data, report, options, zoom, onZoom }: { data: CurvesData; report: Report | null } & ViewProps) {
  const x = stepsOf(data, options.across);
  const curves: Curve[] = [
    { name: "oldest token", tone: "side", x, y: data.columns.staleness_max ?? [] },
    { name: "mean", tone: "main", x, y: data.columns.staleness_mean ?? [] },
  ];
  const bound = report?.staleness.bound;
  return <Chart title="Staleness" unit="weight versions" notation="significant" curves={curves.flatMap((curve) => smoothed(curve, options.radius))} across={options.across} zoom={zoom} onZoom={onZoom} bound={bound == null ? undefined : { value: bound, label: "bound" }} />;
}

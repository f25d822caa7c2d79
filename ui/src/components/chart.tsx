// A chart over steps: uPlot's canvas, and around it a title, the values under the pointer, controls, words and a table.

import { useMemo, useState } from "preact/hooks";

import { ChartCanvas } from "./chart_canvas";
import { describe, newest, write, type Curve, type Notation } from "./chart_data";
import { ChartTable } from "./chart_table";
import "./chart.css";

/** The part of x that is looked at; null is all of it. Charts that share one are zoomed together. */
export type Zoom = readonly [number, number] | null;

export interface ChartProps {
  readonly title: string;
  readonly curves: readonly Curve[];
  readonly notation: Notation;
  readonly unit?: string;
  readonly height?: number;
  /** The x axis; steps by default. */
  readonly across?: string;
  /** True where the axis is logarithmic at first. */
  readonly isLog?: boolean;
  /** A line that is not to be crossed. */
  readonly bound?: { readonly value: number; readonly label: string } | undefined;
  /** Charts of one group show the same place under the pointer. */
  readonly group?: string;
  readonly zoom?: Zoom;
  readonly onZoom?: (zoom: Zoom) => void;
  /** What stands where there is no value. */
  readonly empty?: string;
}

export function Chart(props: ChartProps) {
  const { title, curves, notation, unit = "", height = 160, across = "step", isLog = false, bound, group = "steps", empty } = props;
  const [log, setLog] = useState(isLog);
  const [isTable, setTable] = useState(false);
  const [own, setOwn] = useState<Zoom>(null);
  const [at, setAt] = useState<number | null>(null);
  const [from, setFrom] = useState(0);
  const [zoom, onZoom] = props.onZoom ? [props.zoom ?? null, props.onZoom] : [own, setOwn];
  const words = useMemo(() => describe(title, curves, notation, across), [title, curves, notation, across]);
  const isEmpty = curves.every((curve) => curve.y.every((value) => value === null));
  return (
    <figure class="chart">
      <figcaption>
        <span class="chart-title">{title}</span>
        {unit && <span class="chart-unit">{unit}</span>}
        {!isEmpty && (
          <span class="chart-tools">
            {zoom !== null && (
              <button type="button" aria-label={`Show all: ${title}`} onClick={() => onZoom(null)}>
                reset
              </button>
            )}
            <button type="button" aria-pressed={log} aria-label={`Logarithmic axis: ${title}`} onClick={() => setLog(!log)}>
              log
            </button>
            <button type="button" aria-pressed={isTable} aria-label={`Table: ${title}`} onClick={() => setTable(!isTable)}>
              table
            </button>
          </span>
        )}
      </figcaption>
      {isEmpty ? (
        <p class="chart-empty" style={{ minHeight: `${height}px` }}>
          {empty ?? "nothing measured yet"}
        </p>
      ) : isTable ? (
        <ChartTable title={title} curves={curves} notation={notation} across={across} height={height} />
      ) : (
        <>
          <Legend curves={curves} notation={notation} at={at} across={across} />
          <ChartCanvas {...{ curves, notation, height, log, bound, group, words, zoom, onZoom, across }} onCursor={setAt} onFrom={setFrom} />
          {from > 0 && !log && <p class="chart-from">axis begins at {write(from, notation)}, not at 0</p>}
        </>
      )}
    </figure>
  );
}

/** Name and value of each curve: under the pointer, else the newest. */
function Legend({ curves, notation, at, across }: { curves: readonly Curve[]; notation: Notation; at: number | null; across: string }) {
  const seen = curves.filter((curve) => curve.style !== "faint");
  return (
    <p class="chart-legend">
      {at !== null && <span class="chart-at">{`${across} ${Number(at.toPrecision(6))}`}</span>}
      {seen.map((curve) => (
        <span key={curve.name}>
          <i class={`swatch tone-${curve.tone}`} aria-hidden="true" />
          {(seen.length > 1 || curve.low !== undefined) && <span class="chart-name">{curve.name}</span>}
          <b>{valueAt(curve, at, notation)}</b>
        </span>
      ))}
    </p>
  );
}

function valueAt(curve: Curve, at: number | null, notation: Notation): string {
  const index = at === null ? -1 : curve.x.indexOf(at);
  const value = at === null ? newest(curve) : (curve.shown ?? curve.y)[index];
  const [low, high] = [curve.low?.[index], curve.high?.[index]];
  const interval = at !== null && low != null && high != null ? ` (${write(low, notation)} to ${write(high, notation)})` : "";
  return write(value, notation) + interval;
}

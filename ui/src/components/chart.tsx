// A chart over steps: uPlot's canvas, and around it a title, a legend, controls, words and a table.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";

import { align, describe, type Curve, type Notation } from "./chart_data";
import { drawing } from "./chart_drawing";
import { ChartTable } from "./chart_table";
import "uplot/dist/uPlot.min.css";
import "./chart.css";

export interface ChartProps {
  readonly title: string;
  readonly curves: readonly Curve[];
  readonly notation: Notation;
  readonly unit?: string;
  readonly height?: number;
  /** The x axis; steps by default. */
  readonly across?: string;
  readonly isLog?: boolean;
  /** A line that is not to be crossed. */
  readonly bound?: { readonly value: number; readonly label: string } | undefined;
  /** Charts of one group show the same place under the pointer. */
  readonly group?: string;
}

export function Chart({ title, curves, notation, unit = "", height = 170, across = "step", isLog = false, bound, group = "steps" }: ChartProps) {
  const [log, setLog] = useState(isLog);
  const [isTable, setTable] = useState(false);
  const [zoom, setZoom] = useState<readonly [number, number] | null>(null);
  const words = useMemo(() => describe(title, curves, notation, across), [title, curves, notation, across]);
  const isEmpty = curves.every((curve) => curve.y.every((value) => value === null));
  return (
    <figure class="chart">
      <figcaption>
        <span class="chart-title">{title}</span>
        {unit && <span class="chart-unit">{unit}</span>}
        <span class="chart-tools">
          {zoom !== null && (
            <button type="button" onClick={() => setZoom(null)}>
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
      </figcaption>
      {isEmpty ? (
        <p class="chart-empty">not measured yet</p>
      ) : isTable ? (
        <ChartTable title={title} curves={curves} notation={notation} across={across} />
      ) : (
        <Canvas {...{ curves, notation, height, log, bound, group, words, zoom, onZoom: setZoom, across }} />
      )}
    </figure>
  );
}

interface CanvasProps {
  readonly curves: readonly Curve[];
  readonly notation: Notation;
  readonly height: number;
  readonly log: boolean;
  readonly bound: ChartProps["bound"];
  readonly group: string;
  readonly words: string;
  readonly across: string;
  readonly zoom: readonly [number, number] | null;
  readonly onZoom: (zoom: readonly [number, number] | null) => void;
}

/** Shapes that uPlot must be made anew for: which curves there are, not their values. */
function shape(props: CanvasProps): string {
  const curves = props.curves.map((curve) => `${curve.name}/${curve.tone}/${curve.style ?? ""}/${curve.low !== undefined}`);
  return [props.notation, props.height, props.log, props.bound?.value, props.group, ...curves].join("|");
}

function Canvas(props: CanvasProps) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const zoomed = useRef(props.zoom);
  const [theme, setTheme] = useState(0);
  const data = useMemo(() => align(props.curves), [props.curves]);
  useEffect(() => {
    const host = place.current;
    if (host === null) return;
    const made = new uPlot(drawing(props, host.clientWidth, (zoom) => props.onZoom(zoom)), [data.x, ...data.columns], host);
    plot.current = made;
    const sizes = new ResizeObserver(() => made.setSize({ width: host.clientWidth, height: props.height }));
    sizes.observe(host);
    return () => {
      sizes.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape(props), theme]);
  useEffect(() => {
    zoomed.current = props.zoom;
    plot.current?.setData([data.x, ...data.columns], props.zoom === null);
    if (props.zoom !== null) plot.current?.setScale("x", { min: props.zoom[0], max: props.zoom[1] });
  }, [data, props.zoom]);
  useEffect(() => {
    const repaint = () => setTheme((number) => number + 1);
    const system = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("etude-theme", repaint);
    system.addEventListener("change", repaint);
    return () => {
      removeEventListener("etude-theme", repaint);
      system.removeEventListener("change", repaint);
    };
  }, []);
  return <div class="chart-canvas" role="img" aria-label={props.words} ref={place} />;
}

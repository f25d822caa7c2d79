// uPlot within Preact: made anew when its shape changes, fed when its data do, moved over and zoomed by keys as by mouse.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";

import type { Zoom } from "./chart";
import { align, write, type Curve } from "./chart_data";
import { drawing, type Drawn } from "./chart_drawing";
import "uplot/dist/uPlot.min.css";

interface CanvasProps extends Drawn {
  readonly words: string;
  readonly zoom: Zoom;
  readonly onZoom: (zoom: Zoom) => void;
  /** The x under the pointer. */
  readonly onCursor: (x: number | null) => void;
  /** Where the y axis begins. */
  readonly onFrom: (y: number) => void;
}

/** What uPlot must be made anew for: which curves there are, not their values. */
function shape(props: CanvasProps): string {
  const curves = props.curves.map((curve) => `${curve.name}/${curve.tone}/${curve.style ?? ""}/${curve.low !== undefined}`);
  return [props.notation, props.height, props.log, props.bound?.value, props.group, props.across, ...curves].join("|");
}

export function ChartCanvas(props: CanvasProps) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const newest = useRef(props);
  newest.current = props;
  const theme = useThemeCount();
  const [spoken, setSpoken] = useState("");
  const data = useMemo(() => positive(align(props.curves), props.log), [props.curves, props.log]);
  useEffect(() => {
    const host = place.current;
    if (host === null) return;
    const listeners = {
      onZoom: (zoom: Zoom) => newest.current.onZoom(zoom),
      onCursor: (x: number | null) => newest.current.onCursor(x),
      onFrom: (y: number) => newest.current.onFrom(y),
    };
    const made = new uPlot(drawing(props, host.clientWidth, listeners), [data.x, ...data.columns], host);
    if (props.zoom !== null) made.setScale("x", { min: props.zoom[0], max: props.zoom[1] });
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
    plot.current?.setData([data.x, ...data.columns], props.zoom === null);
    if (props.zoom !== null) plot.current?.setScale("x", { min: props.zoom[0], max: props.zoom[1] });
  }, [data, props.zoom]);
  const onKeyDown = (event: KeyboardEvent) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") props.onZoom(null);
    if ((event.key === "+" || event.key === "-") && plot.current) props.onZoom(zoomed(plot.current, event.key === "+" ? 0.5 : 2));
    if (move !== undefined && plot.current) {
      event.preventDefault();
      setSpoken(say(plot.current, moveCursor(plot.current, move), props));
    }
  };
  return (
    <div class="chart-canvas" ref={place} role="img" tabIndex={0} aria-label={`${props.words} Arrow keys move over it, plus and minus zoom.`} onKeyDown={onKeyDown}>
      <span class="hidden" aria-live="polite">
        {spoken}
      </span>
    </div>
  );
}

/** What a logarithmic axis can show: not 0, nor less. */
function positive(data: ReturnType<typeof align>, log: boolean): ReturnType<typeof align> {
  const shown = (value: number | null | undefined) => (value != null && value <= 0 ? null : value);
  return log ? { x: data.x, columns: data.columns.map((column) => column.map(shown)) } : data;
}

/** Put the cursor some points further, and return where it is. */
function moveCursor(plot: uPlot, by: number): number {
  const last = plot.data[0].length - 1;
  const next = Math.min(last, Math.max(0, (plot.cursor.idx ?? (by < 0 ? last + 1 : -1)) + by));
  plot.setCursor({ left: plot.valToPos(plot.data[0][next] ?? 0, "x"), top: plot.over.clientHeight / 2 });
  return next;
}

function say(plot: uPlot, index: number, { curves, notation, across }: { curves: readonly Curve[] } & Drawn): string {
  const x = plot.data[0][index] ?? 0;
  const values = curves.filter((curve) => curve.style !== "faint").map((curve) => `${curve.name} ${write((curve.shown ?? curve.y)[curve.x.indexOf(x)], notation)}`);
  return `${across} ${x}: ${values.join(", ")}`;
}

/** The part of x around the cursor, or the middle, that is `factor` of what is seen. */
function zoomed(plot: uPlot, factor: number): Zoom {
  const { min = 0, max = 1 } = plot.scales.x ?? {};
  const [low, high] = [min ?? 0, max ?? 1];
  const middle = plot.cursor.idx != null ? (plot.data[0][plot.cursor.idx] ?? (low + high) / 2) : (low + high) / 2;
  const [first, last] = [plot.data[0][0] ?? low, plot.data[0][plot.data[0].length - 1] ?? high];
  const zoom: Zoom = [Math.max(first, middle - (middle - low) * factor), Math.min(last, middle + (high - middle) * factor)];
  return zoom[0] <= first && zoom[1] >= last ? null : zoom;
}

/** Grows with every change of the theme: canvases are painted anew. */
function useThemeCount(): number {
  const [number, setNumber] = useState(0);
  useEffect(() => {
    const repaint = () => setNumber((old) => old + 1);
    const system = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("etude-theme", repaint);
    system.addEventListener("change", repaint);
    return () => {
      removeEventListener("etude-theme", repaint);
      system.removeEventListener("change", repaint);
    };
  }, []);
  return number;
}

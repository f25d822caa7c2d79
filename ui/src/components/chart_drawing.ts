// uPlot's options for a chart: axes, curves, intervals as bands, a bound, in the colours of the style sheet.

import uPlot from "uplot";

import type { Zoom } from "./chart";
import { brief, small } from "../format";
import { range, type Curve, type Notation, type Tone } from "./chart_data";

export interface Drawn {
  readonly curves: readonly Curve[];
  readonly notation: Notation;
  readonly height: number;
  readonly log: boolean;
  readonly bound?: { readonly value: number; readonly label: string } | undefined;
  readonly group: string;
  readonly across: string;
}

export interface Listeners {
  readonly onZoom: (zoom: Zoom) => void;
  readonly onCursor: (x: number | null) => void;
  readonly onFrom: (y: number) => void;
}

/** A colour of the style sheet, as the theme has it now: canvases know no variables. */
function colour(name: string, opacity = 1): string {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const [red, green, blue] = getComputedStyle(probe).color.match(/\d+/g) ?? ["128", "128", "128"];
  probe.remove();
  return `rgb(${red} ${green} ${blue} / ${opacity})`;
}

export function toneColour(tone: Tone, opacity = 1): string {
  return colour(typeof tone === "number" ? `curve-${tone}` : tone, opacity);
}

const FONT = "12px system-ui, sans-serif";

export function drawing(drawn: Drawn, width: number, listeners: Listeners): uPlot.Options {
  const axis: uPlot.Axis = { stroke: colour("soft"), font: FONT, grid: { stroke: colour("hair"), width: 1 }, ticks: { show: false }, gap: 6 };
  const { series, bands } = shapes(drawn);
  return {
    width,
    height: drawn.height,
    padding: [10, 16, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: true, y: false, setScale: false }, sync: { key: drawn.group }, points: { size: 7, width: 0 }, bind: { dblclick: () => () => (listeners.onZoom(null), null) } },
    scales: { x: { time: false, range: xRange }, y: scale(drawn) },
    axes: [
      { ...axis, size: 26, space: 60, grid: { show: false }, values: (_, ticks) => ticks.map((tick) => (drawn.across !== "step" || Number.isInteger(tick) ? axisNumber(tick) : "")) },
      { ...axis, size: axisWidth, space: 30, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : axisText(tick, drawn))) },
    ],
    bands,
    series,
    hooks: {
      setSelect: [(plot) => select(plot, listeners)],
      setCursor: [(plot) => listeners.onCursor(plot.cursor.idx == null || (plot.cursor.left ?? -1) < 0 ? null : (plot.data[0][plot.cursor.idx] ?? null))],
      setScale: [(plot, key) => key === "y" && listeners.onFrom(plot.scales.y?.min ?? 0)],
      draw: [(plot) => drawBound(plot, drawn)],
    },
  };
}

/** Each curve as a series; one with an interval as three, and a band between the outer two. */
function shapes({ curves, across }: Drawn): { series: uPlot.Series[]; bands: uPlot.Band[] } {
  const bands: uPlot.Band[] = [];
  const series: uPlot.Series[] = [{ label: across }];
  let below = 0;
  for (const curve of curves) {
    const stroke = toneColour(curve.tone, curve.style === "faint" ? 0.28 : 1);
    series.push({ label: curve.name, stroke, width: widthOf(curve), points: pointsOf(curve, stroke), spanGaps: true });
    if (curve.style === "area") {
      const fill = toneColour(curve.tone, 0.35);
      if (below > 0) bands.push({ series: [series.length - 1, below], fill });
      else Object.assign(series[series.length - 1] ?? {}, { fill, fillTo: 0 });
      below = series.length - 1;
    }
    if (curve.low && curve.high) {
      const edge: uPlot.Series = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      series.push({ ...edge, label: `${curve.name} low` }, { ...edge, label: `${curve.name} high` });
      bands.push({ series: [series.length - 1, series.length - 2], fill: toneColour(curve.tone, 0.16) });
    }
  }
  return { series, bands };
}

function xRange(_: uPlot, low: number, high: number): [number, number] {
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function scale(drawn: Drawn): uPlot.Scale {
  if (drawn.log) return { distr: 3 };
  if (drawn.curves.some((curve) => curve.style === "area")) return { range: [0, 1] };
  const bound = drawn.bound?.value;
  return { range: (_, low, high) => range(low, bound !== undefined && bound < 3 * high ? Math.max(high, bound) : high, drawn.notation) };
}

/** As wide as its longest number. */
function axisWidth(_: uPlot, values: string[] | null): number {
  return 14 + 7 * Math.max(3, ...(values ?? []).map((text) => text.length));
}

/** Short: 4×10⁻⁴, 12k. */
function axisNumber(value: number): string {
  return Math.abs(value) >= 1e4 ? brief(value) : small(value, 3).replace(/^(\d)\.?0*×/, "$1×").replace(/^1×10/, "10");
}

function axisText(tick: number, drawn: Drawn): string {
  return drawn.notation === "percent" ? `${Math.round(1000 * tick) / 10}%` : axisNumber(tick);
}

function widthOf(curve: Curve): number {
  return curve.style === "faint" || curve.style === "area" ? 1 : curve.tone === "side" ? 1.5 : 2;
}

function pointsOf(curve: Curve, stroke: string): uPlot.Series.Points {
  if (curve.style === "points" && curve.x.length <= 80) return { show: true, size: curve.tone === "side" ? 5 : 7, fill: stroke, stroke, width: 0 };
  return { show: curve.x.length === 1, size: 6, fill: stroke };
}

const LEAST_DRAG = 6;

function select(plot: uPlot, listeners: Listeners): void {
  const { left, width } = plot.select;
  if (width < LEAST_DRAG) return;
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  listeners.onZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
}

function drawBound(plot: uPlot, drawn: Drawn): void {
  if (!drawn.bound) return;
  const y = plot.valToPos(drawn.bound.value, "y", true);
  const { ctx, bbox } = plot;
  if (!(y >= bbox.top && y <= bbox.top + bbox.height)) return;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("warn");
  ctx.setLineDash([3 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "right";
  ctx.fillText(drawn.bound.label, bbox.left + bbox.width, y - 4 * devicePixelRatio);
  ctx.restore();
}

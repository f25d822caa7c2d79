// uPlot's options for a chart: axes, curves, intervals as bands, a bound, in the colours of the style sheet.

import uPlot from "uplot";

import { range, write, type Curve, type Notation, type Tone } from "./chart_data";

interface Drawn {
  readonly curves: readonly Curve[];
  readonly notation: Notation;
  readonly height: number;
  readonly log: boolean;
  readonly bound?: { readonly value: number; readonly label: string } | undefined;
  readonly group: string;
  readonly across: string;
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

export function drawing(drawn: Drawn, width: number, onZoom: (zoom: readonly [number, number] | null) => void): uPlot.Options {
  const { soft, hair } = { soft: colour("soft"), hair: colour("hair") };
  const font = "12px system-ui, sans-serif";
  const axis: uPlot.Axis = { stroke: soft, font, grid: { stroke: hair, width: 1 }, ticks: { show: false }, gap: 6 };
  const bands: uPlot.Band[] = [];
  const series: uPlot.Series[] = [{ label: drawn.across }];
  for (const curve of drawn.curves) {
    const stroke = toneColour(curve.tone);
    series.push({ label: curve.name, stroke, width: widthOf(curve), points: pointsOf(curve, stroke), spanGaps: true, value: (_, value) => write(value, drawn.notation) });
    if (curve.low && curve.high) {
      bands.push({ series: [series.length + 1, series.length], fill: toneColour(curve.tone, 0.15) });
      const edge: uPlot.Series = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      series.push({ ...edge, label: `${curve.name} low` }, { ...edge, label: `${curve.name} high` });
    }
  }
  return {
    width,
    height: drawn.height,
    padding: [8, 12, 0, 0],
    legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: true }, sync: { key: drawn.group }, points: { size: 7 } },
    scales: { x: { time: false }, y: scale(drawn) },
    axes: [
      { ...axis, size: 26, grid: { show: false }, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) },
      { ...axis, size: 52, space: 32, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : axisText(tick, drawn))) },
    ],
    bands,
    series,
    hooks: {
      setSelect: [(plot) => plot.select.width > 0 && onZoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")])],
      draw: [(plot) => drawBound(plot, drawn)],
    },
  };
}

function scale(drawn: Drawn): uPlot.Scale {
  if (drawn.log) return { distr: 3 };
  return {
    range: (_, low, high) => {
      const bound = drawn.bound?.value;
      const top = bound !== undefined && bound < 3 * high ? Math.max(high, bound) : high;
      return range(low, top, drawn.notation);
    },
  };
}

function axisText(tick: number, drawn: Drawn): string {
  if (drawn.notation === "percent") return `${Math.round(1000 * tick) / 10}%`;
  return write(tick, drawn.log || Math.abs(tick) >= 1e4 || drawn.notation === "significant" ? "significant" : "decimal").replace(/\.?0+$/, "") || "0";
}

function widthOf(curve: Curve): number {
  return curve.style === "faint" ? 1 : curve.tone === "side" ? 1.25 : 2;
}

function pointsOf(curve: Curve, stroke: string): uPlot.Series.Points {
  if (curve.style === "points") return { show: true, size: 7, fill: stroke, stroke, width: 0 };
  return curve.x.length === 1 ? { show: true, size: 6, fill: stroke } : { show: false };
}

function drawBound(plot: uPlot, drawn: Drawn): void {
  if (!drawn.bound) return;
  const y = plot.valToPos(drawn.bound.value, "y", true);
  if (!(y >= plot.bbox.top && y <= plot.bbox.top + plot.bbox.height)) return;
  const { ctx, bbox } = plot;
  const warn = colour("warn");
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = warn;
  ctx.setLineDash([3, 4]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "right";
  ctx.fillText(drawn.bound.label, bbox.left + bbox.width, y - 4 * devicePixelRatio);
  ctx.restore();
}

// The lanes over one axis of time: a cursor that says what is under it, drag or keys to zoom and move.

import { useRef, useState } from "preact/hooks";

import { at, clock, describe, isNumber, pan, paths, sums, ticks, title, toneOf, zoom, type Lane, type Mark, type Span, type Timeline } from "./data";

const GROUPS: Readonly<Record<string, string>> = {
  trainer: "Trainer",
  publishing: "Publishing",
  engines: "Engines",
  gateways: "Gateways",
  rollouts: "Rollouts in flight",
  evaluations: "Evaluations",
  away: "Away",
};
const NEAR = 0.006;

interface PlotProps {
  readonly timeline: Timeline;
  readonly onWindow: (span: Span | null) => void;
}

export function Plot({ timeline, onWindow }: PlotProps) {
  const [place, setPlace] = useState<number | null>(null);
  const [drag, setDrag] = useState<Span | null>(null);
  const field = useRef<HTMLDivElement>(null);
  const span: Span = [timeline.from_s, timeline.to_s], whole: Span = [0, timeline.end_s];
  const length = span[1] - span[0];
  const shareOf = (event: PointerEvent) => {
    const box = field.current?.getBoundingClientRect();
    return box ? Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) : 0;
  };
  const keys = (event: KeyboardEvent) => {
    const here = place ?? 0.5, by = event.key === "ArrowLeft" ? -1 : 1;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      if (event.shiftKey) onWindow(pan(span, 0.25 * by, whole));
      else setPlace(Math.min(1, Math.max(0, here + by / timeline.bins)));
    } else if (event.key === "+" || event.key === "=") onWindow(zoom(span, 0.5, here, whole));
    else if (event.key === "-") onWindow(zoom(span, 2, here, whole));
    else if (event.key === "Home" || event.key === "End") setPlace(event.key === "Home" ? 0 : 1);
    else if (event.key === "0" || event.key === "Escape") onWindow(null);
    else return;
    event.preventDefault();
  };
  const release = (event: PointerEvent) => {
    if (drag !== null && Math.abs(drag[1] - drag[0]) > NEAR) {
      const [first = 0, last = 1] = [...drag].sort((a, b) => a - b);
      onWindow([span[0] + first * length, span[0] + last * length]);
    }
    setDrag(null);
    setPlace(shareOf(event));
  };
  const follow = (event: PointerEvent) => {
    setPlace(shareOf(event));
    if (drag !== null) setDrag([drag[0], shareOf(event)]);
  };
  return (
    <div class="timeline-plot">
      <Tools {...{ span, whole, onWindow }} />
      <div
        class="timeline-field"
        tabIndex={0}
        role="group"
        aria-label="Timeline: arrows move the cursor, with shift the window; plus and minus zoom; 0 shows all"
        onKeyDown={keys}
        onPointerLeave={() => drag === null && setPlace(null)}
      >
        <Axis span={span} phases={timeline.phases} />
        <Marks timeline={timeline} />
        {timeline.lanes.map((lane, index) => (
          <LaneRow key={`${lane.group}/${lane.name}`} lane={lane} bins={timeline.bins} length={length} isFirst={timeline.lanes[index - 1]?.group !== lane.group} />
        ))}
        <div
          class="timeline-glass"
          ref={field}
          onPointerDown={(event) => {
            event.currentTarget.setPointerCapture(event.pointerId);
            setDrag([shareOf(event), shareOf(event)]);
          }}
          onPointerMove={follow}
          onPointerUp={release}
          onPointerCancel={() => setDrag(null)}
        >
          {timeline.gaps.map(([from, to]) => (
            <i key={from} class="timeline-gap" style={between(Math.max(0, (from - span[0]) / length), Math.min(1, (to - span[0]) / length))} />
          ))}
          {drag !== null && <i class="timeline-drag" style={between(Math.min(...drag), Math.max(...drag))} />}
          {place !== null && <i class="timeline-cursor" style={{ left: `${100 * place}%` }} />}
        </div>
      </div>
      <Readout timeline={timeline} place={place} />
    </div>
  );
}

const between = (from: number, to: number): Readonly<Record<string, string>> => ({ left: `${100 * from}%`, width: `${100 * (to - from)}%` });

function Tools({ span, whole, onWindow }: { span: Span; whole: Span; onWindow: (span: Span | null) => void }) {
  return (
    <div class="timeline-tools" role="toolbar" aria-label="Window of time">
      <button type="button" onClick={() => onWindow(pan(span, -0.5, whole))} aria-label="Earlier" disabled={span[0] <= 0}>
        ←
      </button>
      <button type="button" onClick={() => onWindow(pan(span, 0.5, whole))} aria-label="Later" disabled={span[1] >= whole[1]}>
        →
      </button>
      <button type="button" onClick={() => onWindow(zoom(span, 0.4, 0.5, whole))} aria-label="Zoom in">
        +
      </button>
      <button type="button" onClick={() => onWindow(zoom(span, 2.5, 0.5, whole))} aria-label="Zoom out">
        −
      </button>
      <button type="button" onClick={() => onWindow(null)}>
        learning
      </button>
      <button type="button" onClick={() => onWindow(whole)}>
        whole run
      </button>
      {whole[1] > 120 && (
        <button type="button" onClick={() => onWindow([Math.max(0, whole[1] - 60), whole[1]])}>
          last minute
        </button>
      )}
      <ul class="timeline-legend" aria-hidden="true">
        {["step", "published", "swapped", "evaluated", "trouble"].map((kind) => (
          <li key={kind}>
            <i class={`timeline-sign-${kind}`} />
            {kind}
          </li>
        ))}
      </ul>
    </div>
  );
}

function Axis({ span, phases }: { span: Span; phases: Timeline["phases"] }) {
  const length = span[1] - span[0];
  const seen = phases.map(({ at_s, phase }, index) => ({ phase, from: Math.max(span[0], at_s), to: Math.min(span[1], phases[index + 1]?.at_s ?? span[1]) })).filter(({ from, to }) => to > from);
  return (
    <div class="timeline-axis" aria-hidden="true">
      {seen.map(({ phase, from, to }) => (
        <span key={`${phase}${from}`} class="timeline-phase" style={between((from - span[0]) / length, (to - span[0]) / length)}>
          {phase}
        </span>
      ))}
      {ticks(span, 7).filter((tick) => (tick - span[0]) / length < 0.955).map((tick) => (
        <span key={tick} class="timeline-tick" style={{ left: `${(100 * (tick - span[0])) / length}%` }}>
          {clock(tick, length)}
        </span>
      ))}
    </div>
  );
}

const SIGNS: Readonly<Record<string, string>> = { step: "timeline-step", published: "timeline-published", evaluated: "timeline-evaluated", restarted: "timeline-trouble", outage: "timeline-trouble", swapped: "timeline-swapped" };

/** What happened at one time: a stroke each, or how many where there are too many. */
function Marks({ timeline: { marks, counted, from_s, to_s, bins } }: { timeline: Timeline }) {
  const x = (at_s: number) => (1000 * (at_s - from_s)) / (to_s - from_s);
  return (
    <svg class="timeline-marks" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">
      {Object.entries(counted).map(([kind, numbers]) => {
        const most = Math.max(...numbers);
        return <path key={kind} class={SIGNS[kind]} d={numbers.map((number, bin) => (number > 0 ? `M${(1000 * (bin + 0.5)) / bins} 10v${(-10 * number) / most}` : "")).join("")} />;
      })}
      {Object.entries(SIGNS).map(([kind, sign]) => (
        <path key={kind} class={sign} d={marks.filter((mark) => mark.kind === kind).map((mark) => `M${x(mark.at_s).toFixed(2)} ${kind === "step" ? 4 : 0}V10`).join("")} />
      ))}
    </svg>
  );
}

function LaneRow({ lane, bins, length, isFirst }: { lane: Lane; bins: number; length: number; isFirst: boolean }) {
  const most = isNumber(lane) ? Math.max(0, ...sums(lane, bins)) : 0;
  return (
    <div class={`timeline-lane ${isFirst ? "timeline-first" : ""} timeline-of-${lane.group}`} role="img" aria-label={describe(lane, length)}>
      <span class="timeline-name">
        {isNumber(lane) && lane.group !== "gateways" ? GROUPS[lane.group] : title(lane)}
        {most > 0 && <small>up to {most >= 10 ? Math.round(most) : most.toFixed(1)}</small>}
      </span>
      <svg viewBox={`0 0 ${bins} 1`} preserveAspectRatio="none">
        {paths(lane, bins).map(({ state, path }) => (
          <path key={state} class={toneOf(state)} d={path} />
        ))}
      </svg>
    </div>
  );
}

function Readout({ timeline, place }: { timeline: Timeline; place: number | null }) {
  const length = timeline.to_s - timeline.from_s;
  if (place === null) return <p class="timeline-readout note">Point at the lanes to read what happens at a time, drag to zoom; or focus them and use the arrows, + and −.</p>;
  const bin = Math.min(timeline.bins - 1, Math.floor(place * timeline.bins)), at_s = timeline.from_s + place * length;
  const near: Mark[] = timeline.marks.filter((mark) => Math.abs(mark.at_s - at_s) < NEAR * length).slice(0, 4);
  return (
    <dl class="timeline-readout" aria-live="polite">
      <div>
        <dt>at</dt>
        <dd>
          <b>{clock(at_s, length)}</b> <small>{new Date(1000 * (timeline.origin_s + at_s)).toLocaleTimeString()}</small>
        </dd>
      </div>
      {timeline.lanes.map((lane) => (
        <div key={`${lane.group}/${lane.name}`}>
          <dt>{title(lane)}</dt>
          <dd>{at(lane, bin)}</dd>
        </div>
      ))}
      {near.map((mark) => (
        <div key={mark.text} class="timeline-near">
          <dt>{mark.kind}</dt>
          <dd>{mark.text}</dd>
        </div>
      ))}
    </dl>
  );
}

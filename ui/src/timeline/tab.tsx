// The tab "Timeline": who waits for whom, and where the other half of the time went.

import { useEffect, useRef, useState } from "preact/hooks";

import { useJson } from "../resource";
import { routeTo } from "../routes";
import type { TabProps } from "../tabs";
import { useSlowly } from "../slowly";
import type { Span, Timeline } from "./data";
import { Plot } from "./plot";
import { Summary } from "./summary";
import { Tables } from "./tables";
import "./style.css";

const REFRESH_MS = 5000;

export function TimelineTab({ run, route, tick }: TabProps) {
  const { from = "", to = "" } = route.options;
  const [bins, setBins] = useState(400);
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const width = place.current?.clientWidth ?? 800;
    setBins(Math.min(600, Math.max(100, Math.round(width / 200) * 100)));
  }, []);
  const query = new URLSearchParams({ bins: String(bins), ...(from && { from }), ...(to && { to }) });
  const news = useSlowly(to ? 0 : (tick?.cursor ?? 0), REFRESH_MS);
  const { data, error } = useJson<Timeline>(`/runs/${encodeURIComponent(run.id)}/timeline?${query}`, news);
  const last = useRef<Timeline | null>(null);
  if (data !== null) last.current = data;
  const timeline = data ?? last.current;
  const show = (span: Span | null) => {
    const isAtEnd = span !== null && timeline !== null && span[1] >= timeline.end_s - 1e-6 && run.alive;
    const options = span === null ? {} : { from: span[0].toFixed(2), to: isAtEnd ? "" : span[1].toFixed(2) };
    location.replace(routeTo(run.id, "timeline", [], options));
  };
  return (
    <div ref={place} class="timeline">
      <h1 class="hidden">Timeline</h1>
      {error !== null && <p role="alert">{error}</p>}
      {timeline === null ? (
        <p class="note">Reading the run’s events …</p>
      ) : timeline.lanes.length === 0 ? (
        <p class="note">Nothing has been timed in this window yet: lanes appear with the first step, rollout and engine.</p>
      ) : (
        <>
          <Summary words={timeline.words} waits={timeline.waits} />
          <Plot timeline={timeline} onWindow={show} />
          <Tables timeline={timeline} />
        </>
      )}
    </div>
  );
}

// The window as tables: the states of each lane, and what happened in it.

import { duration, percent } from "../format";
import { amount, clock, isNumber, title, type Timeline } from "./data";

const MOST = 400;

export function Tables({ timeline }: { timeline: Timeline }) {
  const length = timeline.to_s - timeline.from_s;
  return (
    <details class="timeline-tables">
      <summary>As tables</summary>
      <div class="timeline-scroll" tabIndex={0} role="region" aria-label="Lanes of this window">
        <table>
          <caption class="hidden">Lanes of this window</caption>
          <thead>
            <tr>
              <th scope="col">lane</th>
              <th scope="col">region</th>
              <th scope="col">state</th>
              <th scope="col" class="number">time</th>
              <th scope="col" class="number">on average</th>
            </tr>
          </thead>
          <tbody>
            {timeline.lanes.flatMap((lane) =>
              lane.states.map(({ state, seconds }) => (
                <tr key={`${lane.group}/${lane.name}/${state}`}>
                  <th scope="row">{title(lane)}</th>
                  <td>{lane.region || "home"}</td>
                  <td>{state}</td>
                  <td class="number">{isNumber(lane) ? `${duration(seconds)} together` : duration(seconds)}</td>
                  <td class="number">{isNumber(lane) ? amount(lane, seconds / length) : percent(seconds / length)}</td>
                </tr>
              )),
            )}
          </tbody>
        </table>
      </div>
      <div class="timeline-scroll" tabIndex={0} role="region" aria-label="What happened in this window">
        <table>
          <caption class="hidden">What happened in this window</caption>
          <thead>
            <tr>
              <th scope="col">at</th>
              <th scope="col">kind</th>
              <th scope="col">what</th>
            </tr>
          </thead>
          <tbody>
            {timeline.marks.slice(-MOST).map((mark, index) => (
              <tr key={index}>
                <td>{clock(mark.at_s, length)}</td>
                <td>{mark.kind}</td>
                <td>{mark.text}</td>
              </tr>
            ))}
          </tbody>
        </table>
        {Object.keys(timeline.counted).length > 0 && <p class="note">Too many to list here: {Object.keys(timeline.counted).join(", ")}. Zoom in.</p>}
      </div>
    </details>
  );
}

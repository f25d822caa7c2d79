// Who serves what where: every engine on the line of versions, how late it is and what it costs.

import { ago, percent, significant } from "../format";
import { regionName, seconds, type Engine } from "./data";

/** Versions that the line shows, up to the newest. */
const SHOWN = 12;

export function Serving({ engines, newest }: { engines: readonly Engine[]; newest: number | null }) {
  if (engines.length === 0) return <p class="note">No engine has said yet what it serves.</p>;
  return (
    <section aria-labelledby="serving-title">
      <h2 id="serving-title">Who serves what</h2>
      <div class="weights-scroll" tabIndex={0} role="region" aria-label="Engines">
        <table class="weights-serving">
          <thead>
            <tr>
              <th scope="col">engine</th>
              <th scope="col">region</th>
              <th scope="col" class="number">version</th>
              <th scope="col">up to the newest</th>
              <th scope="col" class="number">lag, mean</th>
              <th scope="col" class="number">pause, worst</th>
              <th scope="col" class="number">busy</th>
              <th scope="col" class="number">calls</th>
              <th scope="col" class="number">tokens/s</th>
              <th scope="col">since</th>
            </tr>
          </thead>
          <tbody>
            {engines.map((engine) => (
              <tr key={engine.name}>
                <th scope="row">{engine.name}</th>
                <td>{regionName(engine.region)}</td>
                <td class="number">{engine.version ?? "–"}</td>
                <td>
                  <Line engine={engine} newest={newest} />
                </td>
                <td class="number">{seconds(engine.lag_s)}</td>
                <td class="number">{engine.pause_ms === null ? "–" : pause(engine.pause_ms)}</td>
                <td class="number">{percent(engine.busy, 0)}</td>
                <td class="number">{engine.running === null ? "–" : `${engine.running}${engine.waiting ? ` + ${engine.waiting}` : ""}`}</td>
                <td class="number">{engine.tokens_per_s === null ? "–" : Math.round(engine.tokens_per_s)}</td>
                <td>{engine.since_s === null ? "–" : ago(Date.now() / 1000 - engine.since_s)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

const pause = (ms: number): string => (ms < 1 ? `${significant(1000 * ms, 2)} µs` : `${significant(ms, 3)} ms`);

/** A dot on a short line of the newest versions. */
function Line({ engine, newest }: { engine: Engine; newest: number | null }) {
  if (engine.version === null || newest === null) return null;
  const behind = engine.behind ?? 0;
  const x = (version: number) => 6 + (108 * (version - newest + SHOWN)) / SHOWN;
  const place = Math.max(x(newest - SHOWN), x(engine.version));
  return (
    <svg class="weights-line" viewBox="0 0 120 16" role="img" aria-label={behind === 0 ? "the newest" : `${behind} behind the newest`}>
      <path class="weights-track" d={`M6 8H${place}`} />
      <path class="weights-missing" d={`M${place} 8H114`} />
      {Array.from({ length: SHOWN + 1 }, (_, index) => (
        <circle key={index} class={newest - SHOWN + index <= (engine.version ?? 0) ? "weights-had" : "weights-due"} cx={x(newest - SHOWN + index)} cy="8" r="1.6" />
      ))}
      <circle class={behind > 0 ? "weights-at is-late" : "weights-at"} cx={place} cy="8" r="4.5" />
    </svg>
  );
}

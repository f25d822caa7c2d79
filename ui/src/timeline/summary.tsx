// Where the time went: the sentence, and the bars that it is made of.

import { percent } from "../format";
import { toneOf, type Waits } from "./data";

const STAGES = ["session", "sandbox", "model", "tools", "grading", "scoring", "not told"];
const TRAINER = ["computing", "landing", "saving", "handing over", "waiting", "other"];

export function Summary({ words, waits }: { words: string; waits: Waits }) {
  const didWait = (waits.trainer.waiting ?? 0) > 0;
  return (
    <section class="timeline-summary" aria-label="Where the time went">
      <p class="timeline-words">{words}</p>
      <div class="timeline-bars">
        <Split title="The trainer’s time" shares={waits.trainer} order={TRAINER} />
        <Split title={didWait ? "Rollouts, while it waited" : "Rollouts"} shares={waits.stages} order={STAGES} />
        {waits.engines_busy !== null && (
          <Split
            title={didWait ? "Engines, while it waited" : "Engines"}
            shares={load(didWait ? (waits.engines_busy_meanwhile ?? waits.engines_busy) : waits.engines_busy)}
            order={["busy", "idle"]}
          />
        )}
      </div>
    </section>
  );
}

const load = (busy: number): Readonly<Record<string, number>> => ({ busy, idle: 1 - busy });

/** One bar of shares that add up to 1, with a word for each that is not tiny. */
function Split({ title, shares, order }: { title: string; shares: Readonly<Record<string, number>>; order: readonly string[] }) {
  const parts = order.map((state) => ({ state, share: shares[state] ?? 0 })).filter(({ share }) => share >= 0.004);
  if (parts.length === 0) return null;
  return (
    <figure class="timeline-split">
      <figcaption>{title}</figcaption>
      <div class="timeline-split-bar" aria-hidden="true">
        {parts.map(({ state, share }) => (
          <i key={state} class={toneOf(state)} style={{ flexGrow: share }} />
        ))}
      </div>
      <ul>
        {parts.map(({ state, share }) => (
          <li key={state}>
            <i class={`timeline-key ${toneOf(state)}`} aria-hidden="true" />
            {state} <b>{percent(share, share < 0.01 ? 1 : 0)}</b>
          </li>
        ))}
      </ul>
    </figure>
  );
}

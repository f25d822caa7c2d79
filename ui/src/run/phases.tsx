// Phases as a strip of their lengths, what the model descends from, and the losses of the phases that imitate.

import { Chart } from "../components/chart";
import type { Curve } from "../components/chart_data";
import { brief, decimal, duration } from "../format";
import type { CurvesData, Loss } from "./curves";

interface Part {
  readonly phase: string;
  readonly seconds: number;
}

/** Phases in their order, each with all of its time; those of a run that was begun again are added up. */
export function partsOfTime(phases: CurvesData["phases"], endS: number): Part[] {
  const sums = new Map<string, number>();
  phases.forEach(({ at_s, phase }, index) => {
    const until = phases[index + 1]?.at_s ?? endS;
    if (phase !== "done") sums.set(phase, (sums.get(phase) ?? 0) + Math.max(0, until - at_s));
  });
  return [...sums].map(([phase, seconds]) => ({ phase, seconds }));
}

export function Phases({ data, updatedS, isAlive }: { data: CurvesData; updatedS: number | null; isAlive: boolean }) {
  const parts = partsOfTime(data.phases, updatedS ?? 0);
  const now = isAlive ? data.phases[data.phases.length - 1]?.phase : undefined;
  if (parts.length === 0) return null;
  return (
    <section class="run-phases" aria-label="Phases and lineage">
      <div class="run-strip" aria-hidden="true">
        {parts.map(({ phase, seconds }) => (
          <span key={phase} class={phase === now ? "now" : ""} style={{ flexGrow: String(Math.max(seconds, 1e-3)) }} title={`${phase} ${duration(seconds)}`} />
        ))}
      </div>
      <ol>
        {parts.map(({ phase, seconds }) => {
          const ended = data.lineage.find((each) => each.phase === phase);
          return (
            <li key={phase} class={phase === now ? "now" : ""}>
              <b>{phase}</b> {duration(seconds)}
              {ended && (
                <span title={`weights ${ended.digest}`}>
                  {` · ${brief(ended.tokens)} tokens${ended.loss !== null ? `, loss ${decimal(ended.loss)}` : ""}, weights ${ended.digest.slice(0, 8)}`}
                </span>
              )}
            </li>
          );
        })}
      </ol>
    </section>
  );
}

const NAMES: Readonly<Record<string, string>> = { midtrain: "Mid-training", sft: "Supervised fine-tuning" };

export function Imitation({ data }: { data: CurvesData }) {
  const phases = Object.keys(data.imitation);
  if (phases.length === 0) return null;
  return (
    <section aria-label="Before RL">
      <h2>Before RL</h2>
      <div class="run-grid">
        {phases.map((phase) => (
          <Chart key={phase} title={NAMES[phase] ?? phase} unit="loss, nats per token" notation="decimal" group={phase} curves={lossCurves(data, phase)} />
        ))}
      </div>
    </section>
  );
}

function lossCurves(data: CurvesData, phase: string): Curve[] {
  const rows = data.imitation[phase] ?? [];
  const heldout = data.losses.filter((each) => each.phase === phase);
  const curve = (name: string, tone: Curve["tone"], of: readonly Loss[], key: "loss" | "action_loss"): Curve => ({ name, tone, x: of.map((each) => each.step), y: of.map((each) => each[key]) });
  const actions = rows.some((each) => each.action_loss !== null) ? [curve("actions", 1, rows, "action_loss")] : [];
  const measured = heldout.length > 0 ? [{ ...curve("held out", "side", heldout, "loss"), style: "points" as const }] : [];
  return [...measured, ...actions, curve("all text", "main", rows, "loss")];
}

// Controls of all charts of the tab: which runs are laid over each other, over what, how smooth.

import type { RunOverview } from "../api";
import { AUTO } from "../components/chart_data";
import { routeTo } from "../routes";
import type { Across } from "./axis";

export interface Options {
  readonly across: Across;
  /** Neighbours on both sides that are averaged; AUTO by how many points there are. */
  readonly radius: number;
  /** True where runs of one recipe are one curve, with an interval for other seeds. */
  readonly asSeeds: boolean;
}

interface ControlsProps {
  readonly run: RunOverview;
  readonly runs: readonly RunOverview[];
  readonly others: readonly string[];
  readonly options: Options;
  readonly onOptions: (options: Options) => void;
}

const RADII: readonly (readonly [number, string])[] = [[AUTO, "auto"], [0, "none"], [3, "7 steps"], [12, "25 steps"], [50, "101 steps"]];

export function Controls({ run, runs, others, options, onOptions }: ControlsProps) {
  const show = (ids: readonly string[]) => (location.hash = routeTo(run.id, "run", [], { with: ids.join(",") }));
  const free = runs.filter((each) => each.id !== run.id && !others.includes(each.id) && each.error === undefined);
  const shown = [run, ...runs.filter((each) => others.includes(each.id))];
  const haveSeeds = new Set(shown.map((each) => each.name)).size < shown.length;
  return (
    <div class="run-controls" role="group" aria-label="Charts">
      {others.map((id) => (
        <button key={id} type="button" class="run-chip" aria-label={`Leave ${id} out`} onClick={() => show(others.filter((each) => each !== id))}>
          {id} <span aria-hidden="true">×</span>
        </button>
      ))}
      {free.length > 0 && (
        <select class="run-select" aria-label="Lay another run over it" value="" onChange={(event) => show([...others, event.currentTarget.value])}>
          <option value="">+ overlay a run</option>
          {free.map((each) => (
            <option key={each.id} value={each.id}>
              {each.id}
            </option>
          ))}
        </select>
      )}
      {haveSeeds && (
        <label class="run-check">
          <input type="checkbox" checked={options.asSeeds} onChange={(event) => onOptions({ ...options, asSeeds: event.currentTarget.checked })} />
          seeds as a band
        </label>
      )}
      <label class="run-field">
        smooth
        <select class="run-select" value={options.radius} onChange={(event) => onOptions({ ...options, radius: Number(event.currentTarget.value) })}>
          {RADII.map(([radius, words]) => (
            <option key={radius} value={radius}>
              {words}
            </option>
          ))}
        </select>
      </label>
      <label class="run-field">
        over
        <select class="run-select" value={options.across} onChange={(event) => onOptions({ ...options, across: event.currentTarget.value as Across })}>
          <option value="step">steps</option>
          <option value="hour">hours</option>
        </select>
      </label>
    </div>
  );
}

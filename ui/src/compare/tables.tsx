// Tables of a comparison: templates with intervals as bars, tasks with links to the rollouts.

import { useState } from "preact/hooks";

import { routeTo } from "../routes";
import type { TaskRow, TemplateRow, Try } from "./data";

type Write = (value: number) => string;

export function TemplateTable({ rows, value, gain }: { rows: readonly TemplateRow[]; value: Write; gain: Write }) {
  const ordered = [...rows].sort((one, other) => other.b - other.a - (one.b - one.a));
  const reach = Math.max(1e-9, ...rows.flatMap((row) => [row.b - row.a, row.low ?? 0, row.high ?? 0].map(Math.abs)));
  const place = (difference: number) => 50 + (50 * difference) / reach;
  return (
    <div class="compare-scroll" tabIndex={0} role="region" aria-label="Templates">
      <table class="compare-templates">
        <thead>
          <tr>
            <th scope="col">template</th>
            <th scope="col">tasks</th>
            <th scope="col">A</th>
            <th scope="col">B</th>
            <th scope="col">B − A</th>
            <th scope="col">
              <span class="hidden">95 % interval</span>
              <span class="compare-axis" aria-hidden="true">
                <span>{gain(-reach)}</span>
                <span>0</span>
                <span>{gain(reach)}</span>
              </span>
            </th>
          </tr>
        </thead>
        <tbody>
          {ordered.map((row) => (
            <tr key={row.template}>
              <th scope="row">{row.template}</th>
              <td>{row.tasks}</td>
              <td>{value(row.a)}</td>
              <td>{value(row.b)}</td>
              <td>{gain(row.b - row.a)}</td>
              <td class="compare-track">
                {row.low !== null && row.high !== null && (
                  <>
                    <span class="hidden">{`${gain(row.low)} to ${gain(row.high)}`}</span>
                    <span class="compare-interval" style={{ left: `${place(row.low)}%`, right: `${100 - place(row.high)}%` }} />
                  </>
                )}
                <span class={`compare-dot ${row.b > row.a ? "up" : row.b < row.a ? "down" : ""}`} style={{ left: `${place(row.b - row.a)}%` }} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const FIRST_ROWS = 100;

export function TaskTable({ rows, value }: { rows: readonly TaskRow[]; value: Write }) {
  const [shown, setShown] = useState(FIRST_ROWS);
  return (
    <div class="compare-scroll" tabIndex={0} role="region" aria-label="Tasks">
      <table class="compare-tasks">
        <thead>
          <tr>
            <th scope="col">task</th>
            <th scope="col">A</th>
            <th scope="col">B</th>
          </tr>
        </thead>
        <tbody>
          {rows.slice(0, shown).map((row) => (
            <tr key={row.task}>
              <th scope="row">
                <span class="compare-id">{row.task}</span> <span class="compare-template">{row.template}</span>
                {row.prompt && <span class="compare-prompt">{row.prompt}</span>}
              </th>
              <td>
                <Tries tries={row.a_tries} mean={row.a} value={value} />
              </td>
              <td>
                <Tries tries={row.b_tries} mean={row.b} value={value} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > shown && (
        <button type="button" class="compare-button" onClick={() => setShown(shown + 10 * FIRST_ROWS)}>
          {`show ${rows.length - shown} more`}
        </button>
      )}
    </div>
  );
}

/** The tries of a task: whether each passed, how it ended, and the rollout itself. */
function Tries({ tries, mean, value }: { tries: readonly Try[]; mean: number; value: Write }) {
  return (
    <>
      {tries.length > 1 && <b>{value(mean)} </b>}
      {tries.map((each, index) => (
        <span key={index} class="compare-try">
          <span class={`compare-mark ${each.passed ? "up" : "down"}`}>{each.passed ? "passed" : "failed"}</span>
          {each.reward !== 0 && each.reward !== 1 && <span> {each.reward.toFixed(3)}</span>}
          {each.rollout !== null && (
            <a href={routeTo(each.run, "rollouts", [each.rollout])}>
              {`${each.reason ?? "rollout"}${each.turns === null ? "" : `, ${each.turns} turns, ${each.tokens} tokens`}`}
            </a>
          )}
        </span>
      ))}
    </>
  );
}

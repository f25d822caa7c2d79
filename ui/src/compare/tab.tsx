// The tab "Compare": two evaluations, of one run or of two, task by task.

import { useState } from "preact/hooks";

import type { RunOverview } from "../api";
import { count, decimal, percent, points } from "../format";
import { useJson } from "../resource";
import { routeTo } from "../routes";
import type { TabProps } from "../tabs";
import { chance, picked, verdict, type Comparison, type Evaluation, type Pick } from "./data";
import { TaskTable, TemplateTable } from "./tables";
import "./style.css";

type Side = readonly [run: string, label: string];

export function CompareTab({ run, runs, route, tick }: TabProps) {
  const own = useJson<Evaluation[]>(`/runs/${run.id}/evaluations`, `${tick?.phase}|${tick?.step}`);
  const list = own.data ?? [];
  const a = sideOf(route.options.a) ?? [run.id, list[0]?.label ?? ""];
  const b = sideOf(route.options.b) ?? [run.id, list[list.length - 1]?.label ?? ""];
  const way = route.options.way === "greedy" ? "greedy" : "sampled";
  const go = (changed: { a?: Side; b?: Side; way?: string }) => {
    const options = { a: (changed.a ?? a).join(":"), b: (changed.b ?? b).join(":"), way: changed.way ?? way };
    location.hash = routeTo(run.id, "compare", [], options);
  };
  const query = new URLSearchParams({ a: a.join(":"), b: b.join(":"), way });
  const isAsked = a[1] !== "" && b[1] !== "";
  const { data, error, isLoading } = useJson<Comparison>(isAsked ? `/compare?${query}` : null, list.length);
  return (
    <div class="compare">
      <div class="compare-sides" role="group" aria-label="What is compared">
        <SidePicker name="A" side={a} runs={runs} onSide={(side) => go({ a: side })} />
        <SidePicker name="B" side={b} runs={runs} onSide={(side) => go({ b: side })} />
        <button type="button" class="compare-button" onClick={() => go({ a: b, b: a })}>
          swap
        </button>
        <label class="compare-field">
          sampled how
          <select class="compare-select" value={way} onChange={(event) => go({ way: event.currentTarget.value })}>
            <option value="sampled">temperature 1</option>
            <option value="greedy">greedy</option>
          </select>
        </label>
      </div>
      {!isAsked && own.data !== null && <p class="note">There is no held-out evaluation yet to compare.</p>}
      {error !== null && <p role="alert">{error}</p>}
      {isLoading && data === null && isAsked && <p class="note" role="status">Comparing …</p>}
      {data !== null && error === null && <Result data={data} />}
    </div>
  );
}

function sideOf(text: string | undefined): Side | null {
  const [run = "", label = ""] = (text ?? "").split(":", 2);
  return run && label ? [run, label] : null;
}

function SidePicker({ name, side, runs, onSide }: { name: string; side: Side; runs: readonly RunOverview[]; onSide: (side: Side) => void }) {
  const [run, label] = side;
  const { data } = useJson<Evaluation[]>(`/runs/${run}/evaluations`);
  const choose = async (id: string) => onSide([id, label]);
  return (
    <fieldset class={`compare-side compare-${name}`}>
      <legend>{name}</legend>
      <select class="compare-select" aria-label={`Run of ${name}`} value={run} onChange={(event) => void choose(event.currentTarget.value)}>
        {runs.map((each) => (
          <option key={each.id} value={each.id}>
            {each.id}
          </option>
        ))}
      </select>
      <select class="compare-select" aria-label={`Evaluation of ${name}`} value={label} onChange={(event) => onSide([run, event.currentTarget.value])}>
        {!(data ?? []).some((each) => each.label === label) && <option value={label}>{label || "none"}</option>}
        {(data ?? []).map((each) => (
          <option key={each.label} value={each.label}>
            {`${each.label} · version ${each.version}`}
          </option>
        ))}
      </select>
    </fieldset>
  );
}

const PICKS: readonly (readonly [Pick, string])[] = [["differ", "they differ"], ["better", "B is better"], ["worse", "B is worse"], ["same", "alike"], ["all", "all"]];

function Result({ data }: { data: Comparison }) {
  const [pick, setPick] = useState<Pick>("differ");
  const [text, setText] = useState("");
  const { difference: change, sign, measure } = data;
  const value = (number: number) => (measure === "pass" ? percent(number) : decimal(number, 3));
  const gain = (number: number) => (measure === "pass" ? points(number) : decimal(number, 3));
  const rows = picked(data.rows, pick, text);
  return (
    <>
      <div class="compare-head">
        <h1 class="headline">{verdict(data)}</h1>
        <p>
          {`95 % interval ${gain(change.low)} to ${gain(change.high)}${measure === "pass" ? " points" : ""}, paired over ${count(data.tasks)} tasks that both tried (${change.method})`}
          {data.untried > 0 && `; ${count(data.untried)} that only one has are left out`}
        </p>
        <dl class="compare-stats">
          <Stat name={measure === "pass" ? "A solves" : "A’s mean reward"} text={value(data.a.value)} more={`${value(data.a.low)} to ${value(data.a.high)}`} />
          <Stat name={measure === "pass" ? "B solves" : "B’s mean reward"} text={value(data.b.value)} more={`${value(data.b.low)} to ${value(data.b.high)}`} />
          <Stat name="B does better" text={`${count(sign.wins)} tasks`} more="" />
          <Stat name="B does worse" text={`${count(sign.losses)} tasks`} more="" />
          <Stat name="alike" text={`${count(sign.ties)} tasks`} more="" />
          <Stat name="sign test" text={`p ${chance(sign.p)}`} more="were both alike" />
        </dl>
      </div>
      <section aria-label="By template">
        <h2>By template</h2>
        <TemplateTable rows={data.templates} value={value} gain={gain} />
      </section>
      <section aria-label="Task by task">
        <h2>Task by task</h2>
        <div class="compare-filter" role="group" aria-label="Tasks">
          {PICKS.map(([name, words]) => (
            <button key={name} type="button" class="compare-button" aria-pressed={pick === name} onClick={() => setPick(name)}>
              {words}
            </button>
          ))}
          <input class="compare-search" type="search" aria-label="Task, template or prompt has" placeholder="task, template, prompt" value={text} onInput={(event) => setText(event.currentTarget.value)} />
          <span class="note" role="status">{`${count(rows.length)} of ${count(data.rows.length)}`}</span>
        </div>
        <TaskTable rows={rows} value={value} />
      </section>
    </>
  );
}

function Stat({ name, text, more }: { name: string; text: string; more: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>
        {text}
        {more && <small>{more}</small>}
      </dd>
    </div>
  );
}

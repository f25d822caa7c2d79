// The tab "Run": how well it does, and how it fares.

import { useMemo } from "preact/hooks";

import { Chart } from "../components/chart";
import type { Curve } from "../components/chart_data";
import { useJson } from "../resource";
import type { TabProps } from "../tabs";
import "./style.css";

interface Measured {
  readonly value: number;
  readonly low: number | null;
  readonly high: number | null;
}

interface Curves {
  readonly step: readonly number[];
  readonly columns: Readonly<Record<string, readonly (number | null)[]>>;
  readonly heldout: readonly { readonly step: number; readonly label: string; readonly sampled: Measured; readonly greedy: Measured }[];
}

export function RunTab({ run, tick }: TabProps) {
  const { data, error } = useJson<Curves>(`/runs/${run.id}/curves`, tick?.cursor ?? 0);
  const heldout = useMemo(() => (data ? heldoutCurves(data) : []), [data]);
  const reward = useMemo(() => (data ? [curve(data, "reward_mean", "mean reward")] : []), [data]);
  if (error !== null && data === null) return <p role="alert">{error}</p>;
  return (
    <>
      <Chart title="Held-out tasks solved" curves={heldout} notation="percent" height={260} />
      <Chart title="Mean reward of each step’s rollouts" curves={reward} notation="decimal" />
    </>
  );
}

function heldoutCurves(data: Curves): Curve[] {
  const x = data.heldout.map((each) => each.step);
  const of = (name: string, tone: "main" | "side", values: readonly Measured[]): Curve => ({
    name,
    tone,
    x,
    y: values.map((each) => each.value),
    low: values.map((each) => each.low),
    high: values.map((each) => each.high),
    style: "points",
  });
  return [
    of("greedy", "side", data.heldout.map((each) => each.greedy)),
    of("sampled", "main", data.heldout.map((each) => each.sampled)),
  ];
}

function curve(data: Curves, column: string, name: string): Curve {
  return { name, tone: "main", x: data.step, y: data.columns[column] ?? [] };
}

// The values of a chart as a table, newest first.

import { write, type Curve, type Notation } from "./chart_data";

const MOST_ROWS = 200;

export function ChartTable({ title, curves, notation, across }: { title: string; curves: readonly Curve[]; notation: Notation; across: string }) {
  const steps = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => b - a);
  const values = curves.map((curve) => new Map(curve.x.map((x, index) => [x, index])));
  const cell = (curve: Curve, index: number | undefined) => {
    if (index === undefined) return "";
    const low = curve.low?.[index], high = curve.high?.[index];
    const interval = low !== null && low !== undefined ? ` (${write(low, notation)} to ${write(high, notation)})` : "";
    return write(curve.y[index], notation) + interval;
  };
  return (
    <div class="chart-table" tabIndex={0} role="region" aria-label={`${title}, as a table`}>
      <table>
        <thead>
          <tr>
            <th scope="col">{across}</th>
            {curves.map((curve) => (
              <th scope="col" key={curve.name}>
                {curve.name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {steps.slice(0, MOST_ROWS).map((step) => (
            <tr key={step}>
              <th scope="row">{step}</th>
              {curves.map((curve, number) => (
                <td key={curve.name}>{cell(curve, values[number]?.get(step))}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

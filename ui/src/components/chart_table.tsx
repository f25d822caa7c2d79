// The values of a chart as a table, newest first.

import { write, type Curve, type Notation } from "./chart_data";

const MOST_ROWS = 200;

interface ChartTableProps {
  readonly title: string;
  readonly curves: readonly Curve[];
  readonly notation: Notation;
  readonly across: string;
  readonly height: number;
}

export function ChartTable({ title, curves, notation, across, height }: ChartTableProps) {
  const places = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => b - a);
  const tables = curves.map((curve) => new Map(curve.x.map((x, index) => [x, index])));
  return (
    <div class="chart-table" tabIndex={0} role="region" aria-label={`${title}, as a table`} style={{ maxHeight: `${height + 28}px` }}>
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
          {places.slice(0, MOST_ROWS).map((x) => (
            <tr key={x}>
              <th scope="row">{Number(x.toPrecision(6))}</th>
              {curves.map((curve, number) => (
                <td key={curve.name}>{cell(curve, tables[number]?.get(x), notation)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {places.length > MOST_ROWS && <p class="note">{`the newest ${MOST_ROWS} of ${places.length}; report.json has all`}</p>}
    </div>
  );
}

function cell(curve: Curve, index: number | undefined, notation: Notation): string {
  if (index === undefined) return "";
  const low = curve.low?.[index], high = curve.high?.[index];
  const interval = low != null && high != null ? ` (${write(low, notation)} to ${write(high, notation)})` : "";
  return write((curve.shown ?? curve.y)[index], notation) + interval;
}

// The A/B test as it goes: the interval as sessions come in, both arms, and whether the arms are what was drawn.

import { count, percent, small } from "../format";
import { signed, verdict, type ArmTest, type Difference } from "./data";

const WIDTH = 640, HEIGHT = 220, LEFT = 44, BOTTOM = 24;

export function ArmTestCard({ test }: { test: ArmTest }) {
  const { evidence } = test;
  const total = evidence.users[0] + evidence.users[1];
  const isSound = evidence.sample_ratio_p >= evidence.alpha_of_each_test;
  return (
    <section class="live-test" aria-labelledby="test-title">
      <h2 id="test-title">
        Version {test.version} against {test.against}
      </h2>
      <p class="live-verdict">{verdict(test)}</p>
      <div class="live-test-parts">
        <Path test={test} />
        <div>
          <table>
            <caption class="hidden">Arms of the test</caption>
            <thead>
              <tr>
                <th scope="col">
                  <span class="hidden">arm</span>
                </th>
                <th scope="col" class="number">users</th>
                <th scope="col" class="number">sessions</th>
                {test.metrics.map((metric) => (
                  <th scope="col" class="number" key={metric.name}>
                    {metric.name}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {[`version ${test.against}`, `version ${test.version}`].map((name, arm) => (
                <tr key={name}>
                  <th scope="row">{name}</th>
                  <td class="number">{count(evidence.users[arm])}</td>
                  <td class="number">{count(evidence.sessions[arm])}</td>
                  {test.metrics.map((metric) => (
                    <td class="number" key={metric.name}>
                      {small(metric.means[arm], 3)}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
          <dl class="live-checks">
            <div>
              <dt>users of the canary</dt>
              <dd>
                {percent(total ? evidence.users[1] / total : null)} of all, {percent(evidence.share, 0)} drawn{" "}
                <b class={isSound ? "is-good" : "is-bad"}>{isSound ? "as drawn" : "mismatch"}</b> <small>p = {small(evidence.sample_ratio_p)}</small>
              </dd>
            </div>
            {test.metrics.map((metric) => (
              <div key={metric.name}>
                <dt>
                  {metric.name} {metric.decides ? "decides" : "must not get worse"}
                </dt>
                <dd>
                  <Interval difference={metric.decides ? test.proof : (evidence.differences[metric.name] ?? null)} />{" "}
                  <small>
                    {metric.direction === "up" ? "more" : "less"} is better, margin {metric.margin}
                  </small>
                </dd>
              </div>
            ))}
            <div>
              <dt>stage</dt>
              <dd>
                {evidence.stage + 1} of {test.needs.stages}, {count(evidence.sessions[1])} of {count(test.needs.min_sessions)} to {count(test.needs.max_sessions)} sessions
              </dd>
            </div>
          </dl>
        </div>
      </div>
    </section>
  );
}

function Interval({ difference }: { difference: Difference | null }) {
  if (difference === null) return <span>not enough users</span>;
  return (
    <span>
      {signed(difference.value)} <small>[{signed(difference.low === null ? null : difference.low)}, {signed(difference.high)}]</small>
    </span>
  );
}

/** The interval over sessions: a band that narrows, the margin that it has to leave behind. */
function Path({ test }: { test: ArmTest }) {
  const metric = test.metrics.find(({ decides }) => decides);
  const known = test.path.filter((point) => point.low !== null && point.high !== null);
  const last = known[known.length - 1];
  if (metric === undefined || last === undefined) return <p class="note">The interval is drawn when both arms have users.</p>;
  const bound = metric.direction === "up" ? -metric.margin : metric.margin;
  const spread = known.slice(Math.floor(known.length / 4)).map(({ low, high }) => Math.max(Math.abs(low ?? 0), Math.abs(high ?? 0)));
  const top = 1.15 * Math.max(...spread, Math.abs(bound), 1e-9);
  const x = (sessions: number) => LEFT + ((WIDTH - LEFT - 8) * sessions) / last.sessions;
  const y = (value: number) => (HEIGHT - BOTTOM) / 2 - (Math.max(-top, Math.min(top, value)) / top) * ((HEIGHT - BOTTOM) / 2 - 6);
  const line = (points: readonly [number, number][]) => points.map(([sessions, value]) => `${x(sessions).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
  const upper = known.map(({ sessions, high }) => [sessions, high ?? top] as [number, number]);
  const lower = known.map(({ sessions, low }) => [sessions, low ?? -top] as [number, number]);
  const words = `${metric.name}, version ${test.version} less ${test.against}: ${signed(last.value)}, from ${signed(last.low)} to ${signed(last.high)} after ${last.sessions} sessions; it must leave ${signed(bound)} behind`;
  return (
    <svg class="live-path" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={words}>
      <path class="live-band" d={`M${line(upper)}L${line([...lower].reverse())}Z`} />
      <path class="live-zero" d={`M${LEFT} ${y(0)}H${WIDTH - 8}`} />
      <path class="live-bound" d={`M${LEFT} ${y(bound)}H${WIDTH - 8}`} />
      <path class="live-mean" d={`M${line(known.map(({ sessions, value }) => [sessions, value]))}`} />
      <text x={WIDTH - 10} y={y(bound) + (bound <= 0 ? 14 : -6)} class="live-bound-text">
        {metric.margin === 0 ? "must be better" : "margin"}
      </text>
      {[top / 1.15, 0, -top / 1.15].map((value) => (
        <text key={value} x={LEFT - 6} y={y(value) + 4} class="live-axis">
          {value === 0 ? "0" : signed(Number(value.toPrecision(2)))}
        </text>
      ))}
      <text x={LEFT} y={HEIGHT - 6} class="live-from">
        0
      </text>
      <text x={WIDTH - 8} y={HEIGHT - 6} class="live-to">
        {count(last.sessions)} sessions
      </text>
    </svg>
  );
}

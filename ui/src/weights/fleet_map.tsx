// The fleet as a map: home in the middle, regions as far out as their weights come late, and the one that is chosen.

import { useState } from "preact/hooks";

import { percent, size } from "../format";
import { describe, healthOf, NARROW, placed, ring, scale, seconds, WIDE, type Fleet, type Process, type Region } from "./data";

export function FleetMap({ fleet }: { fleet: Fleet }) {
  const [chosen, setChosen] = useState<string | null>(null);
  const region = fleet.regions.find(({ name }) => name === chosen) ?? fleet.regions.find(({ is_home }) => is_home);
  return (
    <section aria-labelledby="fleet-title">
      <h2 id="fleet-title">{fleet.kind === "fleet" ? "Fleet" : "Processes"}</h2>
      {fleet.problem && <p class="weights-remark">{fleet.problem}</p>}
      {fleet.regions.length > 1 && (
        <p class="note">
          {fleet.regions.length} regions, placed by the launcher {fleet.launcher}
          {fleet.generation !== null && `, generation ${fleet.generation}`}. The farther from home, the later a version is served there.
        </p>
      )}
      <div class={fleet.regions.length > 1 ? "weights-fleet" : ""}>
        {fleet.regions.length > 1 && (
          <div>
            <Map fleet={fleet} chosen={region?.name ?? ""} onChoose={setChosen} />
            <div class="weights-regions" role="group" aria-label="Regions">
              {fleet.regions.map((each) => (
                <button type="button" key={each.name} aria-pressed={each.name === region?.name} onClick={() => setChosen(each.name)}>
                  <i class={`weights-dot is-${healthOf(each)}`} aria-hidden="true" />
                  {each.name}
                  <span class="hidden">{describe(each)}</span>
                </button>
              ))}
            </div>
          </div>
        )}
        {region && <RegionPanel region={region} isOnly={fleet.regions.length === 1} />}
      </div>
    </section>
  );
}

function Map({ fleet, chosen, onChoose }: { fleet: Fleet; chosen: string; onChoose: (name: string) => void }) {
  const extent = matchMedia("(max-width: 640px)").matches ? NARROW : WIDE;
  const { width, height, home: [left, base], reach } = extent;
  const { distance, orbits } = scale(fleet.regions);
  const places = placed(fleet.regions, extent);
  const home = places.find(({ region }) => region.is_home);
  return (
    <svg class="weights-map" viewBox={`0 0 ${width} ${height}`} aria-hidden="true">
      {orbits.map((lag_s) => {
        const [rx, ry] = [reach[0] * distance(lag_s), reach[1] * distance(lag_s)];
        return (
          <g key={lag_s}>
            <path class="weights-orbit" d={`M${left - rx} ${base}A${rx} ${ry} 0 0 1 ${left + rx} ${base}`} />
            <text class="weights-small" x={left + rx} y={base + 15}>
              {seconds(lag_s)}
            </text>
          </g>
        );
      })}
      {home &&
        places
          .filter((place) => place !== home)
          .map(({ region, x, y }) => (
            <g key={region.name} class={region.is_away ? "is-away" : ""}>
              <line class="weights-link" x1={home.x} y1={home.y} x2={x} y2={y} stroke-width={1 + Math.min(6, Math.sqrt(region.sessions ?? 0))} />
              <text class="weights-lag" x={home.x + 0.56 * (x - home.x)} y={home.y + 0.56 * (y - home.y) + 4}>
                {region.is_away ? "away" : region.lag_s === null ? "" : seconds(region.lag_s)}
              </text>
            </g>
          ))}
      {places.map(({ region, x, y }) => (
        <g key={region.name} class={`weights-node ${region.name === chosen ? "is-chosen" : ""}`} transform={`translate(${x} ${y})`} onClick={() => onChoose(region.name)}>
          <circle class="weights-disc" r="34" />
          <circle class="weights-halo" r="25" />
          {ring(region, 25).map(({ process, x: across, y: down }) => (
            <circle key={process.name} class={`weights-process is-${process.health} ${process.command === "serve" ? "is-engine" : ""}`} cx={across} cy={down} r={process.command === "serve" || process.command === "train" ? 6 : 4}>
              <title>{`${process.name}: ${process.state}`}</title>
            </circle>
          ))}
          <text class="weights-version" y="5">
            {region.version ?? "–"}
          </text>
          <text class="weights-region" y="53">
            {region.name}
          </text>
          <text class="weights-small" y="68">
            {[region.behind ? `${region.behind} behind` : "", region.sessions !== null ? `${region.sessions} sessions` : ""].filter(Boolean).join(" · ")}
          </text>
        </g>
      ))}
    </svg>
  );
}

function RegionPanel({ region, isOnly }: { region: Region; isOnly: boolean }) {
  const facts: [string, string][] = [
    ["serves", region.version === null ? "nothing yet" : `version ${region.version}${region.behind ? `, ${region.behind} behind` : ""}`],
    ["lag", region.lag_s === null ? "not measured" : seconds(region.lag_s)],
    ...(region.sessions === null ? [] : ([["sessions", String(region.sessions)]] as [string, string][])),
    ["sandboxes", `${region.sandboxes}${region.sandbox_hosts ? `, ${region.sandbox_hosts} hosts here` : ""}`],
    ...(region.lent_engines ? ([["lent", `${region.lent_engines} of ${region.engines} engines are on machines of production`]] as [string, string][]) : []),
    ...(region.supervisor ? ([["supervisor", region.supervisor]] as [string, string][]) : []),
    ["store", region.store],
  ];
  return (
    <div class="weights-panel">
      {!isOnly && (
        <h3>
          {region.name} {region.is_home && <small>home</small>}
        </h3>
      )}
      {region.remark && <p class="weights-remark">{region.remark}</p>}
      <dl class="weights-facts">
        {facts.map(([name, text]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
      <div class="weights-scroll" tabIndex={0} role="region" aria-label={`Processes of ${region.name}`}>
        <table>
          <thead>
            <tr>
              <th scope="col">process</th>
              <th scope="col">state</th>
              <th scope="col">machine</th>
              <th scope="col" class="number">version</th>
              <th scope="col" class="number">busy</th>
              <th scope="col" class="number">memory</th>
              <th scope="col" class="number">restarts</th>
            </tr>
          </thead>
          <tbody>
            {region.processes.map((process) => (
              <ProcessRow key={process.name} process={process} />
            ))}
          </tbody>
        </table>
      </div>
    </div>
  );
}

function ProcessRow({ process }: { process: Process }) {
  return (
    <tr>
      <th scope="row">
        <i class={`weights-dot is-${process.health}`} aria-hidden="true" />
        {process.name}
        {process.is_lent && <small class="weights-chip">lent</small>}
      </th>
      <td>{process.state}</td>
      <td>
        {process.host}
        {process.pid !== null && <small> pid {process.pid}</small>}
      </td>
      <td class="number">{process.version ?? ""}</td>
      <td class="number">{process.busy === null ? "" : percent(process.busy, 0)}</td>
      <td class="number">{process.memory_bytes === null ? "" : size(process.memory_bytes)}</td>
      <td class="number">{process.restarts || ""}</td>
    </tr>
  );
}

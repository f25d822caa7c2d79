// The chain of versions: what each is a change of, how large, by which digest it is known, who has it.

import { useState } from "preact/hooks";

import { ago, size } from "../format";
import { regionName, seconds, type Version, type Weights } from "./data";

export function Versions({ weights, before, onBefore }: { weights: Weights; before: number | null; onBefore: (before: number | null) => void }) {
  const last = weights.versions[weights.versions.length - 1]?.version ?? 0;
  const largest = Math.max(1, ...weights.versions.map(({ size_bytes }) => size_bytes));
  return (
    <section aria-labelledby="versions-title">
      <h2 id="versions-title">Versions</h2>
      {weights.problem ? (
        <p class="weights-remark">{weights.problem}</p>
      ) : (
        <>
          <p class="note">
            {weights.total} in the log <code>{weights.log_id?.slice(0, 12)}</code> at <code>{weights.store}</code>
          </p>
          <div class="weights-scroll" tabIndex={0} role="region" aria-label="Table of versions">
            <table>
              <thead>
                <tr>
                  <th scope="col" class="number">version</th>
                  <th scope="col">kind</th>
                  <th scope="col">size</th>
                  <th scope="col">digest of the state</th>
                  <th scope="col" class="number">published in</th>
                  <th scope="col" class="number">lag, worst</th>
                  <th scope="col">other ways here</th>
                  <th scope="col">served by</th>
                  <th scope="col">made</th>
                </tr>
              </thead>
              <tbody>
                {weights.versions.map((version) => (
                  <VersionRow key={version.version} version={version} largest={largest} />
                ))}
              </tbody>
            </table>
          </div>
          <p class="weights-pages">
            {before !== null && (
              <button type="button" onClick={() => onBefore(null)}>
                newest
              </button>
            )}
            {last > 0 && (
              <button type="button" onClick={() => onBefore(last)}>
                older
              </button>
            )}
          </p>
        </>
      )}
    </section>
  );
}

function VersionRow({ version, largest }: { version: Version; largest: number }) {
  const lags = Object.entries(version.lags).sort(([, one], [, other]) => other - one);
  return (
    <tr>
      <th scope="row" class="number">
        {version.version}
      </th>
      <td>
        {version.kind === "full" ? "whole" : `delta of ${version.base}`}
        {version.changed === false && <small class="weights-chip">same weights</small>}
        {version.release !== null && <small class="weights-chip is-release">{version.release.replaceAll("_", " ")}</small>}
      </td>
      <td>
        <span class="weights-size">
          <i style={{ width: `${(100 * version.size_bytes) / largest}%` }} aria-hidden="true" />
          {size(version.size_bytes)}
        </span>
      </td>
      <td>
        <Digest digest={version.digest} />
      </td>
      <td class="number">{seconds(version.seconds)}</td>
      <td class="number" title={lags.map(([region, lag]) => `${regionName(region)} ${seconds(lag)}`).join(", ")}>
        {lags.length > 1 && <small>{regionName(lags[0]?.[0] ?? "")} </small>}
        {seconds(lags[0]?.[1] ?? null)}
      </td>
      <td>
        {version.links.map((link) => (
          <small key={`${link.kind}${link.source}`} class="weights-chip" title={`${link.kind} link of ${size(link.size_bytes)}`}>
            {link.kind === "anchor" ? "anchor" : `${link.kind} from ${link.source}`} · {size(link.size_bytes)}
          </small>
        ))}
      </td>
      <td>{version.served_by.join(", ")}</td>
      <td title={version.created}>{ago(Date.now() / 1000 - Date.parse(version.created) / 1000)}</td>
    </tr>
  );
}

/** The beginning of a digest; all of it is copied. */
function Digest({ digest }: { digest: string }) {
  const [isCopied, setCopied] = useState(false);
  const copy = () => {
    navigator.clipboard?.writeText(digest).then(
      () => setCopied(true),
      () => setCopied(false),
    );
    setTimeout(() => setCopied(false), 1500);
  };
  return (
    <button type="button" class="weights-digest" title={digest} onClick={copy}>
      {isCopied ? "copied" : digest.slice(0, 12)}
      <span class="hidden">, copy the whole digest</span>
    </button>
  );
}

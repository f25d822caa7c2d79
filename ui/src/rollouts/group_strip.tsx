// The rollouts of a group as a row of links, one for each attempt.

import { useJson } from "../resource";
import { routeTo } from "../routes";
import type { TablePage } from "./types";

interface GroupStripProps {
  readonly run: string;
  readonly purpose: string;
  readonly group: number;
  readonly chosen: string;
}

export function GroupStrip({ run, purpose, group, chosen }: GroupStripProps) {
  const query = new URLSearchParams({ purpose, group: String(group), reversed: "1", limit: "200" });
  const { data } = useJson<TablePage>(`/runs/${encodeURIComponent(run)}/rollouts?${query}`);
  if (data === null || data.rows.length < 2) return null;
  return (
    <nav class="rollouts-strip" aria-label="Rollouts of the group">
      {data.rows.map((row) => (
        <a key={row.rollout_id} href={routeTo(run, "rollouts", [row.rollout_id])} aria-current={row.rollout_id === chosen ? "page" : undefined}
          class={row.reward === null ? "is-failed" : row.reward > 0 ? "is-good" : ""}>
          <span><span class="hidden">slot </span>{row.slot}{row.attempt > 0 ? `.${row.attempt}` : ""}</span>
          <b><span class="hidden">, reward </span>{row.reward === null ? "×" : Number(row.reward.toFixed(2))}</b>
        </a>
      ))}
      <a class="rollouts-beside" href={routeTo(run, "rollouts", ["group", purpose, String(group)])}>
        side by side
      </a>
    </nav>
  ); // prettier-ignore
}

// The tab "Rollouts".

import type { TabProps } from "../tabs";
import "./style.css";

export function RolloutsTab({ run }: TabProps) {
  return <p class="note">{run.name} has nothing here yet.</p>;
}

// The tab "Weights".

import type { TabProps } from "../tabs";
import "./style.css";

export function WeightsTab({ run }: TabProps) {
  return <p class="note">{run.name} has nothing here yet.</p>;
}

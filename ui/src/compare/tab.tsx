// The tab "Compare".

import type { TabProps } from "../tabs";
import "./style.css";

export function CompareTab({ run }: TabProps) {
  return <p class="note">{run.name} has nothing here yet.</p>;
}

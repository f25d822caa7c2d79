// The tab "Timeline".

import type { TabProps } from "../tabs";
import "./style.css";

export function TimelineTab({ run }: TabProps) {
  return <p class="note">{run.name} has nothing here yet.</p>;
}

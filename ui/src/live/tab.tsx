// The tab "Live".

import type { TabProps } from "../tabs";
import "./style.css";

export function LiveTab({ run }: TabProps) {
  return <p class="note">{run.name} has nothing here yet.</p>;
}

// Changes to a file, drawn as such.

import { useState } from "preact/hooks";

import { count } from "../format";
import { Visible } from "./text_block";
import type { DiffLine } from "./types";
import { cut } from "./visible";

const LINES = 40;
const CHARACTERS = 1_000;
const NAMES: Readonly<Record<string, string>> = { "+": "added", "-": "removed" };

export function Diff({ lines, path }: { lines: readonly DiffLine[]; path: string }) {
  const [most, setMost] = useState(LINES);
  const added = lines.filter((line) => line.mark === "+").length;
  const removed = lines.filter((line) => line.mark === "-").length;
  return (
    <figure class="rollouts-diff">
      <figcaption>
        <code>
          <Visible text={cut(path, 1, 200).text} />
        </code>
        <span class="is-added">+{count(added)}</span> <span class="is-removed">−{count(removed)}</span>
      </figcaption>
      <div class="rollouts-diff-lines" tabIndex={0} role="group" aria-label={`Changes to a file: ${added} lines added, ${removed} removed`}>
        {lines.slice(0, most).map((line, index) => (
          <div key={index} class={line.mark === "+" ? "is-added" : line.mark === "-" ? "is-removed" : ""}>
            <span class="rollouts-line-number">{line.number ?? ""}</span>
            <span class="rollouts-line-mark" aria-label={NAMES[line.mark]}>
              {line.mark}
            </span>
            <LongLine text={line.text} />
          </div>
        ))}
      </div>
      {lines.length > most && (
        <p class="rollouts-more">
          <button type="button" onClick={() => setMost(most * 10)}>
            Show more
          </button>
          <span>{count(lines.length - most)} more lines</span>
        </p>
      )}
    </figure>
  );
}

function LongLine({ text }: { text: string }) {
  const [most, setMost] = useState(CHARACTERS);
  const shown = cut(text, 1, most);
  return (
    <code>
      <Visible text={shown.text} />
      {shown.missing > 0 && (
        <button type="button" onClick={() => setMost(most * 100)}>
          {count(shown.missing)} more
        </button>
      )}
    </code>
  );
}

// Outputs that are diffs, as lines.

import type { DiffLine } from "./types";

/** The lines of a text that is a unified diff, such as the output of `git diff`; null where it is none. */
export function readDiff(text: string): DiffLine[] | null {
  if (text.length > 200_000 || !/^(diff --git |@@ -\d)/m.test(text)) return null;
  return text.split("\n").map((line) => {
    const isMarked = /^[+-]/.test(line) && !/^(\+\+\+|---) /.test(line);
    return { mark: isMarked ? line.charAt(0) : " ", number: null, text: isMarked ? line.slice(1) : line };
  });
}

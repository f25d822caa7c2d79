// A text that anybody may have written: a text node, never markup; a long one is cut, and shown in steps.

import { useState } from "preact/hooks";

import { count } from "../format";
import { cut, pieces } from "./visible";

const LINES = 14;
const CHARACTERS = 4_000;
const STEP = 10;

export interface TextBlockProps {
  readonly text: string;
  readonly kind: "heard" | "said" | "thought" | "hint" | "plain";
  readonly label: string;
}

export function TextBlock({ text, kind, label }: TextBlockProps) {
  const [scale, setScale] = useState(1);
  const shown = cut(text, LINES * scale, CHARACTERS * scale);
  // A few characters more are no reason for a button.
  const whole = shown.missing > 0 && shown.missing < 80 && !text.slice(-80).includes("\n") ? { text, missing: 0 } : shown;
  if (text === "") return null;
  return (
    <div class={`rollouts-text rollouts-${kind}`}>
      <pre aria-label={label}>
        <Visible text={whole.text} />
      </pre>
      {whole.missing > 0 && (
        <p class="rollouts-more">
          <button type="button" onClick={() => setScale(scale * STEP)}>
            Show more
          </button>
          <button type="button" onClick={() => setScale(Infinity)}>
            Show all
          </button>
          <span>{count(whole.missing)} more characters</span>
        </p>
      )}
    </div>
  );
}

/** A text with its invisible characters spelt out. */
export function Visible({ text }: { text: string }) {
  return (
    <>
      {pieces(text).map((piece, index) =>
        piece.isSpelt ? (
          <span key={index} class="rollouts-spelt">
            {piece.text}
          </span>
        ) : (
          piece.text
        ),
      )}
    </>
  );
}

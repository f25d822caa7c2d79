// What tokens are coloured by, and the legend.

import { MODE_TITLES, MODES, type Colouring, type Mode } from "./token_colours";
import { inline } from "./visible";

interface ColourBarProps {
  /** Null: replies are read as words. */
  readonly mode: Mode | null;
  readonly colours: Colouring | null;
  readonly layers: number;
  readonly layer: number;
  readonly isLoading: boolean;
  readonly error: string | null;
  readonly notes: readonly string[];
  readonly onMode: (mode: Mode | null) => void;
  readonly onLayer: (layer: number) => void;
}

export function ColourBar({ mode, colours, layers, layer, isLoading, error, notes, onMode, onLayer }: ColourBarProps) {
  return (
    <section class="rollouts-colours" aria-label="Colours of tokens">
      <label class="rollouts-field">
        <span>Show</span>
        <select value={mode ?? ""} onChange={(event) => onMode(MODES.find((each) => each === event.currentTarget.value) ?? null)}>
          <option value="">words and calls</option>
          {MODES.map((each) => (
            <option key={each} value={each}>
              tokens by {MODE_TITLES[each]}
            </option>
          ))}
        </select>
      </label>
      {mode === "expert" && layers > 1 && (
        <label class="rollouts-field">
          <span>Layer</span>
          <select value={String(layer)} onChange={(event) => onLayer(Number(event.currentTarget.value))}>
            {Array.from({ length: layers }, (_, index) => (
              <option key={index} value={String(index)}>
                {index}
              </option>
            ))}
          </select>
        </label>
      )}
      {mode !== null && isLoading && <span class="note">{mode === "mismatch" ? "The trainer’s model scores it …" : "…"}</span>}
      {mode !== null && error !== null && <span role="alert">{error}</span>}
      {colours && colours.note === "" && (
        <ul class="rollouts-legend" aria-label="Legend">
          {colours.legend.map((swatch) => (
            <li key={`${swatch.tone}${swatch.label}`}>
              <span class={`rollouts-swatch ${swatch.tone && `rollouts-${swatch.tone}`}`} aria-hidden="true" />
              {swatch.label}
            </li>
          ))}
        </ul>
      )}
      {colours && colours.note !== "" && <span class="note">{colours.note}</span>}
      {notes.length > 0 && <p class="note">{notes.map((note) => inline(note)).join(" · ")}</p>}
    </section>
  );
}

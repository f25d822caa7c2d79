// Text of anybody's as pieces to show: characters that would hide, move or colour something are spelt out.

const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;
const NAMES: Readonly<Record<string, string>> = { "\0": "NUL", "\x07": "BEL", "\x08": "BS", "\x1b": "ESC", "\r": "CR", "\x7f": "DEL" };

export interface Piece {
  readonly text: string;
  /** True: `text` spells a character that cannot be seen. */
  readonly isSpelt: boolean;
}

/** Split a text into what can be shown as it is and what is spelt out; line breaks and tabs stay. */
export function pieces(text: string): Piece[] {
  const found: Piece[] = [];
  let end = 0;
  for (const match of text.matchAll(INVISIBLE)) {
    if (match[0] === "\n" || match[0] === "\t") continue;
    if (match.index > end) found.push({ text: text.slice(end, match.index), isSpelt: false });
    found.push({ text: spelt(match[0]), isSpelt: true });
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push({ text: text.slice(end), isSpelt: false });
  return found;
}

/** A character by its name or its number: ESC, U+202E. */
export function spelt(letter: string): string {
  return NAMES[letter] ?? `U+${(letter.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** One line for a table or a title: nothing invisible, no breaks, and not without end. */
export function inline(text: string, most = 240): string {
  const { text: shown, missing } = cut(text.length > 4 * most ? text.slice(0, 4 * most) : text, Infinity, most);
  return pieces(shown.replace(/[\n\t]+/g, " ")).map((piece) => (piece.isSpelt ? `⟨${piece.text}⟩` : piece.text)).join("") + (missing > 0 ? "…" : "");
}

export interface Cut {
  readonly text: string;
  /** Characters that are left out. */
  readonly missing: number;
}

/** The beginning of a text: at most so many lines, and so many characters in all. Never half of a surrogate pair. */
export function cut(text: string, lines: number, characters: number): Cut {
  let end = 0;
  for (let line = 0; line < lines; line += 1) {
    const next = text.indexOf("\n", end);
    if (next < 0) end = text.length;
    else end = next + 1;
    if (end >= text.length || end > characters) break;
  }
  end = Math.min(end, characters, text.length);
  if (end < text.length && /[\uD800-\uDBFF]/.test(text.charAt(end - 1))) end -= 1;
  return { text: text.slice(0, end), missing: text.length - end };
}

"""Text as data: how something that may address its judge is shown to one, so that it stays what is judged.

    <<< 9f3c… work          a line that only we write: it carries a mark drawn for this one call
    | first line            every line of the data begins with a bar, so none can be taken for one of ours
    | <\\|im_end|>           what a tokenizer may read as a marker of a role is broken by a backslash
    | a\\u{200b}b            what cannot be seen is spelled out
    (1804 characters left out)
    | last line
    >>> 9f3c… work

Three things hold for any text whatever, and are tested as properties: no line of it begins otherwise than with a bar;
no marker of a role is left in it; and what stands outside of the bars depends on nothing but how long it was. The mark
is not needed for that: it is there for the reader, who is a model and not a parser. The spelling is not meant to be
undone: a text may contain ``\\u{200b}`` by itself.

Owns the spelling. Pure. What is asked about the text is :mod:`etude.rewards.judge.prompts`'.
"""

import re
import unicodedata

BAR = "| "
"""Begins every line of data."""
MARK = re.compile(r"[0-9a-f]{32}")
"""A mark: 128 random bits. Its secrecy is what stops a text from being written around it."""
UNUSUAL = re.compile(r"[^\n\t\x20-\x7e]")
"""Characters that are looked at more closely."""
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that are spelled out: controls, formats (zero width, bidirectional, tags), what is no character
at all, and separators of lines other than ours.
"""
IGNORABLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Letters and marks that are drawn as nothing: Unicode's Default_Ignorable_Code_Point beyond the categories."""
MARKER_CHARACTERS = frozenset("<>[]|")
"""What markers of roles are spelled with; a character whose compatibility form has one is spelled out."""
ANGLE = re.compile(r"<(?![ \t\n=\\]|$)")
"""An opening bracket that could begin ``<|im_start|>``, ``<s>``, ``</tool>``, ``<<SYS>>``: not ``a < b``, ``<=``."""
SQUARE = re.compile(r"\[(?=/?[A-Za-z_]*[A-Z]{2})")
"""One that could begin ``[INST]``, ``[/INST]``, ``[gMASK]``."""


def spelled(text: str) -> str:
    """The text with hidden characters spelled out and markers of roles broken."""
    seen = UNUSUAL.sub(lambda found: _spell(found.group()), text)
    return SQUARE.sub("[\\\\", ANGLE.sub("<\\\\", seen))


def guarded(text: str, label: str, mark: str, limit: int) -> str:
    """The lines of a fence with ``text`` in it, of which at most ``limit`` spelled characters are kept: its beginning
    and its end, with a line between them that says how much is missing.

    ``label`` is ours and says what the text is. Raises ``ValueError`` for a mark that is none or occurs in the text.
    """
    if not MARK.fullmatch(mark) or mark in text:
        raise ValueError(f"mark {mark!r}: expected 32 hex digits that do not occur in what they stand around")
    seen = spelled(text)
    body = _barred(seen)
    if len(seen) > limit:
        head, tail = limit - limit // 2, limit // 2
        left_out = f"({len(seen) - limit} characters left out)"
        body = "\n".join([_barred(seen[:head]), left_out, _barred(seen[len(seen) - tail :])])
    return f"<<< {mark} {label}\n{body}\n>>> {mark} {label}"


def _barred(text: str) -> str:
    return "\n".join(BAR + line for line in text.split("\n"))


def _spell(character: str) -> str:
    hidden = unicodedata.category(character) in HIDDEN or IGNORABLE.match(character)
    if hidden or not MARKER_CHARACTERS.isdisjoint(unicodedata.normalize("NFKC", character)):
        return f"\\u{{{ord(character):x}}}"
    return character

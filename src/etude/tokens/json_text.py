"""JSON in the spelling that a model gave it.

Owns the reading of an object's members as text. Does not own what they mean (:mod:`etude.tokens.call_forms`).
"""

import json
import re

from etude.types import Json


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
"""Reads JSON as the standard has it: ``NaN`` and kin are none."""
SPACE = re.compile(r"[ \t\r\n]*")
"""White space that JSON allows between its parts."""


def read_object(text: str) -> dict[str, tuple[Json, str]] | None:
    """The members of a JSON object: name → (value, its spelling). ``None`` if ``text`` is anything else."""
    members: dict[str, tuple[Json, str]] = {}
    try:
        at = _skip(text, 0, "{")
        if text[at : at + 1] != "}":
            while True:
                name, at = DECODER.raw_decode(text, at)
                start = _skip(text, at, ":")
                value, end = DECODER.raw_decode(text, start)
                if not isinstance(name, str):
                    return None
                members[name] = (value, text[start:end])
                at = _space(text, end)
                if text[at : at + 1] == "}":
                    break
                at = _skip(text, at, ",")
        return members if _space(text, at + 1) == len(text) else None
    except (ValueError, RecursionError):
        return None


def _skip(text: str, at: int, mark: str) -> int:
    at = _space(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"expected {mark!r} at {at}")
    return _space(text, at + 1)


def _space(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return match.end() if match else at

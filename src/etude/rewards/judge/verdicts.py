"""What a judge replied: one JSON object that proves it was asked, or a fault that counts.

    {"reason": "clear, but too long", "score": 4, "aspect": "style", "nonce": "5d0c…"}

Strict on purpose. The nonce is drawn for the call and stands behind the judged text, in the instructions: a verdict
that was found in the text and copied does not have it. Owns what is readable. Pure: nothing is repaired here; whoever
asked may ask once more, and is told which fault it was and not one word of the reply.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from etude.rewards.judge.rubrics import Rubric
from etude.types import Json

LONGEST_REPLY = 20_000
"""Characters; a reply beyond is not looked at."""
LONGEST_REASON = 1_000
"""Characters that are kept of a reason."""
KEYS = frozenset({"reason", "score", "aspect", "nonce"})
"""All that a verdict has."""
THOUGHTS = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
"""What some models say to themselves first, and some servers leave in the reply."""
CODE_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
"""The one wrapping that is taken off, for it cannot change what is inside."""


class Fault(StrEnum):
    """Why a reply cannot be read."""

    CUT = "it was cut before its end"
    TOO_LONG = "it was too long"
    NOT_JSON = "it was not one JSON object and nothing else"
    WRONG_KEYS = "its keys were not the ones asked for"
    WRONG_NONCE = "its nonce was not the one given"
    WRONG_ASPECT = "its aspect was not the one asked about"
    OFF_SCALE = "its score was not on the scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One readable reply."""

    score: int | None
    """``None``: it says that it cannot tell."""
    reason: str
    descending: bool = False
    """Whether it was shown the scale from best to worst."""


def read_vote(reply: str, rubric: Rubric, nonce: str, *, descending: bool = False) -> Vote | Fault:
    """The vote in a reply about ``rubric``, or why there is none. Raises nothing, whatever the reply."""
    found = read_object(reply)
    if isinstance(found, Fault):
        return found
    if found.keys() != KEYS or not isinstance(found["reason"], str):
        return Fault.WRONG_KEYS
    if found["nonce"] != nonce:
        return Fault.WRONG_NONCE
    if found["aspect"] != rubric.aspect:
        return Fault.WRONG_ASPECT
    score = found["score"]
    if score is not None and (type(score) is not int or not rubric.lowest <= score <= rubric.highest):
        return Fault.OFF_SCALE
    return Vote(score=score, reason=found["reason"][:LONGEST_REASON], descending=descending)


def read_object(reply: str) -> dict[str, Json] | Fault:
    """The one JSON object that a reply is, or why it is none; a key that stands twice is a fault."""
    if len(reply) > LONGEST_REPLY:
        return Fault.TOO_LONG
    text = THOUGHTS.sub("", reply, count=1).strip() if THOUGHTS.match(reply) else reply.strip()
    wrapped = CODE_BLOCK.fullmatch(text)
    try:
        found = json.loads(wrapped.group(1) if wrapped else text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return Fault.NOT_JSON
    return found if isinstance(found, dict) else Fault.NOT_JSON


def _once(pairs: Sequence[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is no JSON")

"""Rubrics: one aspect of a piece of work, the question that is asked about it, and what each score means.

    aspect = "style"               one rubric, one aspect, one call: nothing else is asked in it
    version = "1"
    about = "answer"               what is shown: the agent's last words, or the whole session ("transcript")
    question = "How well is the summary written?"
    tie = "lower"                  which of the two middle votes counts when they differ
    [[scale]]
    score = 1
    anchor = "No sentence about the function."

Owns the noun, its file format and its digest. What a judge is told besides is :mod:`etude.rewards.judge.prompts`'.
"""

import hashlib
import re
import tomllib
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import orjson

from etude.errors import ConfigError

ASPECT = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""What an aspect may be called: it names parts of rewards and files, and stands in prompts."""
FEWEST_SCORES, MOST_SCORES = 2, 11
"""A scale of one score says nothing; beyond eleven nobody, judge or human, tells neighbours apart."""
LONGEST_TEXT = 2_000
"""Characters of a question or an anchor."""


class About(StrEnum):
    """What of a rollout is shown to the judge."""

    ANSWER = "answer"
    """Its last words."""
    TRANSCRIPT = "transcript"
    """All that was said and seen in it."""


class TieRule(StrEnum):
    """Which score counts when an even number of votes has two different ones in its middle."""

    LOWER = "lower"
    UPPER = "upper"
    MEDIAN = "median"
    """Half-way between them."""
    ABSTAIN = "abstain"
    """None: there is no verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """What a score means."""

    score: int
    anchor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """How one aspect is judged."""

    aspect: str
    version: str
    about: About
    question: str
    tie: TieRule
    scale: tuple[Anchor, ...]
    """Ascending, without gaps."""

    def __post_init__(self) -> None:
        if not ASPECT.fullmatch(self.aspect):
            raise ValueError(f"aspect {self.aspect!r}: expected up to 32 of a–z, 0–9 and _, a letter first")
        scores = [anchor.score for anchor in self.scale]
        if not FEWEST_SCORES <= len(scores) <= MOST_SCORES:
            raise ValueError(f"a scale of {len(scores)} scores: expected {FEWEST_SCORES} to {MOST_SCORES}")
        if scores != list(range(scores[0], scores[0] + len(scores))):
            raise ValueError(f"scores {scores}: expected them to ascend by one")
        for text in (self.version, self.question, *(anchor.anchor for anchor in self.scale)):
            if not 0 < len(text.strip()) <= LONGEST_TEXT:
                raise ValueError(f"text {text[:40]!r} of a rubric: expected 1 to {LONGEST_TEXT} characters")

    @property
    def lowest(self) -> int:
        """The worst score."""
        return self.scale[0].score

    @property
    def highest(self) -> int:
        """The best score."""
        return self.scale[-1].score

    def value(self, score: float) -> float:
        """A score as a number from 0 (worst) to 1 (best)."""
        return (score - self.lowest) / (self.highest - self.lowest)

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all that the rubric says: a word changed is another rubric."""
        return hashlib.sha256(orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS)).hexdigest()


def parse_rubric(text: str, source: str) -> Rubric:
    """Read a rubric's TOML. Raises :class:`~etude.errors.ConfigError` that names ``source`` and the fault."""
    try:
        tree: dict[str, Any] = tomllib.loads(text)
        tree["about"], tree["tie"] = About(tree["about"]), TieRule(tree["tie"])
        tree["scale"] = tuple(Anchor(**_typed(anchor, {"score": int, "anchor": str})) for anchor in tree["scale"])
        texts = dict.fromkeys(("aspect", "version", "question", "about", "tie"), str)
        return Rubric(**_typed(tree, {**texts, "scale": tuple}))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{source}: the rubric lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error


def _typed(table: Any, kinds: dict[str, type]) -> dict[str, Any]:
    """The table, if it has these keys with values of these kinds and no others."""
    if not isinstance(table, dict) or table.keys() != kinds.keys():
        raise ValueError(f"{table!r}: expected a table with exactly the keys {', '.join(sorted(kinds))}")
    for key, kind in kinds.items():
        if not isinstance(table[key], kind) or isinstance(table[key], bool):
            raise ValueError(f"{key} = {table[key]!r}: expected a value of type {kind.__name__}")
    return table

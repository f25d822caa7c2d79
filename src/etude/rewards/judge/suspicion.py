"""Does a text speak to its judge? Signs, each of which honest work may show: a flag for people, never a verdict.

Prompt injection is defended against by how a text is shown (:mod:`etude.rewards.judge.injection_guard`) and by what of
a reply is believed (:mod:`etude.rewards.judge.verdicts`), not by guessing here. What this is for: a policy that learns
to flatter its judge shows up as a rising share of flagged rollouts, long before somebody reads one.

Owns the signs. Pure.
"""

import re
import unicodedata
from collections.abc import Mapping
from types import MappingProxyType

LONGEST_TEXT = 200_000
"""Characters that are looked through; the rest of a longer text is not."""

SIGNS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "verdict": re.compile(r"""["']?\b(score|rating|grade|verdict)\b["']?\s*[:=]\s*["']?\d""", re.IGNORECASE),
        "plea": re.compile(
            r"\b(give|award|assign|rate|score|grade)\b[^.\n]{0,40}\b(full|maximum|max|highest|perfect|top|best|\d+\s*/\s*\d+)",
            re.IGNORECASE,
        ),
        "command": re.compile(
            r"\b(ignore|disregard|forget|override)\b[^.\n]{0,40}\b(previous|prior|above|earlier|all|instruction|rubric|rule)",
            re.IGNORECASE,
        ),
        "address": re.compile(
            r"\b(dear|attention|note to|hey|hello)[ ,:]+(the )?(judge|grader|evaluator|reviewer|assessor|model)\b"
            r"|\b(as|you are) (an?|the) (\w+ )?(judge|grader|evaluator|assessor)\b",
            re.IGNORECASE,
        ),
        "marker": re.compile(
            r"<\|?/?(im_start|im_end|system|user|assistant|start_of_turn|end_of_turn|eot_id|endoftext)\b|\[/?INST\]"
            r"|^[ \t]*(system|assistant|human)\s*:",
            re.IGNORECASE | re.MULTILINE,
        ),
        "rubric": re.compile(
            r"\b(new|updated|revised|actual|real|correct)\s+(rubric|scale|criteria|grading)\b", re.IGNORECASE
        ),
        "fence": re.compile(r"^[ \t]*(<<<|>>>)\s*[0-9a-f]{8,}", re.IGNORECASE | re.MULTILINE),
    }
)
"""Name of a sign → what shows it."""
INVISIBLE = frozenset({"Cf", "Cs", "Co"})
"""Unicode categories of what cannot be seen: between letters, it breaks words that the other signs look for."""


def signs_in(text: str) -> frozenset[str]:
    """The signs that a text shows, by name; ``hidden`` where invisible characters stand in it."""
    seen = text[:LONGEST_TEXT]
    plain = "".join(character for character in seen if unicodedata.category(character) not in INVISIBLE)
    hidden = frozenset({"hidden"}) if len(plain) < len(seen) else frozenset[str]()
    folded = unicodedata.normalize("NFKC", plain)
    return hidden | {name for name, pattern in SIGNS.items() if pattern.search(folded)}

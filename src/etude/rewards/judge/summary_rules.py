"""Rules that judge one-line summaries of functions: how one is written, and whether it is true. Pure.

    def first(items): return items[0]      first returns items[0]                      style 5, factuality 4
                                           hm, I think it maybe returns the first!     style 1, factuality 2

They stand in for a model that judges, behind the same API (:mod:`etude.rewards.judge.rules`), so that a recipe whose
reward comes from rubrics learns on a machine that has none. The rubrics themselves are text, beside the recipe; how far
the rules agree with labels given by their words is measured like any judge's.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

SUMMARY_RULES_VERSION = "1"
"""Raised with every change of a rule: a calibration holds for one version."""
STYLE_SCORES, FACTUALITY_SCORES = (1, 5), (1, 4)
"""Lowest and highest score."""
LONGEST_LINE = 72
"""Characters of a summary that is one line."""
OPENING = re.compile(r"[A-Za-z_]\w* returns \S")
"""The function's name first, then what it does."""
HEDGE = re.compile(
    r"\b(I|I'm|we|you|my)\b|\b(think|guess|probably|maybe|perhaps|basically|simply|just|seems?|hm+|well|kind of|"
    r"sort of|some)\b",
    re.IGNORECASE,
)
"""Words that are about the writer, or about nothing, but in what the task returns."""
ORNAMENT = re.compile(r"!(?!=)|\*\*\S|[`#~]|\.\.\.|:\)")
"""Marks that say nothing of the function, but in what the task returns."""
DEFINITION = re.compile(r"^\s*(?:async )?def (\w+)", re.MULTILINE)
RETURN = re.compile(r"^\s*return (.+)$", re.MULTILINE)
WORDS = re.compile(r"\w+")
"""Names and numbers of an expression."""


def style(task: str, work: str) -> tuple[int, str]:
    """How a summary is written: one score off for each kind of fault."""
    text = work.strip()
    prose = _without_expression(task, text)
    faults = [
        name
        for name, found in (
            ("it does not begin with a name and 'returns'", not OPENING.match(text)),
            ("it hedges or chats", HEDGE.search(prose)),
            ("it is ornamented", ORNAMENT.search(prose)),
            ("it is not one short line", "\n" in text or len(text) > LONGEST_LINE),
        )
        if found
    ]
    return max(STYLE_SCORES[0], STYLE_SCORES[1] - len(faults)), "; ".join(faults) or "plain and short"


def factuality(task: str, work: str) -> tuple[int, str]:
    """Whether a summary names the function of the task, and says what that returns."""
    defined, returned = DEFINITION.search(task), RETURN.findall(task)
    if defined is None or not returned:
        return FACTUALITY_SCORES[0], "the task shows no function"
    names = defined[1] in WORDS.findall(work)
    wanted, said = returned[-1].strip(), " ".join(work.split())
    told = 2 if wanted in said else 1 if _shares_words(wanted, said) else 0
    reason = f"the name is {'there' if names else 'missing'}, and of what it returns {('nothing', 'some', 'all')[told]}"
    return FACTUALITY_SCORES[0] + names + told, reason


SUMMARY_RULES: Mapping[str, Callable[[str, str], tuple[int, str]]] = MappingProxyType(
    {"style": style, "factuality": factuality}
)
"""Aspect → rule."""


def _without_expression(task: str, text: str) -> str:
    for returned in RETURN.findall(task):
        text = text.replace(returned.strip(), "")
    return text


def _shares_words(wanted: str, said: str) -> bool:
    words = set(WORDS.findall(wanted))
    return bool(words) and 2 * len(words & set(WORDS.findall(said))) >= len(words)

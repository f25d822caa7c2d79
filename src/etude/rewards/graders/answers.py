"""Grader of answers: the agent's last words against the right ones, by the rule that the task names.

    exact        the same words in the same order, white space aside
    normalised   likewise, but for case, articles, punctuation around words and commas in numbers
    choice       the same letter: the one that is given alone, or the last one that is called the answer
    math         the same number, expression, set, …: what is no plain number by math-verify, in a process of its own

What a model wrote is hostile input. Words and letters are found by patterns that are linear in the text; nothing here
evaluates it (:mod:`etude.rewards.graders.math_worker` says how mathematics is kept within bounds).
"""

import re
import string
import unicodedata
from fractions import Fraction

from etude.protocols import Grade, HarnessResult, Sandbox
from etude.rewards.graders.math_checker import MathChecker
from etude.types import AnswerChecks, Task

SUBMITTED = "submit"
"""The one reason for stopping that asks for a reward."""
ARTICLES = frozenset({"a", "an", "the"})
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
"""Comma that groups the digits of a number."""
AROUND = string.punctuation + "“”‘’«»…–—"
"""Punctuation that is no part of a word when it stands at its ends."""
SIGNED = re.compile(r"[-+]?\.?\d")
"""Beginning of a number, whose sign and point belong to it."""
CHOSEN = re.compile(r"(?i:answer|choice|option)(?i: is)?\W{0,4}([A-Z])\b")
BRACKETED = re.compile(r"\(([A-Z])\)")
ALONE = re.compile(r"\W*([A-Za-z])(?:\W.*)?", re.DOTALL)
"""Ways to name a choice: ``the answer is C``, ``(C)``, ``C. because …``."""
BOXED = "\\boxed{"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")
PLAIN = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+|/0*[1-9][0-9]*)?")
LONGEST_NUMBER = 100
"""Characters of a number that is compared here."""
LONGEST_LINE = 400
"""Characters at the end of a line that is searched for an answer in mathematics."""


class AnswerGrader:
    """Rewards 1 for the right answer; implements :class:`~etude.protocols.Grader`."""

    def __init__(self) -> None:
        self._math = MathChecker()

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """1.0 if the agent ended its session with the right answer, else 0.0.

        Parts: ``submitted``, 0 or 1; ``wrong``, 1 for an answer that was given and is not right;
        ``facts_answered``, the share of the facts that the answer takes which stand in it, where the task names them.
        Raises ``ValueError`` for a task that is graded in another way, and
        :class:`~etude.errors.InfrastructureError` where the process that compares mathematics fails.
        """
        checks = task.checks
        if not isinstance(checks, AnswerChecks):
            raise ValueError(f"task {task.task_id!r} is graded by {type(checks).__name__}, not by its answer")
        submitted, given = result.reason == SUBMITTED, given_answer(result.answer, checks.after)
        right = submitted and bool(given) and await self._is_right(checks, given)
        parts = {"submitted": float(submitted), "wrong": float(submitted and bool(given) and not right)}
        if checks.facts:
            answer = " ".join(given.split())
            parts["facts_answered"] = sum(fact in answer for fact in checks.facts) / len(checks.facts)
        return Grade(value=float(right), parts=parts)

    async def close(self) -> None:
        """Kill the process that compares mathematics; calling it twice is harmless."""
        await self._math.close()

    async def _is_right(self, checks: AnswerChecks, given: str) -> bool:
        match checks.match:
            case "exact":
                return given.split() == checks.answer.split()
            case "normalised":
                return normalised(given) == normalised(checks.answer)
            case "choice":
                return bool(letter := chosen(given)) and letter == chosen(checks.answer)
            case "math":
                result, right = mathematics(given), mathematics(checks.answer)
                numbers = number(result), number(right)
                if None not in numbers:
                    return numbers[0] == numbers[1]
                return normalised(result) == normalised(right) or await self._math.is_equal(right, result)


def given_answer(text: str, after: str) -> str:
    """The answer in a message: what stands behind the last ``after``, nothing where that is missing."""
    return (text.rpartition(after)[2] if after in text else "").strip() if after else text.strip()


def normalised(text: str) -> list[str]:
    """The words of an answer without what says nothing: case, articles, punctuation around them."""
    words = THOUSANDS.sub("", unicodedata.normalize("NFKC", text)).casefold().split()
    return [bare for word in words if (bare := _bare(word)) and bare not in ARTICLES] or words


def _bare(word: str) -> str:
    """A word without the punctuation around it; a number keeps its sign."""
    bare = word.strip(AROUND)
    place = word.find(bare)
    start = next((at for at in range(max(0, place - 2), place) if bare and SIGNED.match(word, at)), place)
    return (word[start:place] + bare).lstrip("+")


def chosen(text: str) -> str:
    """The letter of a choice; empty where none is named."""
    text = " ".join(text.split())
    if " " in text and (named := CHOSEN.findall(text) or BRACKETED.findall(text)):
        return str(named[-1]).upper()
    alone = ALONE.fullmatch(text)
    return alone[1].upper() if alone else ""


def mathematics(text: str) -> str:
    """The mathematics that a message ends in: what is boxed; else, of its last line, what stands last between dollars,
    or behind ``is`` or a colon, of which in a sentence the last number.
    """
    if BOXED in text:
        return _balanced(text.rpartition(BOXED)[2])
    line = text.strip().rpartition("\n")[2][-LONGEST_LINE:].strip()
    if line.count("$") >= 2:
        return line.rsplit("$", 2)[1].strip()
    for mark in (" is ", " is: ", ": "):
        line = line.rpartition(mark)[2]
    line = line.strip().rstrip(".")
    if " " in line and not set(line) & set("\\^{}=") and (numbers := NUMBER.findall(line)):
        return str(numbers[-1])
    return line


def number(text: str) -> Fraction | None:
    """The number that a text is, ``-1,234.5`` or ``3/4``; ``None`` for anything else: no process has to compare two."""
    plain = THOUSANDS.sub("", text.strip())
    if len(plain) > LONGEST_NUMBER or not PLAIN.fullmatch(plain):
        return None
    return Fraction(plain)


def _balanced(text: str) -> str:
    """The text up to the brace that closes what was opened before it."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return text[:place].strip()
    return text.strip()

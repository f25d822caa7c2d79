"""Grader that compares the agent's final message with the right answer, by the rule that the task names.

    exact        the same words in the same order; white space is ignored
    normalised   the same words; case, articles, punctuation around words and commas in numbers are ignored, too
    choice       the same letter: the only one given, or the last one that is called the answer
    math         the same number, expression, set, …; math-verify compares all but plain numbers, in a separate process

A model's output is hostile input. Words and letters are found by patterns that are linear in the text; nothing here
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
"""The only finish reason that can earn a reward."""
ARTICLES = frozenset({"a", "an", "the"})
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
"""Comma that groups the digits of a number."""
AROUND = string.punctuation + "“”‘’«»…–—"
"""Punctuation that is ignored at both ends of a word."""
SIGNED = re.compile(r"[-+]?\.?\d")
"""Start of a number, including its sign and decimal point."""
CHOSEN = re.compile(r"(?i:answer|choice|option)(?i: is)?\W{0,4}([A-Z])\b")
BRACKETED = re.compile(r"\(([A-Z])\)")
ALONE = re.compile(r"\W*([A-Za-z])(?:\W.*)?", re.DOTALL)
"""Ways to name a choice: ``the answer is C``, ``(C)``, ``C. because …``."""
BOXED = "\\boxed{"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")
PLAIN = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+|/0*[1-9][0-9]*)?")
LONGEST_NUMBER = 100
"""Maximum length, in characters, of a number that is compared in this process."""
LONGEST_LINE = 400
"""Number of characters at the end of a line that are searched for a mathematical answer."""


class AnswerGrader:
    """Rewards 1 for the right answer; implements :class:`~etude.protocols.Grader`."""

    def __init__(self) -> None:
        self._math = MathChecker()

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Return 1.0 if the agent submitted the right answer, else 0.0.

        Parts: ``submitted``, 0 or 1; ``wrong``, 1 for a submitted answer that is not right; ``facts_answered``, the
        share of the task's required facts that occur in the answer, if the task names any.
        Raises ``ValueError`` for a task with another kind of checks, and
        :class:`~etude.errors.InfrastructureError` if the process that compares mathematics fails.
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
    """The answer in a message: the text behind the last ``after``, empty if ``after`` is missing."""
    return (text.rpartition(after)[2] if after in text else "").strip() if after else text.strip()


def normalised(text: str) -> list[str]:
    """The words of an answer without case, articles and the punctuation around them."""
    words = THOUSANDS.sub("", unicodedata.normalize("NFKC", text)).casefold().split()
    return [bare for word in words if (bare := _bare(word)) and bare not in ARTICLES] or words


def _bare(word: str) -> str:
    """A word without the punctuation around it; a number keeps its sign."""
    bare = word.strip(AROUND)
    place = word.find(bare)
    start = next((at for at in range(max(0, place - 2), place) if bare and SIGNED.match(word, at)), place)
    return (word[start:place] + bare).lstrip("+")


def chosen(text: str) -> str:
    """The letter of a choice; empty if the text names none."""
    text = " ".join(text.split())
    if " " in text and (named := CHOSEN.findall(text) or BRACKETED.findall(text)):
        return str(named[-1]).upper()
    alone = ALONE.fullmatch(text)
    return alone[1].upper() if alone else ""


def mathematics(text: str) -> str:
    """The mathematical answer at the end of a message: the last ``\\boxed`` expression. Without one, the last formula
    between dollars in the last line, or the text behind ``is`` or a colon; if that is a sentence, its last number.
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
    """The number in a text such as ``-1,234.5`` or ``3/4``; ``None`` if it is anything else. Plain numbers need no
    worker process to be compared.
    """
    plain = THOUSANDS.sub("", text.strip())
    if len(plain) > LONGEST_NUMBER or not PLAIN.fullmatch(plain):
        return None
    return Fraction(plain)


def _balanced(text: str) -> str:
    """The text up to the brace that closes the one opened before it."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return text[:place].strip()
    return text.strip()

"""Rules that compare answers, and the cost of hostile answers."""

import asyncio
import time
from pathlib import Path

import pytest

from etude.errors import InfrastructureError
from etude.protocols import Grade, HarnessResult
from etude.rewards.graders import math_checker
from etude.rewards.graders.answers import AnswerGrader, chosen, mathematics, normalised
from etude.rewards.graders.math_checker import MathChecker
from etude.rollouts.fake import FakeSandbox
from etude.types import AnswerChecks, AnswerMatch, Split, Task


def grade(answer: str, right: str, match: AnswerMatch, after: str = "") -> Grade:
    checks = AnswerChecks(answer=right, match=match, after=after)
    task = Task(task_id="t", family="f", template="", split=Split.TRAIN, prompt="", files={}, checks=checks)

    async def run() -> Grade:
        grader = AnswerGrader()
        try:
            return await grader.grade(
                task, FakeSandbox({}, lambda sandbox: None), HarnessResult(reason="submit", counts={}, answer=answer)
            )
        finally:
            await grader.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("The Eiffel  Tower.", "eiffel tower"),
        ("$1,000", "1000"),
        ("+5", "5"),
        ("“x”", "X"),
        ("ﬁve", "five"),
        (">", ">"),
    ],
)
def test_what_says_nothing_is_not_compared(given: str, right: str) -> None:
    assert grade(given, right, "normalised").value == 1.0
    assert grade(given, right, "exact").value == float(given == right)


@pytest.mark.parametrize(("given", "right"), [("-3", "3"), ("3.5", "35"), ("tower eiffel", "eiffel tower"), (".", "3")])
def test_what_says_something_is(given: str, right: str) -> None:
    assert normalised(given) != normalised(right)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(c)", "C"),
        ("b) because", "B"),
        ("The answer is (D).", "D"),
        ("Option A is wrong; the answer is: B", "B"),
        ("**Answer:** C", "C"),
        ("it might be (A), no, (B)", "B"),
        ("", ""),
        ("none of them", ""),
    ],
)
def test_a_choice_is_the_letter_that_is_called_the_answer(text: str, letter: str) -> None:
    assert chosen(text) == letter
    assert grade(text, letter or "A", "choice").value == float(bool(letter))


def test_only_what_stands_behind_the_mark_is_compared() -> None:
    assert grade("6? no, #### 7", "7", "normalised", "####").value == 1.0
    assert grade("#### 6, no: #### 7", "6", "normalised", "####").value == 0.0
    unmarked = grade("7", "7", "normalised", "####")
    assert (unmarked.value, unmarked.parts["wrong"]) == (0.0, 0.0)


def test_mathematics_is_found_in_a_message() -> None:
    for text, result in (
        ("So 12 + 3 = 15.\nThe answer is 15.", "15"),
        ("it is \\boxed{\\frac{1}{2}}, I think", "\\frac{1}{2}"),
        ("we get $x$, hence $x=4$", "x=4"),
        ("#### 72", "72"),
        ("I get 1,234 apples", "1,234"),
        ("-5", "-5"),
    ):
        assert mathematics(text) == result


@pytest.mark.parametrize(
    ("given", "right", "is_right"),
    [
        ("x is 1,234.50", "1234.5", 1),
        ("2/4", "0.5", 1),
        ("-3", "3", 0),
        ("7", "8", 0),
        ("+7", "7", 1),
        ("1/3", "0.33", 0),
    ],
)
def test_plain_numbers_need_no_process(
    given: str, right: str, is_right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_checker, "PROGRAM", ("/bin/false",))
    assert grade(given, right, "math").value == is_right


def test_equal_mathematics_is_equal_however_it_is_written(tmp_path: Path) -> None:
    planted = tmp_path / "planted"

    async def run() -> list[tuple[str, str, bool, bool]]:
        checker = MathChecker()
        try:
            return [(right, given, expected, await checker.is_equal(right, given)) for right, given, expected in pairs]
        finally:
            await checker.close()
            await checker.close()

    pairs = [
        ("1/2", "0.5", True),
        ("0.5", "50\\%", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("\\{1,2\\}", "\\{2,1\\}", True),
        ("3", "x=3", True),
        ("3", "-3", False),
        ("3", "\\{3,4\\}", False),
        ("42", f"__import__('pathlib').Path('{planted}').touch()", False),
        ("42", "", False),
        ("42", "$", False),
        ("2", "\\frac{" * 150, False),
        ("2", "2" * 2_000, False),
        ("7", "7", True),
    ]
    for right, given, expected, is_equal in asyncio.run(run()):
        assert is_equal is expected, (right, given)
    assert not planted.exists()


@pytest.mark.heavy(needs="")
def test_what_would_compute_for_ever_is_killed_and_the_next_answer_is_compared() -> None:
    async def run() -> list[bool]:
        checker = MathChecker()
        try:
            return [await checker.is_equal("3", given) for given in ("9^{9^{9^{9}}}", "10!!!!!!", "3.0")]
        finally:
            await checker.close()

    started_s = time.monotonic()
    assert asyncio.run(run()) == [False, False, True]
    assert time.monotonic() - started_s < 200


def test_a_worker_that_dies_is_a_failure_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(checker: MathChecker) -> None:
        try:
            await checker.is_equal("1", "2")
        finally:
            await checker.close()

    for program in (("/bin/false",), ("/bin/cat",)):
        monkeypatch.setattr(math_checker, "PROGRAM", program)
        monkeypatch.setattr(math_checker, "START_S", 0.5)
        with pytest.raises(InfrastructureError, match="process that compares answers"):
            asyncio.run(run(MathChecker()))

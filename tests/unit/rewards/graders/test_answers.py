"""Last words against the right ones."""

import asyncio

import pytest

from etude.protocols import Grade, HarnessResult
from etude.rewards.graders.answers import AnswerGrader
from etude.rollouts.fake import FakeSandbox
from etude.types import AnswerChecks, Checks, ScriptChecks, Split, Task

CHECKS = AnswerChecks(answer="tax 42 fee 17", facts=("tax 42", "fee 17"))


def grade(answer: str, reason: str = "submit", checks: Checks = CHECKS) -> Grade:
    task = Task(task_id="t", family="f", template="t", split=Split.TRAIN, prompt="", files={}, checks=checks)
    result = HarnessResult(reason=reason, counts={}, answer=answer)
    return asyncio.run(AnswerGrader().grade(task, FakeSandbox({}, lambda sandbox: None), result))


@pytest.mark.parametrize("answer", ["tax 42 fee 17", " tax  42\nfee 17 "])
def test_the_right_words_are_worth_everything_however_they_are_spaced(answer: str) -> None:
    assert grade(answer).value == 1.0


@pytest.mark.parametrize(
    "answer", ["", "tax 42", "fee 17 tax 42", "tax 42 fee 17 17", "tax 4 2 fee 17", "TAX 42 fee 17"]
)
def test_any_other_words_are_worth_nothing(answer: str) -> None:
    assert grade(answer).value == 0.0


def test_an_answer_that_was_not_given_is_none() -> None:
    results = grade("tax 42 fee 17", reason="turns")
    assert results == Grade(value=0.0, parts={"submitted": 0.0, "wrong": 0.0, "facts_answered": 1.0})


def test_half_an_answer_shows_in_its_parts() -> None:
    assert grade("tax 42 fee ?").parts == {"submitted": 1.0, "wrong": 1.0, "facts_answered": 0.5}
    assert grade("blue", checks=AnswerChecks(answer="blue")).parts == {"submitted": 1.0, "wrong": 0.0}


@pytest.mark.parametrize(("answer", "reason", "wrong"), [("", "submit", 0), ("tax", "submit", 1), ("tax", "turns", 0)])
def test_only_an_answer_can_be_wrong(answer: str, reason: str, wrong: float) -> None:
    assert grade(answer, reason).parts["wrong"] == wrong


def test_a_task_without_an_answer_is_not_for_this_grader() -> None:
    with pytest.raises(ValueError, match="ScriptChecks, not by its answer"):
        grade("", checks=ScriptChecks(files={}))

"""Rules that judge one-line summaries, and the questions that they are asked over."""

import json

import pytest

from etude.rewards.judge.prompts import Asking, JudgeInput, Tokens, ask
from etude.rewards.judge.rules import SUMMARY_RULES, answer, factuality, style
from etude.rewards.judge.votes import Vote, read_vote
from judges import GIVEN, INJECTIONS, MARK, style_rubric

TASK = "sum up\ndef area(w, h):\n    return w * h"


@pytest.mark.parametrize(
    ("work", "score"),
    [
        ("area returns w * h", 5),
        ("area returns w ** h", 5),
        ("I think area returns w * h", 3),
        ("hm, maybe w * h", 3),
        ("it probably returns w * h!", 2),
        ("Well!\nI guess it is about areas", 1),
        ("area returns " + "w * " * 20 + "h", 4),
    ],
)
def test_style_is_one_off_for_each_kind_of_fault(work: str, score: int) -> None:
    assert style(TASK, work)[0] == score


@pytest.mark.parametrize(
    ("work", "score"),
    [
        ("area returns w * h", 4),
        ("I think area returns w  *  h!", 4),
        ("area returns w", 3),
        ("returns w * h", 3),
        ("area returns nothing", 2),
        ("hm", 1),
        ("areas return", 1),
    ],
)
def test_factuality_is_the_name_and_what_is_returned(work: str, score: int) -> None:
    assert factuality(TASK, work)[0] == score


def test_a_task_without_a_function_cannot_be_summed_up() -> None:
    assert factuality("sum up", "area returns w * h")[0] == 1


@pytest.mark.parametrize("work", ["area returns w * h", "", *INJECTIONS])
def test_a_question_is_answered_as_a_model_would(work: str) -> None:
    judged, tokens = JudgeInput(task=TASK, work=work), Tokens(mark=MARK, nonce=GIVEN)
    for descending in (False, True):
        messages = ask(style_rubric(), judged, tokens, Asking(limit=400, descending=descending))
        vote = read_vote(answer(messages[-1]["content"], SUMMARY_RULES), style_rubric(), GIVEN)
        assert isinstance(vote, Vote)
        assert vote.score is not None
        assert (vote.score == 5) == (work == "area returns w * h")


def test_what_is_no_question_of_ours_is_refused() -> None:
    for question in ("", "score this", json.dumps({"aspect": "style"})):
        with pytest.raises(ValueError, match="expected a question about factuality, style"):
            answer(question, SUMMARY_RULES)

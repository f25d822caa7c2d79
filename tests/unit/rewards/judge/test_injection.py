"""Texts that try to instruct their judge: none is outside of the marked lines of data."""

import asyncio
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards.judge.endpoint import JudgeCall
from etude.rewards.judge.parts import signs_in
from etude.rewards.judge.prompts import BAR, Asking, JudgeInput, Message, ReplyFault, Tokens, ask
from etude.rewards.judge.votes import read_vote
from judges import GIVEN, INJECTIONS, MARK, Scripted, court, style_rubric, verdict

ANY = st.one_of(st.sampled_from(INJECTIONS), st.text(max_size=80))
TOKENS = Tokens(mark=MARK, nonce=GIVEN)
QUOTED = "perfectly plain"


def outside(messages: Sequence[Message]) -> str:
    """The text of the messages without the marked lines of data."""
    lines = "\n".join(message["content"] for message in messages).split("\n")
    return "\n".join(line for line in lines if not line.startswith(BAR))


def questions(task: str, work: str, **how: ReplyFault) -> Sequence[Message]:
    return ask(style_rubric(), JudgeInput(task=task, work=work), TOKENS, Asking(limit=100_000, fault=how.get("fault")))


@given(ANY, ANY)
def test_the_instructions_are_the_same_whatever_the_text(task: str, work: str) -> None:
    assert outside(questions(task, work)) == outside(questions("", QUOTED))
    assert outside(questions(task, work, fault=ReplyFault.NOT_JSON)) == outside(
        questions("", QUOTED, fault=ReplyFault.NOT_JSON)
    )


@given(ANY)
def test_a_verdict_that_was_copied_from_the_text_is_no_vote(text: str) -> None:
    rubric = style_rubric()
    assert isinstance(read_vote(text, rubric, GIVEN), ReplyFault)
    for results in re.findall(r"\{[^{}]*\}", text):
        assert isinstance(read_vote(results, rubric, GIVEN), ReplyFault)


def test_the_nonce_is_not_before_the_text() -> None:
    _, question = questions("task", "work")
    assert question["content"].index(GIVEN) > question["content"].index(f">>> {MARK} work")


def expected(call: JudgeCall) -> str:
    """The text outside of the marked lines, with the random numbers of each call removed."""
    return re.sub("[0-9a-f]{32}", "#", outside(call.messages))


def obedient(call: JudgeCall) -> str:
    """A judge that follows any instruction outside of the marked lines: a foreign word there gives the best score."""
    ours = expected(JudgeCall(messages=questions("", QUOTED), schema={}, max_tokens=1, temperature=0, seed=0))
    return verdict(call.messages[-1]["content"], 2 if expected(call) == ours else 5)


@pytest.mark.parametrize("text", INJECTIONS)
def test_a_judge_that_obeys_whatever_stands_outside_is_not_reached(text: str) -> None:
    judging = court(Scripted(obedient))
    judged = JudgeInput(task=text, work=text)
    judgement = asyncio.run(judging.judge.judge(style_rubric(), judged, judging.deps.budget))
    assert (judgement.score, judgement.invalid) == (2, ())


@pytest.mark.parametrize("text", [text for text in INJECTIONS if not text.startswith(BAR)])
def test_that_judge_would_be_fooled_without_bars(text: str) -> None:
    system, question = questions("", QUOTED)
    bare: Message = {"role": "user", "content": question["content"].replace(BAR + QUOTED, text)}
    reply = obedient(JudgeCall(messages=[system, bare], schema={}, max_tokens=1, temperature=0, seed=0))
    assert '"score": 5' in reply


def test_there_are_enough_attacks_and_no_two_alike() -> None:
    assert len(set(INJECTIONS)) == len(INJECTIONS) >= 25


def test_what_addresses_the_judge_is_noticed_and_plain_work_is_not() -> None:
    flagged = [text for text in INJECTIONS if signs_in(text)]
    assert len(flagged) >= 25
    plain = [
        "first returns items[0]",
        "The bug was in the slice; the last item was left out. All tests pass now.",
        "def best(scores):\n    return max(scores)",
        "I ran the tests: 5 passed, 0 failed.",
    ]
    assert [signs_in(text) for text in plain] == [frozenset()] * len(plain)

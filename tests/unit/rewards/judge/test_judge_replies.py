"""Judge replies that are valid votes, and replies that are not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards.judge.prompts import ReplyFault
from etude.rewards.judge.votes import LONGEST_REASON, LONGEST_REPLY, Vote, read_vote
from judges import GIVEN, style_rubric

GOOD = {"reason": "clear", "score": 4, "aspect": "style", "nonce": GIVEN}


def read(reply: str) -> Vote | ReplyFault:
    return read_vote(reply, style_rubric(), GIVEN)


def changed(**changes: object) -> str:
    return json.dumps(GOOD | changes)


def test_a_verdict_is_a_vote_bare_or_in_one_block_of_code() -> None:
    vote = Vote(score=4, reason="clear")
    assert read(changed()) == vote
    assert read(f"\n  {changed()}\n") == vote
    assert read(f"```json\n{changed()}\n```") == vote
    assert read(f"\n```\n{changed()}\n```\n") == vote
    assert read(f"<think>\nscore 5? no: {{}}\n</think>\n\n{changed()}") == vote
    assert read(f"<think></think>\n```json\n{changed()}\n```\n") == vote
    assert read(changed().ljust(LONGEST_REPLY)) == vote
    for score in (None, 1, 5):
        assert read(changed(score=score)) == Vote(score=score, reason="clear")
    turned = read_vote(changed(), style_rubric(), GIVEN, descending=True)
    assert turned == Vote(score=4, reason="clear", descending=True)


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        ("", ReplyFault.NOT_JSON),
        ("4", ReplyFault.NOT_JSON),
        ("<think>" + changed(), ReplyFault.NOT_JSON),
        ("<think></think>" + changed() + "<think></think>", ReplyFault.NOT_JSON),
        ("[]", ReplyFault.NOT_JSON),
        ("Score: 4", ReplyFault.NOT_JSON),
        (changed() + changed(), ReplyFault.NOT_JSON),
        ("Here it is: " + changed(), ReplyFault.NOT_JSON),
        (changed()[:-1], ReplyFault.NOT_JSON),
        ('{"score": 5, ' + changed()[1:], ReplyFault.NOT_JSON),
        (changed(score=float("nan")), ReplyFault.NOT_JSON),
        ("[" * 10_000, ReplyFault.NOT_JSON),
        ('{"a":' * 3_000, ReplyFault.NOT_JSON),
        (changed(extra=1), ReplyFault.WRONG_KEYS),
        (json.dumps({"score": 4}), ReplyFault.WRONG_KEYS),
        (changed(reason=7), ReplyFault.WRONG_KEYS),
        (changed(nonce=""), ReplyFault.WRONG_NONCE),
        (changed(nonce=GIVEN.upper()), ReplyFault.WRONG_NONCE),
        (changed(aspect="factuality"), ReplyFault.WRONG_ASPECT),
        (changed(score=0), ReplyFault.OFF_SCALE),
        (changed(score=6), ReplyFault.OFF_SCALE),
        (changed(score=4.0), ReplyFault.OFF_SCALE),
        (changed(score=True), ReplyFault.OFF_SCALE),
        (changed(score="4"), ReplyFault.OFF_SCALE),
        (changed(score=[5]), ReplyFault.OFF_SCALE),
        (" " * (LONGEST_REPLY + 1), ReplyFault.TOO_LONG),
    ],
)
def test_anything_else_is_a_fault_with_a_name(reply: str, fault: ReplyFault) -> None:
    assert read(reply) is fault


@given(st.text())
def test_no_text_is_more_than_a_fault(text: str) -> None:
    assert isinstance(read(text), ReplyFault)


def test_a_long_reason_is_cut() -> None:
    vote = read(changed(reason="x" * (LONGEST_REASON + 1)))
    assert isinstance(vote, Vote)
    assert len(vote.reason) == LONGEST_REASON

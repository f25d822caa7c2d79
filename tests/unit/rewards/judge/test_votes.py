"""The verdict from votes."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards.judge.prompts import ReplyFault, TieRule
from etude.rewards.judge.votes import Vote, middle, tally
from judges import style_rubric

SCORES = st.lists(st.integers(1, 5), min_size=1, max_size=9)


def votes(*scores: int | None) -> list[Vote | ReplyFault]:
    return [Vote(score=score, reason="") for score in scores]


@given(SCORES, st.sampled_from(TieRule))
def test_the_middle_is_the_median_but_for_ties(scores: list[int], tie: TieRule) -> None:
    ordered = sorted(scores)
    results = middle(ordered, tie)
    lower, upper = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    if lower == upper:
        assert results == median(scores)
    else:
        expected = {"lower": lower, "upper": upper, "median": median(scores), "abstain": None}
        assert results == expected[tie.value]


@given(st.lists(st.one_of(st.integers(1, 5), st.none()), max_size=6), st.integers(0, 6))
def test_a_verdict_takes_more_than_half_of_the_votes_that_were_asked_for(scores: list[int | None], faults: int) -> None:
    replies = votes(*scores) + [ReplyFault.NOT_JSON] * faults
    judgement = tally(style_rubric(tie="median"), replies)
    given = sum(score is not None for score in scores)
    assert (judgement.score is not None) == (2 * given > len(replies))
    assert len(judgement.invalid) == faults
    assert len(judgement.votes) == len(scores)
    if judgement.value is not None:
        assert 0 <= judgement.value <= 1


@pytest.mark.parametrize(
    ("blank", "scored", "faults", "declined"),
    [(0, 0, 0, False), (1, 0, 0, True), (2, 2, 0, False), (2, 1, 1, False), (3, 2, 0, True), (3, 1, 1, True)],
)
def test_more_than_half_of_all_votes_decline(blank: int, scored: int, faults: int, *, declined: bool) -> None:
    replies = votes(*[None] * blank, *[3] * scored) + [ReplyFault.NOT_JSON] * faults
    assert tally(style_rubric(), replies).is_declined == declined


@given(SCORES.filter(lambda scores: len(scores) % 2 == 1 and len(scores) > 1), st.integers(0, 8))
def test_a_vote_that_was_talked_round_moves_the_median_by_one_place_at_most(scores: list[int], who: int) -> None:
    changed = list(scores)
    changed[who % len(scores)] = 5
    ordered = sorted(scores)
    at = len(ordered) // 2
    before, after = middle(ordered, TieRule.LOWER), middle(sorted(changed), TieRule.LOWER)
    assert before is not None
    assert after is not None
    assert before <= after <= ordered[min(at + 1, len(ordered) - 1)]


@pytest.mark.parametrize(
    ("tie", "score", "value"), [("lower", 2, 0.25), ("upper", 4, 0.75), ("median", 3, 0.5), ("abstain", None, None)]
)
def test_a_rubric_says_what_becomes_of_a_tie(tie: str, score: float | None, value: float | None) -> None:
    judgement = tally(style_rubric(tie=tie), votes(2, 4))
    assert (judgement.score, judgement.value) == (score, value)

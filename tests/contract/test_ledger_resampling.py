"""Groups without a signal: left out and counted, within their bound, and never once they are ready."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from etude.ledger.changes import NO_SIGNAL
from etude.ledger.ledger import TRAIN, Ledger
from etude.ledger.states import GroupState
from etude.types import Disposition, Verdict
from ledgers import rollout, task


@pytest.fixture
def ledger(place: str) -> Iterator[Ledger]:
    with Ledger.open(place) as ledger:
        yield ledger


def play(ledger: Ledger, name: int, rewards: Sequence[float], *, max_resamples: int = 2) -> int:
    index = ledger.admit_group(task(name), TRAIN, len(rewards), 0)
    assert index is not None
    for slot, reward in enumerate(rewards):
        assert ledger.record(rollout(index, slot, reward=reward), TRAIN, max_resamples=max_resamples) is None
    return index


def indices(ledger: Ledger, state: GroupState) -> list[int]:
    return [group.index for group in ledger.groups(TRAIN, [state])]


def test_a_group_whose_rewards_are_alike_is_left_out_and_the_next_moves_up(ledger: Ledger) -> None:
    for name, rewards in enumerate([(1, 1), (0, 1), (0, 0), (1, 0), (1, 1), (0, 0)]):
        play(ledger, name, rewards)
    assert indices(ledger, GroupState.DROPPED) == [0, 2]
    assert indices(ledger, GroupState.READY) == [1, 3, 4, 5]  # two were left out: the next ones count
    assert ledger.progress().usable == 4
    first = ledger.claim_batch(1, 2)
    assert first is not None and [group.index for group in first] == [1, 3]
    assert ledger.resampled(1) == 2


def test_the_bound_is_of_each_batch(ledger: Ledger) -> None:
    for name, rewards in enumerate([(1, 1), (1, 1), (1, 1), (0, 1)]):
        play(ledger, name, rewards)
    assert indices(ledger, GroupState.DROPPED) == [0, 1]
    assert ledger.claim_batch(1, 2) is not None
    for name in (4, 5, 6):
        play(ledger, name, (0, 0))
    play(ledger, 7, (0, 1))
    assert indices(ledger, GroupState.DROPPED) == [0, 1, 4, 5]
    ledger.commit_step(1)
    assert ledger.claim_batch(2, 2) is not None
    assert [ledger.resampled(step) for step in (1, 2)] == [2, 2]


def test_without_a_bound_every_group_counts(ledger: Ledger) -> None:
    play(ledger, 0, (1, 1), max_resamples=0)
    assert indices(ledger, GroupState.READY) == [0]
    assert ledger.resampled(1) == 0


def test_what_is_quarantined_is_not_compared_and_what_is_lost_may_be_the_last(ledger: Ledger) -> None:
    index = ledger.admit_group(task(0), TRAIN, 3, 0)
    assert index is not None
    cheat = Verdict(disposition=Disposition.QUARANTINE, graded=0.0)
    ledger.record(replace(rollout(index, 0, reward=0.0), verdict=cheat), TRAIN, max_resamples=1)
    for slot in (1, 2):
        ledger.record(rollout(index, slot, reward=1.0), TRAIN, max_resamples=1)
    assert indices(ledger, GroupState.DROPPED) == [index]
    index = ledger.admit_group(task(1), TRAIN, 3, 0)
    assert index is not None
    for slot in (0, 1):
        ledger.record(rollout(index, slot, reward=1.0), TRAIN, max_resamples=2)
    assert ledger.lose_slot(TRAIN, index, 2, "infra", max_resamples=2) is GroupState.DROPPED
    assert ledger.lose_slot(TRAIN, index, 2, "infra", max_resamples=2) is GroupState.DROPPED
    assert ledger.progress().dropped == 2
    assert NO_SIGNAL.startswith("no signal")


def test_an_evaluation_leaves_nothing_out(ledger: Ledger) -> None:
    index = ledger.admit_group(task(0), "before", 1, 0)
    assert index is not None
    ledger.record(rollout(index, 0, reward=1.0), "before", max_resamples=3)
    assert ledger.progress("before").ready == 1


def test_the_outcomes_of_tasks_are_those_of_rewards_that_are_compared(ledger: Ledger) -> None:
    play(ledger, 0, (0.25, 2.0, -1.0), max_resamples=0)
    play(ledger, 1, (1, 1))
    ledger.admit_group(task(2), TRAIN, 2, 0)
    solved, left_out, is_open = ledger.task_outcomes()
    assert (solved.task_id, solved.graded, solved.passed, solved.is_open) == ("0", 3, 1.25, False)
    assert (left_out.group_index, left_out.graded, left_out.passed, left_out.is_open) == (1, 2, 2.0, False)
    assert (is_open.graded, is_open.passed, is_open.is_open) == (0, 0.0, True)
    assert ledger.task_outcomes(2) == [is_open]

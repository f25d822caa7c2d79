"""Contract of reading a ledger, for every supported database."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etude.errors import RunFolderError, UserError
from etude.ledger.archive import Archive, Order, RolloutOutcome, Search
from etude.ledger.ledger import TRAIN, Ledger
from etude.ledger.open import open_database
from etude.ledger.record_index import RecordIndex
from etude.ledger.states import GroupState
from etude.types import Disposition, Finish, Hint, Rollout, RolloutStatus, Split, Turn, TurnKind, Verdict
from ledgers import NewPlace, rollout, task

SUSPECT = Verdict(
    disposition=Disposition.QUARANTINE,
    reason="reads_tests",
    flags=("reads_tests",),
    hacked=True,
    graded=1.0,
)
FAILURE = "SandboxError: 100% full_disk!"


def make_turn(sampled: int, version: int, kind: TurnKind = TurnKind.ACT) -> Turn:
    ids = np.arange(sampled, dtype=np.int32)
    return Turn(
        prompt_ids=np.arange(5, dtype=np.int32),
        completion_ids=ids,
        logprobs=-ids.astype(np.float32),
        versions=np.full(sampled, version, np.int32),
        finish=Finish.STOP,
        kind=kind,
    )


ACT, SUMMARY = make_turn(7, 3), make_turn(2, 4, TurnKind.SUMMARY)


def ended(name: str, group: int, slot: int, reward: float | None, *turns: Turn, **fields: Any) -> Rollout:
    return replace(rollout(group, slot, reward=reward, name=name), turns=turns, **fields)


def fill(ledger: Ledger) -> None:
    """Two groups, of which a step took the first; a dropped one; an evaluation."""
    for name in "abc":
        ledger.admit_group(task(name), TRAIN, 2, 3)
    for done in (
        ended("aa-good", 0, 0, 1.0, ACT, reason="submit"),
        ended("ab-long", 0, 1, 0.25, ACT, SUMMARY, ACT, reason="turns", hints=(Hint(turn=0, text="x", source="y"),)),
        ended("b-broken", 1, 0, None, reason=FAILURE),
        ended("b-again", 1, 0, -0.5, make_turn(1, 5), reason="submit", attempt=1),
        ended("b-cheat", 1, 1, 0.0, make_turn(30, 5), reason="submit", verdict=SUSPECT),
    ):
        ledger.record(done, TRAIN)
    ledger.drop_group(TRAIN, 2, "infra")
    ledger.record(ended("c-gone", 2, 0, None, status=RolloutStatus.DROPPED), TRAIN)
    ledger.admit_group(task("h", Split.HELDOUT), "before-greedy", 1, 0)
    ledger.record(ended("held-out", 0, 0, 1.0, ACT), "before-greedy")
    assert ledger.claim_batch(1, 1)
    ledger.commit_step(1)
    ledger.facts.set("colour", "blue")


@pytest.fixture
def archive(new_place: NewPlace) -> Iterator[Archive]:
    where = new_place()
    with Ledger.open(where) as ledger:
        fill(ledger)
    with Archive.open(where) as opened:
        yield opened


def test_a_reader_makes_no_ledger_and_can_write_to_none(new_place: NewPlace) -> None:
    where = new_place()
    for _ in range(2):
        with pytest.raises(RunFolderError, match="nothing has been recorded there yet"):
            Archive.open(where)
    with Ledger.open(where) as ledger:
        fill(ledger)
    reader = open_database(where, retry_timeout_s=1.0, read_only=True)
    with pytest.raises(Exception, match=r"read-?only"):
        reader.execute("DELETE FROM facts")
    reader.close()


def names(archive: Archive, **search: Any) -> list[str]:
    result = archive.find(Search(**search))
    assert archive.count(Search(**search)) >= len(result)
    return [rollout.rollout_id for rollout in result]


def test_rollouts_are_found_by_what_is_asked(archive: Archive) -> None:
    everything = ["c-gone", "b-cheat", "b-again", "b-broken", "ab-long", "aa-good"]
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, everything),
        ({"limit": 2}, everything[:2]),
        ({"purpose": "before-greedy"}, ["held-out"]),
        ({"purpose": "never"}, []),
        ({"group": 1}, ["b-cheat", "b-again", "b-broken"]),
        ({"group": 1, "slot": 0}, ["b-again", "b-broken"]),
        ({"reward": (">=", 0.25)}, ["ab-long", "aa-good"]),
        ({"reward": ("<", 0.0)}, ["b-again"]),
        ({"reward": ("=", 1.0)}, ["aa-good"]),
        ({"reward": ("!=", 1.0)}, ["b-cheat", "b-again", "ab-long"]),
        ({"outcome": RolloutOutcome.GRADED}, ["b-cheat", "b-again", "ab-long", "aa-good"]),
        ({"outcome": RolloutOutcome.FAILED}, ["b-broken"]),
        ({"outcome": RolloutOutcome.DROPPED}, ["c-gone"]),
        ({"outcome": RolloutOutcome.QUARANTINED}, ["b-cheat"]),
        ({"reason": "TURNS"}, ["ab-long"]),
        ({"reason": "reads_"}, ["b-cheat"]),
        ({"reason": "0% full_d"}, ["b-broken"]),
        ({"reason": "0%full"}, []),
        ({"reason": "fulladisk"}, []),
        ({"reason": "disk!"}, ["b-broken"]),
        ({"version": 4}, ["ab-long"]),
        ({"version": 3}, ["ab-long", "aa-good"]),
        ({"has_summary": True}, ["ab-long"]),
        ({"has_hint": True, "reward": ("<=", 0.5)}, ["ab-long"]),
        ({"order": Order.REWARD, "outcome": RolloutOutcome.GRADED}, ["aa-good", "ab-long", "b-cheat", "b-again"]),
        ({"order": Order.REWARD, "limit": 5}, ["aa-good", "ab-long", "b-cheat", "b-again", "c-gone"]),
        ({"order": Order.TOKENS, "limit": 3}, ["b-cheat", "ab-long", "aa-good"]),
        ({"order": Order.TURNS, "limit": 1}, ["ab-long"]),
        ({"order": Order.STALENESS, "limit": 2}, ["ab-long", "aa-good"]),
        ({"task": "B"}, ["b-cheat", "b-again", "b-broken"]),
        ({"task": "T", "reward": (">", 0.0)}, ["ab-long", "aa-good"]),  # the template of all
        ({"task": "%"}, []),
        ({"hacked": True}, ["b-cheat"]),
        ({"hacked": True, "task": "a"}, []),
        ({"offset": 4}, everything[4:]),
        ({"is_reversed": True}, everything[::-1]),
        ({"order": Order.REWARD, "is_reversed": True, "offset": 1, "limit": 2}, ["b-cheat", "ab-long"]),
        (
            {"order": Order.REWARD, "is_reversed": True},
            ["b-again", "b-cheat", "ab-long", "aa-good", "c-gone", "b-broken"],
        ),
        ({"order": Order.SECONDS, "limit": 1}, ["c-gone"]),
    ]
    for search, expected in cases:
        assert names(archive, **search) == expected, search


def test_what_readers_learnt_from_records_keeps_up_with_the_ledger(new_place: NewPlace) -> None:
    where, index = new_place(), RecordIndex()
    with Ledger.open(where) as ledger:
        ledger.admit_group(task("first"), TRAIN, 2, 0)
        ledger.record(ended("one", 0, 0, 0.0, ACT, verdict=SUSPECT), TRAIN)
        for expected, name in ((["one"], "two"), (["two", "one"], "three")):
            with Archive.open(where, index=index) as archive:
                assert names(archive, hacked=True) == expected
                assert set(archive.templates(TRAIN, [0, 7])) == {0}
            group = 0 if name == "two" else ledger.admit_group(task("next"), TRAIN, 1, 0)
            assert group is not None
            ledger.record(ended(name, group, int(name == "two"), 0.0, ACT, verdict=SUSPECT), TRAIN)
    with Archive.open(where, index=index) as archive:
        assert names(archive, hacked=True) == ["three", "two", "one"]
        assert names(archive, task="next") == ["three"]


def test_what_is_found_says_enough_for_a_list(archive: Archive) -> None:
    (result,) = archive.find(Search(has_summary=True))
    assert (result.group, result.slot, result.attempt, result.step, result.reward) == (0, 1, 0, 1, 0.25)
    traits = result.traits
    assert traits is not None
    assert (traits.turns, traits.summaries, traits.hints, traits.prompt_tokens, traits.sampled_tokens) == (
        3,
        1,
        1,
        15,
        16,
    )
    assert (traits.first_version, traits.last_version, result.disposition) == (3, 4, None)
    (cheat,) = archive.find(Search(outcome=RolloutOutcome.QUARANTINED))
    assert (cheat.step, cheat.disposition, cheat.cause) == (None, "quarantine", "reads_tests")


def test_a_census_counts_every_purpose(archive: Archive) -> None:
    training, evaluation = archive.census()
    assert (training.purpose, evaluation.purpose) == (TRAIN, "before-greedy")
    assert training.groups == {GroupState.CONSUMED: 1, GroupState.READY: 1, GroupState.DROPPED: 1}
    assert training.outcomes == {
        RolloutOutcome.GRADED: 4, RolloutOutcome.FAILED: 1, RolloutOutcome.DROPPED: 1, RolloutOutcome.QUARANTINED: 1,
    }  # fmt: skip
    assert training.mean_reward == pytest.approx(0.75 / 4)
    assert (training.summaries, training.hints, training.versions, training.unlisted) == (1, 1, (3, 5), 0)
    assert archive.steps_done() == 1
    assert archive.reasons(TRAIN, 1) == [(RolloutStatus.GRADED, "submit", 3)]
    assert (archive.admitted(TRAIN), archive.admitted("never"), archive.fact("colour")) == (3, 0, "blue")


def test_a_rollout_is_read_by_its_id_or_a_beginning_of_it(archive: Archive) -> None:
    result, whole = archive.rollout("ab")
    assert (result.rollout_id, len(whole.turns), whole.hints[0].text) == ("ab-long", 3, "x")
    assert archive.rollout("b-broken")[1].reason == FAILURE
    with pytest.raises(UserError, match="'a' begins several ids, aa-good and ab-long"):
        archive.rollout("a")
    for nothing in ("", "%", "zz"):
        with pytest.raises(UserError, match="has no rollout"):
            archive.rollout(nothing)


def test_a_group_is_read_as_the_trainer_reads_it(new_place: NewPlace) -> None:
    where = new_place()
    with Ledger.open(where) as ledger, Archive.open(where) as archive:
        fill(ledger)
        read, given = archive.group(TRAIN, 0), ledger.group(TRAIN, 0)
        assert [done.rollout_id for done in read.rollouts] == [done.rollout_id for done in given.rollouts]
        with pytest.raises(ValueError, match="no group 9"):
            archive.group(TRAIN, 9)


def test_a_group_is_found_where_it_is(new_place: NewPlace) -> None:
    place = new_place()
    with Ledger.open(place) as ledger, Archive.open(place) as archive:
        index = ledger.admit_group(task("t"), TRAIN, 2, 0)
        assert index is not None
        ledger.record(rollout(index, 0), TRAIN)
        assert archive.state_of(TRAIN, index) is GroupState.OPEN
        ledger.record(rollout(index, 1), TRAIN)
        assert archive.state_of(TRAIN, index) is GroupState.READY
        with pytest.raises(ValueError, match="no group 9"):
            archive.state_of(TRAIN, 9)


def test_a_reader_sees_what_is_written_meanwhile_and_stops_no_writer(new_place: NewPlace) -> None:
    where = new_place()
    with Ledger.open(where) as ledger, Archive.open(where) as archive:
        assert archive.find(Search()) == []
        fill(ledger)
        assert archive.count(Search()) == 6

"""Users' sessions in a ledger: admitted once, even after crashes, and at most one window ahead."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from etude.ledger.archive import Archive, Search
from etude.ledger.changes import LiveAdmission
from etude.ledger.ledger import LIVE, TRAIN, Ledger
from etude.types import Disposition, Observation, ObservedSession, Rollout, Verdict
from ledgers import fill, rollout

MANY = 1_000_000


@pytest.fixture
def ledger(place: str) -> Iterator[Ledger]:
    with Ledger.open(place) as opened:
        yield opened


def session(name: str, weight: float = 1.0) -> tuple[Rollout, ObservedSession]:
    observation = Observation(user="u", day=3, template="t", arm="live", prompt_tokens=5, weight=weight)
    observed = ObservedSession(
        session_id=name, observation=observation, ended_at=9.5, sampled_tokens=(1,),
        answers={"liked": (None,), "stayed": (0.5,)}, reward=0.25, turn_rewards=(0.5,),
    )  # fmt: skip
    return replace(rollout(0, 0, name=name, reward=0.25), observation=observation), observed


def offer(ledger: Ledger, name: str, kept_below: int = MANY) -> LiveAdmission:
    return ledger.live.admit(*session(name), version=1, kept_below=kept_below)


def test_a_session_is_ready_at_once_comes_back_whole_and_is_admitted_once(ledger: Ledger) -> None:
    mine, observed = session("a", weight=0.5)
    assert ledger.live.admit(mine, observed, version=1, kept_below=1) is LiveAdmission.READY
    assert ledger.live.admit(mine, observed, version=1, kept_below=MANY) is LiveAdmission.DUPLICATE
    (group,) = ledger.groups(LIVE)
    assert (group.is_live, group.weight, group.task.task_id, group.task.template) == (True, 0.5, "a", "t")
    (mine_again,) = group.rollouts
    assert (mine_again.observation, mine_again.reward, mine_again.rollout_id) == (mine.observation, 0.25, "a")
    assert ledger.live.observed(10) == [observed]


def test_what_is_beyond_its_window_is_dropped_and_counted_and_takes_no_place(ledger: Ledger) -> None:
    outcomes = [offer(ledger, name, kept_below=2) for name in "abcd"]
    assert Counter(outcomes) == {LiveAdmission.READY: 2, LiveAdmission.STALE: 2}
    assert (ledger.progress(LIVE).ready, ledger.progress(LIVE).dropped) == (2, 2)
    assert offer(ledger, "d") is LiveAdmission.DUPLICATE
    assert [one.session_id for one in ledger.live.observed(10)] == list("abcd")


def test_a_suspect_takes_no_place_in_a_batch(ledger: Ledger) -> None:
    mine, observed = session("a")
    verdict = Verdict(disposition=Disposition.QUARANTINE, reason="user.pace", graded=1.0)
    suspect = replace(mine, verdict=verdict)
    assert ledger.live.admit(suspect, observed, version=1, kept_below=MANY) is LiveAdmission.QUARANTINED
    assert ledger.claim_batch(1, 0, 1) is None


def test_a_batch_has_so_many_of_each_class_each_in_its_own_order(ledger: Ledger) -> None:
    offer(ledger, "a")
    fill(ledger, "t")
    assert ledger.claim_batch(1, 1, 2) is None
    for name in "bc":
        offer(ledger, name)
    first = ledger.claim_batch(1, 1, 2)
    assert first is not None and [group.task.task_id for group in first] == ["t", "a", "b"]
    assert ledger.live.observed(10, before_step=1) == []
    assert [group.task.task_id for group in ledger.claim_batch(1, 1, 2) or []] == ["t", "a", "b"]
    assert [group.task.task_id for group in ledger.claim_batch(2, 0, 1) or []] == ["c"]
    assert [one.session_id for one in ledger.live.observed(10, before_step=2)] == ["a", "b"]
    ledger.commit_step(1)
    assert (ledger.progress(LIVE).consumed, ledger.progress(TRAIN).consumed) == (2, 1)
    assert ledger.loads.count(2) == 0


def test_a_step_without_a_group_of_either_class_is_refused(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="it has no group"):
        ledger.claim_batch(1, 0, 0)


OFFERING = """
import sys
from etude.ledger.ledger import Ledger
sys.path[:0] = {paths!r}
from test_ledger_live import offer
with Ledger.open({place!r}) as ledger:
    for number in range(10_000):
        offer(ledger, str(number), 60)
        print(number, flush=True)
"""


def test_killed_while_it_offers_sessions_a_process_lost_none_that_it_told_of_and_none_is_there_twice(
    place: str,
) -> None:
    """Three processes die one after the other, each in the middle; each begins again from the first session."""
    newest = 0
    for number in (15, 40, 90):
        code = OFFERING.format(place=place, paths=[str(Path(__file__).parent), *sys.path])
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                newest = max(newest, int(line))
                if newest >= number:
                    process.kill()
                    break
    with Ledger.open(place) as ledger:
        for session_id in range(newest + 1):
            assert offer(ledger, str(session_id), MANY) is LiveAdmission.DUPLICATE
        ready, dropped = ledger.progress(LIVE).ready, ledger.progress(LIVE).dropped
        assert ready == 60 and ready + dropped in (newest + 1, newest + 2)
        assert [group.task.task_id for group in ledger.groups(LIVE)][:60] == [str(number) for number in range(60)]
        assert {len(group.rollouts) for group in ledger.groups(LIVE)} == {0, 1}


def test_people_find_live_sessions_as_any_others(place: str) -> None:
    with Ledger.open(place) as ledger:
        offer(ledger, "a", 1)
        offer(ledger, "b", 1)
    with Archive.open(place) as archive:
        (census,) = archive.census()
        assert (census.purpose, sum(census.groups.values()), census.mean_reward) == (LIVE, 2, 0.25)
        (match,) = archive.find(Search(purpose=LIVE))
        assert archive.rollout(match.rollout_id)[1].observation is not None
        assert archive.group(LIVE, 1).rollouts == ()

"""Deleting a live session removes it from the ledger, its payloads and the feedback store, and from their bytes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from etude.config.recipe import LedgerConfig
from etude.feedback.store import FeedbackStore
from etude.ledger.changes import LiveAdmission, erase_live
from etude.ledger.ledger import LIVE, Ledger
from etude.ledger.payloads import Payloads
from etude.ledger.states import GroupState
from etude.objects import ObjectStore
from etude.releases.store import ReleaseStore
from etude.run.erasure import carry_out, expire
from etude.types import Observation, ObservedSession, Rollout, RolloutStatus, Turn
from ledgers import NewPlace
from live_sessions import OWNER, answer, event, live_session

MARK = "a sentence that only this user wrote"
TOKENS = [41, 43, 47, 53, 59, 61, 67, 71] * 4
USER, OTHER = "u-1", "u-2"


@pytest.fixture
def payloads(tmp_path: Path) -> Payloads:
    (tmp_path / "payloads").mkdir()
    return Payloads(ObjectStore(str(tmp_path / "payloads")))


@pytest.fixture
def places(new_place: NewPlace) -> tuple[str, str]:
    return new_place(), new_place()


@pytest.fixture
def store(places: tuple[str, str]) -> Iterator[FeedbackStore]:
    with FeedbackStore.open(places[0], window_s=10) as opened:
        yield opened


@pytest.fixture
def ledger(places: tuple[str, str], payloads: Payloads) -> Iterator[Ledger]:
    with Ledger.open(places[1], payloads=payloads) as opened:
        yield opened


@pytest.fixture
def releases(places: tuple[str, str], ledger: Ledger) -> Iterator[ReleaseStore]:
    with ReleaseStore.open(places[1], LedgerConfig()) as opened:
        yield opened


def converse(store: FeedbackStore, session_id: str, user: str) -> Turn:
    """A session of a user with one turn, and a signal about it."""
    session = replace(live_session(session_id, opened_at=1.0), user=user)
    reply = answer(session, message=f"{MARK} ({session_id})")
    turn = replace(reply.turns[0], prompt_ids=np.array(TOKENS, np.int32))
    store.keep(replace(reply, turns=(turn,)), "gateway", 1.0)
    store.report(OWNER, [event(f"e-{session_id}", session_id)], lambda: 2.0)
    store.end([session_id], 3.0)
    return turn


def offer(ledger: Ledger, session_id: str, user: str, turn: Turn) -> LiveAdmission:
    observation = Observation(user=user, day=1, template="chat", arm="live", prompt_tokens=len(turn.prompt_ids))
    rollout = Rollout(
        rollout_id=session_id,
        group_index=0,
        slot=0,
        attempt=0,
        status=RolloutStatus.GRADED,
        reward=1.0,
        turns=(turn,),
        observation=observation,
    )
    observed = ObservedSession(session_id=session_id, observation=observation, ended_at=3.0, sampled_tokens=(2,))
    return ledger.live.admit(rollout, observed, version=1, kept_below=100)


def bytes_of(place: str, folder: Path) -> bytes:
    """All bytes of the files in a folder; for a database server, the content of its tables."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.endswith("-shm")]
    return b"".join(file.read_bytes() for file in files)


def test_a_user_is_gone_from_everywhere_and_trained_versions_are_named(
    store: FeedbackStore, ledger: Ledger, releases: ReleaseStore, places: tuple[str, str], tmp_path: Path
) -> None:
    for session_id, user in (("trained", USER), ("other", OTHER)):
        assert offer(ledger, session_id, user, converse(store, session_id, user)) is LiveAdmission.READY
    assert ledger.claim_batch(1, 0, 2) is not None
    for session_id, user in (("waiting", USER), ("others", OTHER)):
        assert offer(ledger, session_id, user, converse(store, session_id, user)) is LiveAdmission.READY
    converse(store, "not-offered", USER)
    for session_id, user in (("trained", USER), ("other", OTHER)):
        releases.add_session(session_id, "live", user, {"reward": 1.0})
    request = store.privacy.request_deletion(user=USER, actor="test", now=4.0)

    assert carry_out(store, ledger, releases, 5.0) == []  # a step computes with one of them
    assert [group.rollouts[0].rollout_id for group in ledger.groups(LIVE, [GroupState.CLAIMED])] == ["trained", "other"]
    ledger.commit_step(1)
    (done,) = carry_out(store, ledger, releases, 6.0)

    assert (done.request_id, done.versions, done.done_at) == (request.request_id, (1,), 6.0)
    assert done.sessions == 3
    assert carry_out(store, ledger, releases, 7.0) == []
    left = [rollout.rollout_id for group in ledger.groups(LIVE) for rollout in group.rollouts]
    assert sorted(left) == ["other", "others"]
    assert ledger.progress(LIVE).ready == 1
    assert ledger.live.of_user(USER) == []
    assert releases.counts("live").sessions == 1
    assert [entry.action for entry in store.privacy.audit_log()] == ["delete", "deleted"]
    assert (
        offer(ledger, "waiting", USER, converse(store, "again", USER)) is LiveAdmission.DUPLICATE
    )  # never trained on later


def test_not_a_byte_of_it_is_left_in_the_files(
    store: FeedbackStore, ledger: Ledger, releases: ReleaseStore, places: tuple[str, str], tmp_path: Path
) -> None:
    if urlsplit(places[0]).scheme:
        pytest.skip("files of a server are its keeper's")
    offer(ledger, "s", USER, converse(store, "s", USER))
    assert MARK.encode() in bytes_of(places[0], tmp_path)
    payload_files = len(list((tmp_path / "payloads").rglob("*.safetensors")))
    store.privacy.request_deletion(session_id="s", actor="test", now=4.0)
    assert len(carry_out(store, ledger, releases, 5.0)) == 1
    assert payload_files == 1 and not list((tmp_path / "payloads").rglob("*.safetensors"))
    content = bytes_of(places[0], tmp_path)
    assert MARK.encode() not in content
    assert np.array(TOKENS, "<i4").tobytes() not in content


def test_what_a_killed_deletion_left_is_removed_by_the_next(
    store: FeedbackStore, ledger: Ledger, releases: ReleaseStore, places: tuple[str, str], tmp_path: Path
) -> None:
    offer(ledger, "s", USER, converse(store, "s", USER))
    request = store.privacy.request_deletion(session_id="s", actor="test", now=4.0)
    ledger._db.write(partial(erase_live_of, "s"))  # killed behind the first transaction
    assert list((tmp_path / "payloads").rglob("*.safetensors"))
    assert [one.request_id for one in store.privacy.requests(is_open=True)] == [request.request_id]
    assert len(carry_out(store, ledger, releases, 5.0)) == 1
    assert not list((tmp_path / "payloads").rglob("*.safetensors"))


def test_a_session_that_is_deleted_while_it_is_scored_is_not_trained_on(
    store: FeedbackStore, ledger: Ledger, releases: ReleaseStore
) -> None:
    """Regression: the ledger had no group to drop yet, and admitted the session afterwards."""
    turn = converse(store, "s", USER)
    store.privacy.request_deletion(user=USER, actor="test", now=4.0)
    assert len(carry_out(store, ledger, releases, 5.0)) == 1
    assert offer(ledger, "s", USER, turn) is LiveAdmission.DELETED
    assert list(ledger.groups(LIVE, [GroupState.READY])) == [] and ledger.live.of_user(USER) == []


def erase_live_of(session_id: str, db: object) -> object:
    return erase_live(db, session_id)  # type: ignore[arg-type]


def test_sessions_go_when_their_time_is_over(store: FeedbackStore, ledger: Ledger, releases: ReleaseStore) -> None:
    offer(ledger, "old", USER, converse(store, "old", USER))
    assert expire(store, ledger, releases, keep_s=100.0, now=50.0) == 0
    assert expire(store, ledger, releases, keep_s=100.0, now=104.0) == 1
    assert list(ledger.groups(LIVE, [GroupState.READY])) == []
    assert store.status(OWNER, "old") is None
    assert [entry.action for entry in store.privacy.audit_log()] == ["expired"]


def test_a_request_is_about_a_user_or_a_session(store: FeedbackStore) -> None:
    with pytest.raises(ValueError, match="expected one of them"):
        store.privacy.request_deletion(actor="test", now=0.0)

"""Contract of the feedback store, for every supported database."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from etude.errors import DamagedError, InfrastructureError, RunFolderError
from etude.feedback.join import EventResult
from etude.feedback.joiner import Joiner, StoreOnlySink
from etude.feedback.privacy import forget_sessions
from etude.feedback.store import FeedbackStore
from etude.feedback.writer import StoreWriter
from etude.ledger.database import Database
from etude.ledger.ledger import Ledger
from ledgers import NewPlace
from live_sessions import OWNER, answer, event, live_session

WINDOW_S = 10.0
GATEWAY = "gateway"


@pytest.fixture
def store(place: str) -> Iterator[FeedbackStore]:
    with FeedbackStore.open(place, window_s=WINDOW_S) as opened:
        yield opened


def report(store: FeedbackStore, now: float, *events: object) -> list[str]:
    return [one.value for one in store.report(OWNER, events, lambda: now)]  # type: ignore[arg-type]


def two_turns(store: FeedbackStore, session_id: str = "s", name: str = "n", opened_at: float = 1.0) -> None:
    session = live_session(session_id, name, opened_at=opened_at)
    first = answer(session, message="do it")
    store.keep(first, GATEWAY, opened_at)
    store.keep(answer(session, 1, earlier=first.turns[0], message="no, that is wrong"), GATEWAY, opened_at + 1)


def test_a_session_and_all_that_was_said_in_time_come_out_once_joined(store: FeedbackStore) -> None:
    two_turns(store)
    assert report(store, 3, event("a", "n"), event("b", "s", turn=1), event("c", completion="sc0")) == ["accepted"] * 3
    store.end(["s"], 5)
    store.end(["s"], 50)  # it ended before
    assert report(store, 15, event("d", "n", turn=0)) == ["accepted"]
    assert report(store, 15.5, event("e", "n")) == ["late"]
    assert store.close_windows(14.9, 10) == 0
    assert store.close_windows(15.1, 10) == 1
    assert report(store, 14, event("f", "n")) == ["late"], "a clock that was set back opens no window again"
    (joined,), left_out = store.closed(10)
    assert [(one.event_id, one.turn) for one in joined.signals] == [("a", None), ("b", 1), ("c", 0), ("d", 0)]
    assert [turn.prompt_ids.tolist() for turn in joined.turns] == [[1, 2, 0], [1, 2, 0, 3, 4, 9, 1]]
    assert (joined.messages, joined.follows) == (("do it", "no, that is wrong"), (None, 0))
    assert (joined.session.first_version, joined.session.last_version, joined.session.turns) == (1, 2, 2)
    assert not left_out
    assert (store.taken({"s": "admitted"}, left_out, 20), store.taken({"s": "admitted"}, left_out, 21)) == (1, 0)
    assert store.closed(10) == ([], {})
    assert store.counts() == {"accepted": 4, "late": 2, "session_admitted": 1}


def test_an_event_counts_once_however_often_it_comes(store: FeedbackStore) -> None:
    two_turns(store)
    assert report(store, 2, event("a", "n"), event("a", "n", value=-1)) == ["accepted", "duplicate"]
    assert report(store, 3, event("a", "s", turn=1)) == ["duplicate"]
    assert report(store, 3, event("x", "elsewhere"), event("x", "elsewhere")) == ["unknown_session", "duplicate"]
    store.end(["s"], 5)
    assert report(store, 99, event("l", "n"), event("l", "n")) == ["late", "duplicate"]
    assert [one.value for one in store.report("other", [event("a", "n")], lambda: 3)] == ["unknown_session"]


def test_what_comes_before_its_session_or_turn_waits_for_it(store: FeedbackStore) -> None:
    early = [event("a", "n"), event("b", "s", turn=1), event("c", completion="sc1"), event("d", "never")]
    assert report(store, 0.5, *early) == ["unknown_session"] * 4
    two_turns(store)
    assert store.give_up_unmatched(0.6) == 1
    store.end(["s"], 5)
    store.close_windows(16, 10)
    (joined,), _ = store.closed(10)
    assert [(one.event_id, one.turn) for one in joined.signals] == [("a", None), ("b", 1), ("c", 1)]
    assert store.counts()["left_out_unmatched"] == 1


def test_of_sessions_with_one_name_the_newest_is_meant_and_an_answer_names_its_own(store: FeedbackStore) -> None:
    two_turns(store, "old", opened_at=1)
    two_turns(store, "new", opened_at=3)
    assert report(store, 5, event("a", "n"), event("b", "old"), event("c", completion="oldc1")) == ["accepted"] * 3
    status = {name: store.status(OWNER, name) for name in ("old", "new", "n", "nothing")}
    kinds = {name: one and (one.session.session_id, dict(one.signals)) for name, one in status.items()}
    old, new = ("old", {"thumbs": 2}), ("new", {"thumbs": 1})
    assert kinds == {"old": old, "new": new, "n": new, "nothing": None}


def test_sessions_of_a_gateway_that_died_end_and_others_do_not(store: FeedbackStore) -> None:
    two_turns(store, "mine")
    store.keep(answer(live_session("other")), "gateway-1", 2)
    assert store.end_all_of(GATEWAY, 7) == 1
    assert store.end_idle(1.5, 8) == 0
    assert store.end_idle(2.5, 9) == 1
    ends = [one.session.ended_at for name in ("mine", "other") if (one := store.status(OWNER, name))]
    assert ends == [7, 9]


def test_the_longest_ended_come_first_and_so_many_at_a_time(store: FeedbackStore) -> None:
    for index, ended in enumerate([3.0, 1.0, 2.0]):
        store.keep(answer(live_session(f"s{index}")), GATEWAY, 0.5)
        store.end([f"s{index}"], ended)
    assert (store.close_windows(99, 2), store.close_windows(99, 2)) == (2, 1)
    assert [one.session.session_id for one in store.closed(2)[0]] == ["s1", "s2"]
    store.taken({"s1": "admitted", "s2": "stale"}, {}, 99)
    assert [one.session.session_id for one in store.closed(2)[0]] == ["s0"]


def test_of_a_session_whose_consent_was_withdrawn_nothing_is_left(store: FeedbackStore) -> None:
    two_turns(store)
    report(store, 2, event("a", "n"))
    store.withdraw("s")
    assert store.status(OWNER, "s") is None
    assert report(store, 3, event("b", "n"), event("c", completion="sc0")) == ["unknown_session"] * 2


def test_signals_without_a_session_are_bounded(store: FeedbackStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.feedback.store.MAX_UNMATCHED", 3)
    assert report(store, 1, *[event(f"e{index}", "n") for index in range(3)]) == ["unknown_session"] * 3
    assert report(store, 1, event("e3", "n"), event("e3", "n")) == ["unknown_session"] * 2
    two_turns(store)
    assert report(store, 2, event("e3", "n")) == ["accepted"], "it was not kept, so it is none that came before"


def test_writers_of_two_processes_take_turns(new_place: NewPlace) -> None:
    place = new_place()

    def write(prefix: str) -> None:
        with FeedbackStore.open(place, window_s=WINDOW_S) as store:
            for index in range(25):
                report(store, 1, event(f"{index}", "n"), event(f"{prefix}{index}", "n"))

    threads = [threading.Thread(target=write, args=(prefix,)) for prefix in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with FeedbackStore.open(place, window_s=WINDOW_S) as store:
        assert store.counts() == {"unknown_session": 75, "duplicate": 25}


def test_what_waits_is_written_in_one_transaction_and_a_work_that_fails_spoils_no_other(place: str) -> None:
    writer = StoreWriter(lambda: FeedbackStore.open(place, window_s=WINDOW_S))
    gate: Future[None] = Future()

    def fail(db: Database) -> None:
        raise ValueError("a work that fails")

    def wait(db: Database) -> None:
        gate.result()

    with FeedbackStore.open(place, window_s=WINDOW_S) as store:
        works = [store.keeping(answer(live_session(f"s{index}")), GATEWAY, 1) for index in range(20)]
        writer.start()
        blocked = writer.submit(wait)
        while not blocked.running():
            pass
        futures = [writer.submit(work) for work in [*works[:10], fail, *works[10:]]]
        gate.set_result(None)
        failed = futures.pop(10)
        for future in futures:
            future.result(30)
        with pytest.raises(ValueError, match="a work that fails"):
            failed.result(30)
        assert writer.commits == 2
        reported = writer.submit(store.reporting(OWNER, [event("a", "s1")], lambda: 2.0))
        assert reported.result(30) == [EventResult.ACCEPTED]
        writer.stop(30)
        assert store.status(OWNER, "s19") is not None


def test_turns_that_cannot_be_read_are_named(store: FeedbackStore) -> None:
    two_turns(store)
    store.end(["s"], 2)
    store.close_windows(99, 1)
    store._db.write(lambda db: db.execute("UPDATE turns SET record = ? WHERE turn = 1", b"nonsense"))
    with pytest.raises(DamagedError, match="live session s cannot be read"):
        store.closed(1)
    store._db.write(lambda db: forget_sessions(["s"], db))
    assert store.closed(1)[0] == []


def test_a_session_ends_before_the_first_turn_that_is_missing(store: FeedbackStore) -> None:
    """Regression: later turns moved up by one place, or no session was learnt from any more."""
    session = live_session("s")
    first = answer(session, message="with a \0 in it")
    store.keep(first, GATEWAY, 1)
    store.keep(answer(session, 2, earlier=first.turns[0]), GATEWAY, 2)
    store.end(["s"], 3)
    store.close_windows(99, 1)
    ((joined,), _) = store.closed(1)
    assert (joined.session.turns, len(joined.turns), joined.messages) == (1, 1, ("with a  in it",))


def test_a_session_that_cannot_be_read_does_not_hold_up_the_others(store: FeedbackStore) -> None:
    two_turns(store)
    store.keep(answer(live_session("other")), GATEWAY, 1)
    store.end(["s", "other"], 2)
    store._db.write(lambda db: db.execute("UPDATE turns SET record = ? WHERE turn = 1", b"nonsense"))
    joiner = Joiner(store, StoreOnlySink(), None)
    assert [joiner.step(99.0) for _ in range(3)] == [1, 1, 0]
    assert store.counts() == {"session_damaged": 1, "session_kept": 1}


def test_the_newest_session_of_a_name_and_user_is_withdrawn_also_once_it_is_handed_on(store: FeedbackStore) -> None:
    for session_id, opened_at in [("old", 1.0), ("new", 2.0)]:
        store.keep(answer(live_session(session_id, "n", opened_at=opened_at)), GATEWAY, opened_at)
    assert not store.withdraw_named(OWNER, "n", "someone else", 3.0)
    assert not store.withdraw_named("another key", "n", "someone", 3.0)
    assert store.withdraw_named(OWNER, "n", "someone", 3.0)
    assert store.status(OWNER, "new") is None and store.status(OWNER, "old") is not None
    store.end(["old"], 4.0)
    store.close_windows(99.0, 1)
    assert store.withdraw_named(OWNER, "n", "someone", 100.0)
    assert [(one.session_id, one.requested_by) for one in store.privacy.requests(is_open=True)] == [("old", OWNER)]


def test_a_work_that_must_run_is_tried_until_the_store_takes_it(place: str) -> None:
    writer = StoreWriter(lambda: FeedbackStore.open(place, window_s=WINDOW_S))
    writer.start()
    tries: list[int] = []

    def work(db: Database) -> str:
        tries.append(len(tries))
        if len(tries) < 3:
            raise InfrastructureError("the store is away")
        return "done"

    refused = writer.submit(work)
    with pytest.raises(InfrastructureError, match="away"):
        refused.result(30)
    assert writer.submit(work, must_run=True).result(30) == "done"
    writer.stop(30)


def test_a_ledger_is_no_feedback_store(tmp_path: object, new_place: NewPlace) -> None:
    place = new_place()
    if place.startswith("postgres"):
        pytest.skip("there the name of the schema tells them apart")
    Ledger.open(place).close()
    with pytest.raises(RunFolderError, match="is not a feedback store of étude"):
        FeedbackStore.open(place, window_s=WINDOW_S)

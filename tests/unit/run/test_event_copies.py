"""Events at a run's URL: one stream of whole lines for each process, on any machine."""

from pathlib import Path

import pytest

from etude.errors import DamagedError
from etude.objects import ObjectStore
from etude.run.event_copies import EventCopies, EventDownloads, fetch_events
from etude.run.folder import RunFolder, exclusive
from etude.telemetry.events import RunStarted
from etude.telemetry.log import EventLog, EventReader
from faulty_store import Failure, FaultyStore


def write(folder: Path, store: ObjectStore, *resumed: bool) -> None:
    log = EventLog(folder, "trainer")
    log.follow(EventCopies(store, folder, "trainer"))
    with log:
        for one in resumed:
            log.write(RunStarted(resumed=one))


def read(folder: Path) -> list[bool]:
    return [logged.event.resumed for logged in EventReader(folder).new() if isinstance(logged.event, RunStarted)]


def test_a_stream_goes_on_from_machine_to_machine(tmp_path: Path) -> None:
    store, (first, second, reader) = ObjectStore("memory://"), (tmp_path / name for name in ("a", "b", "c"))
    write(first, store, False, True)
    fetch_events(store, second)
    write(second, store, True)
    write(second, store, False)
    fetch_events(store, reader)
    assert read(reader) == [False, True, True, False]
    with (reader / "trainer.jsonl").open("ab") as stream:
        stream.write(b"not sent yet")
    fetch_events(store, reader)
    assert (reader / "trainer.jsonl").read_bytes().endswith(b"not sent yet")


def test_the_file_of_a_process_that_runs_here_is_not_replaced(tmp_path: Path) -> None:
    """Regression: whoever opened the run replaced it, and the process wrote on into the removed file."""
    store, (first, second) = ObjectStore("memory://"), (tmp_path / name / "events" for name in ("a", "b"))
    write(first, store, False)
    write(second, ObjectStore("memory://"), True)
    with exclusive(RunFolder(second.parent), "trainer"):
        fetch_events(store, second)
        assert read(second) == [True]
    fetch_events(store, second)
    assert read(second) == [False]


def test_what_a_lost_machine_had_not_sent_is_replaced_by_what_came_after_it(tmp_path: Path) -> None:
    store, (first, second) = ObjectStore("memory://"), (tmp_path / name for name in ("a", "b"))
    write(first, store, False)
    with EventLog(first, "trainer") as log:  # it dies before it sends this one
        log.write(RunStarted(resumed=False))
    fetch_events(store, second)
    write(second, store, True, True)
    fetch_events(store, first)
    assert read(first) == [False, True, True]


def test_an_unfinished_line_waits_for_its_end(tmp_path: Path) -> None:
    store = ObjectStore("memory://")
    (tmp_path / "trainer.jsonl").write_bytes(b"one\ntw")
    EventCopies(store, tmp_path, "trainer").close()
    assert [store.get(key) for key in store.list("")] == [b"one\n"]
    (tmp_path / "trainer.jsonl").write_bytes(b"one\ntwo\n")
    EventCopies(store, tmp_path, "trainer").close()
    assert [store.get(key) for key in store.list("")] == [b"one\n", b"two\n"]


def test_an_answer_that_was_lost_costs_nothing_though_the_file_has_grown_since(tmp_path: Path) -> None:
    """Regression: the object was taken for another process's, and nothing was sent any more."""
    store = ObjectStore("memory://")
    (tmp_path / "trainer.jsonl").write_bytes(b"one\n")
    copies = EventCopies(FaultyStore(store, {1: Failure.ANSWER_LOST}), tmp_path, "trainer")
    copies.catch_up()
    with (tmp_path / "trainer.jsonl").open("ab") as file:
        file.write(b"two\n")
    copies.catch_up()
    copies.close()
    assert [store.get(key) for key in store.list("")] == [b"one\n", b"two\n"]


def test_a_missing_object_is_named(tmp_path: Path) -> None:
    store = ObjectStore("memory://")
    for resumed in (False, True, False):
        write(tmp_path / "a", store, resumed)
    first, second, third = store.list("")
    store.delete(second)
    with pytest.raises(DamagedError, match=rf"{third} do not follow those before"):
        fetch_events(store, tmp_path / "b")
    assert not (tmp_path / "b" / "trainer.jsonl").exists()
    assert first.endswith("trainer/000000000000.jsonl")


def test_a_follower_gets_events_of_remote_processes_and_keeps_its_own(tmp_path: Path) -> None:
    store, (here, there) = ObjectStore("memory://"), (tmp_path / name for name in ("a", "b"))
    with EventLog(here, "supervisor") as own, EventDownloads(store, here):
        own.write(RunStarted(resumed=False))
        write(there, store, True)
    assert sorted(path.name for path in here.iterdir()) == ["supervisor.jsonl", "trainer.jsonl"]
    assert read(here) == [False, True]


def test_a_file_that_lacks_what_was_sent_from_elsewhere_is_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ObjectStore("memory://")
    write(tmp_path / "a", store, False, True)
    write(tmp_path / "b", store, False)
    assert "lacks events that were sent from elsewhere" in caplog.text
    assert len(store.list("")) == 1

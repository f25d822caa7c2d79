"""A ledger whose database fails: retries are bounded, and nothing is lost or done twice."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from databases import Server, ask, temporary_server
from etude.clock import SystemClock
from etude.config.recipe import LedgerConfig
from etude.errors import DamagedError, InfrastructureError, RunFolderError
from etude.ledger.database import Interrupted, LedgerUnavailable, Row, Value
from etude.ledger.ledger import TRAIN, Ledger
from etude.ledger.open import open_database
from etude.ledger.postgres import PostgresDatabase
from etude.ledger.schema import NEWEST
from etude.ledger.sqlite import SqliteDatabase
from etude.ledger.transactions import Transactions
from ledgers import fill, new_task, rollout, task

HASTY = LedgerConfig(retry_timeout_s=0.3)
SERVER_PID = "SELECT pg_backend_pid()"


@pytest.fixture(scope="module")
def server(postgresql: None) -> Iterator[Server]:
    """A database server of this test alone, which may be stopped at any time."""
    with temporary_server() as started:
        yield started


class Severed:
    """A database whose connection breaks at the next commit, before the server gets it or after it is done."""

    def __init__(self, database: PostgresDatabase, server: Server) -> None:
        self._database = database
        self._server = server
        self.when = ""
        self.settled: list[bool] = []

    @property
    def name(self) -> str:
        return self._database.name

    def execute(self, sql: str, *values: Value) -> list[Row]:
        return self._database.execute(sql, *values)

    def begin(self) -> None:
        self._database.begin()

    def commit(self) -> None:
        when, self.when = self.when, ""
        ((pid,),) = self.execute(SERVER_PID)
        if when == "after":
            self._database.commit()
        if when:
            ask(self._server.folder, f"SELECT pg_terminate_backend({pid}, 5000)", database="postgres")
        if when == "after":
            raise Interrupted("the reply never came")
        self._database.commit()

    def committed(self) -> bool:
        self.settled.append(self._database.committed())
        return self.settled[-1]

    def rollback(self) -> None:
        self._database.rollback()

    def version(self) -> int:
        return self._database.version()

    def set_version(self, version: int) -> None:
        self._database.set_version(version)

    def scrub(self) -> None:
        self._database.scrub()

    def close(self) -> None:
        self._database.close()


@pytest.mark.parametrize(("when", "stored"), [("before", False), ("after", True)])
def test_a_commit_whose_reply_is_lost_counts_once(postgres: Server, when: str, stored: bool) -> None:
    severed = Severed(PostgresDatabase.open(postgres.url, f"severed_{when}", retry_timeout_s=30.0), postgres)
    transactions = Transactions(severed, retry_timeout_s=30.0)
    with Ledger(transactions, term_s=20.0, clock=SystemClock()) as ledger:
        severed.when = when
        assert ledger.admit_group(task("a"), "before", 2, 0) == 0  # not idempotent: evaluations may repeat a task
        severed.when = when
        assert ledger.record(rollout(0, 0, reward=None), "before") == 1
        severed.when = when
        assert ledger.admit_next(new_task, size=1, version=0, kept_below=1)
        assert severed.settled == [stored] * 3
        assert [slot.attempt for slot in ledger.open_slots("before")] == [1, 0]
        assert (ledger.progress("before").admitted, ledger.progress().admitted, ledger.progress().drawn) == (1, 1, 1)


class Worker:
    """A thread that admits groups of one and grades them, until it is stopped or fails."""

    def __init__(self, place: str) -> None:
        self.done = 0
        self._place = place
        self._reports = threading.Event()
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        with Ledger.open(self._place, LedgerConfig(retry_timeout_s=60.0)) as ledger:
            while not self._reports.is_set():
                (slot,) = ledger.admit_next(new_task, size=1, version=0, kept_below=10**6) or []
                ledger.record(rollout(slot.group_index, 0), TRAIN)
                self.done += 1

    def end(self) -> int:
        """Stop the thread and return the number of groups it finished."""
        self._reports.set()
        self.thread.join()
        return self.done


def test_a_server_may_restart_and_crash_under_load(server: Server) -> None:
    place = f"{server.url}#load"
    workers = [Worker(place) for _ in range(2)]
    for fault in (signal.SIGINT, signal.SIGQUIT, None):
        before = sum(worker.done for worker in workers)
        while sum(worker.done for worker in workers) < before + 20:
            assert all(worker.thread.is_alive() for worker in workers)
            time.sleep(0.01)
        if fault is not None:
            server.stop(fault)
            server.start()
    done = sum(worker.end() for worker in workers)
    with Ledger.open(place) as ledger:
        progress = ledger.progress()
        assert progress.ready == progress.admitted == progress.drawn == done
        assert len({group.task.task_id for group in ledger.groups(TRAIN)}) == done


def test_what_stays_away_is_given_up_by_name_and_the_connection_opens_again(server: Server) -> None:
    with Ledger.open(f"{server.url}#away", HASTY) as ledger:
        fill(ledger, "a")
        server.stop()
        started_s = time.monotonic()
        with pytest.raises(LedgerUnavailable, match=r"postgresql:///app#away could not be asked for 0.3 s"):
            ledger.progress()
        with pytest.raises(InfrastructureError, match="nothing recorded is lost"):
            ledger.admit_group(task("b"), TRAIN, 1, 0)
        assert time.monotonic() - started_s < 10
        with pytest.raises(LedgerUnavailable, match="away"):
            Ledger.open(f"{server.url}#away", HASTY)
        server.start()
        assert ledger.admit_group(task("b"), TRAIN, 1, 0) == 1


def test_a_foreign_schema_or_of_a_newer_ledger_is_refused_and_left_alone(postgres: Server) -> None:
    ask(postgres.folder, "CREATE SCHEMA songs CREATE TABLE names (name TEXT)", user="app")
    Ledger.open(f"{postgres.url}#newer").close()
    ask(postgres.folder, "UPDATE newer.schema_version SET version = 99", user="app")
    for schema, why in [("songs", "not a ledger of étude, it holds 'names'"), ("newer", f"version 99.* to {NEWEST}")]:
        with pytest.raises(RunFolderError, match=why):
            Ledger.open(f"{postgres.url}#{schema}")
    assert ask(postgres.folder, "SELECT count(*) FROM pg_tables WHERE schemaname = 'songs'") == [[1]]


def test_a_lock_held_for_too_long_is_an_infrastructure_fault_and_passes(place: str) -> None:
    with Ledger.open(place, HASTY) as ledger:
        other = open_database(place, retry_timeout_s=5.0)
        other.begin()
        with pytest.raises(LedgerUnavailable, match=r"could not be asked for 0\.3 s.*lock"):
            fill(ledger, "a")
        assert ledger.progress().admitted == 0  # readers never wait
        other.rollback()
        other.close()
        assert fill(ledger, "a") == 0


def test_a_full_disk_leaves_no_transaction_behind(tmp_path: Path) -> None:
    database = SqliteDatabase.open(tmp_path / "ledger.db", retry_timeout_s=1.0)
    with Ledger(Transactions(database, retry_timeout_s=0.1), term_s=20.0, clock=SystemClock()) as ledger:
        ((pages,),) = database.execute("PRAGMA page_count")
        database.execute(f"PRAGMA max_page_count = {pages + 4}")
        with pytest.raises(LedgerUnavailable, match="full"):
            for name in range(1000):
                fill(ledger, str(name))
        stored = ledger.progress()
        database.execute(f"PRAGMA max_page_count = {pages + 1000}")
        assert fill(ledger, "after") == stored.admitted


def test_commits_survive_a_power_cut_as_checkpoints_do(tmp_path: Path) -> None:
    database = SqliteDatabase.open(tmp_path / "ledger.db", retry_timeout_s=1.0)
    assert database.execute("PRAGMA synchronous") == [(2,)], "FULL: a commit is synced before it returns"
    database.close()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.open(path) as ledger:
        for name in range(50):
            fill(ledger, str(name))
    data = bytearray(path.read_bytes())
    data[4096 * 2 :] = b"\x5a" * (len(data) - 4096 * 2)
    path.write_bytes(data)
    named = pytest.raises((DamagedError, RunFolderError), match=r"ledger\.db is damaged.*from a copy")
    with named, Ledger.open(path) as ledger:  # whichever comes upon it first
        ledger.progress()

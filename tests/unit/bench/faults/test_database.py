"""A fault campaign's database server: committed data survives every fault, and the server leaves nothing behind."""

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bench.faults.database import Database, connect, locked, programs, query, split
from etude.errors import InfrastructureError

PROGRAMS = programs()

pytestmark = pytest.mark.heavy("PostgreSQL, and psycopg", missing=PROGRAMS is None)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="etude-faults-") as scratch:  # pytest's own are closed to others
        Path(scratch).chmod(0o711)
        yield Path(scratch) / "postgres"


def test_a_server_is_locked_cut_off_and_crashed_and_keeps_what_it_has(folder: Path) -> None:
    import psycopg

    assert PROGRAMS is not None
    question = ["SELECT a FROM groups"]
    with Database(PROGRAMS, folder) as database:
        place = split(f"{database.url}#run")
        assert place is not None
        with closing(connect(place)) as db:
            db.execute("CREATE SCHEMA run")
            for table in ("groups", "rollouts", "steps"):
                db.execute(f"CREATE TABLE {table} (a INTEGER)".encode())
            db.execute("INSERT INTO groups VALUES (1)")
            db.commit()
            db.execute("INSERT INTO rollouts VALUES (1)")
            assert query(place, question) == [[(1,)]]
            with database.cut(), pytest.raises(psycopg.Error):
                db.execute("SELECT 1")
        with locked(place):
            assert query(place, question) is None
        with database.down():
            assert query(place, question) is None
            with pytest.raises(InfrastructureError, match="no connections that could be cut"), database.cut():
                pass
        assert query(place, [*question, "SELECT a FROM rollouts"]) == [[(1,)], []]
    assert not folder.exists()


def test_a_file_has_no_server() -> None:
    assert split("/runs/quickstart/ledger.db") is None

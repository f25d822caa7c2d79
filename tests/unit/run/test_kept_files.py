"""Files kept at the URL of a run: brought where another machine put newer ones, databases as they are at a moment."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from etude.config.recipe import RunConfig
from etude.errors import DamagedError
from etude.objects import ObjectStore
from etude.rewards.judge.votes import Vote, VoteCache
from etude.run.evaluate import EVALUATIONS, evaluating
from etude.run.folder import RunFolder
from etude.run.judging import JudgeState, synced_judge_state
from etude.run.kept_files import KeptFiles


@pytest.fixture
def machines(tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    """Working folders of two machines."""
    ledger, url = str(tmp_path / "ledger.db"), str(tmp_path / "url")
    first, second = (RunFolder.create(tmp_path / name, RunConfig(), at=url, ledger=ledger) for name in "ab")
    return first, second


def write(folder: RunFolder, name: str, value: int) -> None:
    file = folder.path / EVALUATIONS / name
    file.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE IF NOT EXISTS facts (value INTEGER)")
        database.execute("INSERT INTO facts VALUES (?)", (value,))
        database.commit()


def read(folder: RunFolder, name: str) -> list[int]:
    with closing(sqlite3.connect(folder.path / EVALUATIONS / name)) as database:
        return [value for (value,) in database.execute("SELECT value FROM facts")]


def test_evaluations_of_two_machines_are_on_both(machines: tuple[RunFolder, RunFolder]) -> None:
    first, second = machines
    here, there = (KeptFiles(folder, EVALUATIONS) for folder in machines)
    here.bring()
    write(first, "v1.db", 1)
    here.keep(f"{EVALUATIONS}/v1.db")
    write(second, "v2.db", 2)
    there.keep(f"{EVALUATIONS}/v2.db")
    there.keep(f"{EVALUATIONS}/v2.db")
    assert ObjectStore(f"{first.url}/{EVALUATIONS}").list("manifests")[-1] == "manifests/00000002.json"
    here.bring()
    assert (read(first, "v1.db"), read(first, "v2.db")) == ([1], [2])
    write(first, "v1.db", 11)
    here.bring()
    assert read(first, "v1.db") == [1, 11], "what this disk has done since is not replaced by what it had"
    fresh = KeptFiles(RunFolder.create(second.path.parent / "c", RunConfig(), at=second.url, ledger="x"), EVALUATIONS)
    store = ObjectStore(f"{second.url}/{EVALUATIONS}")
    store.delete(*store.list("parts"))
    with pytest.raises(DamagedError, match=r"evaluations/parts/.*is missing: restore it"):
        fresh.bring()


def test_what_this_disk_added_to_a_database_stays_when_another_machine_adds_one(
    machines: tuple[RunFolder, RunFolder],
) -> None:
    """Regression: a new set replaced every database of the one before, and removed what was still in its WAL."""
    first, second = machines
    here, there = (KeptFiles(folder, EVALUATIONS) for folder in machines)
    write(first, "v1.db", 1)
    here.keep(f"{EVALUATIONS}/v1.db")
    there.bring()
    write(second, "v2.db", 2)
    there.keep(f"{EVALUATIONS}/v2.db")
    with closing(sqlite3.connect(first.path / EVALUATIONS / "v1.db")) as writer:
        writer.execute("INSERT INTO facts VALUES (11)")
        writer.commit()
        here.bring()
        assert (read(first, "v1.db"), read(first, "v2.db")) == ([1, 11], [2])


def test_no_evaluation_replaces_the_ledger_of_one_in_progress(machines: tuple[RunFolder, RunFolder]) -> None:
    """Regression: a second `etude eval` removed the WAL of the first one and replaced its database."""
    first, second = machines
    here, there = (KeptFiles(folder, EVALUATIONS) for folder in machines)
    with evaluating(first, here):
        write(first, "v1.db", 1)
        write(second, "v1.db", 2)
        there.keep(f"{EVALUATIONS}/v1.db")
        with evaluating(first, KeptFiles(first, EVALUATIONS)):
            assert read(first, "v1.db") == [1]
    with evaluating(first, here):
        assert read(first, "v1.db") == [2]


def test_a_database_is_kept_while_it_is_written_to(machines: tuple[RunFolder, RunFolder]) -> None:
    first, second = machines
    write(first, "v1.db", 1)
    with closing(sqlite3.connect(first.path / EVALUATIONS / "v1.db")) as writer:
        writer.execute("INSERT INTO facts VALUES (2)")
        writer.commit()
        writer.execute("INSERT INTO facts VALUES (3)")  # not committed
        KeptFiles(first, EVALUATIONS).keep(EVALUATIONS)
    KeptFiles(second, EVALUATIONS).bring()
    assert read(second, "v1.db") == [1, 2]


def test_a_judge_on_a_new_disk_has_its_votes_and_its_costs(machines: tuple[RunFolder, RunFolder]) -> None:
    first, second = machines
    for number in range(3):
        state = JudgeState(first.path, worker_id=1)
        with synced_judge_state(first, state), VoteCache(state.votes, 10) as votes:
            votes.put(b"k%d" % number, Vote(score=number, reason="so"))
            state.spending.save(state.spending.load())
            (first.path / "judge-held.txt").write_text("odd")
    (first.path / "judge-held.txt").unlink()
    with synced_judge_state(first, JudgeState(first.path, 1)):
        pass
    there = JudgeState(second.path, worker_id=1)
    with synced_judge_state(second, there), VoteCache(there.votes, 10) as votes:
        assert [vote and vote.score for vote in (votes.get(b"k%d" % number) for number in range(3))] == [0, 1, 2]
    assert (second.path / "judge-spend-1.json").exists()
    assert not there.pause.reason
    assert len(ObjectStore(f"{first.url}/judge/1").list("manifests")) <= 3


def test_a_run_without_a_url_keeps_nothing(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    before = sorted(folder.path.rglob("*"))
    files = KeptFiles(folder, EVALUATIONS)
    files.bring()
    files.keep(EVALUATIONS)
    assert sorted(folder.path.rglob("*")) == before

"""A weight log is opened with what the run's folder and ledger know about it, everywhere."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from etude.cli.actions.weight_store import log_of
from etude.config.recipe import RunConfig
from etude.errors import DamagedError, FencedError
from etude.ledger.ledger import Ledger
from etude.run.folder import RunFolder
from etude.run.weight_log import open_log, open_store
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher
from etude.weights.pull import pull
from etude.weights.records import commit_key
from synthetic_updates import synthetic_version


def publish(log: WeightLog, *versions: int) -> None:
    with Publisher(log) as publisher:
        for version in versions:
            publisher.publish(synthetic_version(version), version=version, step=version).result(60)


def test_a_run_follows_its_own_log_alone(tmp_path: Path) -> None:
    ours, other = (RunFolder.create(tmp_path / name, RunConfig()) for name in ("ours", "other"))
    publish(open_log(ours), 0)
    publish(open_log(other), 0)
    assert open_log(ours).records.log_id() != open_log(other).records.log_id()
    (tmp_path / "ours" / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "other" / "store").rename(tmp_path / "ours" / "store")
    for log in (open_log(ours), log_of(str(ours.path))):
        with pytest.raises(DamagedError, match=r"is of log .*, this is log"):
            pull(log)
    with pytest.raises(FencedError, match="give each run a store of its own"):
        publish(open_log(ours), 1)


def test_no_process_of_a_run_begins_with_less_than_its_ledger_knows(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    publish(open_log(folder), 0, 1, 2)
    Ledger.open(folder.ledger, RunConfig().ledger).close()
    with closing(sqlite3.connect(folder.ledger)) as ledger, ledger:
        ledger.execute("INSERT INTO steps VALUES (1, 'done'), (2, 'done'), (3, 'claimed')")
    assert pull(open_log(folder)).version == 2
    open_store(folder.store).store.delete(commit_key(2))
    with pytest.raises(DamagedError, match="is 1, but version 2 was published"):
        pull(open_log(folder))
    assert pull(open_log(folder), 1).version == 1, "who names it gets it"

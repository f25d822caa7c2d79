"""Leases that a thread keeps up."""

import time
from pathlib import Path

import pytest

from etude.config.recipe import LedgerConfig
from etude.errors import FencedError, RunFolderError
from etude.ledger import heartbeat
from etude.ledger.heartbeat import leased
from etude.ledger.ledger import Ledger
from waiting import wait_until

QUICK = LedgerConfig(lease_s=1.0)


PATIENT = LedgerConfig(lease_s=20.0)


def test_a_lease_lives_as_long_as_its_context_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.db"
    monkeypatch.setattr(heartbeat, "WAIT_TERMS", 0.1)  # of a term that no heartbeat is too late for
    second = leased(path, PATIENT, name="trainer", holder="b")
    refused = pytest.raises(RunFolderError, match="a is its 'trainer'; stop that process first")
    with leased(path, QUICK, name="trainer", holder="a") as ledger:
        wait_until(lambda: ledger.leases.look("trainer").beats > 0)
        with refused, second:
            raise AssertionError("two trainers")
    with leased(path, QUICK, name="trainer", holder="b") as ledger:
        assert ledger.leases.look("trainer").holder == "b"
    with Ledger.open(path) as ledger:
        assert ledger.leases.look("trainer").is_free


def test_a_dead_holder_is_waited_for_a_term_and_then_succeeded(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.open(path, QUICK) as dead:
        assert dead.leases.take("trainer", "a")  # and never beats
        started_s = time.monotonic()
        with leased(path, QUICK, name="trainer", holder="b") as heir:
            assert time.monotonic() - started_s >= QUICK.lease_s
            heir.facts.set("who", "b")
            with pytest.raises(FencedError):
                dead.facts.set("who", "a")
            assert heir.facts.get("who") == "b"


def test_a_holder_that_lost_its_lease_leaves_quietly(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with leased(path, QUICK, name="trainer", holder="a"), Ledger.open(path) as other:
        assert other.leases.take("trainer", "a")
        time.sleep(QUICK.lease_s / 2)
        assert other.leases.look("trainer").beats == 0
        with pytest.raises(ValueError, match="holds the lease"):
            other.leases.take("rollouts", "a")

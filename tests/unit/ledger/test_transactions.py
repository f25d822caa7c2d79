"""Interrupted work is tried again within a bound; a bug is not."""

import pytest

from etude.ledger.database import Interrupted, LedgerUnavailable
from etude.ledger.transactions import retry


def test_a_fault_that_passes_is_not_heard_of_and_one_that_stays_is_named() -> None:
    faults = [Interrupted("away"), Interrupted("away")]

    def attempt() -> str:
        if faults:
            raise faults.pop()
        return "done"

    assert retry(attempt, "x", 5.0) == "done"
    faults.extend(Interrupted(f"away {number}") for number in range(1000))
    with pytest.raises(
        LedgerUnavailable, match=r"the ledger x could not be asked for 0.05 s \(ledger.retry_timeout_s\): away"
    ):
        retry(attempt, "x", 0.05)


def test_a_bug_is_not_tried_again() -> None:
    tries = []

    def attempt() -> None:
        tries.append(1)
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        retry(attempt, "x", 5.0)
    assert len(tries) == 1

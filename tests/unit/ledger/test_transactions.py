"""How long a ledger insists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.ledger.database import Interrupted, LedgerUnavailable
from etude.ledger.transactions import FIRST_PAUSE_S, LONGEST_PAUSE_S, insist, pause_s


@given(st.floats(0.001, 1000.0))
def test_pauses_double_up_to_a_bound_and_end_with_the_patience(patience_s: float) -> None:
    spent_s, tries, pauses = 0.0, 0, list[float]()
    while (pause := pause_s(tries + 1, spent_s, patience_s)) is not None:
        assert 0 < pause <= LONGEST_PAUSE_S
        pauses.append(pause)
        spent_s, tries = spent_s + pause, tries + 1
        assert tries < 10 + patience_s / LONGEST_PAUSE_S + 10
    assert spent_s == pytest.approx(patience_s)
    assert pauses[:-1] == sorted(pauses[:-1])
    assert pauses[0] == min(FIRST_PAUSE_S, patience_s)


def test_a_fault_that_passes_is_not_heard_of_and_one_that_stays_is_named() -> None:
    faults = [Interrupted("away"), Interrupted("away")]

    def attempt() -> str:
        if faults:
            raise faults.pop()
        return "done"

    assert insist(attempt, "x", 5.0) == "done"
    faults.extend(Interrupted(f"away {number}") for number in range(1000))
    with pytest.raises(
        LedgerUnavailable, match=r"the ledger x could not be asked for 0.05 s \(ledger.patience_s\): away"
    ):
        insist(attempt, "x", 0.05)


def test_a_bug_is_not_tried_again() -> None:
    tries = []

    def attempt() -> None:
        tries.append(1)
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        insist(attempt, "x", 5.0)
    assert len(tries) == 1

"""``bench losses``: equal losses agree, unequal ones do not, and a missing contestant is reported as missing."""

from pathlib import Path
from typing import Any

import pytest

from bench.losses.bench import AGREE, bench_losses, compare, losses_options, make_batch, our_loss, table
from bench.losses.cases import CASES, Case
from bench.trl_environment import VARIABLE
from etude.config.training import LossConfig

BATCHES = [make_batch(seed) for seed in range(3)]


def answers(case: Case) -> list[dict[str, Any]]:
    """A case's own figures, in the format of another program's answers."""
    losses = [our_loss(case, batch) for batch in BATCHES]
    return [{name: value.tolist() if name != "loss" else value for name, value in one.items()} for one in losses]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.contestant}: {case.name}")
def test_a_case_is_a_loss_that_tells_itself_from_others(case: Case) -> None:
    """Against its own figures all batches agree; against those of another loss, or gradient, not all do."""
    row = compare(case, BATCHES, answers(case))
    assert isinstance(row, dict)
    assert (row["agree"], row["batches"], row["gradient"]) == (3, 3, 0.0)
    other = LossConfig(kind="rloo", correction="none").model_dump()
    plain = Case(contestant="trl", name="rloo", loss=other)
    wrong = compare(case, BATCHES, answers(plain))
    assert isinstance(wrong, dict)
    assert wrong["agree"] == 0


def test_without_the_other_systems_nothing_is_said_to_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))
    result = bench_losses(losses_options(("trl",), quick=True))
    assert result["goals"] == {
        "agree": {
            "meaning": AGREE.meaning, "value": None, "goal": 1.0, "sense": "at least", "met": False, "cases": 0,
            "reason": "nothing to compare was measured",
        }
    }  # fmt: skip
    assert "trl: not measured: there is no" in table(result)

"""`bench numerics`: figures are of the tokens that were sampled, and exact arithmetic is exact."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.engine.models import QUICK_MODEL
from bench.numerics.bench import Row, bench_numerics, judged_rows, numerics_options, route_flips, table
from bench.numerics.model import Schooling, trained_model
from etude.errors import UserError
from etude.models.experts import Routing
from etude.trainer.mismatch import summarise
from etude.types import NO_ROUTE

SCHOOLING = Schooling(model=QUICK_MODEL, steps=4, rows=2, row_tokens=128)


def _row(engine: str, mode: str, difference: float, form: str = "bfloat16") -> Row:
    mismatch, flipped = (summarise(np.full(9, share * difference, np.float32)) for share in (1, 2))
    return Row(engine=engine, format=form, mode=mode, mismatch=mismatch, flipped=flipped)


@pytest.mark.heavy("minutes, with all that a bench starts")
def test_invariant_arithmetic_is_exact_and_fast_is_close(tmp_path: Path) -> None:
    options = replace(
        numerics_options(("native-invariant", "native-fast"), quick=True),
        formats=("bfloat16",),
        schooling=SCHOOLING,
        cache=tmp_path,
    )
    result = bench_numerics(options)
    printed = json.loads(json.dumps(result))
    rows, goals = printed["results"], printed["goals"]
    assert [row["case"].split(", ")[1] for row in rows] == ["invariant", "none", "replay", "filter"]
    exact, plain = rows[:2]
    assert exact["tokens"] == plain["tokens"] == 4 * 24
    assert exact["max"] == 0 and exact["equal_share"] == 1 and exact["flip_share"] == 0
    assert plain["max"] < 0.5  # on some processors the two sides round alike, and it is 0
    assert goals["invariant_max_abs"]["met"] is True
    assert goals["replay_p99_removed"]["met"] is False
    assert "native-invariant" in table(result)


def test_the_model_is_trained_once(tmp_path: Path) -> None:
    text: list[str] = []
    first = trained_model(SCHOOLING, tmp_path, text.append)
    again = trained_model(SCHOOLING, tmp_path, text.append)
    other = trained_model(replace(SCHOOLING, seed=1), tmp_path, text.append)
    assert first.folder == again.folder != other.folder
    assert [line.split()[0] for line in text] == ["training", "trained", "training"]
    excerpts = first.excerpts(5, 20, seed=0)
    assert excerpts == first.excerpts(5, 20, seed=0) != first.excerpts(5, 20, seed=1)
    assert [len(excerpt) for excerpt in excerpts] == [20] * 5


def test_flips_are_counted_as_sets_and_unknown_routes_are_not() -> None:
    routing = Routing(record=True)
    routing._recorded_NSk = torch.tensor([[[0, 1]], [[2, 3]], [[4, 5]]])
    engine_MSk = torch.tensor([[[1, 0]], [[2, 9]], [[NO_ROUTE, NO_ROUTE]]])
    assert route_flips(routing, engine_MSk) == (4, 1)
    assert route_flips(routing, None) == (0, 0)


def test_goals_judge_another_systems_engine() -> None:
    rows = [
        _row("native-invariant", "invariant", 0.0),
        _row("native-invariant", "invariant", 1e-7, "float32"),
        _row("transformers-generate", "none", 1.0),
        _row("transformers-generate", "replay", 0.25),
        _row("native-fast", "none", 1.0),
        _row("native-fast", "replay", 0.5),
    ]
    goals = judged_rows(rows)
    exact, removed = goals["invariant_max_abs"], goals["replay_p99_removed"]
    assert isinstance(exact, dict) and isinstance(removed, dict)
    assert exact["met"] is False and exact["each"] == {"bfloat16": 0.0, "float32": pytest.approx(1e-7)}
    assert removed["value"] == 0.75 and removed["met"] is True and removed["each"] == {
        "native-fast": 0.5, "transformers-generate": 0.75
    }  # fmt: skip
    unknown = judged_rows(rows[:1])["replay_p99_removed"]
    assert isinstance(unknown, dict)
    assert unknown["value"] is None and unknown["met"] is False and unknown["each"] == {}


def test_flipped_tokens_are_judged_apart() -> None:
    rows = [_row("native-fast", mode, difference) for mode, difference in (("none", 1.0), ("replay", 0.5))]
    calm = summarise(np.ones(9, np.float32))
    removed = judged_rows([replace(row, mismatch=calm) for row in rows])["replay_p99_removed"]
    assert isinstance(removed, dict)
    assert removed["each"] == {"native-fast": 0.0} and removed["each_of_flipped"] == {"native-fast": 0.5}


def test_unknown_engines_are_refused() -> None:
    with pytest.raises(UserError, match="no 'sglang' among native-fast"):
        numerics_options(("sglang",))

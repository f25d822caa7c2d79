"""``bench exploration`` sets up its trials and adds them up; its runs take minutes each and are not made here."""

from pathlib import Path

import pytest

from bench.trials.exploration import (
    AIDS,
    CONDITIONS,
    RATES,
    Cell,
    Trial,
    bench_exploration,
    chosen_cells,
    figures,
    half_at,
    table,
    trial_config,
)
from etude.clock import date_utc
from etude.errors import UserError
from etude.run.task_families import open_demonstrations
from etude.types import Json

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart"


def trial(seed: int, after: float, rewards: list[float], aid: str = "none") -> Trial:
    calls: Json = [{"read": 0.9, "edit": 0.1}]
    report: dict[str, Json] = {
        "curve": [{"reward_mean": reward} for reward in rewards],
        "heldout": {
            "pass_before": 0.02, "pass_after": after, "greedy_before": 0.0, "greedy_after": after,
            "interval": [0.1, 0.2], "greedy_interval": [0.1, 0.2], "calls_before": calls, "calls_after": calls,
        },
        "seconds": {"total": 1.0, "rl": 1.0},
    }  # fmt: skip
    return Trial(cell=Cell(condition="test", rate=0.05, aid=aid), seed=seed, report=report, start_pass_at_8=0.25)


@pytest.mark.parametrize("cell", chosen_cells(), ids=str)
def test_every_cell_is_a_recipe_with_demonstrations(cell: Cell) -> None:
    config = trial_config(RECIPE, 0, cell)
    assert open_demonstrations(config)
    unaided = trial_config(RECIPE, 0, Cell(condition=cell.condition, rate=cell.rate, aid="none"))
    assert (config == unaided) == (cell.aid == "none")
    assert (config.tasks, config.midtrain, config.harness) == (unaided.tasks, unaided.midtrain, unaided.harness)


def test_cells_without_an_aid_come_first() -> None:
    cells = chosen_cells()
    assert len(cells) == len(CONDITIONS) * len(RATES) * len(AIDS)
    assert {cell.aid for cell in cells[: len(CONDITIONS) * len(RATES)]} == {"none"}
    assert chosen_cells(["search"], ["0.03"], ["none"]) == [Cell(condition="search", rate=0.03, aid="none")]


@pytest.mark.parametrize(
    ("conditions", "rates", "aids", "message"),
    [
        (["sleep"], None, None, "--conditions sleep: expected some of test, search, error"),
        (None, ["often"], None, "--rates often: expected numbers from 0 to 1"),
        (None, ["2"], None, "--rates 2: expected numbers from 0 to 1"),
        (None, None, ["luck"], "--aids luck: expected some of none, shared_prefix, resampling"),
    ],
)
def test_what_there_is_not_is_refused(
    conditions: list[str] | None, rates: list[str] | None, aids: list[str] | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        chosen_cells(conditions, rates, aids)


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.0] * 20, None),
        ([0.0] * 10 + [1.0] * 10, 13),
        ([0.5] * 10, None),
        ([0.4] * 10 + [0.8] * 10, 13),
        ([1.0] * 3, None),
    ],
)
def test_half_of_the_end_is_reached_by_a_step(rewards: list[float], step: int | None) -> None:
    assert half_at(rewards) == step


def test_cells_average_seeds_and_a_skill_that_was_not_learnt_is_a_row_like_any_other() -> None:
    learnt, lost = [0.0] * 10 + [1.0] * 10, [0.0] * 20
    result = figures([trial(0, 0.8, learnt), trial(0, 0.0, lost, "resampling"), trial(1, 0.6, learnt)])
    cells = result["cells"]
    assert isinstance(cells, list)
    first, second = cells
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (first["seeds"], first["pass_after"], first["half_at_step"]) == (2, 0.7, 13)
    assert isinstance(first["pass_interval"], list)
    assert (second["contestant"], second["pass_after"], second["half_at_step"]) == ("resampling", 0.0, None)
    shown = table({"bench": "exploration", "date": date_utc(), "commit": "0", **result})
    assert "1: read 90%, edit 10%" in shown
    assert "None" not in shown


def test_nothing_is_run_of_no_cells(tmp_path: Path) -> None:
    assert bench_exploration(RECIPE, tmp_path, seeds=[0], cells=[])["results"] == []

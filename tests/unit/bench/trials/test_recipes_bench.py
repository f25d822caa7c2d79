"""``bench recipes``: the expected range of the next seed, and a small recipe that is run again."""

from pathlib import Path

import orjson
import pytest

from bench.trials.recipes import EXPECTED, bench_recipes, expectation, table
from etude.errors import UserError
from etude.types import Json

RECIPES = Path(__file__).parents[4] / "recipes"
SMALL = """
name = "small"
[tasks.options]
kinds = ["arith"]
[midtrain]
tokens = 20_000
threads = 1
[rollouts]
groups_per_step = 2
group_size = 2
concurrency = 4
[engine]
device = "cpu"
[trainer]
device = "cpu"
steps = 1
[eval]
tasks = 8
"""


def report(seed: int, before: float, after: float) -> dict[str, Json]:
    heldout = {f"{name}_{label}": value for label, value in (("before", before), ("after", after))
               for name in ("pass", "greedy")}  # fmt: skip
    return {"seed": seed, "heldout": heldout | {"interval": [0.25, 0.75], "greedy_interval": [0.25, 0.75]}}


def test_the_next_seed_is_expected_where_its_predecessors_spread() -> None:
    expected = expectation([report(0, 0.0, 0.8), report(1, 0.0, 0.9), report(2, 0.1, 1.1)], "sampled")
    half = 4.3027 * 0.1 * (4 / 3) ** 0.5  # Student's t of two degrees of freedom
    assert (expected.low, expected.high) == pytest.approx((0.9 - half, 0.9 + half), abs=1e-3)
    assert [expected.place(gain) for gain in (0.3, 0.9, 1.5)] == ["below", "inside", "above"]


def test_of_one_seed_its_own_interval_stands() -> None:
    expected = expectation([report(0, 0.0, 0.5)], "greedy")
    assert (expected.low, expected.high, expected.seeds) == (0.25, 0.75, 1)


@pytest.mark.parametrize(
    ("recipe", "seed", "message"),
    [
        ("quickstart", 0, r"seed 0 of quickstart is committed in its expected\.json: choose another one"),
        ("gpu-1t", None, r"expected\.json is not there: nothing is known of what gpu-1t comes to"),
        ("live", None, "it is measured by a bench of its own"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    tmp_path: Path, recipe: str, seed: int | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        bench_recipes([recipe], tmp_path / "out", seed, place=RECIPES)
    assert not (tmp_path / "out").exists()


@pytest.mark.heavy("half a minute of two cores")
def test_a_recipe_is_run_again_at_a_new_seed(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "run.toml").write_text(SMALL, encoding="utf-8")
    (folder / EXPECTED).write_bytes(orjson.dumps([report(3, 0.0, 0.5), report(4, 0.0, 0.6)]))
    result = bench_recipes(["small"], tmp_path / "out", place=tmp_path)
    rows = result["results"]
    assert isinstance(rows, list)
    assert [(row["contestant"], row["way"], row["seed"]) for row in rows if isinstance(row, dict)] == [
        ("small", "sampled", 5),
        ("small", "greedy", 5),
    ]
    assert "small" in table(result)
    again = bench_recipes(["small"], tmp_path / "out", place=tmp_path)
    assert again["results"] == rows, "what is done is read"

"""docs/science.md has the figures of the committed results of ``bench science``, which have enough seeds."""

import pytest

from bench.science.ablations import ABLATIONS, FRESH, JUDGED, JUDGED_SEEDS
from bench.science.page import DOCS, committed, render
from bench.tables import results_of

FEWEST_SEEDS = 3


def test_the_page_and_its_plots_are_those_of_the_results() -> None:
    files = render(committed())
    assert files.keys() > {"science.md"}
    for name, text in files.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"`python -m bench.science.page` writes {name} anew"


@pytest.mark.parametrize("name", committed())
def test_every_arm_was_trained_on_three_seeds_and_the_same(name: str) -> None:
    result, seeds = committed()[name], dict[str, set[int]]()
    for row in results_of(result):
        seeds.setdefault(str(row["contestant"]), set()).add(int(str(row["seed"])))
    assert list(seeds) == [arm.name for arm in ABLATIONS[name].arms]
    skipped = result["skipped_seeds"]
    assert isinstance(skipped, list)
    usable = [seed for seed in range(FEWEST_SEEDS + len(skipped)) if seed not in skipped]
    assert all(set(usable[:FEWEST_SEEDS]) <= each for each in seeds.values())


def test_the_goal_of_staleness_is_judged_on_more_seeds() -> None:
    result = committed()["staleness"]
    for arm in (FRESH, *JUDGED):
        assert sum(row["contestant"] == arm for row in results_of(result)) == JUDGED_SEEDS
    goals = result["goals"]
    assert isinstance(goals, dict)
    assert len(goals) == len(JUDGED)

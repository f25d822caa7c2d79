"""``bench summaries`` sets up its arms and judges them; its runs take minutes each and are not made here."""

from pathlib import Path

import pytest

from bench.trials.summaries import ARMS, LIFT, START_OF, Trial, arm_config, bench_summaries, figures, table
from etude.clock import date_utc
from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.config.rollouts import CodingOptions
from etude.config.tasks import LookupOptions
from etude.errors import UserError
from etude.tasks.lookup import LookupFamily
from etude.tokens.word_cache import FIND_WORDS
from etude.types import Split

RECIPES = Path(__file__).parents[3] / "recipes" / "self-summary"
RECIPE = load_recipe(RECIPES)


def coding(config: RunConfig) -> CodingOptions:
    """The options of its harness."""
    assert isinstance(config.harness.options, CodingOptions)
    return config.harness.options


def trial(arm: str, seed: int, before: float, after: float, shares: tuple[float, float] | None) -> Trial:
    first, last = shares or (None, None)
    heldout = {
        "pass_before": before, "pass_after": after, "stderr": 0.02,
        "greedy_before": before, "greedy_after": after, "greedy_stderr": 0.02,
        "recall_before": first, "recall_after": last,
    }  # fmt: skip
    return Trial(arm=arm, seed=seed, heldout=heldout, rl_s=1.0, seconds=2.0)


def test_an_arm_differs_from_the_recipe_in_what_it_takes_away() -> None:
    assert arm_config(RECIPE, "trained") == RECIPE
    untrained = arm_config(RECIPE, "untrained")
    assert untrained.credit.summaries == "mask"
    assert untrained.harness == RECIPE.harness
    truncated = arm_config(RECIPE, "truncated")
    assert (coding(truncated).context, truncated.engine) == ("truncate", RECIPE.engine)
    assert coding(truncated).summary_at_tokens == coding(RECIPE).summary_at_tokens
    assert {START_OF[arm] for arm in ARMS} == {"trained", "truncated", "unlimited"}


def test_the_whole_material_has_its_place_in_an_unlimited_window() -> None:
    config = arm_config(RECIPE, "unlimited")
    assert coding(config).context == "grow"
    options = RECIPE.tasks.options
    assert isinstance(options, LookupOptions)
    task = LookupFamily(options, seed=0).task(Split.TRAIN, 0)
    words = sum(len(FIND_WORDS(text)) + text.count("\n") + 1 for text in task.files.values())
    assert config.engine.max_length > words + options.pages * (coding(config).max_tokens_per_turn + 4)


def test_the_worst_seed_decides_and_only_of_the_recipes_own_arm() -> None:
    trials = [
        trial("trained", 0, 0.1, 0.8, (0.5, 0.9)),
        trial("trained", 1, 0.1, 0.25, (0.5, 0.7)),
        trial("truncated", 0, 0.0, 0.0, None),
    ]
    result = figures(trials)
    goals, rows = result["goals"], result["results"]
    assert isinstance(goals, dict)
    assert isinstance(rows, list)
    assert goals["lift"] == {
        "meaning": LIFT.meaning, "value": 0.15, "goal": 0.2, "sense": "at least", "met": False,
        "each": {"seed 0": 0.7, "seed 1": 0.15},
    }  # fmt: skip
    assert goals["recall_gain"]["met"] is True  # type: ignore[index,call-overload]  # JSON
    shown = table({"bench": "summaries", "date": date_utc(), "commit": "0", **result})
    assert "truncated" in shown
    assert "None" not in shown


def test_an_arm_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no contestant 'forgotten': expected some of trained, untrained"):
        bench_summaries(RECIPES, tmp_path, seeds=[0], arms=["forgotten"])

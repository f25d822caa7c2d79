"""The simulated users of ``recipes/live``: their opinions, their feedback, and the figures of a day."""

import json
import sys
from pathlib import Path
from random import Random
from statistics import fmean

from etude.config.loading import load_recipe, parse_config
from etude.run.resolve import resolve

RECIPE = Path(__file__).parents[2] / "recipes" / "live"
sys.path[:0] = [str(RECIPE), str(RECIPE / "users")]

from day import VARIANTS  # noqa: E402 - the recipe is no package
from measure import ReleaseMove, TruthRow, day_figures, over_seeds  # noqa: E402 - the recipe is no package
from population import TASTES, Conduct, Outcome, Person, draw_population, population_satisfaction  # noqa: E402

TESTED = Outcome(solved=True, turns=4, edits=1, tested=True, read_first=True, submitted=True)
BRIEF = Outcome(solved=True, turns=3, edits=1, tested=False, read_first=True, submitted=True)
WRONG = Outcome(solved=False, turns=3, edits=1, tested=False, read_first=False, submitted=True)
NOON = 0.5


def test_users_who_answer_prefer_something_else_than_all_users() -> None:
    """The loud minority: without propensities brief sessions look best, with them those that all people prefer."""
    honest = [person for person in draw_population(2000, seed=1) if person.conduct is Conduct.HONEST]

    def heard(outcome: Outcome, *, weighted: bool) -> float:
        odds = [person.answer_propensity(outcome, NOON) for person in honest]
        weights = [1.0 if weighted else one for one in odds]
        return sum(
            weight * person.satisfaction(outcome, NOON) for weight, person in zip(weights, honest, strict=True)
        ) / sum(weights)

    assert heard(BRIEF, weighted=False) > heard(TESTED, weighted=False) + 0.1
    assert heard(TESTED, weighted=True) > heard(BRIEF, weighted=True) + 0.1
    assert population_satisfaction(TESTED) > population_satisfaction(BRIEF) > population_satisfaction(WRONG)


def test_what_people_say_follows_what_they_think_and_vandals_do_not() -> None:
    def mean_kept(conduct: Conduct, outcome: Outcome) -> float:
        person = Person(user="u", taste_name="hobbyist", conduct=conduct, rng=Random(3))
        signals = [signal for _ in range(4000) for signal in person.signals(outcome, NOON) if signal.kind == "kept"]
        return fmean(signal.value for signal in signals)

    assert mean_kept(Conduct.HONEST, BRIEF) > 0.85
    assert mean_kept(Conduct.HONEST, WRONG) < 0.35
    assert mean_kept(Conduct.CONTRARY, BRIEF) < 0.35
    assert mean_kept(Conduct.RING, WRONG) == 1.0
    assert mean_kept(Conduct.RING, BRIEF) < 0.35


def test_people_leave_a_product_below_the_bar() -> None:
    def left(solved: float) -> float:
        people, rng = draw_population(500, seed=2), Random(4)
        for person in people:
            for _ in range(10):
                person.experience(person.satisfaction(TESTED if rng.random() < solved else WRONG, NOON))
        return fmean(person.left for person in people)

    assert left(0.05) > 0.5
    assert left(0.6) < 0.1


def test_the_population_is_the_same_for_the_same_seed_and_has_its_shares() -> None:
    people, again = draw_population(1000, seed=0), draw_population(1000, seed=0)
    assert [(one.taste_name, one.conduct) for one in people] == [(one.taste_name, one.conduct) for one in again]
    for name, taste in TASTES.items():
        assert abs(fmean(one.taste_name == name for one in people) - taste.share) < 0.01
    assert sum(one.conduct is not Conduct.HONEST for one in people) == 60


def test_the_figures_of_a_day_compare_its_first_release_with_its_evening() -> None:
    def row(second: int) -> TruthRow:
        version, satisfied = (8, 0.4) if second < 60 else (12, 0.7)
        return TruthRow(
            unix_s=float(second), template=f"t{second % 7}", versions=(version,), satisfied=satisfied,
            population_satisfied=satisfied, solved=True, tested=version == 12, turns=3, conduct="honest", user="u",
        )  # fmt: skip

    moves = [
        ReleaseMove(unix_s=0.0, version=8, to="released"),
        ReleaseMove(unix_s=50.0, version=11, to="rejected", planted="noise"),
        ReleaseMove(unix_s=60.0, version=12, to="released"),
        ReleaseMove(unix_s=60.0, version=8, to="superseded"),
        ReleaseMove(unix_s=90.0, version=14, to="rolled_back", planted="habit"),
    ]
    figures = day_figures([row(second) for second in range(100)], moves)
    assert figures["rise"] == 0.3
    assert figures["tested"] == [0.0, 1.0]
    assert figures["releases"] == {
        "released": 2, "rejected": 1, "rolled_back": 1, "planted": {"noise": "rejected", "habit": "rolled_back"}
    }  # fmt: skip


def test_the_ablations_are_of_this_recipe_and_come_to_what_its_page_says() -> None:
    whole = json.loads((RECIPE / "expected.json").read_text(encoding="utf-8"))["days"][1]
    ablations = json.loads((RECIPE / "ablations.json").read_text(encoding="utf-8"))
    page = (RECIPE / "README.md").read_text(encoding="utf-8")
    for day in ablations:
        settings = [*VARIANTS[day["variant"]], f"seed={whole['seed']}"]
        assert resolve(parse_config(day["config"], source="ablations.json")) == resolve(load_recipe(RECIPE, settings))
        shown = f"| {100 * day['satisfied_before']['value']:.1f} % | {100 * day['satisfied_after']['value']:.1f} % |"
        assert shown in page
    rises = {day["variant"]: day["rise"] for day in ablations}
    assert rises.keys() == VARIANTS.keys() - {"live"}
    assert rises["no-propensity"] < whole["rise"] - 0.05
    assert rises["below-the-bar"] < 0.02


def test_the_measured_days_are_of_this_recipe_and_users_are_better_off_on_every_seed() -> None:
    expected = json.loads((RECIPE / "expected.json").read_text(encoding="utf-8"))
    assert [day["seed"] for day in expected["days"]] == [0, 1, 2]
    assert over_seeds(expected["days"]) == expected["rise"]
    assert expected["rise"]["low"] > 0
    for day in expected["days"]:
        measured = resolve(parse_config(day["config"], source="expected.json"))
        assert measured == resolve(load_recipe(RECIPE, [f"seed={day['seed']}"]))
        assert day["satisfied_after"]["low"] > day["satisfied_before"]["high"]
        assert day["releases"]["planted"]["noise"] == "rejected", "users never met it"
    habits = [day["releases"]["planted"]["habit"] for day in expected["days"]]
    assert habits.count("rolled_back") >= 2 and not {"released", "superseded"} & {*habits}

"""Figures of evaluations, and of the difference of two."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType

from etude.dashboard.evaluation import Evaluation, Measure, TokenPrices, Try, differences, figures
from etude.dashboard.evaluation_text import comparison_table, evaluation_table
from etude.dashboard.formatting import number_at
from etude.errors import ConfigError


def make_try(task: int, reward: float, **fields: Any) -> Try:
    spent = {"prompt_tokens": 300, "new_tokens": 100, "sampled_tokens": 40, "turns": 3, "summaries": 0, "seconds": 2.0}
    seen: dict[str, Any] = {"graded": reward, "parts": {}, "template": f"template-{task}"}
    return Try(task_id=f"task-{task}", reward=reward, **(seen | spent | fields))


def make_evaluation(*passes: list[float | None], greedy: list[float] | None = None, version: int = 3) -> Evaluation:
    def tries(rewards: Any) -> tuple[Try | None, ...]:
        return tuple(None if reward is None else make_try(index, reward) for index, reward in enumerate(rewards))

    modes: Any = {"sampled": tuple(map(tries, passes))}
    if greedy is not None:
        modes["greedy"] = (tries(greedy),)
    return Evaluation(run="runs/a", version=version, digest="d" * 32, tries=modes, engine_s=12.5)


def test_pass_rates_are_means_over_tasks() -> None:
    result = figures(make_evaluation([1, 0, 1], [0, 0, 1]), Measure(ks=(1, 2)))
    assert number_at(result, "sampled.pass.1.value") == pytest.approx((0.5 + 0 + 1) / 3)
    assert number_at(result, "sampled.pass.2.value") == pytest.approx(2 / 3)
    assert number_at(result, "sampled.tries") == 6
    assert number_at(result, "engine_seconds") == 12.5


def test_a_missing_try_is_counted_and_is_no_failure() -> None:
    result = figures(make_evaluation([1, None, 1], [1, 1, None]), Measure())
    assert number_at(result, "sampled.missing") == 2
    assert number_at(result, "sampled.pass.1.value") == 1.0


def test_what_passes_is_said() -> None:
    evaluation = make_evaluation([0.4, 0.6, -0.5])
    assert number_at(figures(evaluation, Measure()), "sampled.pass.1.value") == 0.0  # full marks
    assert number_at(figures(evaluation, Measure(pass_at=0.4)), "sampled.pass.1.value") == pytest.approx(2 / 3)
    assert number_at(figures(evaluation, Measure(pass_at=0.5)), "sampled.pass.1.value") == pytest.approx(1 / 3)
    summed = make_evaluation([0.1 + 0.2 + 0.7])
    assert number_at(figures(summed, Measure()), "sampled.pass.1.value") == 1.0
    assert number_at(figures(evaluation, Measure()), "sampled.reward.value") == pytest.approx(0.5 / 3)


def styled(*tries: tuple[float, float | None], version: int = 3) -> Evaluation:
    """An evaluation with one try per task; each try has a grader's score, and a judge's score or ``None``."""
    passes = tuple(
        make_try(index, graded + 0.2 * (style or 0.0), graded=graded, parts={} if style is None else {"style": style})
        for index, (graded, style) in enumerate(tries)
    )
    return Evaluation(run="a", version=version, digest="", tries={"sampled": (passes,)}, engine_s=0, parts=("style",))


def test_a_bonus_for_style_passes_nothing() -> None:
    result = figures(styled((0.0, 1.0), (1.0, 0.0), (0.0, 0.5), (0.0, None)), Measure())
    assert number_at(result, "sampled.pass.1.value") == 1 / 4
    assert number_at(result, "sampled.reward.value") == pytest.approx((0.2 + 1.0 + 0.1) / 4)


def test_every_part_has_a_figure_over_the_tries_that_have_it() -> None:
    before = styled((0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (0.0, None), version=0)
    after = styled((0.0, 1.0), (0.0, 1.0), (0.0, None), (0.0, 0.5))
    result, changed = figures(after, Measure()), differences(before, after, Measure())
    assert number_at(result, "sampled.parts.style.value") == pytest.approx(2.5 / 3)
    low, high = (number_at(result, f"sampled.parts.style.{end}") or 0.0 for end in ("low", "high"))
    assert 0.1 < low < 2.5 / 3 < high <= 1.0
    assert number_at(changed, "sampled.parts.style.value") == 0.75
    assert number_at(changed, "sampled.pass.1.value") == 0.0
    assert "  style" in drawn(evaluation_table(result), 80)
    assert "+0.750" in drawn(comparison_table(figures(before, Measure()), result, changed), 80)
    unknown = figures(styled((1.0, None)), Measure())["sampled"]
    assert isinstance(unknown, dict)
    assert unknown["parts"] == {}


def test_versions_are_shown_over_the_tasks_that_both_tried() -> None:
    """Each failed a task that the other could not try."""
    before, after = make_evaluation([0, 1, 0, None]), make_evaluation([None, 1, 1, 0])
    changed = differences(before, after, Measure())
    table = drawn(comparison_table(figures(before, Measure()), figures(after, Measure()), changed), 100)
    (row,) = (line for line in table.splitlines() if "pass@1" in line)
    assert row.split()[1:4] == ["50.0%", "100.0%", "+50.0"]


def of_templates(*tries: tuple[str, float], version: int = 3) -> Evaluation:
    """One pass: of each task its template and its reward."""
    passes = tuple(make_try(index, reward, template=template) for index, (template, reward) in enumerate(tries))
    return Evaluation(run="a", version=version, digest="", tries={"sampled": (passes,)}, engine_s=0)


def test_errors_are_over_templates_where_tasks_share_them() -> None:
    passed = {"a": 9, "b": 5, "c": 4, "d": 8, "e": 6}  # of ten tasks each
    tries = [(name, float(index < count)) for name, count in passed.items() for index in range(10)]
    before, after = of_templates(*((name, 0.0) for name, _ in tries), version=0), of_templates(*tries)
    result, changed = figures(after, Measure()), differences(before, after, Measure())
    alone = figures(
        of_templates(*((f"{name}{index}", reward) for index, (name, reward) in enumerate(tries))), Measure()
    )
    over_templates, over_tasks = (number_at(each, "sampled.pass.1.stderr") or 0.0 for each in (result, alone))
    assert over_templates == pytest.approx(0.09274, abs=1e-5)  # of the five rates 0.9, 0.5, 0.4, 0.8, 0.6
    assert over_templates > 1.3 * over_tasks
    assert (number_at(result, "sampled.templates"), number_at(alone, "sampled.templates")) == (5, 50)
    assert number_at(changed, "sampled.pass.1.stderr") == pytest.approx(over_templates)
    for table in (evaluation_table(result), comparison_table(figures(before, Measure()), result, changed)):
        assert "intervals over 5 templates: Student's t over templates" in drawn(table, 80)


def test_tasks_without_a_template_are_alike_with_no_other() -> None:
    result = figures(of_templates(*(("", float(index % 2)) for index in range(8))), Measure())
    assert number_at(result, "sampled.templates") == 8
    assert number_at(result, "sampled.pass.1.stderr") == pytest.approx((2 / 7 / 8) ** 0.5)


def test_cost_is_of_read_cached_and_sampled_tokens() -> None:
    prices = TokenPrices(new=2.0, cached=0.5, sampled=10.0)
    assert prices.of(make_try(0, 1.0)) == pytest.approx((100 * 2.0 + 200 * 0.5 + 40 * 10.0) / 1e6)
    assert number_at(figures(make_evaluation([1, 0]), Measure(prices=prices)), "sampled.cost.value") == pytest.approx(
        7e-4
    )
    assert number_at(figures(make_evaluation([1, 0]), Measure()), "sampled.cost.value") is None


def test_a_k_beyond_the_tries_says_so() -> None:
    with pytest.raises(ConfigError, match=r"pass@4 takes 4 tries of a task.*--passes"):
        figures(make_evaluation([1, 0], [0, 1]), Measure(ks=(1, 4)))
    with pytest.raises(ConfigError, match="numbers from 1 on"):
        Measure(ks=(0,))


def test_no_figure_is_made_of_nothing() -> None:
    with pytest.raises(ConfigError, match="every sampled try failed"):
        figures(make_evaluation([None, None]), Measure())


def test_two_versions_are_compared_on_the_tasks_that_both_have_tried() -> None:
    before = make_evaluation([0, 0, 0, None, 1], [0, 0, 0, None, 1], greedy=[0, 0, 1, 1, 1], version=0)
    after = make_evaluation([1, 1, 0, 1, 1], [1, 0, 0, 1, 1], greedy=[1, 1, 0, 1, 1])
    result = differences(before, after, Measure(ks=(1, 2)))
    assert number_at(result, "sampled.tasks") == 4
    assert number_at(result, "sampled.pass.1.value") == pytest.approx((1 + 0.5) / 4)
    assert number_at(result, "sampled.pass.2.value") == pytest.approx(2 / 4)
    assert (number_at(result, "sampled.sign_test.wins"), number_at(result, "sampled.sign_test.losses")) == (2, 0)
    assert (number_at(result, "greedy.sign_test.wins"), number_at(result, "greedy.sign_test.losses")) == (2, 1)
    assert number_at(result, "greedy.sign_test.p") == 1.0


def test_other_tasks_cannot_be_compared() -> None:
    before, after = make_evaluation([1, 0]), make_evaluation([1, 0])
    strange: Any = {"sampled": ((make_try(0, 1.0), make_try(7, 1.0)),)}
    with pytest.raises(ConfigError, match=r"task 1 is task-1 for one and task-7"):
        differences(before, Evaluation(run="b", version=0, digest="", tries=strange, engine_s=0.0), Measure())
    greedy = Evaluation(run="b", version=0, digest="", tries={"greedy": after.tries["sampled"]}, engine_s=0.0)
    with pytest.raises(ConfigError, match="not evaluated in the same way"):
        differences(before, greedy, Measure())


@pytest.mark.parametrize("width", [80, 100])
def test_the_tables_fit_and_say_how_intervals_were_found(width: int) -> None:
    measure = Measure(ks=(1, 2), prices=TokenPrices(new=1, cached=1, sampled=1))
    evaluations = [
        make_evaluation([0, 0.5, 1, None], [1, 0, 0, 1], greedy=[0, 0, 1, 1], version=version) for version in (0, 3)
    ]
    before, after = (figures(evaluation, measure) for evaluation in evaluations)
    single = drawn(evaluation_table(after), width)
    for words in ("sampled ×2, 1 tries missing", "pass@2", "Student's t over tasks", "cost"):
        assert words in single
    double = drawn(comparison_table(before, after, differences(evaluations[0], evaluations[1], measure)), width)
    for words in ("runs/a v0 → v3", "difference", "McNemar, exact", "exact sign test", "alike on"):
        assert words in double
    for text in (single, double):
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text


def drawn(table: RenderableType, width: int) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(table)
    return out.getvalue()

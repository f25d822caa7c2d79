"""Results of a suite: written and read again, compared task by task, put side by side."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from etude.dashboard.evaluation import TokenPrices, differences, figures
from etude.dashboard.formatting import number_at
from etude.dashboard.plots import FrontierDot, frontier, frontier_plot
from etude.dashboard.suite_report import report_page, report_rows, report_table
from etude.dashboard.suite_results import (
    RESULTS_FILE,
    SuiteResults,
    SuiteTry,
    common_tasks,
    read_results,
    write_results,
)
from etude.errors import ConfigError

PRICES = TokenPrices(new=10.0, cached=1.0, sampled=100.0)


def results(
    passed: str, *, model: str = "m", passes: int = 1, sampled: int = 50, date: str = "2026-01-01"
) -> SuiteResults:
    """Tries at tasks ``a``, ``b``, …, two of a template: ``+`` passed, ``-`` not, ``.`` missing, pass by pass."""
    ids = [chr(ord("a") + index) for index in range(len(passed) // passes)]
    tries = [
        SuiteTry(
            task_id=ids[index % len(ids)],
            template=f"t{index % len(ids) // 2}",
            number=index // len(ids),
            reward=float(mark == "+"),
            graded=float(mark == "+"),
            passed=mark == "+",
            reason="submit",
            seconds=2.0,
            measures={"calls": 4, "prompt_tokens": 100, "cached_tokens": 40, "sampled_tokens": sampled, "model_s": 1.0},
        )
        for index, mark in enumerate(passed)
        if mark != "."
    ]
    return SuiteResults(
        suite="s", version="1", digest="d", model=model, url="http://x", api="openai", harness="shell", date=date,
        etude="0", temperature=1.0, passes=passes, pass_at=1.0,
        tasks={task_id: f"t{index // 2}" for index, task_id in enumerate(ids)}, tries=tuple(tries), prices=PRICES,
    )  # fmt: skip


def shown(rows: list[SuiteResults]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report_table(report_rows(rows)))
    return console.export_text()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    before = results("++-.+-", passes=2)
    file = write_results(before, tmp_path)
    assert read_results(tmp_path) == read_results(file) == before
    tree = json.loads(file.read_text())
    assert tree["missing"] == [{"task_id": "a", "number": 1}]
    assert tree["figures"]["sampled"]["pass"].keys() == {"1", "2"}


@pytest.mark.parametrize(
    ("text", "message"), [("{}", "KeyError"), ("[", "no file of results"), ('{"schema": "other/2"}', "'other/2'")]
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / RESULTS_FILE).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_results(tmp_path)
    with pytest.raises(ConfigError, match="no results at"):
        read_results(tmp_path / "nowhere")


def test_figures_have_cost_latency_and_pass_at_k() -> None:
    one = results("+-+--+", passes=2)
    shown_figures = figures(one.evaluation(), one.measure())
    at = {name: number_at(shown_figures, f"sampled.{name}.value") for name in ("pass.1", "pass.2", "cost", "call_s")}
    assert at["pass.1"] == pytest.approx(0.5)
    assert at["pass.2"] == pytest.approx(2 / 3)  # a: + and -, b: - and -, c: + and +
    assert at["cost"] == pytest.approx((60 * 10 + 40 * 1 + 50 * 100) / 1e6)
    assert at["call_s"] == 0.25


def test_two_are_compared_over_the_tasks_of_both_however_they_are_ordered() -> None:
    first, second = results("+-+-"), results("++--+")
    second = replace(second, tasks=dict(sorted(second.tasks.items(), reverse=True)))
    common = common_tasks(first, second)
    assert common == ["a", "b", "c", "d"]
    gained = differences(first.evaluation(common), second.evaluation(common), first.measure())
    assert number_at(gained, "sampled.pass.1.value") == 0.0
    assert (number_at(gained, "sampled.sign_test.wins"), number_at(gained, "sampled.sign_test.losses")) == (1, 1)
    assert number_at(gained, "sampled.cost.value") == 0.0
    with pytest.raises(ConfigError, match="suite 's' and the other of 'x'"):
        common_tasks(first, replace(second, suite="x"))
    with pytest.raises(ConfigError, match="no task in common"):
        common_tasks(first, replace(second, tasks={"z": "t"}))


def test_models_of_different_prices_are_compared_by_their_own() -> None:
    first = results("+-")
    second = replace(results("+-"), prices=TokenPrices(new=20.0, cached=2.0, sampled=200.0))
    gained = differences(first.evaluation(), second.evaluation(), first.measure())
    assert number_at(gained, "sampled.cost.value") == pytest.approx((60 * 10 + 40 * 1 + 50 * 100) / 1e6)


def test_a_table_has_the_best_first_and_says_what_is_missing() -> None:
    text = shown([results("+-.-", model="poor"), results("+++-", model="rich")])
    lines = text.splitlines()
    rich, poor = (next(index for index, line in enumerate(lines) if name in line) for name in ("rich ·", "poor ·"))
    assert rich < poor
    assert "75.0%" in lines[rich]
    assert "poor · shell: 1 tries are missing" in text


def test_a_page_needs_nothing_else_and_has_a_plot_over_days_only_where_there_are_some() -> None:
    rows = [results("+-+-", sampled=10), results("+++-", model="big <b>", sampled=500)]
    page = report_page(report_rows(rows))
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    assert "big &lt;b&gt; · shell solves 75.0%" in page
    assert "Quality against cost of a try" in page
    assert "Over time" not in page
    drifted = report_page(report_rows([*rows, results("++++", sampled=10, date="2026-03-02")]))
    assert "m · shell: pass@1 in %, over days since 2026-01-01" in drifted


def dot(label: str, amount: float, share: float) -> FrontierDot:
    return FrontierDot(label=label, amount=amount, share=share, low=share - 0.1, high=share + 0.1)


def test_the_frontier_has_what_no_other_beats_in_both() -> None:
    dots = [dot("cheap", 1, 0.2), dot("worse", 2, 0.1), dot("good", 3, 0.6), dot("dear", 9, 0.6), dot("best", 20, 0.9)]
    assert [each.label for each in frontier(dots)] == ["cheap", "good", "best"]
    plot = frontier_plot("title", dots)
    assert plot.count("<circle") == 5
    assert plot.count('class="dot side"') == 2
    assert frontier_plot("title", [dot("free", 0, 0.5)]) == ""

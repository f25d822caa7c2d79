"""The page needs no other file, is well formed, and shows only figures of the report."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest

from etude.config.recipe import RunConfig
from etude.config.training import ModelConfig
from etude.dashboard.page import render_page
from etude.dashboard.plots import Line, line_plot, smooth
from etude.dashboard.report import build_report
from etude.dashboard.run_metrics import RunMetrics
from etude.dashboard.text import summary
from etude.telemetry.events import Logged
from etude.types import Json
from evaluations import evaluation


@pytest.fixture
def empty(config: RunConfig) -> dict[str, Json]:
    return build_report(RunMetrics(), config, machine={}, date="today", commit="")


def test_the_page_needs_nothing_from_elsewhere(report: dict[str, Json]) -> None:
    page = render_page(report)
    assert "<script" not in page
    assert not re.search(r"(?:src|href|url|@import)\s*[=(]", page)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_the_headline_is_the_held_out_result(report: dict[str, Json]) -> None:
    page = render_page(report)
    assert "From 31.2% to 67.2% of 64 held\u2011out tasks solved" in page
    assert "+35.9" in page
    assert "± 1.6 points" in page
    assert "95 % interval +32.2 to +39.6" in page
    assert "± is one standard error over 8 templates; runs of other seeds have the same held-out tasks" in page
    assert "from random weights to the last evaluation" in page
    assert 'class="warning"' not in page


def test_a_grader_that_pays_fractions_has_its_mean_reward_as_headline(config: RunConfig) -> None:
    run = RunMetrics()
    for number, (label, full) in enumerate((("before", 1), ("after", 2))):
        paid = evaluation(label, 0, 6, 6, tasks=6, paid=0.5 + 0.25 * number)
        passed = [index < full for index in range(6)]
        done = replace(paid, sampled_passed=[*passed], greedy_passed=[*passed])
        run.add(Logged(at_s=float(number), process="rollouts", event=done))
    begun = config.model_copy(update={"model": ModelConfig(checkpoint="models/ll")})
    report = build_report(run, begun, machine={}, date="today", commit="")
    page = render_page(report | {"finished": True})
    assert "Mean reward 0.500 → 0.750 on 6 held\u2011out tasks (full marks: 1 → 2)" in page
    assert "solved" not in page
    assert "from models/ll to the last evaluation" in page
    assert "random weights" not in page


def test_a_run_that_learnt_nothing_says_so_at_the_top(report: dict[str, Json]) -> None:
    learning = report["learning"]
    assert isinstance(learning, dict)
    page = render_page(report | {"learning": learning | {"nothing_learnt": "nothing was learnt: <why>"}})
    assert '<p class="warning">nothing was learnt: &lt;why&gt;</p></header>' in page


def test_every_plot_can_be_read_aloud(report: dict[str, Json]) -> None:
    root = _parsed(render_page(report))
    labels = [plot.get("aria-label") or "" for plot in root.iter("svg") if plot.get("role") == "img"]
    assert len(labels) == 12
    assert all(labels)
    assert "Greedy: before 35.9% ± 1.6, after 71.9% ± 2.1" in labels


def test_the_mismatch_is_broken_down_by_position(report: dict[str, Json]) -> None:
    root = _parsed(render_page(report))
    (table,) = [table for table in root.iter("table") if table.get("class") == "figures below"]
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert rows[0] == ["position", "tokens", "k3", "p99", "max", "equal bits"]
    assert [row[0] for row in rows[1:]] == ["0", "1–7", "8–31", "32 and beyond"]
    assert rows[1][1] == "960"
    assert rows[1][-1] == "33%"


def test_what_was_not_is_not_drawn(empty: dict[str, Json]) -> None:
    page = render_page(empty)
    _parsed(page)
    assert "<h1>Not evaluated</h1>" in page
    for title in ("Learning", "Health", "Mid-training loss", "Entropy", "Mismatch k3", "Greedy", ">Time<"):
        assert title not in page
    assert "polyline class" not in page


def test_mid_training_that_a_recipe_leaves_out_takes_no_time(report: dict[str, Json]) -> None:
    config = report["config"]
    assert isinstance(config, dict)
    assert "midtrain 3:00" in dict(summary(report))["time"]
    off = report | {"config": config | {"midtrain": {"tokens": 0}}, "midtrain_curve": []}
    assert "midtrain" not in dict(summary(off))["time"]
    assert ">midtrain<" not in render_page(off).partition("Configuration")[0]


def test_text_is_escaped(report: dict[str, Json]) -> None:
    hostile = '<b onload="x">&'
    page = render_page({**report, "name": hostile, "commit": hostile, "machine": {hostile: hostile}})
    _parsed(page)
    assert "<b " not in page


def test_the_configuration_is_all_there(report: dict[str, Json], config: RunConfig) -> None:
    page = render_page(report)
    for section, values in config.model_dump().items():
        for key in values if isinstance(values, dict) else [section]:
            assert f">{key}</th>" in page or f"[{section}.{key}]" in page


def test_higher_values_are_drawn_higher() -> None:
    plot = line_plot("x", [Line(points=[(0, 0.0), (1, 0.5), (2, 1.0)], label="", style="main")], height=100)
    assert 'points="0,100.0 500,50.0 1000,0.0"' in plot


def test_a_log_plot_gives_each_decade_the_same_height() -> None:
    points = [(0, 1e-6), (1, 1e-5), (2, 1e-4)]
    plot = line_plot("x", [Line(points=points, label="", style="main")], height=100, log=True)
    assert 'points="0,100.0 500,50.0 1000,0.0"' in plot
    assert ">10⁻⁵<" in plot


@pytest.mark.parametrize("values", [[0.5], [2.0, 2.0], [0.0, 0.0], [-1.0, 1.0], [1e-9, 1e9]])
@pytest.mark.parametrize("log", [False, True])
def test_any_values_can_be_drawn(values: list[float], log: bool) -> None:
    points = list(enumerate(values))
    plot = line_plot("x", [Line(points=points, label="end", style="main")], height=100, log=log, bound=(2.0, "bound"))
    heights = [float(y) for y in re.findall(r"[yM ,](-?\d+\.\d)\b", plot)]
    assert "nan" not in plot
    assert all(-1 <= y <= 120 for y in heights)


def test_labels_at_the_end_do_not_overlap() -> None:
    lines = [Line(points=[(0, 0.0), (1, level)], label=f"{level}", style="side") for level in (0.0, 0.01, 0.02, 1.0)]
    places = [float(y) for y in re.findall(r'class="end side"[^>]* y="([-\d.]+)"', line_plot("x", lines, height=100))]
    assert len(places) == 4
    assert min(b - a for a, b in pairwise(places)) >= 13


def test_smoothing_keeps_the_mean_of_a_line() -> None:
    points = [(float(step), 2.0 * step) for step in range(9)]
    assert smooth(points, radius=2)[4] == (4.0, 8.0)
    assert smooth(points, radius=2)[0] == (0.0, 2.0)
    assert smooth([]) == []


def _parsed(page: str) -> ElementTree.Element:
    """The page as XML: every element closed, every attribute quoted (void elements of the head aside)."""
    return ElementTree.fromstring(re.sub(r"<!DOCTYPE html>|<meta[^>]*>", "", page))

"""The panel and the final table, as text on terminals of several widths."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType

from etude.config.log import AlertConfig
from etude.config.recipe import EvalConfig, RunConfig
from etude.dashboard.report import build_report
from etude.dashboard.run_metrics import RunMetrics
from etude.dashboard.terminal import final_table, render, sparkline
from etude.dashboard.text import render_line
from etude.telemetry.events import AlertChanged, Logged, SinkFailed, StepDone
from etude.types import Json
from steps import changed


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.02, 0.1, 0.5, 0.99, 1.0])
def test_the_panel_fits_at_every_moment(width: int, share: float, events: list[Logged], config: RunConfig) -> None:
    run = _run(events, share)
    lines = _text(render(run, config, run.segments[-1].end_s + 5), width).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)


def test_the_panel_says_what_happens_now(events: list[Logged], config: RunConfig) -> None:
    run = _run(events, 0.6)
    text = _text(render(run, config, run.segments[-1].end_s), 100)
    step = run.steps[-1].event
    for words in (
        "bugfix-tiny · seed 3", "● RL", "✓ midtrain 3:00", f"step {step.step} of 40",
        f"mean {step.metrics['reward_mean']:.3f}",
        "max 2 of 2 allowed", "sampled 31.2% ± 2.4", "run resumed 1×", " left",
        "in 7 of 8 groups", "submit 81%, length 19%",
    ):  # fmt: skip
        assert words in text


def test_the_panel_says_what_went_wrong_last_and_where_to_look(events: list[Logged], config: RunConfig) -> None:
    rule = AlertConfig(name="idle", when="no_signal >= 3")
    run, watched = _run(events, 0.6), config.model_copy(update={"alerts": (rule,)})
    at_s, page = run.segments[-1].end_s, "http://127.0.0.1:43567/#token=abc"
    assert "last " in (text := _text(render(run, watched, at_s), 80))
    assert "start in 250 ms" in text and "tools 1.5 s · grading 500 ms" in text
    for event in (
        SinkFailed(sink="wandb", reason="unavailable", lost=0),
        AlertChanged(alert="idle", firing=True, value=3.0, summary="no_signal = 3; no_signal >= 3", to=["page"]),
    ):
        run.add(Logged(at_s=at_s, process="sinks", event=event))
    for width in (80, 160):
        text = _text(render(run, watched, at_s + 5, page), width)
        for words in ("wandb: unavailable", "1 firing, 0:05 ago", "idle: no_signal = 3", page):
            assert words in text
        assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k3": 2e-3}, "k3 0.002 · max 0.01 · above 0.001"),
        ({"k3": 0.0, "mismatch_equal": 100}, "k3 0 · max 0.01 · equal to the last bit"),
        ({"k3": 1e-6}, "k3 1.0×10⁻⁶ · max 0.01 · 0.5% flips"),
    ],
)
def test_the_mismatch_says_what_matters_most(
    events: list[Logged], config: RunConfig, changes: dict[str, Any], words: str
) -> None:
    run = _run(events, 0.6)
    last = run.steps[-1]
    figures: dict[str, Any] = {
        "mismatch_tokens": 100,
        "mismatch_max": 0.01,
        "mismatch_pairs": 600,
        "mismatch_flips": 3,
        **changes,
    }
    run.steps[-1] = replace(last, event=changed(last.event, **figures))
    assert words in _text(render(run, config, run.segments[-1].end_s), 100)


def test_a_mismatch_above_its_bound_is_in_the_line(events: list[Logged], config: RunConfig) -> None:
    run = _run(events, 0.6)
    last = run.steps[-1]
    assert "above" not in render_line(run, config, last.at_s)
    run.steps[-1] = replace(last, event=changed(last.event, k3=2e-3))
    assert "k3 2.0e-03 above 0.001!" in render_line(run, config, last.at_s)


def test_an_evaluation_shows_how_far_it_is(events: list[Logged], config: RunConfig) -> None:
    during = [logged for logged in events if logged.at_s < events[0].at_s + 189.9]
    assert "20 sampled · 20 greedy, of 64 each" in _text(render(_run(during, 1.0), config, during[-1].at_s), 100)


def test_a_run_without_evaluation_does_not_speak_of_it(events: list[Logged], config: RunConfig) -> None:
    bare = config.model_copy(update={"eval": EvalConfig(enabled=False)})
    unmeasured = [logged for logged in events if getattr(logged.event, "phase", "") != "eval-before"]
    run = _run(unmeasured, 0.6)
    text = _text(render(run, bare, run.segments[-1].end_s), 100)
    assert "eval" not in text
    assert "before RL" not in text
    assert " left" in text


def test_silence_is_said(events: list[Logged], config: RunConfig) -> None:
    run = _run(events, 0.6)
    assert "no event for 1:30" in _text(render(run, config, run.segments[-1].end_s + 90), 100)
    assert "no event" not in _text(render(run, config, run.segments[-1].end_s + 5), 100)


def test_the_rest_of_the_run_is_foreseen(events: list[Logged], config: RunConfig) -> None:
    """At the end of step 30, 10 steps of 12.5 s and an evaluation of 41 s are left."""
    end_of_step = [logged for logged in events if type(logged.event).__name__ == "StepDone"][29].at_s
    run = _run([logged for logged in events if logged.at_s <= end_of_step], 1.0)
    assert "about 2:46 left" in _text(render(run, config, end_of_step), 100)


def test_the_final_table_gives_the_gain_and_its_error(report: dict[str, Json]) -> None:
    text = _text(final_table(report), 100)
    for words in (
        "64 held-out tasks", "31.2%", "67.2%", "+35.9 ± 1.6", "over 8 templates", "5 failed", "trainer 79%",
        "max 2 of 2", "in 280 of 320 groups; rollouts ended: submit 81%, length 19%",
    ):  # fmt: skip
        assert words in text


def test_the_final_table_of_an_unfinished_run_has_dashes(config: RunConfig) -> None:
    report = build_report(RunMetrics(), config, machine={}, date="today", commit="")
    assert "trainer –, engine –" in _text(final_table(report), 80)


def test_a_sparkline_rises_from_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(800)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([], 8) == ""


def _run(events: list[Logged], share: float) -> RunMetrics:
    run = RunMetrics()
    for event in events[: max(1, int(share * len(events)))]:
        run.add(event)
    return run


def _text(renderable: RenderableType, width: int) -> str:
    console = Console(width=width, height=30, file=StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_line_says_what_goes_on_before_there_is_a_figure(events: list[Logged], config: RunConfig) -> None:
    start_s = events[0].at_s
    for seconds, words in ((1, "midtrain: reading texts"), (60, "midtrain: step 320/1000")):
        seen = [logged for logged in events if logged.at_s < start_s + seconds]
        assert words in render_line(_fold(seen), config, start_s + seconds)
    at_once = config.model_copy(update={"midtrain": config.midtrain.model_copy(update={"tokens": 0})})
    first = _fold(events[:2])
    assert "publishing the model that RL starts from" in render_line(first, at_once, start_s + 1)
    assert "midtrain" not in render_line(first, at_once, start_s + 1)
    during = [logged for logged in events if logged.at_s < start_s + 189.9]
    assert "eval-before: 20 sampled and 20 greedy tries graded, of 64 each" in render_line(
        _fold(during), config, start_s + 190
    )
    before = events.index(next(logged for logged in events if isinstance(logged.event, StepDone)))
    line = render_line(_fold(events[:before]), config, events[before].at_s)
    assert "of 64 rollouts of the first step graded" in line
    assert "no event for 1:00" in render_line(first, config, start_s + 60)


def test_an_engine_that_is_heard_of_first_is_not_ahead_of_what_was_published(
    events: list[Logged], config: RunConfig
) -> None:
    run = _run(events, 0.6)
    newest = run.published[-1].event.version
    for served, words in ((newest - 1, f"v{newest}, engine at v{newest - 1}"), (newest + 1, f"v{newest + 1}, served")):
        run.swapped_to = dict.fromkeys(run.swapped_to, served)
        assert words in _text(render(run, config, run.segments[-1].end_s), 100)


def _fold(events: list[Logged]) -> RunMetrics:
    return _run(events, 1.0)

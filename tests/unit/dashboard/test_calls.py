"""Calls of each turn: their counts, and the text about them."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from etude.config.recipe import RunConfig
from etude.dashboard.calls import in_words, named_calls, reported_turns, told_turns, turn_shares
from etude.dashboard.page import render_page
from etude.dashboard.report import build_report
from etude.dashboard.run_metrics import RunMetrics
from etude.dashboard.terminal import final_table
from etude.telemetry.events import Logged
from evaluations import evaluation

SESSIONS = [
    ["edit", "submit"],
    ["edit", "test", "edit", "submit"],
    ["read", "edit", "", "submit"],
    ["read", "read", "submit"],
]


def test_a_call_that_was_made_before_is_another_one() -> None:
    assert named_calls(["edit", "test", "edit", "", "edit"]) == ["edit", "test", "edit again", "no call", "edit again"]


def test_shares_are_of_all_sessions_and_what_lacks_had_ended() -> None:
    turns = turn_shares(SESSIONS)
    assert turns[0] == {"edit": 0.5, "read": 0.5}
    assert turns[1] == {"submit": 0.25, "test": 0.25, "edit": 0.25, "read again": 0.25}
    assert turns[2] == {"edit again": 0.25, "no call": 0.25, "submit": 0.25}
    assert turns[3] == {"submit": 0.5}
    assert turn_shares([]) == []
    assert turn_shares([[]]) == []


def test_few_sessions_are_not_told_of() -> None:
    turns = turn_shares([["edit"]] * 99 + [["read", "submit"]])
    assert told_turns(turns) == turns[:1]
    assert in_words(turns[0]) == "edit 99%"
    assert in_words({"edit": 0.5, "read": 0.3, "test": 0.2}) == "edit 50%, read 30%"


def test_a_report_of_another_time_has_no_turns() -> None:
    assert reported_turns({"heldout": {"n": 3}}, "before") == []
    assert reported_turns({"heldout": {"calls_after": [{"read": 0.9, "edit": 0.1}]}}, "after") == [
        {"read": 0.9, "edit": 0.1}
    ]


def test_what_was_called_before_and_after_stands_on_the_page_and_in_the_terminal(config: RunConfig) -> None:
    run = RunMetrics()
    for label, version, calls in (("before", 0, [{"edit": 0.8, "read": 0.2}]), ("after", 9, turn_shares(SESSIONS))):
        done = replace(evaluation(label, version, 8, 8), sampled_calls=calls)
        run.add(Logged(at_s=float(version), process="rollouts", event=done))
    report = build_report(run, config, machine={}, date="", commit="")
    text = StringIO()
    Console(file=text, width=100).print(final_table(report))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert any("turn 1 edit 80%, read 20% edit 50%, read 50%" in line for line in lines)
    assert any("turn 4 submit 50%" in line for line in lines)
    page = render_page(report)
    assert "Calls before RL, sampled. turn 1: edit 80%, read 20%" in page
    assert page.count('class="stack"') == 2

"""``bench loop`` reads runs and compares them; the runs take minutes and are not made here."""

import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.loop import runs
from bench.loop.bench import ASYNC_VS_SYNC, ASYNC_VS_TRL, figures, judge_ratio, table
from bench.loop.contestants import (
    ASYNCHRONOUS,
    CONTESTANTS,
    SYNCHRONOUS,
    TRL,
    Contestant,
    ContestantRun,
    LoopOptions,
    loop_options,
    recipe,
)
from bench.loop.heldout import Point, rising, target_rate, time_to
from bench.loop.runs import CpuWatch, command_cpu_s, etude_commands, outcome
from bench.loop.trl import training_tasks
from etude.clock import date_utc
from etude.errors import UserError
from etude.run.folder import RunFolder
from etude.telemetry.events import PhaseStarted, RunStarted, WeightsPublished
from etude.telemetry.log import EventLog, EventReader
from waiting import WAIT_S

BY_NAME = {contestant.name: contestant for contestant in CONTESTANTS}


def curve(*rates: float, every_s: float = 10.0) -> list[Point]:
    return [
        Point(step=index, seconds=index * every_s, passed=rate, stderr=0.02, greedy=rate)
        for index, rate in enumerate(rates)
    ]


def ran(name: str, rollouts: int, seconds: float) -> ContestantRun:
    return ContestantRun(contestant=BY_NAME[name], steps=1, rollouts=rollouts, seconds=seconds, busy_trainer=0.95)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_a_rising_curve_is_the_closest_one(values: list[float]) -> None:
    fitted = rising(values)
    assert len(fitted) == len(values)
    assert all(low <= high + 1e-12 for low, high in pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(values))
    distance = sum((one - two) ** 2 for one, two in zip(fitted, values, strict=True))
    for other in (sorted(values), [sum(values) / len(values)] * len(values)):
        assert distance <= sum((one - two) ** 2 for one, two in zip(other, values, strict=True)) + 1e-9


def test_a_curve_that_rises_is_left_as_it_is() -> None:
    assert rising([0.1, 0.2, 0.2, 0.5]) == [0.1, 0.2, 0.2, 0.5]


def test_the_time_to_a_rate_lies_between_two_versions() -> None:
    assert time_to(0.3, curve(0.1, 0.2, 0.4)) == pytest.approx(15.0)
    assert time_to(0.05, curve(0.1, 0.2)) == 0.0
    assert time_to(0.5, curve(0.1, 0.2, 0.4)) is None


def test_one_lucky_measurement_does_not_reach_a_rate() -> None:
    assert time_to(0.35, curve(0.1, 0.4, 0.2, 0.4)) == pytest.approx(25.0)


def test_the_rate_is_most_of_what_was_gained() -> None:
    assert target_rate(curve(0.1, 0.3, 0.6)) == pytest.approx(0.1 + 0.8 * 0.5)


def test_time_is_judged_where_both_got_there_and_rollouts_where_not() -> None:
    outcomes = {ASYNCHRONOUS: ran(ASYNCHRONOUS, 100, 10.0), SYNCHRONOUS: ran(SYNCHRONOUS, 100, 20.0)}
    in_time = judge_ratio(ASYNC_VS_SYNC, outcomes, {ASYNCHRONOUS: 10.0, SYNCHRONOUS: 30.0}, [SYNCHRONOUS])
    assert (in_time["value"], in_time["by"], in_time["in_rollouts"]) == (3.0, "time to the rate", 2.0)
    in_rollouts = judge_ratio(ASYNC_VS_SYNC, outcomes, {ASYNCHRONOUS: 10.0, SYNCHRONOUS: None}, [SYNCHRONOUS])
    assert (in_rollouts["value"], in_rollouts["by"]) == (2.0, "rollouts per second")


def test_the_faster_of_the_synchronous_modes_counts() -> None:
    slow, fast = SYNCHRONOUS, f"{SYNCHRONOUS}-all-cores"
    outcomes = {ASYNCHRONOUS: ran(ASYNCHRONOUS, 100, 10.0), slow: ran(slow, 100, 40.0), fast: ran(fast, 100, 15.0)}
    assert judge_ratio(ASYNC_VS_SYNC, outcomes, {}, [slow, fast])["value"] == 1.5


def test_a_contestant_that_is_missing_says_why_and_is_not_compared() -> None:
    outcomes = [ran(ASYNCHRONOUS, 100, 10.0), ContestantRun(contestant=BY_NAME[TRL], missing="no TRL here")]
    result = figures(outcomes, {ASYNCHRONOUS: curve(0.1, 0.5)})
    assert result["rate"] == pytest.approx(0.42)
    goals = result["goals"]
    assert isinstance(goals, dict)
    assert goals["async_vs_trl"] == {
        "meaning": ASYNC_VS_TRL.meaning, "value": None, "goal": 3.0, "sense": "at least", "met": False,
        "reason": "nothing to compare was measured",
    }  # fmt: skip
    assert "no TRL here" in table({"bench": "loop", "date": date_utc(), "commit": "0", **result})


def test_marks_are_at_even_distances_and_end_with_the_last_version() -> None:
    assert loop_options(steps=60).marked == (10, 20, 30, 40, 50, 60)
    assert loop_options(steps=4).marked == (1, 2, 3, 4)
    assert loop_options(marks=0).marked == ()


def test_options_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(UserError, match="no contestant 'verl'"):
        loop_options(("verl",))
    with pytest.raises(UserError, match="3 marks in 2 steps"):
        LoopOptions(steps=2, marks=3)


def test_everybody_trains_on_the_tasks_that_are_admitted_none_twice() -> None:
    config = recipe(BY_NAME[ASYNCHRONOUS], loop_options(quick=True))
    tasks = training_tasks(config)
    assert len(tasks) == config.trainer.steps * config.rollouts.groups_per_step
    assert len({task.task_id for task in tasks}) == len(tasks)


def test_the_contestants_differ_in_staleness_and_threads_alone() -> None:
    options = loop_options(quick=True)
    first, *others = (recipe(contestant, options) for contestant in CONTESTANTS)
    same = {"max_staleness": 0}
    for other in others:
        for section in ("rollouts", "engine", "trainer"):
            ours, theirs = (getattr(config, section).model_dump() | same for config in (first, other))
            for values in (ours, theirs):
                values.get("options", values).pop("threads", None)
            assert ours == theirs


def metrics(tmp_path: Path, contestant: Contestant, options: LoopOptions) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run", recipe(contestant, options))
    with EventLog(folder.events, "supervisor") as events:
        events.write(RunStarted(resumed=False))
        events.write(PhaseStarted(phase="rl"))
        for version in (1, 2):
            events.write(
                WeightsPublished(version=version, kind="full", size_bytes=1, state_bytes=1, seconds=0.0, blocked_s=0.0)
            )
        events.write(PhaseStarted(phase="done"))
    return folder


def test_a_run_is_read_from_its_events(tmp_path: Path) -> None:
    options = loop_options(quick=True)
    run = outcome(BY_NAME[ASYNCHRONOUS], options, metrics(tmp_path, BY_NAME[ASYNCHRONOUS], options), [])
    (mark,) = run.marks
    assert (mark.version, mark.step) == (2, 2)
    assert 0 <= mark.seconds <= run.seconds
    assert run.cpu_s == {}


def test_a_process_that_ends_before_the_phase_has_its_seconds(tmp_path: Path) -> None:
    options = loop_options(quick=True)
    folder = metrics(tmp_path, BY_NAME[ASYNCHRONOUS], options)
    (began_s,) = (
        logged.at_s for logged in EventReader(folder.events).new() if logged.event == PhaseStarted(phase="rl")
    )
    taken = [
        (began_s - 1, {"train": 0.5, "serve": 0.5}),
        *((began_s, spent) for spent in ({"train": 1.0, "serve": 1.0}, {"train": 5.0, "serve": 2.0}, {"serve": 4.0})),
    ]
    run = outcome(BY_NAME[ASYNCHRONOUS], options, folder, taken)
    assert run.cpu_s == {"train": 4.0, "serve": 3.0}


def test_processes_that_are_no_command_of_ours_are_not_counted() -> None:
    assert command_cpu_s(etude_commands()) == {}
    with CpuWatch() as watch:
        assert watch.taken == []


def test_a_watch_that_fails_is_an_error_and_no_smaller_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def fail() -> dict[int, str]:
        failed.set()
        raise OSError("no /proc")

    monkeypatch.setattr(runs, "etude_commands", fail)
    with pytest.raises(OSError, match="no /proc"), CpuWatch():
        assert failed.wait(WAIT_S)

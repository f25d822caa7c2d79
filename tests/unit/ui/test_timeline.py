"""The timeline: spans add up at every zoom, lanes agree with events, and the summary agrees with the figures."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.telemetry.events import (
    EngineStats,
    Event,
    GatewayStats,
    PhaseStarted,
    RolloutClosed,
    RunStarted,
    StepDone,
    StepSaved,
    WeightsPublished,
    WeightsSwapped,
)
from etude.ui.spans import Spans
from etude.ui.time_use import sentence, time_use
from etude.ui.timeline import Timeline
from etude.ui.timeline_view import MOST_MARKS, view

START_S = 1_800_000_000.0
TIMES = st.floats(0, 100)


@given(st.lists(st.tuples(TIMES, TIMES, st.floats(0.1, 5)), max_size=20), st.integers(1, 50))
def test_bins_have_of_every_span_what_lies_in_them(spans: list[tuple[float, float, float]], bins: int) -> None:
    folded = Spans()
    for first, second, rate in spans:
        folded.add(min(first, second), max(first, second), rate)
    edges = np.linspace(0, 100, bins + 1)
    expected = [
        sum(rate * max(0.0, min(high, max(a, b)) - max(low, min(a, b))) for a, b, rate in spans) / (high - low)
        for low, high in pairwise(edges)
    ]
    assert folded.rates(edges) == pytest.approx(expected, abs=1e-6)


def rollout(seconds: float, **stage_s: float) -> RolloutClosed:
    return RolloutClosed(
        rollout_id="r", purpose="train", group_index=0, status="graded", reason="submit", reward=1.0, turns=1,
        sampled_tokens=1, seconds=seconds, stage_s=stage_s,
    )  # fmt: skip


def step(number: int, busy_s: float, wait_s: float) -> StepDone:
    return StepDone(step=number, metrics={"busy_s": busy_s, "wait_s": wait_s})


def load(busy: float, window_s: float = 10.0) -> EngineStats:
    return EngineStats(
        busy_s=busy * window_s, window_s=window_s, generated_tokens=1, prefill_tokens=1, reused_tokens=0, running=1,
        waiting=0,
    )  # fmt: skip


def timeline(events: Iterable[tuple[float, str, Event]]) -> Timeline:
    folded = Timeline()
    for at_s, process, event in events:
        folded.add(type(event).__name__, {"at_s": START_S + at_s, "writer": process, **asdict(event)})
    folded.settle()
    return folded


WAITING: list[tuple[float, str, Event]] = [
    (0.0, "supervisor", RunStarted(resumed=False)),
    (0.0, "rollouts", PhaseStarted(phase="rl")),
    (10.0, "train", step(1, busy_s=2.0, wait_s=8.0)),
    (8.0, "rollouts", rollout(8.0, session=1.0, sandbox=1.0, model=1.0, tools=1.0, grading=4.0)),
    (8.0, "rollouts", rollout(8.0, session=1.0, sandbox=1.0, model=1.0, tools=1.0, grading=4.0)),
    (10.0, "serve", load(0.3)),
]
"""A trainer that waits for two rollouts of which most is grading; events of files that are read one after the other."""


def test_lanes_are_what_events_tell() -> None:
    folded = timeline([
        *WAITING,
        (10.6, "train", StepSaved(step=1, commit_s=0.1, save_s=0.3, publish_s=0.2)),
        (12.0, "train", published(1, seconds=0.5)),
        (11.3, "serve", WeightsSwapped(version=1, stage_ms=20.0, pause_ms=0.1)),
        (12.0, "gateway", GatewayStats(window_s=2.0, calls=8, failed=0, call_s=6.0, waited_s=2.0)),
    ])  # fmt: skip
    seconds = {(lane.group, state): spans.total(0, 12) for lane in folded.lanes.values()
               for state, spans in lane.states.items()}  # fmt: skip
    assert seconds["trainer", "computing"] == pytest.approx(2.0)
    assert seconds["trainer", "waiting"] == pytest.approx(8.0)
    assert seconds["trainer", "saving"] == pytest.approx(0.3)
    assert folded.lanes["trainer", "train"].states["saving"].total(10.1, 10.4) == pytest.approx(0.3), "in its place"
    assert folded.lanes["publishing", "publishing"].states["publishing"].total(10.6, 11.1) == pytest.approx(0.5)
    assert folded.lanes["rollouts", "rollouts"].states["grading"].total(4, 8) == pytest.approx(8.0), "both, at once"
    assert seconds["engines", "busy"] == pytest.approx(3.0)
    assert (seconds["gateways", "at an engine"], seconds["gateways", "queued"]) == pytest.approx((4.0, 2.0))
    assert [mark.kind for mark in folded.marks] == ["step", "swapped", "published"]


def published(version: int, seconds: float) -> WeightsPublished:
    return WeightsPublished(
        version=version, kind="delta", size_bytes=10, state_bytes=100, seconds=seconds, blocked_s=0.0, digest="d"
    )


def words(folded: Timeline, **options: int) -> str:
    return sentence(time_use(folded, 0.0, folded.end_s), **options)


def test_the_sentence_names_where_the_waiting_went() -> None:
    assert words(timeline(WAITING)) == (
        "The trainer computed 20% of the time and waited 80%: while it waited, 2 rollouts were in flight, 50% being "
        "graded, 12% opening sessions and 12% starting sandboxes of their time; the engine was 30% busy."
    )


@pytest.mark.parametrize(
    ("events", "text"),
    [
        (WAITING[:2], "No step was computed in this time, so no process waited for one."),
        (WAITING[:3], "what rollouts did meanwhile no event tells"),
        ([*WAITING[:3], (8.0, "rollouts", rollout(8.0))], "whose stages were not recorded; how busy engines were"),
        ([*WAITING[:2], (10.0, "train", step(1, 9.9, 0.1)), (10.0, "serve", load(0.4))], "idle 60% of the time"),
        ([*WAITING[:5], (10.0, "serve", load(0.95))], "95% busy, so sampling is the bottleneck"),
        ([*WAITING, (40.0, "serve", load(0.1, 30.0))], "The other 75% no event tells"),
    ],
)
def test_what_no_event_tells_is_said_to_be_unknown(events: list[tuple[float, str, Event]], text: str) -> None:
    assert text in words(timeline(events))


def test_users_are_what_a_batch_of_theirs_waits_for() -> None:
    text = words(timeline([*WAITING[:3], (10.0, "production", load(0.9))]), sessions=16)
    assert "waited 80% for users: a batch takes 16 of their sessions" in text


def test_the_time_in_which_a_run_was_stopped_counts_for_nothing() -> None:
    stopped = timeline([*WAITING, (100.0, "supervisor", RunStarted(resumed=True)), (110.0, "train", step(2, 2.0, 8.0))])
    assert time_use(stopped, 0.0, 110.0).seconds == pytest.approx(20.0)
    assert time_use(stopped, 0.0, 110.0).trainer["waiting"] == pytest.approx(0.8)


def test_events_in_any_order_make_the_same_timeline() -> None:
    assert view(timeline(WAITING), 0.0, 10.0, 7) == view(timeline(reversed(WAITING)), 0.0, 10.0, 7)


def test_ten_thousand_steps_are_one_small_answer_at_any_zoom() -> None:
    folded = timeline(chain(WAITING[:2], chain.from_iterable(_steps(10_000))))
    answers: list[Mapping[str, object]] = []
    times_s: list[float] = []
    for window in ((0.0, folded.end_s), (5_000.0, 5_010.0)):
        began_s = time.thread_time()
        answers.append(view(folded, *window, 400))
        times_s.append(time.thread_time() - began_s)
    whole, near = answers
    assert len(str(whole)) < 200_000
    assert whole["marks"] == []
    assert set(whole["counted"]) == {"step", "swapped"}  # type: ignore[call-overload]
    assert 0 < len(near["marks"]) < MOST_MARKS  # type: ignore[arg-type]
    assert min(times_s) < 0.5, "the second answer, which sorts nothing"


def _steps(number: int) -> Iterable[list[tuple[float, str, Event]]]:
    for index in range(1, number + 1):
        yield [
            (index, "train", step(index, 0.3, 0.6)),
            (index, "rollouts", rollout(0.8, session=0.1, model=0.5, grading=0.2)),
            (index, "serve", load(0.5, 1.0)),
            (index, "serve", WeightsSwapped(version=index, stage_ms=1.0, pause_ms=0.1)),
        ]

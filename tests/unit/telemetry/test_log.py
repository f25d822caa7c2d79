"""The event log: events are read back whole, once, in order of time."""

from pathlib import Path
from typing import get_args

import pytest

from etude.errors import DamagedError
from etude.fsync import write_whole
from etude.telemetry.events import (
    AlertChanged,
    EngineStats,
    EvalDone,
    EvalFailed,
    Event,
    GatewayStats,
    GroupAdmitted,
    HeldoutLoss,
    ImitationProgress,
    JudgeAlarm,
    MemoryUsed,
    MismatchMeasured,
    MismatchWarned,
    ModelCall,
    Outage,
    PhaseEnded,
    PhaseStarted,
    ProcessStarted,
    RegionServed,
    RolloutClosed,
    RolloutsStats,
    RunStarted,
    SinkFailed,
    StepSaved,
    WeightsPublished,
    WeightsSwapped,
)
from etude.telemetry.log import EventLog, EventReader
from steps import step_done

EXAMPLES: tuple[Event, ...] = (
    RunStarted(resumed=True),
    PhaseStarted(phase="eval-before"),
    ProcessStarted(process="engine", pid=4321, restarts=2),
    MemoryUsed(size_bytes=3_000_000),
    ImitationProgress(phase="midtrain", step=5, steps=10, tokens=20_000, loss=1.25, action_loss=0.75, tokens_per_s=2e4),
    HeldoutLoss(phase="sft", step=5, tokens=20_000, loss=1.25, action_loss=0.75, sources={"chat:a.jsonl": 1.25}),
    PhaseEnded(phase="sft", steps=10, tokens=40_000, loss=1.125, digest="0" * 32, parent="1" * 32),
    step_done(
        3, busy_s=1.5, wait_s=0.25, reward_mean=0.625, groups_without_signal=2, loss_tokens=900, trained_tokens=4000,
        grad_norm=0.5, entropy=0.3, truncated_share=0.01, masked_share=0.0, staleness_sum=800, staleness_tokens=900,
        staleness_max=2,
        mismatch_tokens=90, k1=1e-7, k3=3.25e-6, mismatch_p99=0.004,
        mismatch_max=0.01, mismatch_equal=30, mismatch_pairs=540, mismatch_flips=2,
        replayed_pairs=500, replaced_pairs=1,
    ),
    MismatchMeasured(
        step=3, by="position", first=512, last=None, tokens=9, k1=1e-7, k3=3e-6, p99=0.004, max=0.01, equal=3, pairs=0,
        flips=0,
    ),
    MismatchWarned(step=3, k3=2e-3, bound=1e-3),
    WeightsPublished(version=3, kind="delta", size_bytes=1000, state_bytes=9000, seconds=0.125, blocked_s=0.0),
    WeightsSwapped(version=3, stage_ms=40.5, pause_ms=0.75),
    EngineStats(
        busy_s=0.5, window_s=1.0, generated_tokens=300, prefill_tokens=200, reused_tokens=100, running=8, waiting=1
    ),
    RolloutClosed(
        rollout_id="7-2-0", purpose="train", group_index=7, status="failed_infra", reason="sandbox “died”", reward=None,
        turns=1, sampled_tokens=0, seconds=0.5,
    ),
    EvalDone(
        label="after", version=40, tasks=256, sampled_pass=0.5, sampled_stderr=0.031, greedy_pass=0.75,
        greedy_stderr=0.027,
    ),
    EvalFailed(label="step-10", reason="UserError: every rollout used up its attempts"),
    JudgeAlarm(kind="agreement", aspect="style", detail="less than it was calibrated with"),
    Outage(what="rollouts", seconds=90.5, reason="the sandbox died"),
    RegionServed(region="eu", version=3, open=8, sessions=20, payload_bytes=1000, is_away=False),
    GroupAdmitted(purpose="train", group_index=7, version=3),
    ModelCall(
        session="s1", seconds=1.5, waited_s=0.5, first_token_s=None, api="/v1/messages", engine="serve", status=200,
        prompt_tokens=90, completion_tokens=9, reused_tokens=80, versions=[3, 4],
    ),
    AlertChanged(alert="idle", firing=True, value=3.0, summary="no_signal = 3, above 2", to=["log"]),
    SinkFailed(sink="wandb", reason="unavailable", lost=0),
    StepSaved(step=3, commit_s=0.25, save_s=0.5, publish_s=0.125),
    GatewayStats(window_s=2.0, calls=3, failed=1, call_s=1.5, waited_s=0.25, cpu_s=0.5),
    RolloutsStats(running=96, capacity=128, sandboxes=90, sandbox_room=38),
)  # fmt: skip


def test_there_is_an_example_of_every_event() -> None:
    assert {type(event) for event in EXAMPLES} == set(get_args(Event))


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_an_event_survives_the_round_trip(tmp_path: Path, event: Event) -> None:
    with EventLog(tmp_path, "trainer") as log:
        log.write(event)
    (logged,) = EventReader(tmp_path).new()
    assert (logged.event, logged.process) == (event, "trainer")


def test_a_reader_returns_only_what_is_new(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert reader.new() == []
    with EventLog(tmp_path, "trainer") as log:
        log.write(RunStarted(resumed=False))
        assert [logged.event for logged in reader.new()] == [RunStarted(resumed=False)]
        log.write(PhaseStarted(phase="rl"))
        assert [logged.event for logged in reader.new()] == [PhaseStarted(phase="rl")]
    assert reader.new() == []


def test_processes_are_merged_in_order_of_time(tmp_path: Path) -> None:
    with EventLog(tmp_path, "engine") as engine, EventLog(tmp_path, "trainer") as trainer:
        for version in range(4):
            trainer.write(
                WeightsPublished(version=version, kind="full", size_bytes=1, state_bytes=1, seconds=0.0, blocked_s=0.0)
            )
            engine.write(WeightsSwapped(version=version, stage_ms=1.0, pause_ms=1.0))
    seen = EventReader(tmp_path).new()
    assert [logged.process for logged in seen] == ["trainer", "engine"] * 4
    assert [logged.at_s for logged in seen] == sorted(logged.at_s for logged in seen)


def test_a_reopened_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    for resumed in (False, True):
        with EventLog(tmp_path, "run") as log:
            log.write(RunStarted(resumed=resumed))
    assert [logged.event for logged in EventReader(tmp_path).new()] == [
        RunStarted(resumed=False),
        RunStarted(resumed=True),
    ]


def test_an_unfinished_last_line_is_left_for_later(tmp_path: Path) -> None:
    with EventLog(tmp_path, "trainer") as log:
        log.write(RunStarted(resumed=False))
        log.write(PhaseStarted(phase="rl"))
    file = tmp_path / "trainer.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    reader = EventReader(tmp_path)
    assert [logged.event for logged in reader.new()] == [RunStarted(resumed=False)]
    file.write_bytes(whole)
    assert [logged.event for logged in reader.new()] == [PhaseStarted(phase="rl")]


@pytest.mark.parametrize(
    "line",
    [
        b'{"at_s": 1.0, "wri',
        b'{"at_s": 1.0, "writer": "run", "event": "NoSuchEvent"}',
        b'{"at_s": 1.0, "writer": "run", "event": "RunStarted"}',
        b'{"writer": "run", "event": "RunStarted", "resumed": false}',
    ],
    ids=["cut short", "unknown event", "missing field", "no time"],
)
def test_a_damaged_line_is_an_error_that_names_the_file(tmp_path: Path, line: bytes) -> None:
    with EventLog(tmp_path, "run") as log:
        log.write(RunStarted(resumed=False))
    file = tmp_path / "run.jsonl"
    file.write_bytes(line + b"\n" + file.read_bytes())
    with pytest.raises(DamagedError, match=r"run\.jsonl: unreadable event"):
        EventReader(tmp_path).new()


def write_at(folder: Path, *times_s: float) -> None:
    clock = iter(times_s)
    with EventLog(folder, "trainer", now=lambda: next(clock)) as log:
        for _ in times_s:
            log.write(RunStarted(resumed=False))


def replace_by(folder: Path, other: Path) -> None:
    write_whole(folder / "trainer.jsonl", (other / "trainer.jsonl").read_bytes())


@pytest.mark.parametrize("later", [(30.5,), (30.5, 31, 32.25, 33, 34)])
def test_a_reader_goes_on_in_the_file_of_another_machine(tmp_path: Path, later: tuple[float, ...]) -> None:
    """Regression: it read on in the middle of a line, and the supervisor of a run died of the damaged event."""
    here, there = tmp_path / "here", tmp_path / "there"
    write_at(here, 1, 2, 3)
    write_at(there, 1, 2, 3)
    write_at(here, 14.125, 15, 16)  # not sent before the machine was lost
    reader = EventReader(here)
    assert len(reader.new()) == 6
    write_at(there, *later)
    replace_by(here, there)
    assert [logged.at_s for logged in reader.new()] == list(later)
    assert reader.new() == []
    write_at(there, 40)
    replace_by(here, there)
    assert [logged.at_s for logged in reader.new()] == [40]


def test_a_position_in_another_machines_file_goes_on_at_its_next_line(tmp_path: Path) -> None:
    """Regression: the sinks of a restarted run died of half an event."""
    write_at(tmp_path, 1, 2)
    first, second = (placed.end for placed in EventReader(tmp_path).placed())
    for position, expected in ((first, [2, 3]), (first + 5, [3]), (second + 500, [3])):
        (tmp_path / "trainer.jsonl").unlink()
        write_at(tmp_path, 1, 2)
        reader = EventReader(tmp_path, offsets={"trainer.jsonl": position})
        before = reader.new()
        write_at(tmp_path, 3)
        assert [logged.at_s for logged in [*before, *reader.new()]] == expected

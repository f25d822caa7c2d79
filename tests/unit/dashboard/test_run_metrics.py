"""Folding events: phases, time that counts, tallies, and events that arrive out of order."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from etude.config.recipe import RunConfig
from etude.dashboard.formatting import number_at
from etude.dashboard.report import build_report
from etude.dashboard.run_metrics import PHASES, RunMetrics
from etude.dashboard.text import summary
from etude.telemetry.events import (
    EngineStats,
    Event,
    ImitationProgress,
    Logged,
    Outage,
    PhaseStarted,
    ProcessStarted,
    RegionServed,
    RolloutClosed,
    RunStarted,
)
from etude.types import RolloutStatus


def test_an_empty_metrics_knows_nothing() -> None:
    run = RunMetrics()
    assert (run.phase, run.steps, run.phase_s("rl"), run.total_s()) == (None, [], None, 0)


def test_phases_share_out_the_time() -> None:
    run = _observed((0, RunStarted(resumed=False)), (2, _phase("midtrain")), (12, _phase("rl")), (42, _phase("done")))
    assert (run.phase_s("midtrain"), run.phase_s("rl"), run.total_s()) == (10, 30, 42)
    assert run.phase_s("eval-before") is None


def test_time_while_the_run_was_stopped_does_not_count() -> None:
    run = _observed(
        (0, RunStarted(resumed=False)), (0, _phase("rl")), (10, _process("trainer")),
        (500, RunStarted(resumed=True)), (501, _phase("rl")), (507, _process("trainer")),
    )  # fmt: skip
    assert (run.phase_s("rl"), run.total_s(), len(run.segments)) == (17, 17, 2)
    assert run.total_s(until_s=510) == 20
    assert run.total_s(until_s=5) == 5


def test_time_after_the_end_does_not_count() -> None:
    run = _observed((0, RunStarted(resumed=False)), (0, _phase("rl")), (9, _phase("done")), (30, _process("gateway")))
    assert run.total_s() == 9


def test_a_phase_without_an_end_lasts_until_now() -> None:
    run = _observed((100, RunStarted(resumed=False)), (100, _phase("midtrain")))
    assert run.phase_s("midtrain", until_s=130) == 30


def test_only_deaths_are_restarts() -> None:
    run = _observed((0, _process("engine")), (5, _process("engine", 1)), (6, _process("trainer")))
    assert (run.restarts, run.processes["engine"].restarts) == (1, 1)


def test_what_regions_were_used_for_is_added_up_over_processes(config: RunConfig) -> None:
    def served(region: str, sessions: int, version: int = 1) -> RegionServed:
        return RegionServed(
            region=region, version=version, open=2, sessions=sessions, payload_bytes=10 * sessions, is_away=False
        )

    run = _observed((0, served("", 3)), (1, served("eu", 4)), (2, served("eu", 5, version=2)))
    assert build_report(run, config, machine={}, date="", commit="")["regions"] == {
        "home": {"version": 1, "sessions": 3, "payload_bytes": 30},
        "eu": {"version": 2, "sessions": 9, "payload_bytes": 90},
    }


def test_the_share_of_several_engines_is_the_mean_of_theirs() -> None:
    run = _observed((0, RunStarted(resumed=False)), (0, _phase("rl")), (10, _phase("done")))
    for engine, busy_s in {"serve": 4.0, "serve-1": 8.0}.items():
        run.add(Logged(at_s=5, process=engine, event=_stats(busy_s)))
    report = build_report(run, RunConfig(), machine={}, date="", commit="")
    assert number_at(report, "busy.engine") == 0.6
    assert number_at(report, "tokens.generated") == 200
    assert {*run.engines} == {"serve", "serve-1"}
    assert number_at(report, "tokens.accepted_share") is None and "drafts" not in dict(summary(report))
    run.add(Logged(at_s=6, process="serve", event=replace(_stats(1.0), drafted_tokens=120, accepted_tokens=60)))
    report = build_report(run, RunConfig(), machine={}, date="", commit="")
    assert dict(summary(report))["drafts"] == "50% accepted, 1.25 tokens per engine step and sequence"


def _stats(busy_s: float) -> EngineStats:
    return EngineStats(
        busy_s=busy_s, window_s=10.0, generated_tokens=100, prefill_tokens=0, reused_tokens=0, running=3, waiting=0
    )


def test_a_process_that_is_started_again_waits_for_nothing_yet() -> None:
    """Regression: a process that ended during an outage never reported the end of the outage."""
    run = _observed((90, Outage(what="rollouts", seconds=60.0, reason="no engine")))
    assert [outage.at_s for outage in run.outages.values()] == [30]
    run.add(Logged(at_s=95, process="supervisor", event=_process("trainer", 1)))
    assert run.outages
    run.add(Logged(at_s=99, process="supervisor", event=_process("run", 1)))
    assert not run.outages


def test_rollouts_are_counted_by_purpose_status_and_reason() -> None:
    run = _observed(
        (0, _rollout("train", RolloutStatus.GRADED, "finished")),
        (1, _rollout("train", RolloutStatus.FAILED_INFRA, "engine gone")),
        (2, _rollout("before-greedy", RolloutStatus.GRADED, "finished")),
    )
    train = run.rollouts["train"]
    assert (train.closed, train.statuses["graded"], train.reasons["failed_infra", "engine gone"]) == (2, 1, 1)
    assert (train.sampled_tokens, run.rollouts["before-greedy"].closed) == (20, 1)


def test_progress_made_again_replaces_what_was_lost() -> None:
    run = _observed((1, _midtrain(100)), (2, _midtrain(200)), (3, _midtrain(300)), (9, _midtrain(150)))
    assert [timed.event.step for timed in run.imitation["midtrain"]] == [100, 150]


def test_the_made_up_run_is_told_whole(run: RunMetrics) -> None:
    assert (run.phase, len(run.steps), len(run.published), len(run.swapped)) == ("done", 40, 41, 40)
    assert run.total_s() == sum(run.phase_s(phase) or 0 for phase in PHASES)


@given(st.permutations(range(5)))
def test_the_order_of_arrival_within_a_segment_does_not_matter(order: list[int]) -> None:
    rest: list[tuple[float, Event]] = [
        (1, _phase("midtrain")), (3, _process("trainer")), (7, _phase("rl")), (8, _process("engine")),
        (20, _process("gateway")),
    ]  # fmt: skip
    run = _observed((0, RunStarted(resumed=False)), *(rest[index] for index in order))
    assert (run.phase, run.phase_s("midtrain"), run.phase_s("rl"), run.total_s()) == ("rl", 6, 13, 20)


def _observed(*events: tuple[float, Event]) -> RunMetrics:
    run = RunMetrics()
    for at_s, event in events:
        run.add(Logged(at_s=at_s, process="run", event=event))
    return run


def _phase(name: str) -> PhaseStarted:
    return PhaseStarted(phase=name)


def _process(name: str, restarts: int = 0) -> ProcessStarted:
    return ProcessStarted(process=name, pid=1, restarts=restarts)


def _midtrain(step: int) -> ImitationProgress:
    return ImitationProgress(
        phase="midtrain", step=step, steps=300, tokens=step * 100, loss=1.0, action_loss=1.0, tokens_per_s=100.0
    )


def _rollout(purpose: str, status: RolloutStatus, reason: str) -> RolloutClosed:
    reward = 1.0 if status is RolloutStatus.GRADED else None
    return RolloutClosed(
        rollout_id="r", purpose=purpose, group_index=0, status=status, reason=reason, reward=reward, turns=1,
        sampled_tokens=10, seconds=1.0,
    )  # fmt: skip

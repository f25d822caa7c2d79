"""The events of a small run: two evaluations, some steps, a rollout or two for each, model calls and all."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from etude.telemetry.events import (
    EngineStats,
    EvalDone,
    Event,
    GroupAdmitted,
    HeldoutLoss,
    ImitationProgress,
    MemoryUsed,
    ModelCall,
    PhaseEnded,
    PhaseStarted,
    ProcessStarted,
    RolloutClosed,
    RunStarted,
    StepDone,
    WeightsPublished,
    WeightsSwapped,
)
from etude.telemetry.log import EventLog

METRICS = {
    "busy_s": 2.0,
    "wait_s": 1.0,
    "reward_mean": 0.5,
    "groups": 1.0,
    "groups_without_signal": 0.0,
    "grad_norm": 0.25,
    "mismatch_tokens": 20.0,
    "k3": 1e-6,
}
STAGES = {"session": 0.1, "sandbox": 0.4, "model": 2.0, "tools": 1.0, "grading": 0.4, "scoring": 0.6}


def step(number: int, **metrics: float) -> StepDone:
    return StepDone(
        step=number,
        metrics={**METRICS, "reward_mean": number / 10, **metrics},
        reward_parts={"tests": 0.5},
        ended={"submit": 3, "length": 1},
        groups=[number - 1],
    )


def rollout(number: int, purpose: str = "train", *, hacked: bool = False) -> RolloutClosed:
    return RolloutClosed(
        rollout_id=f"rollout{number}",
        purpose=purpose,
        group_index=number,
        status="graded",
        reason="submit",
        reward=1.0,
        turns=2,
        sampled_tokens=30,
        seconds=4.5,
        hacked=hacked,
        session=f"session{number}",
        stage_s=STAGES,
    )


def call(number: int) -> ModelCall:
    return ModelCall(
        session=f"session{number}",
        seconds=1.0,
        waited_s=0.25,
        first_token_s=0.5,
        api="/v1/chat/completions",
        engine="serve",
        status=200,
        prompt_tokens=100,
        completion_tokens=15,
        reused_tokens=80,
        versions=[number],
    )


def evaluation(label: str, version: int) -> EvalDone:
    return EvalDone(
        label=label,
        version=version,
        tasks=2,
        sampled_pass=0.5,
        sampled_stderr=0.1,
        greedy_pass=1.0,
        greedy_stderr=0.0,
        clusters=["sort", "a|b"],
        sampled_rewards=[1.0, 0.0],
        sampled_passed=[True, False],
        greedy_rewards=[1.0, None],
        greedy_passed=[True, None],
    )


def small_run(steps: int) -> Iterator[tuple[str, Event]]:
    """Process and event, in order."""
    yield "supervisor", RunStarted(resumed=False)
    yield "supervisor", PhaseStarted(phase="midtrain")
    yield (
        "midtrain",
        ImitationProgress(
            phase="midtrain", step=20, steps=20, tokens=900, loss=2.0, action_loss=1.5, tokens_per_s=90.0
        ),
    )
    yield "midtrain", HeldoutLoss(phase="midtrain", step=20, tokens=900, loss=2.25, action_loss=1.75)
    yield "midtrain", PhaseEnded(phase="midtrain", steps=20, tokens=900, loss=2.25, digest="d1", parent="d0")
    yield "supervisor", ProcessStarted(process="train", pid=1, restarts=0)
    yield "rollouts", rollout(100, "before-sampled")
    yield "rollouts", evaluation("before", 0)
    yield "rollouts", PhaseStarted(phase="rl")
    for number in range(1, steps + 1):
        yield "rollouts", GroupAdmitted(purpose="train", group_index=number - 1, version=number - 1)
        yield "gateway", call(number - 1)
        yield "gateway", call(number - 1)
        yield "rollouts", rollout(number - 1)
        yield "train", step(number)
        yield (
            "train",
            WeightsPublished(version=number, kind="delta", size_bytes=10, state_bytes=99, seconds=0.1, blocked_s=0.0),
        )
        yield "serve", WeightsSwapped(version=number, stage_ms=5.0, pause_ms=1.0)
        yield (
            "serve",
            EngineStats(
                busy_s=1.0, window_s=2.0, generated_tokens=30, prefill_tokens=20, reused_tokens=80, running=1, waiting=2
            ),
        )
        yield "supervisor", MemoryUsed(size_bytes=1_000)


def write(folder: Path, events: Sequence[tuple[str, Event]]) -> None:
    """Append events to the files of their processes."""
    logs: dict[str, EventLog] = {}
    for process, event in events:
        if process not in logs:
            logs[process] = EventLog(folder, process)
        logs[process].write(event)
    for log in logs.values():
        log.close()

"""A made-up run, shaped like a real one: the events that the dashboard's tests read."""

import math
import random
from collections.abc import Iterator

import pytest

from etude.config.recipe import EvalConfig, RunConfig
from etude.config.rollouts import RolloutConfig
from etude.config.training import TrainerConfig
from etude.dashboard.report import build_report
from etude.dashboard.run_metrics import RunMetrics
from etude.telemetry.events import (
    EngineStats,
    Event,
    ImitationProgress,
    Logged,
    MismatchMeasured,
    MismatchWarned,
    PhaseStarted,
    ProcessStarted,
    RolloutClosed,
    RunStarted,
    WeightsPublished,
    WeightsSwapped,
)
from etude.types import Json
from evaluations import evaluation
from steps import step_done

STEPS, STATE_BYTES = 40, 1_480_000


@pytest.fixture
def config() -> RunConfig:
    return RunConfig(
        name="bugfix-tiny",
        seed=3,
        trainer=TrainerConfig(steps=STEPS),
        eval=EvalConfig(tasks=64),
        rollouts=RolloutConfig(groups_per_step=8),
    )


@pytest.fixture
def events() -> list[Logged]:
    """A finished run of 40 steps, interrupted for 1,000 s after step 12, with one engine crash."""
    return sorted(_run(random.Random(0)), key=lambda logged: logged.at_s)


@pytest.fixture
def run(events: list[Logged]) -> RunMetrics:
    return fold(events)


@pytest.fixture
def report(run: RunMetrics, config: RunConfig) -> dict[str, Json]:
    machine: dict[str, Json] = {"cpu": "AMD EPYC 7B13", "cores": 2, "python": "3.11.9", "torch": "2.11.0"}
    return build_report(run, config, machine=machine, date="2026-01-02T03:04:05+00:00", commit="a1948e9")


def fold(events: list[Logged]) -> RunMetrics:
    run = RunMetrics()
    for event in events:
        run.add(event)
    return run


def _run(chance: random.Random) -> Iterator[Logged]:
    at_s = 1_700_000_000.0
    yield Logged(at_s=at_s, process="run", event=RunStarted(resumed=False))
    yield Logged(at_s=at_s, process="run", event=PhaseStarted(phase="midtrain"))
    for step in range(20, 1001, 20):
        at_s += 3.6
        loss = 0.35 + 4 * math.exp(-step / 150)
        progress = ImitationProgress(
            phase="midtrain",
            step=step,
            steps=1000,
            tokens=step * 4000,
            loss=loss,
            action_loss=loss * 0.8,
            tokens_per_s=22_200.0,
        )
        yield Logged(at_s=at_s, process="trainer", event=progress)
    for process in ("engine", "gateway", "rollouts", "trainer"):
        yield Logged(at_s=at_s, process="run", event=ProcessStarted(process=process, pid=42, restarts=0))
    yield _published(at_s, 0, chance)
    yield Logged(at_s=at_s, process="run", event=PhaseStarted(phase="eval-before"))
    yield from _evaluation(at_s, "before", 0, 20)
    at_s += 41
    yield Logged(at_s=at_s, process="run", event=PhaseStarted(phase="rl"))
    for step in range(1, STEPS + 1):
        if step == 13:
            at_s += 1000
            yield Logged(at_s=at_s, process="run", event=RunStarted(resumed=True))
        if step == 27:
            yield Logged(at_s=at_s, process="run", event=ProcessStarted(process="engine", pid=43, restarts=1))
        yield from _step(at_s, step, chance)
        at_s += 12.5
    yield Logged(at_s=at_s, process="run", event=PhaseStarted(phase="eval-after"))
    yield from _evaluation(at_s, "after", STEPS, 43)
    at_s += 43
    yield Logged(at_s=at_s, process="run", event=PhaseStarted(phase="done"))


def _step(at_s: float, step: int, chance: random.Random) -> Iterator[Logged]:
    """One step of 12.5 s: the engine's reports, 64 rollouts, the step and its weights."""
    skill = 0.3 + 0.4 * (1 - math.exp(-step / 14))
    for tick in range(5):
        yield _engine(at_s + 2.5 * tick, chance)
    for slot in range(64):
        reward = float(chance.random() < skill)
        status, reason = ("failed_infra", "engine gone") if step == 27 and slot < 5 else ("graded", "finished")
        yield _rollout(at_s + slot / 8, "train", step, slot, status, reason, reward)
    tokens, lag = 64 * 130, min(step - 1, 2)
    done = step_done(
        step, busy_s=9.4 + chance.random(), wait_s=2.1, reward_mean=skill + chance.gauss(0, 0.05),
        groups_without_signal=1, loss_tokens=tokens, trained_tokens=4 * tokens, grad_norm=0.4,
        entropy=0.42 * math.exp(-step / 30) + 0.01 * chance.random(), truncated_share=0.002, masked_share=0.0,
        staleness_sum=int(tokens * lag * (0.45 + 0.1 * chance.random())), staleness_tokens=tokens, staleness_max=lag,
        mismatch_tokens=tokens // 10, k1=1e-5, k3=3e-6 * math.exp(chance.gauss(0, 0.8)),
        mismatch_p99=0.004 + 0.002 * chance.random(), mismatch_max=0.03 + 0.001 * step,
        mismatch_equal=tokens // 30, mismatch_pairs=6 * tokens // 10, mismatch_flips=step,
        replayed_pairs=500, replaced_pairs=1, groups=8, reward_low=0.0, reward_high=1.0, reward_std=0.31,
        signal_share=0.875, cut_short=0.1875,
        ended={"submit": 52, "length": 12},
    )  # fmt: skip
    yield Logged(at_s=at_s + 11.5, process="trainer", event=done)
    yield from _mismatch(at_s + 11.5, step, random.Random(step))
    yield _published(at_s + 11.6, step, chance)
    swapped = WeightsSwapped(version=step, stage_ms=40 + 9 * chance.random(), pause_ms=0.6 + 0.5 * chance.random())
    yield Logged(at_s=at_s + 11.8, process="engine", event=swapped)


def _mismatch(at_s: float, step: int, chance: random.Random) -> Iterator[Logged]:
    """832 tokens compared, by place in the completion and by version; one step is above the bound."""
    ranges = [("position", 0, 0, 24), ("position", 1, 7, 168), ("position", 8, 31, 416), ("position", 32, None, 224)]
    for by, first, last, tokens in [*ranges, ("version", step - 1, step - 1, 832)]:
        k3 = 2e-6 * (1 + first) ** 0.3 * math.exp(chance.gauss(0, 0.3))
        row = MismatchMeasured(
            step=step, by=by, first=first, last=last, tokens=tokens, k1=1e-5, k3=k3, p99=math.sqrt(k3), max=9 * k3**0.5,
            equal=tokens // 3, pairs=6 * tokens * (by == "version"), flips=step * (by == "version"),
        )  # fmt: skip
        yield Logged(at_s=at_s, process="trainer", event=row)
    if step == 20:
        yield Logged(at_s=at_s, process="trainer", event=MismatchWarned(step=step, k3=1.2e-3, bound=1e-3))


def _published(at_s: float, version: int, chance: random.Random) -> Logged:
    kind, size_bytes = ("delta", int(chance.gauss(390_000, 20_000))) if version else ("full", 1_210_000)
    event = WeightsPublished(
        version=version, kind=kind, size_bytes=size_bytes, state_bytes=STATE_BYTES, seconds=0.06, blocked_s=0.002,
        digest=f"digest-{version}",
    )  # fmt: skip
    return Logged(at_s=at_s, process="trainer", event=event)


def _engine(at_s: float, chance: random.Random) -> Logged:
    event = EngineStats(
        busy_s=2.1 + 0.3 * chance.random(), window_s=2.5, generated_tokens=1900, prefill_tokens=5200,
        reused_tokens=9100, running=92, waiting=int(20 * chance.random()),
    )  # fmt: skip
    return Logged(at_s=at_s, process="engine", event=event)


def _evaluation(at_s: float, label: str, version: int, passed: int) -> Iterator[Logged]:
    for way in ("sampled", "greedy"):
        for task in range(64):
            yield _rollout(at_s + task / 2, f"{label}-{way}", task, 0, "graded", "finished", 1.0)
    yield Logged(at_s=at_s + 40, process="rollouts", event=evaluation(label, version, passed, passed + 3))


def _rollout(at_s: float, purpose: str, group: int, slot: int, status: str, reason: str, reward: float) -> Logged:
    event: Event = RolloutClosed(
        rollout_id=f"{purpose}-{group}-{slot}", purpose=purpose, group_index=group, status=status, reason=reason,
        reward=reward if status == "graded" else None, turns=4, sampled_tokens=130, seconds=6.0,
        stage_s={"session": 0.01, "sandbox": 0.25, "model": 3.5, "tools": 1.5, "grading": 0.5},
    )  # fmt: skip
    return Logged(at_s=at_s, process="rollouts", event=event)

"""The speed of a run's parts, estimated from its events.

    EngineStats                    busy seconds of an engine ≈ step_s · steps + sequence_s · tokens + prompt_s · prompts
                                   (if steps are not counted: tokens / sequences in progress)
    StepDone                       busy seconds of the trainer ≈ fixed_s + token_s · trained tokens
    StepSaved, WeightsPublished,   seconds between two steps, until a version is published, and until it is served
    WeightsSwapped
    RolloutClosed                  turns, tokens and seconds of rollouts (:mod:`etude.simulation.workload`)

Each is a least-squares fit whose coefficients are not negative. Pure.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median
from typing import Self

import numpy as np

from etude.config.inference import EngineConfig
from etude.errors import UserError
from etude.simulation.engine import EngineRates
from etude.simulation.workload import Workload
from etude.telemetry.events import (
    EngineStats,
    Logged,
    RolloutClosed,
    StepDone,
    StepSaved,
    WeightsPublished,
    WeightsSwapped,
)

FEWEST_STEPS = 3
"""Minimum number of optimiser steps for a fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    """Times of a trainer, in seconds."""

    fixed_s: float
    """Part of every step, independent of its batch."""
    token_s: float
    """For each sampled token of the batch."""
    save_s: float
    """Between two steps: copying the state, handing over the weights."""
    publish_s: float
    """From there until the version is visible; the next step runs meanwhile."""

    def step_s(self, tokens: int) -> float:
        """Seconds of a step on a batch."""
        return self.fixed_s + self.token_s * tokens

    def scaled(self, factor: float) -> "TrainerTimes":
        """The same trainer with all times multiplied."""
        return TrainerTimes(
            fixed_s=factor * self.fixed_s,
            token_s=factor * self.token_s,
            save_s=factor * self.save_s,
            publish_s=factor * self.publish_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCalibration:
    """All modelled speeds."""

    engine: EngineRates
    trainer: TrainerTimes
    swap_s: float
    """From a version's publication until an engine samples with it."""
    call_s: float
    """Seconds of a model call outside of the engine: gateway, harness, network."""
    workload: Workload
    cores: float = math.inf
    """Processors that all of these share, each using one at a time; infinite if each has its own."""

    @classmethod
    def of_events(cls, logged: Iterable[Logged], engine: EngineConfig, *, cores: float = math.inf) -> Self:
        """The calibration of a run that has trained for some steps, except ``call_s``, which is not in its events.

        Raises :class:`~etude.errors.UserError` if there are too few events.
        """
        ordered = sorted(logged, key=lambda each: each.at_s)
        return cls(
            engine=fit_engine(ordered, engine),
            cores=cores,
            trainer=fit_trainer(ordered),
            swap_s=_swap_s(ordered),
            call_s=0.0,
            workload=Workload.of_events(ordered),
        )


def fit_engine(logged: Sequence[Logged], engine: EngineConfig) -> EngineRates:
    """The rates of an engine, from its reports while rollouts for training ended."""
    training = [each.at_s for each in logged if isinstance(each.event, RolloutClosed) and each.event.purpose == "train"]
    rows, before = list[tuple[float, float, float]](), dict[str, int]()
    busy_s = list[float]()
    for each in logged:
        if not isinstance(each.event, EngineStats):
            continue
        stats, running = each.event, (before.get(each.process, each.event.running) + each.event.running) / 2
        before[each.process] = stats.running
        if training and training[0] <= each.at_s <= training[-1] and stats.generated_tokens:
            steps = stats.steps or stats.generated_tokens / max(1.0, running)
            rows.append((steps, stats.generated_tokens, stats.prefill_tokens))
            busy_s.append(stats.busy_s)
    if not rows:
        raise UserError("the run's engines reported nothing during training: name a run that trained for some steps")
    step_s, sequence_s, prompt_s = fit_non_negative(rows, busy_s)
    rates = EngineRates(step_s=step_s, sequence_s=sequence_s, prompt_s=prompt_s, max_running=engine.max_running)
    return replace(rates, step_tokens=engine.native.step_tokens) if engine.kind == "native" else rates


def fit_trainer(logged: Sequence[Logged]) -> TrainerTimes:
    """The times of a trainer; of a repeated step only the last run counts."""
    done = {each.event.step: each.event for each in logged if isinstance(each.event, StepDone)}
    if len(done) < FEWEST_STEPS:
        raise UserError(f"the run has {len(done)} optimiser steps, and {FEWEST_STEPS} are needed: name a longer one")
    metrics = [event.metrics for event in done.values()]
    rows = [(1.0, step["staleness_tokens"]) for step in metrics]
    fixed_s, token_s = fit_non_negative(rows, [step["busy_s"] for step in metrics])
    saved = [each.event for each in logged if isinstance(each.event, StepSaved)]
    published = [each.event for each in logged if isinstance(each.event, WeightsPublished) and each.event.version]
    return TrainerTimes(
        fixed_s=fixed_s,
        token_s=token_s,
        save_s=fmean([event.save_s + event.publish_s for event in saved]) if saved else 0.0,
        publish_s=fmean([event.seconds for event in published]) if published else 0.0,
    )


def fit_non_negative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Least squares without negative coefficients: the best fit over all subsets of the few columns."""
    whole, target = np.asarray(rows, np.float64), np.asarray(values, np.float64)
    columns, best, least = whole.shape[1], np.zeros(whole.shape[1]), float(target @ target)
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            fitted = np.linalg.lstsq(whole[:, chosen], target, rcond=None)[0]
            left = target - whole[:, chosen] @ fitted
            if (fitted >= 0).all() and float(left @ left) < least:
                best, least = np.zeros(columns), float(left @ left)
                best[list(chosen)] = fitted
    return tuple(best.tolist())


def _swap_s(logged: Sequence[Logged]) -> float:
    """Median time from publication to service; 0 if no version was swapped in."""
    published = {each.event.version: each.at_s for each in logged if isinstance(each.event, WeightsPublished)}
    delays = [
        max(0.0, each.at_s - published[each.event.version])
        for each in logged
        if isinstance(each.event, WeightsSwapped) and each.event.version in published
    ]
    return median(delays) if delays else 0.0

"""Events of optimiser steps, with the metrics of the table as keyword arguments."""

from collections.abc import Mapping
from dataclasses import replace

from etude.telemetry.events import StepDone
from etude.telemetry.metrics import METRICS


def step_done(step: int, *, ended: Mapping[str, int] | None = None, **metrics: float) -> StepDone:
    """One step with these metrics."""
    assert metrics.keys() <= METRICS.keys()
    return StepDone(step=step, metrics=metrics, ended=dict(ended or {}))


def changed(step: StepDone, *, number: int | None = None, **metrics: float | None) -> StepDone:
    """The same step with other metrics; ``None`` takes one away."""
    assert metrics.keys() <= METRICS.keys()
    seen = {name: value for name, value in (step.metrics | metrics).items() if value is not None}
    return replace(step, step=step.step if number is None else number, metrics=seen)

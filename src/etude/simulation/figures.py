"""Figures of a run that a plan predicts, from the events of a simulated or a real run.

    busy shares of trainer and engines · seconds of a step · tokens by their staleness · rollouts in progress

The first steps are left out, since the pipeline fills, and the last ones, since no more work is admitted. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import final

from etude.errors import UserError
from etude.telemetry.events import EngineStats, Logged, StepDone

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of a run, over the counted steps."""

    steps: int
    """Number of counted steps."""
    step_s: float
    trainer_busy: float
    """Share of the time in which the trainer was not waiting for a batch."""
    engine_busy: float
    """Share of the time in which an engine was busy, averaged over engines."""
    engine_s: float
    """Busy seconds of all engines per step."""
    tokens_per_step: float
    """Sampled tokens per step."""
    token_ages: tuple[int, ...]
    """Staleness in weight versions, from 0 → sampled tokens."""

    @staticmethod
    def of_events(logged: Iterable[Logged], *, skipped: int) -> "RunFigures":
        """The figures without ``skipped`` steps at either end.

        Raises :class:`~etude.errors.UserError` if no step is left.
        """
        records = StepRecords()
        records.follow(sorted(logged, key=lambda each: each.at_s))
        done = sorted(records.ends_s)
        counted = done[skipped : len(done) - skipped]
        if not counted or counted[0] - 1 not in done:
            raise UserError(f"{len(done)} steps are too few: {2 * skipped + 2} are needed, as {skipped} at either end "
                            f"do not count")  # fmt: skip
        return records.figures(counted[0] - 1, counted[-1])

    @property
    def steps_per_hour(self) -> float:
        """Optimiser steps per hour."""
        return HOUR_S / self.step_s

    @property
    def staleness(self) -> float:
        """Mean over tokens, in weight versions."""
        tokens = sum(self.token_ages)
        return sum(age * count for age, count in enumerate(self.token_ages)) / tokens if tokens else 0.0

    @property
    def inference_to_training(self) -> float:
        """Busy seconds of all engines per busy second of the trainer."""
        trainer_s = self.trainer_busy * self.step_s
        return self.engine_s / trainer_s if trainer_s else 0.0


@final
class StepRecords:
    """The steps of a run, and the work of its engines up to the end of each: the figures of any steps, without another
    pass over the events.
    """

    def __init__(self) -> None:
        self.ends_s: dict[int, float] = {}
        """Step → time of its end."""
        self._done: dict[int, StepDone] = {}
        self._engines: dict[int, tuple[float, float]] = {}
        """Step → busy and reported seconds of all engines from the first event to its end."""
        self._busy_s = self._window_s = 0.0
        self._read = 0

    def follow(self, logged: Sequence[Logged]) -> None:
        """Read the events that a list has had appended since the last call; they must be in order of time."""
        for each in logged[self._read :]:
            if isinstance(each.event, EngineStats):
                self._busy_s += each.event.busy_s
                self._window_s += each.event.window_s
            elif isinstance(each.event, StepDone):
                self.ends_s[each.event.step] = each.at_s
                self._done[each.event.step] = each.event
                self._engines[each.event.step] = self._busy_s, self._window_s
        self._read = len(logged)

    def figures(self, before: int, last: int) -> RunFigures:
        """The figures of the steps after ``before`` up to ``last``; all of them are done."""
        steps = [self._done[step] for step in range(before + 1, last + 1)]
        seconds = self.ends_s[last] - self.ends_s[before]
        busy_s, window_s = (now - then for now, then in zip(self._engines[last], self._engines[before], strict=True))
        return RunFigures(
            steps=len(steps),
            step_s=seconds / len(steps),
            trainer_busy=sum(step.metrics["busy_s"] for step in steps) / seconds,
            engine_busy=busy_s / window_s if window_s else 0.0,
            engine_s=busy_s / len(steps),
            tokens_per_step=sum(step.metrics["staleness_tokens"] for step in steps) / len(steps),
            token_ages=tuple(map(sum, zip_longest(*(step.token_ages for step in steps), fillvalue=0))),
        )


FULL = 0.85
"""Busy share from which a side counts as full: the rest is lost to batches and rollouts that end unevenly."""


def bottleneck(figures: RunFigures) -> tuple[str, str]:
    """Two sentences: which side is the bottleneck, and what to change."""
    trainer, engine = figures.trainer_busy, figures.engine_busy
    shares = f"the trainer is busy {trainer:.0%} of the time, engines {engine:.0%}"
    if max(trainer, engine) < FULL:
        return (
            f"Neither side is full: {shares}; steps wait for the longest rollouts and for new weights.",
            "Raise rollouts.max_staleness with rollouts.concurrency, or shorten the longest rollouts.",
        )
    if trainer >= engine:
        return f"The trainer is the bottleneck: {shares}.", "Give it more ranks (parallel.dp), or take engines away."
    ratio = engine / max(trainer, 1e-9)
    return (
        f"Engines are the bottleneck: {shares}.",
        f"Add engines: with about {min(ratio, FULL / max(trainer, 1e-9)):.1f} times as many both sides are full.",
    )

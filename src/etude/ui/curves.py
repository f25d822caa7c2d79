"""Columns over a run's steps, folded from its events for the page's charts.

    StepDone, EvalDone, PhaseStarted, … ──▶ Curves ──▶ columns since a step

A step that is done again after a resumption replaces what had followed it; then the ``revision`` is another.
"""

from collections.abc import Mapping

from etude.dashboard.statistics import Estimate, mean_of
from etude.telemetry.events import EvalDone, HeldoutLoss, ImitationProgress, Logged, PhaseStarted, StepDone
from etude.telemetry.metrics import METRICS
from etude.types import Json

PART, END = "part:", "end:"
"""Begin the names of columns that are no metrics: parts of the reward, and rollouts by how they ended."""


class Curves:
    """Everything of a run that is drawn over steps."""

    def __init__(self) -> None:
        self.revision = 0
        self._steps: list[int] = []
        self._at_s: list[float] = []
        self._rows: list[Mapping[str, float]] = []
        self._evals: dict[str, EvalDone] = {}
        self._losses: dict[tuple[str, int], HeldoutLoss] = {}
        self._imitation: dict[str, list[ImitationProgress]] = {}
        self._phases: list[tuple[float, str]] = []

    def add(self, logged: Logged) -> None:
        """Fold in one event."""
        match logged.event:
            case StepDone() as step:
                self._add_step(logged.at_s, step)
            case EvalDone() as done:
                self._evals[done.label] = done
            case HeldoutLoss() as loss:
                self._losses[loss.phase, loss.step] = loss
            case ImitationProgress() as progress:
                self._imitation.setdefault(progress.phase, []).append(progress)
            case PhaseStarted() as started:
                self._phases.append((logged.at_s, started.phase))

    def columns(self, since: int) -> Json:
        """Steps after ``since``, a column for each metric that any of them has; measurements in whole."""
        first = next((index for index, step in enumerate(self._steps) if step > since), len(self._steps))
        rows = self._rows[first:]
        names = dict.fromkeys(name for row in rows for name in row)
        ordered = [*(name for name in METRICS if name in names), *(name for name in names if name not in METRICS)]
        return {
            "revision": self.revision,
            "since": since,
            "step": list(self._steps[first:]),
            "at_s": list(self._at_s[first:]),
            "columns": {name: [row.get(name) for row in rows] for name in ordered},
            "heldout": [_measured(done) for done in sorted(self._evals.values(), key=lambda done: done.version)],
            "phases": [{"at_s": at_s, "phase": phase} for at_s, phase in self._phases],
        }

    def _add_step(self, at_s: float, step: StepDone) -> None:
        while self._steps and self._steps[-1] >= step.step:
            self._steps.pop(), self._at_s.pop(), self._rows.pop()
            self.revision += 1
        self._steps.append(step.step)
        self._at_s.append(at_s)
        parts = {PART + name: value for name, value in step.reward_parts.items()}
        ends = {END + reason: float(count) for reason, count in step.ended.items()}
        self._rows.append({**step.metrics, **parts, **ends})


def _measured(done: EvalDone) -> Json:
    """One held-out evaluation, with intervals over templates."""
    return {
        "step": done.version,
        "label": done.label,
        "tasks": done.tasks,
        "sampled": _interval(done.sampled_pass, done.sampled_passed, done.clusters),
        "greedy": _interval(done.greedy_pass, done.greedy_passed, done.clusters),
    }


def _interval(share: float, passed: list[bool | None], clusters: list[str]) -> Json:
    tried = [(float(value), cluster) for value, cluster in zip(passed, clusters, strict=False) if value is not None]
    if not tried:
        return {"value": share, "low": None, "high": None, "tried": 0}
    estimate: Estimate = mean_of([value for value, _ in tried], [cluster for _, cluster in tried])
    return {"value": share, "low": estimate.low, "high": estimate.high, "tried": len(tried)}

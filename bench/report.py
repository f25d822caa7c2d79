"""The common frame of every bench's figures: place and time of the measurement, and the judgement of its goals."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from etude.clock import date_utc
from etude.dashboard.statistics import mean_over_seeds
from etude.run.machine_info import describe_machine, source_commit
from etude.types import Json

INTERRUPTED = "interrupted: of what was measured by then"
UNMEASURED = "interrupted before it was measured"
"""Reasons why a goal of an interrupted bench is not met, whatever was reached."""


@dataclass(slots=True)
class SoFar:
    """State of a measurement: interrupted or not."""

    interrupted: bool = False


@contextmanager
def so_far() -> Iterator[SoFar]:
    """Measure until all is done or an interruption (Ctrl-C, SIGTERM); the caller continues with the rows so far.

    Results must be stored outside of the context, row by row. A second interruption is not caught.
    """
    state = SoFar()
    try:
        yield state
    except KeyboardInterrupt:
        state.interrupted = True


def envelope(bench: str, seconds: float, figures: Mapping[str, Json], *, interrupted: bool = False) -> dict[str, Json]:
    """The object of ``python -m bench NAME --json``: machine, commit and date, then ``figures``.

    ``seconds`` is the duration of the measurement. ``figures`` have ``results``, one object per row with its
    ``contestant``, and ``goals``, by name, each with the reached value and ``met``. In an interrupted bench no goal is
    met, because the missing rows might be worse.
    """
    whole: dict[str, Json] = {
        "bench": bench,
        "machine": describe_machine(),
        "commit": source_commit(),
        "date": date_utc(),
        "seconds": round(seconds, 1),
        **figures,
    }
    if interrupted:
        goals = figures["goals"]
        assert isinstance(goals, dict)
        whole |= {"interrupted": True, "goals": {name: _unmet(goal) for name, goal in goals.items()}}
    return whole


def _unmet(goal: Json) -> Json:
    """A goal of a bench that was interrupted."""
    assert isinstance(goal, dict)
    return goal | {"met": False, "reason": UNMEASURED if goal["value"] is None else INTERRUPTED}


def heading(result: Mapping[str, Json], *details: str) -> str:
    """The title of a table: which bench, ``details``, when and of what."""
    words = [*details, "INTERRUPTED"] if result.get("interrupted") else details
    return " · ".join((f"bench {result['bench']}", *words, str(result["date"]), str(result["commit"])))


@dataclass(frozen=True, slots=True)
class Goal:
    """A required value of a figure."""

    name: str
    sense: Literal["at most", "at least"]
    goal: float
    meaning: str
    """One sentence that says which figure this is, with its unit."""

    def met(self, value: float) -> bool:
        """True if ``value`` meets the goal."""
        return value <= self.goal if self.sense == "at most" else value >= self.goal

    def judge(self, value: float | None, reason: str | None = None) -> dict[str, Json]:
        """The goal as printed; without a value it is not met, for ``reason``."""
        shown = None if value is None else round(value, 3)
        judged: dict[str, Json] = {"meaning": self.meaning, "value": shown, "goal": self.goal, "sense": self.sense}
        judged["met"] = value is not None and self.met(value)
        return judged if value is not None else judged | {"reason": reason or "nothing to compare was measured"}

    def judge_seeds(self, values: Sequence[float]) -> dict[str, Json]:
        """The goal for the mean of one figure per seed; it is met if the worse end of its interval meets it.

        The mean of a few seeds alone does not show that two differ by at most a given amount. ``method`` says what
        seeds share.
        """
        judged = self.judge(statistics.fmean(values) if values else None) | {"seeds": len(values)}
        if len(values) < 2:
            return judged | {"met": False, "interval": None, "stderr_seeds": None, "method": None}
        mean = mean_over_seeds(values)
        return judged | {
            "met": self.met(mean.high if self.sense == "at most" else mean.low),
            "interval": [round(mean.low, 4), round(mean.high, 4)],
            "stderr_seeds": round(mean.stderr, 4),
            "method": mean.method,
        }

    def judge_worst(self, each: Mapping[str, float], reason: str | None = None) -> dict[str, Json]:
        """The goal for the worst of some figures, with all of them; judged like :meth:`judge`."""
        if not each:
            return self.judge(None, reason)
        worst = max(each.values()) if self.sense == "at most" else min(each.values())
        return self.judge(worst) | {"each": {case: round(value, 3) for case, value in each.items()}}

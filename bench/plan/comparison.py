"""A prediction beside what was measured: busy shares and seconds of a step, and the goals of both."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.report import Goal
from etude.simulation.figures import RunFigures
from etude.types import Json

BUSY_ERROR = Goal(
    "busy_error",
    "at most",
    0.1,
    "Difference between the predicted and the measured busy share, of trainer or engines; the largest.",
)
STEP_TIME_ERROR = Goal(
    "step_time_error",
    "at most",
    0.1,
    "Difference between predicted and measured seconds of a step, as a share of the measured ones; the largest.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One case."""

    case: str
    measured: RunFigures
    predicted: RunFigures

    @property
    def busy_error(self) -> float:
        """In shares of the time."""
        return max(
            abs(self.predicted.trainer_busy - self.measured.trainer_busy),
            abs(self.predicted.engine_busy - self.measured.engine_busy),
        )

    @property
    def step_time_error(self) -> float:
        """Error as a share of the measured time."""
        return abs(self.predicted.step_s / self.measured.step_s - 1)

    def row(self) -> dict[str, Json]:
        """For people and programs."""
        return {
            "contestant": self.case,
            "step_s": round(self.measured.step_s, 3),
            "step_s_predicted": round(self.predicted.step_s, 3),
            "trainer": round(self.measured.trainer_busy, 3),
            "trainer_predicted": round(self.predicted.trainer_busy, 3),
            "engines": round(self.measured.engine_busy, 3),
            "engines_predicted": round(self.predicted.engine_busy, 3),
            "steps": self.measured.steps,
        }


def judged(compared: Sequence[Comparison]) -> dict[str, Json]:
    """Both goals, for the worst of some cases."""
    busy = {each.case: each.busy_error for each in compared}
    step_time = {each.case: each.step_time_error for each in compared}
    return {
        BUSY_ERROR.name: BUSY_ERROR.judge_worst(busy),
        STEP_TIME_ERROR.name: STEP_TIME_ERROR.judge_worst(step_time),
    }

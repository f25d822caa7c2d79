"""A sink: the mean reward of each step as a line of a file. ``[[log.to]]`` with ``kind = "@sink.py:RewardCurve"``."""

from pydantic import Field

from etude.config.section import Section
from etude.telemetry.events import Logged, StepDone
from etude.telemetry.sinks.sink import SinkContext


class RewardCurveOptions(Section):
    """The mean reward of each step as a line of a file."""

    file: str = Field(min_length=1)
    """The file in the run folder, which is appended to."""


class RewardCurve:
    Options = RewardCurveOptions

    def __init__(self, options: RewardCurveOptions, context: SinkContext) -> None:
        self._file = context.folder / options.file

    def emit(self, event: Logged) -> None:
        if isinstance(step := event.event, StepDone):
            with self._file.open("a") as file:
                print(step.step, step.metrics["reward_mean"], file=file)

    def close(self) -> None: ...

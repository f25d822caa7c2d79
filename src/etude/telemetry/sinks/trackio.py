"""A run in Trackio, on this machine or in a Space; of the extra ``trackio``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import trackio

from etude.config.log import TrackioOptions
from etude.telemetry.sinks.sink import SinkContext
from etude.telemetry.sinks.trackers import Cell, TrackerSink


def open_trackio(options: TrackioOptions, context: SinkContext) -> TrackerSink:
    """Begin a run, or go on with it."""
    return TrackerSink(TrackioTracker(options, context), context)


@final
class TrackioTracker:
    """One run; implements :class:`~etude.telemetry.sinks.trackers.Tracker`."""

    def __init__(self, options: TrackioOptions, context: SinkContext) -> None:
        self._run = trackio.init(
            project=options.project,
            name=f"{context.run}-{context.id}",
            space_id=options.space_id or None,
            config=dict(context.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, axis: str, step: int, at_s: float, values: Mapping[str, float]) -> None:
        """One row of metrics."""
        self._run.log({**values, axis: step}, step=step)

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table of its own kind."""
        self._run.log({name: trackio.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def text(self, name: str, step: int, at_s: float, text: str) -> None:
        """A table of one text, which is shown as it is."""
        self._run.log({name: trackio.Table(columns=["step", "text"], data=[[step, text]])}, step=step)

    def describe(self, facts: Mapping[str, str]) -> None:
        """A table of facts: its configuration cannot be changed any more."""
        self._run.log({"facts": trackio.Table(columns=["name", "value"], data=[[*fact] for fact in facts.items()])})

    def artefact(self, file: Path) -> None:
        """A version of an artefact."""
        self._run.log_artifact(file, name="report", type="report")

    def close(self) -> None:
        """End it, once all was written."""
        self._run.finish()

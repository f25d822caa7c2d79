"""A run as event files of TensorBoard; of the extra ``tensorboard``."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from tensorboardX import SummaryWriter

from etude.config.log import TensorboardOptions
from etude.telemetry.sinks.sink import SinkContext
from etude.telemetry.sinks.trackers import Cell, TrackerSink

ROWS = 500
"""Rows of a table that are shown: it is a text."""


def open_tensorboard(options: TensorboardOptions, context: SinkContext) -> TrackerSink:
    """Write another event file beside those of the run that there are."""
    return TrackerSink(TensorboardTracker(options, context), context)


@final
class TensorboardTracker:
    """One folder of event files; implements :class:`~etude.telemetry.sinks.trackers.Tracker`."""

    def __init__(self, options: TensorboardOptions, context: SinkContext) -> None:
        self._folder = Path(options.folder) / f"{context.run}-{context.id}" if options.folder else None
        self._folder = self._folder or context.folder / "tensorboard"
        before = len(list(self._folder.glob("events.*")))
        self._writer = SummaryWriter(
            str(self._folder), filename_suffix=f".{before}"
        )  # or one of this second is replaced
        if not before:
            self._writer.add_text("config", _code(json.dumps(context.config, indent=2)), 0)

    def log(self, axis: str, step: int, at_s: float, values: Mapping[str, float]) -> None:
        """A scalar of each."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, at_s)
        self._writer.flush()

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table in Markdown."""
        lines = [columns, ["---"] * len(columns), *rows[:ROWS]]
        self._writer.add_text(name, "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines), step)

    def text(self, name: str, step: int, at_s: float, text: str) -> None:
        """A text as it is."""
        self._writer.add_text(name, _code(text), step, at_s)

    def describe(self, facts: Mapping[str, str]) -> None:
        """One text for each."""
        for name, value in facts.items():
            self._writer.add_text(name, _code(value), 0)

    def artefact(self, file: Path) -> None:
        """A copy beside the event files: they hold none."""
        (Path(self._writer.logdir) / file.name).write_bytes(file.read_bytes())

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()


def _cell(value: Cell) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    """A text that Markdown leaves alone: indented."""
    return "\n".join(f"    {line}" for line in text.splitlines())

"""A run in Weights & Biases, online or offline; of the extra ``wandb``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import wandb

from etude.config.log import WandbOptions
from etude.telemetry.sinks.sink import SinkContext
from etude.telemetry.sinks.trackers import Cell, TrackerSink

AXES = {
    "train/step": ("train/*", "reward/*", "ended/*", "rollouts/*"),
    "midtrain/step": ("midtrain/*", "heldout/midtrain_*"),
    "sft/step": ("sft/*", "heldout/sft_*"),
    "heldout/step": ("heldout/*",),
}
"""Axis → the curves over it. Its own step counts calls, since it must never go back and a run has several axes."""


def open_wandb(options: WandbOptions, context: SinkContext) -> TrackerSink:
    """Begin a run, or go on with it. Raises ``wandb.Error`` where it cannot be had."""
    return TrackerSink(WandbTracker(options, context), context)


@final
class WandbTracker:
    """One run; implements :class:`~etude.telemetry.sinks.trackers.Tracker`."""

    def __init__(self, options: WandbOptions, context: SinkContext) -> None:
        self._id = context.id
        self._run = wandb.init(
            project=options.project,
            entity=options.entity or None,
            dir=options.folder or context.folder,
            id=context.id,
            name=context.run,
            config=dict(context.config),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        for axis, curves in AXES.items():
            self._run.define_metric(axis, hidden=True)
            for curve in curves:
                self._run.define_metric(curve, step_metric=axis)

    def log(self, axis: str, step: int, at_s: float, values: Mapping[str, float]) -> None:
        """One row of history."""
        self._run.log({**values, axis: step})

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table of its own kind."""
        self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def text(self, name: str, step: int, at_s: float, text: str) -> None:
        """A table of one text, which is shown as it is."""
        self._run.log({name: wandb.Table(columns=["step", "text"], data=[[step, text]])})

    def describe(self, facts: Mapping[str, str]) -> None:
        """Entries of its summary."""
        self._run.summary.update(dict(facts))

    def artefact(self, file: Path) -> None:
        """A version of an artefact."""
        artefact = wandb.Artifact(name=f"report-{self._id}", type="report")
        artefact.add_file(str(file))
        self._run.log_artifact(artefact)

    def close(self) -> None:
        """End it, once all was sent or written."""
        self._run.finish()

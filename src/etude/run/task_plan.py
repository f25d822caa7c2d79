"""Plan of a run's training tasks: their number, the epochs that the steps need, and the held-out tasks.

    33 training tasks, 4 a step: 8.25 steps an epoch; 100 steps are 12.1 epochs
    7 held-out tasks

This module owns the arithmetic and the checks before the start; :mod:`etude.rollouts.task_order` owns the order of
tasks.
"""

from dataclasses import dataclass

from etude.config.recipe import RunConfig
from etude.config.tasks import ENDLESS_FAMILIES
from etude.errors import ConfigError, UserError
from etude.protocols import TaskFamily
from etude.rollouts.admission import Admission
from etude.run.task_families import NOTHING_HELD_OUT, open_family
from etude.types import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """Numbers of a run's tasks."""

    family: str
    steps: int
    groups_per_step: int
    epochs: int
    """The recipe's maximum number of epochs; 0: as many as needed."""
    train: int | None
    """Training tasks of an epoch; ``None``: infinite."""
    heldout: int | None
    """Held-out tasks; ``None``: infinite or not needed."""
    selection: str = "in_order"
    """The way in which training tasks are chosen."""
    live: int = 0
    """Number of the steps' groups that are replaced by users' sessions."""

    @property
    def needed(self) -> int:
        """Number of groups that the run trains on, each with one task."""
        return self.steps * self.groups_per_step - self.live

    def describe(self) -> list[str]:
        """The plan as lines of text."""
        steps, each = self.steps, self.groups_per_step
        if self.train is None:
            live = f" − {self.live:,} of users" if self.live else ""
            count = f"{steps:,} steps × {each}{live} = {self.needed:,}"
            lines = [f"{self.family} makes new training tasks without end: {count}"]
        elif self.train and self.selection != "in_order":
            lines = [
                f"{self.train:,} training tasks, {each} a step, chosen by {self.selection}: {steps:,} steps are "
                f"{self.needed:,} draws, {self.needed / self.train:.3g} of each task on average"
            ]
        elif self.train:
            lines = [
                f"{self.train:,} training tasks, {each} a step: {self.train / each:.3g} steps an epoch; "
                f"{steps:,} steps are {self.needed / self.train:.3g} epochs"
            ]
        else:
            lines = ["no training task"]
        return lines if self.heldout is None else [*lines, f"{self.heldout:,} held-out tasks"]

    def check(self) -> None:
        """Raise :class:`~etude.errors.ConfigError` if training or held-out tasks are missing, or the epochs do not
        suffice.
        """
        if self.train == 0:
            raise ConfigError(
                "every task is held out, so that none is left to train on: hold out fewer (a larger "
                "tasks.heldout_every), or add tasks"
            )
        if self.train is None and self.selection != "in_order":
            raise ConfigError(
                f"tasks.selection.kind = {self.selection!r} chooses among tasks that come again, but those of "
                f"tasks.family = {self.family!r} have no end: leave it out"
            )
        if self.heldout == 0:
            raise ConfigError(NOTHING_HELD_OUT)
        available = self.epochs * (self.train or 0)
        if self.train and self.epochs and available < self.needed:
            raise ConfigError(
                f"tasks.epochs = {self.epochs} of {self.train:,} training tasks are {available:,}, but trainer.steps = "
                f"{self.steps:,} of rollouts.groups_per_step = {self.groups_per_step} need {self.needed:,}: lower "
                f"trainer.steps to {available // self.groups_per_step:,}, raise tasks.epochs to "
                f"{-(-self.needed // self.train)}, or leave it out"
            )


def open_tasks(config: RunConfig) -> TaskFamily:
    """The opened task family of a recipe. Raises :class:`~etude.errors.ConfigError`."""
    try:
        return open_family(config)
    except UserError as error:
        is_of_folder = config.tasks.folder and "tasks." not in str(error)
        raise ConfigError(f"tasks.folder: {error}" if is_of_folder else str(error)) from error


def plan_tasks(config: RunConfig, family: TaskFamily | None = None) -> TaskPlan:
    """The plan of a recipe. Opens its family unless ``family`` is given or it is infinite.

    Raises :class:`~etude.errors.ConfigError` for tasks that cannot be read.
    """
    sizes: dict[Split, int | None] = dict.fromkeys(Split)
    if config.tasks.family not in ENDLESS_FAMILIES:
        family = family or open_tasks(config)
        sizes = {split: family.size(split) for split in Split}
    needed = Admission(config.rollouts, steps=config.trainer.steps, live=config.live).groups_needed()
    return TaskPlan(
        family=config.tasks.family,
        steps=config.trainer.steps,
        groups_per_step=config.rollouts.groups_per_step,
        epochs=config.tasks.epochs,
        train=sizes[Split.TRAIN],
        heldout=sizes[Split.HELDOUT] if config.eval.enabled else None,
        selection=config.tasks.selection.kind,
        live=config.trainer.steps * config.rollouts.groups_per_step - needed,
    )

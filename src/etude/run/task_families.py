"""The task family of a recipe, and the demonstrations that mid-training shows of it."""

from pathlib import Path
from typing import cast

from etude.config.recipe import RunConfig
from etude.config.rollouts import CodingOptions
from etude.config.tasks import (
    FAMILIES,
    BugfixOptions,
    DatasetOptions,
    LookupOptions,
    NextEditOptions,
    RepositoryOptions,
)
from etude.errors import ConfigError
from etude.protocols import FamilyContext, TaskFamily
from etude.tasks.bugfix import BugfixFamily
from etude.tasks.corpora.corpus import DemonstratedFamily, Demonstrations
from etude.tasks.corpora.lookup import LookupDemonstrations
from etude.tasks.corpora.nextedit import NextEditDemonstrations
from etude.tasks.corpora.shell_transcripts import SHELL, ShellTasks
from etude.tasks.corpora.transcripts import TOOLS, TOOLS_WITH_USAGE, BugfixDemonstrations
from etude.tasks.datasets.family import DatasetDemonstrations, DatasetTasks
from etude.tasks.impossible import WithImpossible
from etude.tasks.lookup import LookupFamily
from etude.tasks.nextedit import NextEditFamily
from etude.tasks.repositories.family import BriefTasks, RepairDemonstrations
from etude.tasks.summaries import SummariesFamily, SummaryDemonstrations
from etude.types import Split

NOTHING_HELD_OUT = (
    "no task is held out, so that nothing can be measured: hold out more (a smaller tasks.heldout_every), name some in "
    "their own metadata (metadata.etude.split = 'heldout' in task.toml), or measure nothing (eval.enabled = false)"
)
"""Error of a family without held-out tasks."""


def open_family(config: RunConfig) -> TaskFamily:
    """The family that a recipe names. Raises :class:`~etude.errors.UserError` for a folder without tasks."""
    family = _family(config)
    if config.tasks.impossible_share:
        family = WithImpossible(family, share=config.tasks.impossible_share, seed=config.seed)
    return ShellTasks(family) if config.tasks.family == "bugfix" and config.harness.kind == "command" else family


def _family(config: RunConfig) -> TaskFamily:
    tasks, images = config.tasks, config.sandboxes.images
    context = FamilyContext(
        seed=config.seed,
        heldout_every=tasks.heldout_every,
        texts_heldout_every=config.eval.heldout_every,
        folder=Path(tasks.folder),
        images=Path(images) if images else None,
    )
    return cast("TaskFamily", FAMILIES.make(tasks.family, tasks.options, context))


def open_demonstrations(config: RunConfig, split: Split = Split.TRAIN) -> Demonstrations:
    """Open the demonstrations of a recipe's family: mid-training shows those of the training side and is measured on
    those of the held-out side.

    Raises :class:`~etude.errors.ConfigError` for a family without any.
    """
    match _family(config), config.tasks.options, config.harness.options:
        case BriefTasks() as family, RepositoryOptions() as options, _:
            return RepairDemonstrations(family, options, split)
        case LookupFamily() as family, LookupOptions() as options, CodingOptions() as harness:
            return LookupDemonstrations(family, options, harness, split)
        case NextEditFamily() as family, NextEditOptions() as options, _:
            return NextEditDemonstrations(family, options, split)
        case SummariesFamily() as family, _, _:
            return SummaryDemonstrations(family, split)
        case DatasetTasks() as family, DatasetOptions() as options, _:
            return DatasetDemonstrations(family, options, split)
        case BugfixFamily() as family, BugfixOptions() as options, CodingOptions() as harness:
            return BugfixDemonstrations(family, options, TOOLS_WITH_USAGE if harness.usage else TOOLS, split)
        case BugfixFamily() as family, BugfixOptions() as options, _:
            return BugfixDemonstrations(family, options, SHELL, split)
        case DemonstratedFamily() as family, _, _:
            return family.demonstrations(split)
        case _:
            raise ConfigError(
                f"mid-training has nothing to show of tasks.family = {config.tasks.family!r}: set midtrain.tokens = 0 "
                f"with a model.checkpoint; a repository family shows repairs with tasks.options.brief = true, one of "
                f"your own what its method 'demonstrations' gives"
            )

"""The task family of a recipe, and the demonstrations that mid-training shows of it."""

import logging
from pathlib import Path

from etude.config.recipe import RunConfig
from etude.config.rollouts import CodingOptions
from etude.config.tasks import BugfixOptions, LookupOptions, NextEditOptions, RepositoryOptions
from etude.errors import ConfigError
from etude.protocols import TaskFamily
from etude.run.task_sandboxes import image_store
from etude.sandboxes.images.store import ImageStore
from etude.tasks.bugfix import BugfixFamily
from etude.tasks.corpora.corpus import Demonstrations
from etude.tasks.corpora.lookup import LookupDemonstrations
from etude.tasks.corpora.nextedit import NextEditDemonstrations
from etude.tasks.corpora.shell_transcripts import SHELL, ShellTasks
from etude.tasks.corpora.transcripts import TOOLS, BugfixDemonstrations
from etude.tasks.harbor.family import HarborTasks
from etude.tasks.impossible import WithImpossible
from etude.tasks.lookup import LookupFamily
from etude.tasks.migrations.family import MigrationFamily
from etude.tasks.nextedit import NextEditFamily
from etude.tasks.repositories.family import BriefTasks, RepairDemonstrations
from etude.tasks.repositories.folder import RepositoryTasks
from etude.tasks.summaries import SummariesFamily, SummaryDemonstrations
from etude.types import Split

logger = logging.getLogger(__name__)

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
    tasks, folder, seed, every = config.tasks, Path(config.tasks.folder), config.seed, config.tasks.heldout_every
    match tasks.options:
        case BugfixOptions() as options:
            return BugfixFamily(options, seed=seed, heldout_every=every)
        case LookupOptions() as options:
            return LookupFamily(options, seed=seed, heldout_every=every)
        case NextEditOptions():
            return NextEditFamily(seed=seed, one_in=config.eval.heldout_every)
        case RepositoryOptions() as options:
            repository = RepositoryTasks(folder)
            if (unprobed := repository.unprobed) and not options.unprobed:
                raise ConfigError(
                    f"tasks.folder = {tasks.folder!r}: {len(unprobed)} tasks have no probe, so that code which forges "
                    f"the results of its tests meets canaries alone: delete them ({', '.join(unprobed[:3])} …, each "
                    f"*/tasks/ID.json), or set tasks.options.unprobed = true"
                )
            return BriefTasks(repository, ImageStore(repository.images)) if options.brief else repository
    match tasks.family:
        case "harbor":
            harbor = HarborTasks(folder, images=image_store(config.sandboxes, tasks), heldout_every=every)
            for name, reason in harbor.refused.items():
                logger.warning("task %s is set aside: %s", name, reason)
            return harbor
        case "migrations":
            return MigrationFamily(seed=seed, heldout_every=every)
        case "summaries":
            return SummariesFamily(heldout_every=every)
        case family:
            raise AssertionError(f"tasks.family = {family!r} has options")


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
        case BugfixFamily() as family, BugfixOptions() as options, harness:
            return BugfixDemonstrations(family, options, TOOLS if isinstance(harness, CodingOptions) else SHELL, split)
        case _:
            raise ConfigError(
                f"mid-training has nothing to show of tasks.family = {config.tasks.family!r}: set "
                f"tasks.options.brief = true with a repository family, or midtrain.tokens = 0 with a model.checkpoint"
            )

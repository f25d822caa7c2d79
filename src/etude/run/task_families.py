"""The tasks of a recipe, and what a model learns from before it meets them."""

import logging
from pathlib import Path

from etude.config.recipe import RunConfig
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


def open_family(config: RunConfig) -> TaskFamily:
    """The family that a recipe names. Raises :class:`~etude.errors.UserError` for a folder without tasks."""
    family = _family(config)
    if config.tasks.impossible_share:
        family = WithImpossible(family, share=config.tasks.impossible_share, seed=config.seed)
    return ShellTasks(family) if config.tasks.family == "bugfix" and config.harness.kind == "command" else family


def _family(config: RunConfig) -> TaskFamily:
    tasks, folder = config.tasks, Path(config.tasks.folder)
    match tasks.family:
        case "repository":
            repository = RepositoryTasks(folder)
            if (unprobed := repository.unprobed) and not tasks.unprobed:
                raise ConfigError(
                    f"tasks.folder = {tasks.folder!r}: {len(unprobed)} tasks have no probe, so that code which forges "
                    f"the results of its tests meets canaries alone: delete them ({', '.join(unprobed[:3])} …, each "
                    f"*/tasks/ID.json), or set tasks.unprobed = true"
                )
            return BriefTasks(repository, ImageStore(repository.images)) if tasks.brief else repository
        case "harbor":
            images = image_store(config.sandboxes, tasks)
            harbor = HarborTasks(folder, seed=config.seed, images=images, heldout_every=tasks.heldout_every)
            for name, reason in harbor.refused.items():
                logger.warning("task %s is set aside: %s", name, reason)
            return harbor
        case "migrations":
            return MigrationFamily(seed=config.seed, heldout_every=tasks.heldout_every)
        case "bugfix":
            return BugfixFamily(tasks, seed=config.seed)
        case "lookup":
            return LookupFamily(tasks, seed=config.seed)
        case "nextedit":
            return NextEditFamily(seed=config.seed, one_in=config.eval.heldout_every)
        case "summaries":
            return SummariesFamily(seed=config.seed, heldout_every=tasks.heldout_every)


def open_demonstrations(config: RunConfig, split: Split = Split.TRAIN) -> Demonstrations:
    """Demonstrations of a recipe's family for mid-training, or, of the held-out side, for measuring it.

    Raises :class:`~etude.errors.ConfigError` for one that a model from random weights has nothing to learn from in.
    """
    family = _family(config)
    if isinstance(family, BriefTasks):
        return RepairDemonstrations(family, config.transcripts, split)
    if isinstance(family, LookupFamily):
        return LookupDemonstrations(family, config.transcripts, config.harness, split)
    if isinstance(family, NextEditFamily):
        return NextEditDemonstrations(family, config.transcripts, split)
    if isinstance(family, SummariesFamily):
        return SummaryDemonstrations(family, split)
    if not isinstance(family, BugfixFamily):
        raise ConfigError(
            f"mid-training has nothing to show of tasks.family = {config.tasks.family!r}: "
            f"set tasks.brief = true with a repository family, or midtrain.tokens = 0 with a model.checkpoint"
        )
    style = TOOLS if config.harness.kind == "coding" else SHELL
    return BugfixDemonstrations(family, config.transcripts, style, split)

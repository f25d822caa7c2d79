"""The tasks of a recipe, and what a model learns from before it meets them."""

import logging
from pathlib import Path

from etude.config.recipe import RunConfig
from etude.environments.bugfix import BugfixFamily
from etude.environments.corpus import Practice
from etude.environments.harbor.family import HarborTasks
from etude.environments.impossible import WithImpossible
from etude.environments.lookup import LookupFamily
from etude.environments.lookup_practice import LookupPractice
from etude.environments.migrations import MigrationFamily
from etude.environments.nextedit import NextEditFamily
from etude.environments.nextedit_practice import NextEditPractice
from etude.environments.repositories.brief import BriefTasks, RepairPractice
from etude.environments.repositories.folder import RepositoryTasks
from etude.environments.shell_transcripts import SHELL, ShellTasks
from etude.environments.summaries import SummariesFamily, SummariesPractice
from etude.environments.transcripts import TOOLS, BugfixPractice
from etude.errors import ConfigError
from etude.protocols import TaskFamily
from etude.run.worlds import image_store
from etude.sandboxes.images import ImageStore
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
            harbor = HarborTasks(folder, seed=config.seed, images=images, heldout_one_in=tasks.heldout_one_in)
            for name, reason in harbor.refused.items():
                logger.warning("task %s is set aside: %s", name, reason)
            return harbor
        case "migrations":
            return MigrationFamily(seed=config.seed, heldout_one_in=tasks.heldout_one_in)
        case "bugfix":
            return BugfixFamily(tasks, seed=config.seed)
        case "lookup":
            return LookupFamily(tasks, seed=config.seed)
        case "nextedit":
            return NextEditFamily(seed=config.seed, one_in=config.eval.document_one_in)
        case "summaries":
            return SummariesFamily(seed=config.seed, heldout_one_in=tasks.heldout_one_in)


def open_practice(config: RunConfig, split: Split = Split.TRAIN) -> Practice:
    """What mid-training shows of a recipe's family, or, of the held-out side, is measured on.

    Raises :class:`~etude.errors.ConfigError` for one that a model from random weights has nothing to learn from in.
    """
    family = _family(config)
    if isinstance(family, BriefTasks):
        return RepairPractice(family, config.transcripts, split)
    if isinstance(family, LookupFamily):
        return LookupPractice(family, config.transcripts, config.harness, split)
    if isinstance(family, NextEditFamily):
        return NextEditPractice(family, config.transcripts, split)
    if isinstance(family, SummariesFamily):
        return SummariesPractice(family, split)
    if not isinstance(family, BugfixFamily):
        raise ConfigError(
            f"mid-training has nothing to show of tasks.family = {config.tasks.family!r}: "
            f"set tasks.brief = true with a repository family, or midtrain.tokens = 0 with a model.checkpoint"
        )
    style = TOOLS if config.harness.kind == "coding" else SHELL
    return BugfixPractice(family, config.transcripts, style, split)

"""The recipe for running a version of a run on a suite, and its checks before any try.

    a run's recipe ────────────────────────────────────────────┐
    suite.toml: [tasks] [sandboxes], [reward] [judge] if any ──┴─▶ the recipe of its tries ──▶ checked

The harness, the model and their limits come from the run; tasks and rewards come from the suite. Release gates and
`etude suite run --run` use this recipe (:mod:`etude.run.evaluate`).
"""

from pathlib import Path
from typing import Any

from etude.config.loading import load_recipe, parse_config
from etude.config.recipe import RunConfig
from etude.config.release import SuiteConfig
from etude.config.suite import SUITE_FILE
from etude.errors import ConfigError
from etude.run.judging import check_judge, reward_digest
from etude.run.task_families import open_family
from etude.tasks.suites import is_suite, suite_of, task_config
from etude.types import Split

DIGEST_CHARACTERS = 8
"""Length of a reward's digest in the name of a ledger of tries."""


def trial_config(run: RunConfig, suite: SuiteConfig) -> RunConfig:
    """The recipe for running a run's version on a suite, scored by the suite's ``[reward]`` and ``[judge]`` if it has a
    reward, else by the run's.

    Raises :class:`~etude.errors.ConfigError`.
    """
    place = Path(suite.recipe)
    if not is_suite(place):
        return run.model_copy(update={"tasks": load_recipe(place).tasks})
    file, (tasks, sandboxes) = suite_of(place), task_config(place)
    own: dict[str, Any] = {"tasks": tasks, "sandboxes": sandboxes}
    if not file.reward.parts:
        return run.model_copy(update=own)
    own |= {"reward": file.reward, "judge": file.judge}
    tree = run.model_dump(mode="json", exclude={*own, "hints", "release"})  # hints are only for training
    sections = {name: section.model_dump(mode="json", exclude_defaults=True) for name, section in own.items()}
    return parse_config({**tree, **sections}, source=f"{place / SUITE_FILE} with the harness of {run.name}")


def trial_name(config: RunConfig, suite: SuiteConfig) -> str:
    """The name of a suite's tries: it depends on the reward and its rubrics."""
    digest = reward_digest(config)[:DIGEST_CHARACTERS]
    return f"{suite.name}-{digest}" if digest else suite.name


def check_suites(run: RunConfig) -> None:
    """Raise :class:`~etude.errors.ConfigError` for a suite of a run's release gate that cannot be run: it does not
    exist, has no tasks, or its judge is not trusted.
    """
    for suite in run.release.suites:
        try:
            config = trial_config(run, suite)
            check_judge(config)
            if open_family(config).size(Split.HELDOUT) == 0:
                raise ConfigError("it has no task that is held out: name another suite, or add tasks")
        except ConfigError as error:
            raise ConfigError(f"release.suites, {suite.name!r} (recipe = {suite.recipe!r}): {error}") from error

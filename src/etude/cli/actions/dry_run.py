"""`etude run --dry-run`: prints the resolved recipe and its tasks, after the checks that need no model.

Does not import torch.
"""

from etude.config.loading import dump_toml
from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.rewards.shaping.parts import describe
from etude.run.judging import check_judge
from etude.run.suite_trials import check_suites
from etude.run.task_plan import plan_tasks


def print_recipe(config: RunConfig) -> int:
    """Print a recipe as TOML, its reward and its tasks; returns the exit status.

    Raises :class:`~etude.errors.ConfigError` as a start would.
    """
    about_reward = describe(config.reward)
    check_judge(config)
    check_suites(config)
    print(dump_toml(config), end="")
    print("".join(f"# {line}\n" for line in about_reward), end="")
    return _print_tasks(config)


def _print_tasks(config: RunConfig) -> int:
    """Print how many tasks there are and how often each is needed. Raises as a start would if there are too few tasks.
    A missing folder is only reported.
    """
    try:
        plan = plan_tasks(config)
    except ConfigError as error:
        print(f"# {error}")
        return 0
    print("".join(f"# tasks: {line}\n" for line in plan.describe()), end="")
    plan.check()
    return 0

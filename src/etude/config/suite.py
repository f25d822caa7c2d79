"""``suite.toml``: a set of tasks to measure with, what it is called, and whom it belongs to."""

from typing import Literal

from pydantic import Field

from etude.config.judge import JudgeConfig
from etude.config.reward import RewardConfig
from etude.config.section import Section
from etude.config.tasks import SandboxConfig, TaskConfig

SUITE_FILE = "suite.toml"
"""Name of the file in the folder of a suite."""


class SuiteFile(Section):
    """A whole ``suite.toml``."""

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    """Name in results."""
    version: str = Field(default="1", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Version of the set of tasks; `etude suite refresh` makes a new one."""
    description: str = ""
    """Its purpose, in a line."""
    licence: str = ""
    """Licences of what its tasks are made of."""
    canary: str = Field(default="", pattern=r"^\S*$")
    """A word that stands nowhere else: a text that has it was taken from here (`etude suite contamination`)."""
    split: Literal["all", "heldout"] = "all"
    """All tasks of its family, or those alone that the family holds out."""
    tasks: TaskConfig = TaskConfig()
    """``[tasks]``, as in a recipe; a relative ``folder`` is one beside ``suite.toml``, by default its own."""
    sandboxes: SandboxConfig = SandboxConfig(kind="ns")
    """``[sandboxes]``, as in a recipe."""
    reward: RewardConfig = RewardConfig()
    """``[reward]``, as in a recipe: a try is worth the sum of its parts, by default what the grader says."""
    judge: JudgeConfig = JudgeConfig()
    """``[judge]``, as in a recipe: the judge that parts of ``[reward]`` name, with its rubrics and calibrations."""

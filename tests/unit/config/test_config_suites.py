"""Suites as the tasks of a recipe."""

import pytest

from etude.config.loading import parse_config
from etude.errors import ConfigError
from etude.types import Json


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, "needs tasks.folder"),
        ({"folder": "s", "heldout_every": 3}, "tasks.heldout_every would have no effect .* all of which is held out"),
        ({"folder": "s", "impossible_share": 0.01}, "never trained on"),
    ],
)
def test_a_suite_takes_no_options_of_training(tasks: dict[str, Json], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"tasks": {"family": "suite", **tasks}}, source="test")


def test_a_shell_gives_no_answer() -> None:
    tree: dict[str, Json] = {"tasks": {"family": "lookup"}, "harness": {"kind": "shell"}}
    with pytest.raises(ConfigError, match=r"asks for an answer, which harness\.kind = 'shell' has no way to give"):
        parse_config(tree, source="test")

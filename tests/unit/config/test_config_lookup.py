"""Keys of the lookup family: refused where they would have no effect, and where a task could not be worked on."""

import pytest

from etude.config.loading import default_recipe
from etude.errors import ConfigError

LOOKUP = "tasks.family=lookup"


def test_a_lookup_task_needs_no_machine() -> None:
    config = default_recipe([LOOKUP, "tasks.pages=3", "tasks.asked=1"])
    assert (config.sandboxes.kind, config.tasks.pages, config.tasks.asked) == ("local", 3, 1)


@pytest.mark.parametrize("key", ["pages=3", "page_facts=3", "asked=1", "askable=6"])
def test_keys_of_another_family_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"tasks.{key.partition('=')[0]} would have no effect"):
        default_recipe([f"tasks.{key}"])


def test_a_single_right_answer_cannot_contradict_itself() -> None:
    with pytest.raises(ConfigError, match="no effect on a single right answer"):
        default_recipe([LOOKUP, "tasks.impossible_share=0.01"])


def test_a_harness_that_cannot_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"asks for an answer, which harness\.kind = 'command'"):
        default_recipe([LOOKUP, "sandboxes.kind=ns", "harness.kind=command", 'harness.command=["agent", "{prompt}"]'])


@pytest.mark.parametrize("setting", ["retry=0.2", "right_edit=0.9"])
def test_habits_that_no_session_of_the_family_has_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"transcripts\.\w+ would have no effect with tasks\.family = 'lookup'"):
        default_recipe([LOOKUP, f"transcripts.{setting}"])
    with pytest.raises(ConfigError, match=r"transcripts\.keep_fact would have no effect with tasks\.family = 'bugfix'"):
        default_recipe(["transcripts.keep_fact=0.5", f"transcripts.{setting}"])

"""Keys of the lookup family: refused where they would have no effect, and where a task could not be worked on."""

import pytest

from etude.config.loading import default_recipe
from etude.config.tasks import LookupOptions
from etude.errors import ConfigError

LOOKUP = "tasks.family=lookup"


def test_a_lookup_task_needs_no_machine() -> None:
    config = default_recipe([LOOKUP, "tasks.options.pages=3", "tasks.options.questions=1"])
    assert (config.sandboxes.kind, config.tasks.options) == ("local", LookupOptions(pages=3, questions=1))


@pytest.mark.parametrize("key", ["pages=3", "page_facts=3", "questions=1", "question_names=6", "keep_fact=0.5"])
def test_options_of_another_family_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"no effect with tasks.family = 'bugfix', it goes with 'lookup'"):
        default_recipe([f"tasks.options.{key}"])


def test_a_single_right_answer_cannot_contradict_itself() -> None:
    with pytest.raises(ConfigError, match="no effect on a single right answer"):
        default_recipe([LOOKUP, "tasks.impossible_share=0.01"])


def test_a_harness_that_cannot_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"asks for an answer, which harness\.kind = 'command'"):
        default_recipe(
            [LOOKUP, "sandboxes.kind=ns", "harness.kind=command", 'harness.options.command=["agent", "{prompt}"]']
        )

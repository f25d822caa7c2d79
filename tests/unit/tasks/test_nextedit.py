"""Edits of real code to continue: they are right, and held-out files are never read."""

import asyncio
import re
from pathlib import Path
from random import Random

import pytest

from etude.config.loading import load_recipe, parse_config
from etude.config.tasks import NextEditOptions
from etude.errors import ConfigError
from etude.harnesses.tools import Submit, parse_call
from etude.protocols import Grade, HarnessResult
from etude.rewards.graders.answers import AnswerGrader
from etude.rewards.score import ScorePolicy, score
from etude.rollouts.fake import FakeSandbox
from etude.tasks.corpora.corpus import stdlib_texts
from etude.tasks.corpora.mixture import Side
from etude.tasks.corpora.nextedit import MISTAKES, NextEditDemonstrations
from etude.tasks.nextedit import NextEditFamily, NumberedLine, Site, sites, sites_of
from etude.types import AnswerChecks, Split

RECIPES = Path(__file__).parents[3] / "recipes"
ONE_IN = 6


@pytest.fixture(scope="module")
def family() -> NextEditFamily:
    return NextEditFamily(seed=0, one_in=ONE_IN)


SOURCE = """
def f(self, data, other):
    count = len(data) + 1
    for item in data:
        count += item.count
    text = "count"; print(count, text)
    self.go(count=count)
    return count + other

def g(x):
    global total
    total = x * 2
    return total - x
"""


def test_the_sites_of_a_module() -> None:
    assert list(sites(SOURCE)) == [
        Site("data", NumberedLine("def f(self, data, other):", (12,)), NumberedLine("count = len(data) + 1", (12,))),
        Site("data", NumberedLine("count = len(data) + 1", (12,)), NumberedLine("for item in data:", (12,))),
        Site("item", NumberedLine("for item in data:", (4,)), NumberedLine("count += item.count", (9,))),
        Site("other", NumberedLine("def f(self, data, other):", (18,)), NumberedLine("return count + other", (15,))),
        Site("x", NumberedLine("def g(x):", (6,)), NumberedLine("total = x * 2", (8,))),
        Site("x", NumberedLine("total = x * 2", (8,)), NumberedLine("return total - x", (15,))),
    ]


def test_a_variable_is_renamed_wherever_it_stands() -> None:
    assert NumberedLine("a = b[a] + ab", (0, 6)).renamed("a", "long") == "long = b[long] + ab"


@pytest.mark.parametrize("split", Split)
def test_a_task_is_a_right_renaming(family: NextEditFamily, split: Split) -> None:
    for index in range(200):
        task = family.task(split, index)
        assert task == family.task(split, index)
        edit, cursor = task.prompt.split("\n")
        assert isinstance(task.checks, AnswerChecks)
        old, line = task.template, task.checks.answer
        (new,) = set(re.findall(rf"\[-{old}-\]\{{\+(\w+)\+\}}", edit))
        assert new not in re.findall(r"\w+", cursor)
        assert re.sub(rf"\b{old}\b", new, cursor) == line
        assert line != cursor
        assert len(task.prompt) < 130


def test_what_is_held_out_is_read_nowhere(family: NextEditFamily) -> None:
    by_name = set(sites_of(Split.TRAIN, ONE_IN))
    text = "\n".join(stdlib_texts(Side(split=Split.TRAIN, seed=0, one_in=ONE_IN)))
    modules = set(stdlib_texts(Side(split=Split.HELDOUT, seed=0, one_in=ONE_IN)))
    assert modules
    assert not any(module in text for module in modules)
    drawn = [family.edit(Split.HELDOUT, Random(index)).site for index in range(300)]
    assert not by_name.intersection(drawn)
    assert len(set(drawn)) > 200


def test_runs_are_measured_on_the_same_tasks_and_practise_on_their_own(family: NextEditFamily) -> None:
    other = NextEditFamily(seed=1, one_in=ONE_IN)
    assert other.task(Split.HELDOUT, 3) == family.task(Split.HELDOUT, 3)
    assert other.task(Split.TRAIN, 3) != family.task(Split.TRAIN, 3)


def test_the_careless_one_is_right_as_often_as_asked_for_and_silent_now_and_then(family: NextEditFamily) -> None:
    demonstrations = NextEditDemonstrations(family, NextEditOptions(right_edit=0.5))
    silent = right = spoken = 0
    for index in range(600):
        rng = Random(index)
        requested, output = demonstrations.session(rng)
        call = parse_call(output.content)
        assert isinstance(call, Submit)
        assert requested.content.count("\n") == 1
        silent += not call.answer
        spoken += bool(call.answer)
        edit = family.edit(Split.TRAIN, Random(index))
        right += call.answer.split() == edit.line.split()
    assert 0.14 < silent / 600 < 0.26
    assert 0.42 < right / spoken < 0.6


def test_every_mistake_is_wrong(family: NextEditFamily) -> None:
    for index in range(300):
        rng = Random(index)
        edit = family.edit(Split.TRAIN, rng)
        for mistake in MISTAKES.values():
            assert mistake(edit, "another_one", rng).split() != edit.line.split()


def test_what_mid_training_shows_as_right_is(family: NextEditFamily) -> None:
    for index in range(50):
        requested, output = NextEditDemonstrations(family, NextEditOptions()).code(Random(index))
        edit = family.edit(Split.TRAIN, Random(index))
        assert requested.content == edit.prompt
        assert parse_call(output.content) == Submit(edit.line)


def test_the_recipe_pays_for_right_suggestions_and_not_for_silence(family: NextEditFamily) -> None:
    config = load_recipe(RECIPES / "tab")
    task = family.task(Split.TRAIN, 0)
    assert isinstance(task.checks, AnswerChecks)
    policy, worth = ScorePolicy(reward=config.reward), {}
    for answer in (task.checks.answer, "", task.prompt):
        result = HarnessResult(reason="submit", counts={}, answer=answer)
        graded = asyncio.run(AnswerGrader().grade(task, FakeSandbox({}, lambda sandbox: None), result))
        values = {"behaviour.sampled_tokens": 10.0, "behaviour.malformed_calls": 0.0}
        worth[answer] = score(graded, None, values, policy).value
    assert list(worth.values()) == [1.0, 0.0, -0.5]
    assert config.reward.bounds[1] == 1.0
    truncated = Grade(value=0.0, parts={"wrong": 0.0})
    assert score(truncated, None, {"behaviour.sampled_tokens": 16.0}, policy).value == -0.5


def test_keys_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.heldout_every would have no effect"):
        parse_config({"tasks": {"family": "nextedit", "heldout_every": 9}}, source="test")
    with pytest.raises(ConfigError, match="asks for an answer"):
        harness = {"kind": "command", "options": {"command": ["x", "{prompt}", "{temperature}"]}}
        parse_config({"tasks": {"family": "nextedit"}, "harness": harness}, source="test")

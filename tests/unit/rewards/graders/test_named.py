"""Graders by name."""

import asyncio
from pathlib import Path

import pytest

from etude.config.loading import load_recipe
from etude.errors import ConfigError
from etude.ledger.records import decode_task, encode_task
from etude.protocols import Grade, GraderContext, HarnessResult, Sandbox
from etude.rewards.graders.named import NamedGrader, find_grader
from etude.rollouts.fake import FakeSandbox
from etude.types import Json, NamedChecks, Split, Task

GRADER = """
from etude.config.section import Section
from etude.protocols import Grade

class SameOptions(Section):
    words: tuple[str, ...]
    weight: float = 1.0

class Same:
    Options = SameOptions

    def __init__(self, options, context):
        self.options, self.context = options, context

    async def grade(self, task, sandbox, result):
        fresh = await self.context.open_sandbox(task)
        untouched = await fresh.read_file("work") == task.files["work"]
        return Grade(value=self.options.weight * (result.answer in self.options.words), parts={"fresh": untouched})
"""


def make_task(grader: str, options: dict[str, Json]) -> Task:
    checks = NamedChecks(grader=grader, options=options)
    files = {"work": "to be done"}
    return Task(task_id="1", family="f", template="t", split=Split.TRAIN, prompt="p", files=files, checks=checks)


@pytest.fixture
def names(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "grader.py").write_text(GRADER, encoding="utf-8")
    (tmp_path / "run.toml").write_text("[tasks]\ngraders = {same = '@grader.py:Same'}\n", encoding="utf-8")
    return load_recipe(tmp_path).tasks.graders


def test_a_task_is_graded_by_the_grader_that_it_names_with_its_options(names: dict[str, str]) -> None:
    task = decode_task(encode_task(make_task("same", {"words": ["yes", "no"], "weight": 2})))

    async def fresh(task: Task) -> Sandbox:
        return FakeSandbox(task.files, lambda sandbox: None)

    async def act() -> Grade:
        agents = FakeSandbox({"work": "done"}, lambda sandbox: None)
        result = HarnessResult(reason="submit", counts={}, answer="no")
        return await NamedGrader(names, GraderContext(open_sandbox=fresh)).grade(task, agents, result)

    assert asyncio.run(act()) == Grade(value=2.0, parts={"fresh": 1.0})


@pytest.mark.parametrize(
    ("grader", "options", "words"),
    [
        ("some", {}, "'some' is no grader: .*or a name of tasks.graders: same"),
        ("same", {}, "whose options are words, weight: words: Field required"),
        ("same", {"words": [], "wieght": 1}, "wieght: Extra inputs"),
        ("@grader.py:Same", {}, "a file, which a recipe alone may name"),
        ("no_such_module:Same", {}, "No module named 'no_such_module'"),
    ],
)
def test_a_task_whose_grader_cannot_be_had_is_refused(
    grader: str, options: dict[str, Json], words: str, names: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=f"task '1' is graded by '{grader}'(.|\n)*{words}"):
        find_grader(make_task(grader, options), names)


def test_a_recipe_names_no_grader_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[tasks]\ngraders = {same = '@grader.py:Same'}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tasks\.graders = '@.*grader\.py:Same' cannot be imported"):
        load_recipe(tmp_path)

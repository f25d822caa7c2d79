"""Tasks of exploration: the skill solves them, all else does not, and it is imitated as seldom as asked.

Policies are scripts behind real HTTP; tools, sandboxes and the grader are the real ones.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from random import Random

import aiohttp
import pytest

from etude.config.loading import default_recipe
from etude.config.rollouts import CodingOptions
from etude.config.tasks import BugfixOptions
from etude.errors import ConfigError
from etude.harnesses import tools
from etude.harnesses.coding import CodingHarness
from etude.rewards.graders.functions import HiddenTests
from etude.sandboxes.local.provider import LocalSandboxes
from etude.tasks.bugfix import BugfixFamily
from etude.tasks.corpora.shell_transcripts import SHELL
from etude.tasks.corpora.transcripts import TOOLS, TOOLS_WITH_USAGE, BugfixDemonstrations, Message, Style
from etude.tasks.programs import LABELS, PATHS, with_label
from etude.types import Json, Split, Task
from scripted_model import ScriptedModel, serving

PLAIN = BugfixOptions(kinds=("arith", "slice"))
LABEL = PLAIN.model_copy(update={"hidden_label": True})
FILES = PLAIN.model_copy(update={"files": 4})
HARNESS = CodingOptions(find=True, usage=True)
SESSIONS = 400
TASKS = 3
Say = Callable[[Sequence[dict[str, Json]]], str]
"""A policy: the next reply, of all messages so far."""


def play(task: Task, say: Say, options: CodingOptions = HARNESS) -> tuple[float, Mapping[str, int]]:
    """Reward and counts of one session."""

    async def run() -> tuple[float, Mapping[str, int]]:
        sandboxes = LocalSandboxes(1)
        sandbox = await sandboxes.create(task.files)
        try:
            async with aiohttp.ClientSession() as http, serving(ScriptedModel(say)) as session:
                result = await CodingHarness(options, http).run(task, session, sandbox, temperature=0.0)
            return (await HiddenTests().grade(task, sandbox, result)).value, result.counts
        finally:
            await sandboxes.close()

    return asyncio.run(run())


def problems(options: BugfixOptions) -> list[tuple[Task, str, str]]:
    """Held-out tasks, each with its path and its right answer line without a label."""
    family = BugfixFamily(options, seed=0)
    solutions = []
    for index in range(TASKS):
        task = family.task(Split.HELDOUT, index)
        path, broken = task.function_checks.path, task.files[task.function_checks.path].splitlines()
        lines = {
            kind.answer_line(parts, naming)
            for kind in family.kinds
            for parts in family.templates(kind, Split.HELDOUT)
            if kind.title(parts) == task.template
            for naming in kind.namings
            if kind.program(parts, naming, task.function_checks.function)[:2] == tuple(broken[:2])
        }
        (line,) = lines
        assert line.strip() in family.forbidden
        solutions.append((task, path, line))
    return solutions


def scripted(*steps: str | Callable[[str], str]) -> Say:
    """Replies in order, then ``submit``; a function makes its reply of the last observation."""

    def say(messages: Sequence[dict[str, Json]]) -> str:
        place = (len(messages) - 1) // 2
        step = steps[place] if place < len(steps) else tools.SUBMIT
        return step if isinstance(step, str) else step(str(messages[-1]["content"]))

    return say


def sessions(options: BugfixOptions, style: Style = TOOLS_WITH_USAGE) -> list[list[Message]]:
    demonstrations, rng = BugfixDemonstrations(BugfixFamily(options, seed=0), options, style), Random(0)
    return [demonstrations.session(rng) for _ in range(SESSIONS)]


def calls(session: Sequence[Message]) -> list[tools.Call]:
    return [tools.parse_call(message.content) for message in session if message.role == "assistant"]


def test_without_conditions_tasks_and_sessions_are_those_that_they_were() -> None:
    """Equal to the tasks before conditions existed, with the names of that time; digests are fixed since."""
    plain = BugfixOptions(kinds=("arith", "slice", "comp", "loop", "range"))
    habits = plain.model_copy(update={"stub": 0.5, "bad_call": 0.5, "reminded": 0.2, "read_first": 0.5})
    assert digest(plain, TOOLS) == "39c9faa61840b965"
    assert digest(plain, SHELL) == "0b99801fb200039d"
    assert digest(habits, TOOLS) == "1c01988ac2ec2923"


def digest(options: BugfixOptions, style: Style) -> str:
    family, rng = BugfixFamily(options, seed=3), Random("f")
    demonstrations = BugfixDemonstrations(family, options, style)
    tasks = [family.task(split, index) for split in Split for index in range(40)]
    return hashlib.sha256(repr((tasks, [demonstrations.session(rng) for _ in range(60)])).encode()).hexdigest()[:16]


def test_a_label_is_known_only_from_the_failing_test() -> None:
    for task, path, line in problems(LABEL):
        text = task.prompt + task.files[path]

        def as_told(failure: str, path: str = path, line: str = line) -> str:
            (label,) = re.findall(r"want .*'(\w+)'\]$", failure)
            return f"edit {path} 3\n{with_label(line, label)}"

        assert play(task, scripted("test", as_told))[0] == 1.0
        in_file = [label for label in LABELS if label in re.findall(r"\w+", text)]
        assert len(in_file) == 1
        assert play(task, scripted(f"edit {path} 3\n{with_label(line, in_file[0])}"))[0] == 0.0
        assert play(task, scripted(f"edit {path} 3\n{line}"))[0] == 0.0


def test_a_file_that_the_prompt_does_not_name_is_found_by_a_search() -> None:
    for task, path, line in problems(FILES):
        function = task.function_checks.function
        assert task.prompt == f"fix {function}"
        assert len(task.files) == FILES.files

        def where_it_is(path: str, line: str = line) -> str:
            return f"edit {path} 3\n{line}"

        assert play(task, scripted(f"find {function}", where_it_is)) == (1.0, {"find": 1, "edit": 1, "submit": 1})
        other = next(place for place in PATHS if place != path)
        assert play(task, scripted(f"edit {other} 3\n{line}"))[0] == 0.0


def test_a_recipe_without_the_search_has_no_such_tool() -> None:
    task = BugfixFamily(FILES, seed=0).task(Split.HELDOUT, 0)
    seen: list[str] = []

    def look(observation: str) -> str:
        seen.append(observation)
        return tools.SUBMIT

    say = scripted("find total", look)
    assert play(task, say, CodingOptions()) == (0.0, {"malformed": 1, "submit": 1})
    assert seen == [tools.BAD_CALL]


def test_the_form_of_a_call_is_told_by_its_error() -> None:
    for task, path, line in problems(PLAIN):
        wrong = f"edit {path}:3\n{line}"

        def as_told(error: str, path: str = path, line: str = line) -> str:
            form = error.removeprefix("bad call: ")
            return f"{form.replace('FILE', path).replace('N', '3')}\n{line}"

        assert play(task, scripted(wrong, as_told))[0] == 1.0
        assert play(task, scripted(wrong, wrong))[0] == 0.0


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5])
def test_sessions_follow_the_test_as_often_as_asked(rate: float) -> None:
    options = LABEL.model_copy(update={"follow_test": rate, "read_first": 1.0, "test_after": 1.0, "retry": 1.0})
    first, later = [], []
    for session in sessions(options):
        (label,) = {label for message in session for label in re.findall(r"want .*'(\w+)'\]$", message.content)}
        edits = [f"'{label}'" in call.text for call in calls(session) if isinstance(call, tools.EditFile)]
        first.append(edits[0])
        later += edits[1:]
    assert not any(first)
    assert abs(sum(later) / len(later) - rate) < 0.06
    assert any(later) == (rate > 0)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5])
def test_sessions_search_as_often_as_asked_where_the_file_is_not_named(rate: float) -> None:
    unnamed = 0
    searches = 0
    for session in sessions(FILES.model_copy(update={"search": rate, "read_first": 1.0})):
        if " in " in session[0].content:
            assert not any(isinstance(call, tools.FindName) for call in calls(session))
            continue
        unnamed += 1
        first, *later = calls(session)
        if isinstance(first, tools.FindName):
            searches += 1
            assert later[0] == tools.ReadFile(session[2].content)
        else:
            assert all(isinstance(call, tools.ReadFile | tools.Submit) for call in (first, *later))
    assert 0.4 < unnamed / SESSIONS < 0.6
    assert abs(searches / unnamed - rate) < 0.08
    assert bool(searches) == (rate > 0)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5])
def test_sessions_correct_a_call_as_often_as_asked(rate: float) -> None:
    options = PLAIN.model_copy(update={"bad_call": 1.0, "correct_call": rate, "test_after": 0.0})
    corrected = 0
    for session in sessions(options):
        errors = [message.content for message in session if message.content.startswith(tools.BAD_CALL)]
        assert set(errors) == {"bad call: edit FILE N"}
        corrected += any(isinstance(call, tools.EditFile) for call in calls(session))
    assert abs(corrected / SESSIONS - rate) < 0.06
    assert bool(corrected) == (rate > 0)


@pytest.mark.parametrize("options", [LABEL, FILES], ids=["label", "files"])
def test_what_is_held_out_stays_so(options: BugfixOptions) -> None:
    """Also under a label, and in the other files of a task."""
    family = BugfixFamily(options, seed=0)
    texts = [text for index in range(500) for text in family.task(Split.TRAIN, index).files.values()]
    texts += [message.content for session in sessions(options) for message in session]
    lines = {re.sub(r"return \[(.*), '\w+'\]$", r"return \1", line) for text in texts for line in text.splitlines()}
    stripped = {part.strip() for line in lines for part in (line, line.partition(" ")[2])}
    assert not stripped & family.forbidden
    heldout = [family.task(Split.HELDOUT, index) for index in range(64)]
    assert len({task.task_id for task in heldout}) == 64
    plain = BugfixFamily(PLAIN, seed=1)
    assert {task.template for task in heldout} == {plain.task(Split.HELDOUT, index).template for index in range(64)}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["tasks.options.follow_test=0.1"], "follow_test would have no effect"),
        (["tasks.options.search=0.1"], "search would have no effect"),
        (["tasks.options.correct_call=0.1"], "correct_call would have no effect"),
        (["tasks.options.hidden_label=true", 'tasks.options.kinds=["loop"]'], "leave 'loop' out"),
        (["tasks.options.files=3", "tasks.options.search=0.1"], "harness.options.find = true"),
    ],
)
def test_options_without_effect_are_refused(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        default_recipe(keys)

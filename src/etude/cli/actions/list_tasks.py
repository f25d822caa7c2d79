"""`etude tasks ls`: the first tasks of a recipe or a folder, and the number of all on each side of the hold-out."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from etude.config.loading import is_recipe, load_recipe
from etude.config.recipe import RunConfig
from etude.dashboard.formatting import visible
from etude.protocols import TaskFamily
from etude.run.task_families import open_family
from etude.tasks.harbor.family import HELDOUT_ONE_IN, read_tasks, side_of
from etude.tasks.harbor.folder import SETTINGS
from etude.tasks.repositories.folder import RepositoryTasks
from etude.types import AnswerChecks, Checks, FunctionChecks, NamedChecks, QueryChecks, ScriptChecks, Task, TestChecks
from etude.types import Split as Side

UNLESS_SAID = f", with tasks.heldout_every = {HELDOUT_ONE_IN}"
"""Condition of the sides of Harbor's tasks, which a folder alone does not settle."""


def show_tasks(source: Path, split: str, count: int) -> None:
    """Print the first ``count`` tasks of a side, and the number of tasks on both."""
    if is_recipe(source):
        lines = _task_lines(load_recipe(source), split, count)
    elif is_harbor(source):
        lines = _harbor_lines(source, split, count)
    else:
        lines = _repository_lines(source, split, count)
    text = "\n".join(lines)
    print(visible(text) if sys.stdout.isatty() else text)


def is_harbor(folder: Path) -> bool:
    """True for a folder of tasks in Harbor's format, or of one such task."""
    return (folder / SETTINGS).is_file() or any(folder.glob(f"*/{SETTINGS}"))


def _harbor_lines(folder: Path, split: str, count: int) -> Iterator[str]:
    """The first ``count`` tasks of a side in a folder of Harbor's, by name, and those that cannot be read."""
    reading = read_tasks(folder)
    sides = {task.name: side_of(task) for task in reading.tasks}
    for task in [task for task in reading.tasks if sides[task.name] == split][:count]:
        yield f"{split} {task.name}: {task.instruction.splitlines()[0]}"
    yield from (f"set aside: {name}: {reason}" for name, reason in reading.refused.items())
    yield sides_text(Counter(sides.values())) + UNLESS_SAID


def _repository_lines(folder: Path, split: str, count: int) -> Iterator[str]:
    """The first ``count`` tasks of a side in a folder that was built from repositories."""
    tasks = RepositoryTasks(folder)
    for task in tasks.tasks(Side(split))[:count]:
        yield f"── {split} {task.task_id} {task.template}\n{task.prompt}\n"
    yield sides_text({side: len(tasks.tasks(side)) for side in Side})


def sides_text(sizes: Mapping[Side, int | None]) -> str:
    """Number of tasks on each side of the hold-out."""
    train, heldout = (
        "no end of" if size is None else f"{size:,}"
        for size in (sizes.get(side, 0) for side in (Side.TRAIN, Side.HELDOUT))
    )
    return f"{train} training tasks, {heldout} held-out tasks"


def _task_lines(config: RunConfig, split: str, count: int) -> Iterator[str]:
    """The first ``count`` tasks of a split: prompt, files, and in a line what is asked for."""
    family = open_family(config)
    for index, task in enumerate(first_tasks(family, Side(split), count)):
        yield f"── {split} task {index}, {task.task_id}: {task.template}"
        yield task.prompt
        for path, text in task.files.items():
            yield f"{path}:"
            yield from (f"  {line}" for line in text.splitlines())
        yield _example(task.checks)
    yield sides_text({side: family.size(side) for side in Side})


def first_tasks(family: TaskFamily, side: Side, count: int) -> Iterator[Task]:
    """The first ``count`` tasks of a side, or all of fewer."""
    size = family.size(side)
    return (family.task(side, index) for index in range(count if size is None else min(count, size)))


def _example(checks: Checks) -> str:
    """A task in a line."""
    match checks:
        case FunctionChecks():
            case = checks.visible[0]
            return f"  {checks.function}{case.arguments} should be {case.expected!r}\n"
        case TestChecks():
            return f"  {checks.about} tests should pass, such as {checks.must_pass[0]}\n"
        case ScriptChecks():
            return f"  {' '.join(checks.command)} should give a reward\n"
        case QueryChecks():
            return f"  {checks.queries[0].sql} should give {[list(row) for row in checks.queries[0].rows]!r}\n"
        case AnswerChecks():
            return f"  the answer should be {checks.answer!r}\n"
        case NamedChecks():
            return f"  graded by {checks.grader} with {json.dumps(checks.options)}\n"

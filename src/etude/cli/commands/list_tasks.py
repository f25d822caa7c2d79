"""Tasks as text for people: `etude tasks ls`."""

from collections.abc import Iterator

from etude.config.recipe import RunConfig
from etude.run.task_families import open_family
from etude.types import AnswerChecks, Checks, FunctionChecks, QueryChecks, ScriptChecks, Split, TestChecks


def task_lines(config: RunConfig, split: str, count: int) -> Iterator[str]:
    """The first ``count`` tasks of a split: prompt, files, and in a line what is asked for."""
    family = open_family(config)
    for index in range(count):
        task = family.task(Split(split), index)
        yield f"── {split} task {index}, {task.task_id}: {task.template}"
        yield task.prompt
        for path, text in task.files.items():
            yield f"{path}:"
            yield from (f"  {line}" for line in text.splitlines())
        yield _example(task.checks)


def _example(checks: Checks) -> str:
    """What a task is about, in a line."""
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

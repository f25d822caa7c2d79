"""Graders by name: a task names its grader and the options for it.

    NamedChecks ──▶ name: tasks.graders, built in, module:Name ──▶ its Options ──▶ grader ──▶ grade

The recipe decides which code runs; a task, which may come from an untrusted source, only refers to it by name. So only
``tasks.graders`` may name a file.
"""

import json
from collections.abc import Mapping
from typing import Protocol, cast

from pydantic import ValidationError

from etude.config.section import Section, faults_of, own_options
from etude.config.tasks import GRADERS
from etude.errors import ConfigError
from etude.protocols import Grade, Grader, GraderContext, HarnessResult, Sandbox
from etude.types import NamedChecks, Task


class MakeGrader(Protocol):
    """The type of a callable that a task's ``grader`` names."""

    def __call__(self, options: Section, context: GraderContext, /) -> Grader:
        """Make the grader of one task."""
        ...


class NamedGrader:
    """Makes the grader that a task names, and grades with it; implements :class:`~etude.protocols.Grader`."""

    def __init__(self, names: Mapping[str, str], context: GraderContext) -> None:
        """``names`` is ``tasks.graders``."""
        self._names = names
        self._context = context

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Grade with the named grader. Raises like it, and like :func:`find_grader`."""
        make, options = find_grader(task, self._names)
        return await make(options, self._context).grade(task, sandbox, result)


def find_grader(task: Task, names: Mapping[str, str]) -> tuple[MakeGrader, Section]:
    """The factory of the grader that a task names, and the validated options for it.

    Raises :class:`~etude.errors.ConfigError` for an unknown name, and for options that its class does not accept.
    """
    checks = task.checks
    assert isinstance(checks, NamedChecks), f"task {task.task_id!r} is graded by {type(checks).__name__}"
    where = f"task {task.task_id!r} is graded by {checks.grader!r}"
    if checks.grader.startswith("@"):
        raise ConfigError(
            f"{where}, a file, which a recipe alone may name: tasks.graders = {{ name = '@file.py:Name' }}"
        )
    try:
        thing = GRADERS.find(names.get(checks.grader, checks.grader))
        options = own_options(thing, where).model_validate_json(json.dumps(dict(checks.options)))
    except ValidationError as error:
        fields = ", ".join(own_options(thing, where).model_fields) or "none"
        raise ConfigError(f"{where}, whose options are {fields}: {faults_of(error)}") from error
    except ValueError as error:
        named = f", or a name of tasks.graders: {', '.join(names)}" if names else ""
        raise ConfigError(f"{where}: {error}{named}") from error
    return cast("MakeGrader", thing), options

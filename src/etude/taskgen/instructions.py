"""Task prompts, made from templates, without any line of the solution.

The prompt of a deletion has the signature, docstring and example calls; that of a planted bug reports the failing
tests, as a user would. Pure.
"""

import json
from collections.abc import Mapping, Sequence

from etude.taskgen.candidates import BUG, Candidate
from etude.taskgen.deletions import DeletionKind
from etude.taskgen.hiding import TestView
from etude.taskgen.projects import Project
from etude.types import Case

MAX_FAILURES = 5
"""Maximum failing tests in a prompt."""
EXAMPLES = 3
"""Maximum example calls in a prompt; none of them is used to grade."""


def instruct(
    project: Project, candidate: Candidate, view: TestView, messages: Mapping[str, str], examples: Sequence[Case]
) -> str:
    """The prompt of a task. ``messages`` maps failing tests to messages; ``examples`` are calls of the function."""
    words = _bug(project, view, messages) if candidate.kind == BUG else _deletion(project, candidate, examples)
    command = "`python3 -m pytest`"
    return f"{words}\n\nThe repository is in the working folder; {command} runs the tests that it has. {_closing(view)}"


def _closing(view: TestView) -> str:
    if view.visible:
        return "Mend the cause, not the tests: others, which you do not see, check the same behaviour."
    return "Your work is checked by tests that are not in it; those that are must go on passing."


def _bug(project: Project, view: TestView, messages: Mapping[str, str]) -> str:
    shown = sorted(view.visible or view.hidden)[:MAX_FAILURES]
    lines = [f"- {test}" + (f": {messages[test]}" if messages.get(test) else "") for test in shown]
    if view.visible:
        opening = f"Something in `{project.name}` stopped working. Among others these tests fail:"
    else:
        opening = f"Something in `{project.name}` stopped working. A colleague's tests, not in this repository, fail:"
    return "\n".join((opening, "", *lines, "", "Find the cause in the source and mend it."))


def _deletion(project: Project, candidate: Candidate, examples: Sequence[Case]) -> str:
    module = project.module(candidate.path)
    name = f"`{module}.{candidate.target}`"
    if candidate.operator == DeletionKind.WHOLE:
        exports = sorted(path for path in candidate.after if path.endswith(".py") and path != candidate.path)
        also = f", exported by {' and '.join(f'`{path}`' for path in exports)} as well" if exports else ""
        opening = f"`{project.name}` needs a function {name} in `{candidate.path}`{also}:"
    elif candidate.operator == DeletionKind.CLASS:
        opening = (
            f"The methods of {name} in `{candidate.path}` are not implemented. Write them, after their docstrings:"
        )
    else:
        opening = f"{name} in `{candidate.path}` is not implemented: it raises NotImplementedError. Write it:"
    parts = [opening, f"```python\n{candidate.required}\n```"]
    if examples:
        calls = [_example(candidate.target, case) for case in examples[:EXAMPLES]]
        parts.append("Examples of what it returns:\n\n```python\n" + "\n".join(calls) + "\n```")
    return "\n\n".join(parts)


def _example(function: str, case: Case) -> str:
    arguments = ", ".join(repr(argument) for argument in case.arguments)
    return f">>> {function}({arguments})\n{json.loads(json.dumps(case.expected))!r}"

"""The planted-bug tasks for an agent that has a shell, and transcripts of such an agent for mid-training.

The agent is the imperfect one of :mod:`etude.tasks.corpora.transcripts`; only its messages differ. They are exactly
those of mini-swe-agent with the templates of ``recipes/external-harness/mini.yaml``: one command per message, answered
by its output and by its exit code if that is not 0, until a command prints the word that submits. The observations are
the real outputs of the commands.

Owns the text of messages and the check that an agent can run. Starts nothing.
"""

from dataclasses import replace
from random import Random

from etude.config.tasks import BugfixOptions
from etude.harnesses import tools
from etude.protocols import TaskFamily
from etude.tasks.bugfix import Problem
from etude.tasks.corpora.transcripts import Message, Move, Style, first_failure, moves
from etude.tasks.programs import Lines
from etude.types import Case, FunctionChecks, Split, Task

SYSTEM = "One command per message. To finish: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Text of mini-swe-agent's system template."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command that ends a session of mini-swe-agent."""
CHECK_FILE = "check.py"
"""The visible tests in the agent's sandbox; grading ignores this file."""

ONE_FILE = "a recipe whose agent has a shell is refused tasks of several files"


class ShellTasks:
    """Tasks with a file of visible tests beside the broken one; implements :class:`~etude.protocols.TaskFamily`."""

    def __init__(self, family: TaskFamily) -> None:
        self._family = family

    def size(self, split: Split) -> int | None:
        """The size of the family."""
        return self._family.size(split)

    def task(self, split: Split, index: int) -> Task:
        """The family's task with a program that checks it."""
        task = self._family.task(split, index)
        return replace(task, files={**task.files, CHECK_FILE: check_program(task.function_checks)})


def check_program(checks: FunctionChecks) -> str:
    """A program that prints ``PASS`` or, like the built-in tool ``test``, the first case that fails.

    The program executes the text of the file: an import could load compiled code of the version a second before.
    """
    cases = [(_call(checks.function, case), case.expected) for case in checks.visible]
    return (
        f"exec(open({checks.path!r}).read())\n"
        f"for call, want in {cases!r}:\n"
        "    try:\n"
        "        got = repr(eval(call))\n"
        "    except Exception as error:\n"
        "        got = type(error).__name__\n"
        "    if got != repr(want):\n"
        f'        raise SystemExit(f"FAIL {{call}} = {{got[:{tools.SHOWN_CHARACTERS}]}} want {{want!r}}")\n'
        'print("PASS")\n'
    )


def shell_transcript(problem: Problem, checks: FunctionChecks, options: BugfixOptions, rng: Random) -> list[Message]:
    """One session of the imperfect agent, from the system message to the command that submits."""
    messages = [Message("system", SYSTEM), Message("user", problem.prompt)]
    for move, lines in moves(problem, checks, options, rng):
        messages.append(Message("assistant", _command(move)))
        messages.append(Message("user", observation(*_outcome(move, problem, lines, checks))))
    messages.append(Message("assistant", SUBMIT))
    return messages


def observation(exit_code: int, output: str) -> str:
    """The text of mini-swe-agent's observation template for a finished command."""
    return f"exit {exit_code}\n{output}" if exit_code else output or "ok"


def _command(move: Move) -> str:
    match move:
        case tools.ReadFile(path):
            return f"cat {path}"
        case tools.EditFile(path, line, text):
            return f"sed -i '{line}c\\{text}' {path}"
        case tools.RunTests():
            return f"python3 {CHECK_FILE}"
        case tools.FindName():
            raise AssertionError(ONE_FILE)


def _outcome(move: Move, problem: Problem, lines: Lines, checks: FunctionChecks) -> tuple[int, str]:
    """Exit code and output of a command."""
    match move:
        case tools.FindName():
            raise AssertionError(ONE_FILE)
        case tools.ReadFile():
            return 0, "\n".join(lines)
        case tools.EditFile():
            return 0, ""
        case tools.RunTests():
            failure = first_failure(problem, lines, checks)
            return (0, "PASS\n") if failure is None else (1, tools.render_failure(problem.function, *failure) + "\n")


def _call(function: str, case: Case) -> str:
    return f"{function}({', '.join(map(repr, case.arguments))})"


SHELL = Style(shell_transcript, str)
"""Messages of an agent with a shell."""

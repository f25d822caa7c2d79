"""Imperfect agent sessions on training tasks, for mid-training.

The imitated agent knows the tools but works badly: it often edits without reading, makes mistakes, rarely tests and
gives up early. Its observations are real: the tools of :mod:`etude.harnesses.tools` answer as in a rollout.
Reinforcement learning later adds judgment, and the held-out tasks measure how much.

Three habits, each with its own probability, are the skills that exploration needs: an edit that follows the failing
test (``follow_test``), a search for the file (``search``), and a malformed call corrected after its error
(``correct_call``).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TypeAlias

from etude.config.tasks import BugfixOptions
from etude.harnesses import tools
from etude.tasks.bugfix import BugfixFamily, Problem, run_program
from etude.tasks.programs import LABELS, PATHS, Lines, with_label
from etude.types import Case, FunctionChecks, Split

MAX_EDITS = 3
"""Attempts after which the imitated agent submits."""
MAX_GUESSES = 3
"""Guessed paths that the agent reads before it gives up."""
NAMED_SHARE = 0.5
"""Share of sessions on several files whose prompt names the file: they show work on a file without a search."""
REMINDER = tools.USAGE[tools.EDIT]
"""The user's correction of a malformed edit."""
STUBS = ("pass", "return 0", "return None")
"""Lines of an agent that has not read the file that it edits; as many as :data:`MAX_EDITS`."""
SHOWN_SHARE = 0.7
"""Share of programs that are shown as an agent sees them."""

Move: TypeAlias = tools.ReadFile | tools.EditFile | tools.RunTests | tools.FindName
"""Moves of the imitated agent before it submits."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a transcript."""

    role: str
    content: str


Writer: TypeAlias = Callable[[Problem, FunctionChecks, BugfixOptions, Random], list[Message]]
"""Writes one session of the imperfect agent, from the task's prompt to its submission."""


@dataclass(frozen=True, slots=True)
class Style:
    """The form of an agent's messages and files."""

    write: Writer
    show: Callable[[str], str]
    """Renders a file as that agent sees it."""


def transcript(
    problem: Problem, checks: FunctionChecks, options: BugfixOptions, rng: Random, *, usage: bool = False
) -> list[Message]:
    """One session in the text protocol of the built-in tools; with ``usage`` errors show the form of a call."""
    messages = [Message("user", problem.prompt)]
    for move, lines in moves(problem, checks, options, rng):
        before = _before(move, options, rng, usage=usage)
        messages += before
        is_refused = len(before) > 1
        if is_refused and options.correct_call < 1 and rng.random() >= options.correct_call:
            messages += before * rng.randrange(MAX_EDITS)
            break
        messages.append(Message("assistant", _spell(move)))
        messages.append(Message("user", _observe(move, problem, lines, checks)))
    return [*messages, *_before(None, options, rng), Message("assistant", tools.SUBMIT)]


def _before(move: Move | None, options: BugfixOptions, rng: Random, *, usage: bool = False) -> list[Message]:
    """Messages before a move, or before the submission: a reminder of the form of an edit, or a malformed edit and its
    error; often none.

    A reminder may precede any move, so that it teaches how to edit and not when.

    Options of 0 draw no random number, so that sessions without habits stay the same.
    """
    if options.reminded and rng.random() < options.reminded:
        return [Message("user", REMINDER)]
    if isinstance(move, tools.EditFile) and options.bad_call and rng.random() < options.bad_call:
        wrong = f"{tools.EDIT} {move.path}:{move.line}\n{move.text}"
        return [Message("assistant", wrong), Message("user", tools.explain(wrong) if usage else tools.BAD_CALL)]
    return []


TOOLS = Style(transcript, tools.number_lines)
"""Messages of the built-in tools."""
TOOLS_WITH_USAGE = Style(partial(transcript, usage=True), tools.number_lines)
"""Messages of the built-in tools whose errors show the form of a call."""


class BugfixDemonstrations:
    """Programs and sessions of one side; implements :class:`~etude.tasks.corpora.corpus.Demonstrations`."""

    def __init__(
        self, family: BugfixFamily, options: BugfixOptions, style: Style = TOOLS, split: Split = Split.TRAIN
    ) -> None:
        self._family = family
        self._options = options
        self._style = style
        self._split = split

    def code(self, rng: Random) -> str:
        """A right program, usually as the agent sees it."""
        text = "\n".join(self._family.problem(self._split, rng).right)
        return self._style.show(text) if rng.random() < SHOWN_SHARE else text

    def session(self, rng: Random) -> list[Message]:
        """A session of the imperfect agent on a fresh problem."""
        problem, checks = self._family.graded_problem(self._split, rng)
        if not problem.is_named and rng.random() < NAMED_SHARE:
            problem = replace(problem, is_named=True)
        return self._style.write(problem, checks, self._options, rng)


def moves(
    problem: Problem, checks: FunctionChecks, options: BugfixOptions, rng: Random
) -> Iterator[tuple[Move, Lines]]:
    """The moves of the imperfect agent, each with the program after it."""
    lines = problem.broken
    if not problem.is_named:
        if rng.random() >= options.search:
            for path in _guess_paths(problem, options, rng):
                yield tools.ReadFile(path), lines
            return
        yield tools.FindName(problem.function), lines
    has_read = rng.random() < options.read_first
    if has_read:
        yield tools.ReadFile(problem.path), lines
    tried = set[str]()
    has_failed = False
    for _ in range(MAX_EDITS):
        is_stub = not has_read and options.stub > 0 and rng.random() < options.stub
        line = _draw_stub(problem, tried, rng) if is_stub else _draw_edit(problem, options, tried, rng)
        if problem.label and not is_stub:
            line = with_label(line, _draw_label(problem, options, rng, is_told=has_failed))
        tried.add(line)
        lines = problem.with_answer(line)
        yield tools.EditFile(problem.path, problem.kind.answer + 1, line), lines
        if rng.random() >= options.test_after:
            return
        yield tools.RunTests(), lines
        if first_failure(problem, lines, checks) is None or rng.random() >= options.retry:
            return
        has_failed = True


def first_failure(problem: Problem, lines: Lines, checks: FunctionChecks) -> tuple[Case, str] | None:
    """The first visible case that fails, with the result's ``repr`` or the exception's name."""
    for case in checks.visible:
        got = run_program(lines, problem.function, case.arguments)
        if got != case.expected:
            return case, got[1:] if isinstance(got, str) and got.startswith("!") else repr(got)
    return None


def _draw_edit(problem: Problem, options: BugfixOptions, tried: set[str], rng: Random) -> str:
    """The right line or a mistake, without a label; never a line that was tried before."""
    if rng.random() < options.right_edit:
        return problem.plain_answer
    return rng.choice([line for line in problem.mistakes if line not in tried])


def _draw_label(problem: Problem, options: BugfixOptions, rng: Random, *, is_told: bool) -> str:
    """A wrong label; sometimes the right one, once a test has shown it."""
    if is_told and rng.random() < options.follow_test:
        return problem.label
    return rng.choice([label for label in LABELS if label != problem.label])


def _guess_paths(problem: Problem, options: BugfixOptions, rng: Random) -> Iterator[str]:
    """Wrong paths, until the agent stops trying."""
    for path in rng.sample([path for path in PATHS if path != problem.path], MAX_GUESSES):
        yield path
        if rng.random() >= options.retry:
            return


def _draw_stub(problem: Problem, tried: set[str], rng: Random) -> str:
    """An untried line that needs no knowledge of the file, with the indent of the line that it replaces."""
    right = problem.right[problem.kind.answer]
    indent = right[: len(right) - len(right.lstrip())]
    return rng.choice([indent + stub for stub in STUBS if indent + stub not in tried])


def _spell(move: Move) -> str:
    match move:
        case tools.ReadFile(path):
            return f"{tools.READ} {path}"
        case tools.EditFile(path, line, text):
            return f"{tools.EDIT} {path} {line}\n{text}"
        case tools.RunTests():
            return tools.TEST
        case tools.FindName(name):
            return f"{tools.FIND} {name}"


def _observe(move: Move, problem: Problem, lines: Lines, checks: FunctionChecks) -> str:
    match move:
        case tools.ReadFile(path):
            text = problem.files(lines).get(path)
            return tools.NO_FILE if text is None else tools.number_lines(text)
        case tools.FindName(name):
            return tools.list_files(name, problem.files(lines))
        case tools.EditFile():
            return tools.OK
        case tools.RunTests():
            failure = first_failure(problem, lines, checks)
            return tools.PASS if failure is None else tools.render_failure(problem.function, *failure)

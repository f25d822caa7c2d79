"""Imperfect agent sessions on training tasks, for mid-training.

The imitated agent knows the tools but works badly: it often edits without reading, makes slips, rarely tests and gives
up early. Its observations are true: the tools of :mod:`etude.sandboxes.tools` answer as they would in a rollout. What
reinforcement learning later adds is judgment, and the held-out measure shows how much.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from etude.config import TranscriptConfig
from etude.environments.bugfix import Problem, run_program
from etude.sandboxes import tools
from etude.types import FunctionChecks

MAX_EDITS = 3
"""Attempts after which the imitated agent submits whatever it has."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a transcript."""

    role: str
    content: str


def transcript(problem: Problem, checks: FunctionChecks, config: TranscriptConfig, rng: Random) -> list[Message]:
    """One session of the imperfect agent, from the task's prompt to ``submit``."""
    messages = [Message("user", f"fix {problem.function} in {problem.path}")]
    lines = problem.broken
    for call, lines in _session(problem, checks, config, rng):
        messages.append(Message("assistant", call))
        messages.append(Message("user", _observe(call, problem, lines, checks)))
    messages.append(Message("assistant", tools.SUBMIT))
    return messages


def _session(
    problem: Problem, checks: FunctionChecks, config: TranscriptConfig, rng: Random
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The agent's calls, each with the program as it is afterwards."""
    lines = problem.broken
    if rng.random() < config.read_first:
        yield f"{tools.READ} {problem.path}", lines
    tried = set[str]()
    for _ in range(MAX_EDITS):
        line = _draw_edit(problem, config, tried, rng)
        tried.add(line)
        lines = problem.with_answer(line)
        yield f"{tools.EDIT} {problem.path} {problem.kind.answer + 1}\n{line}", lines
        if rng.random() >= config.test_after:
            return
        yield tools.TEST, lines
        if _failure(problem, lines, checks) is None or rng.random() >= config.retry:
            return


def _draw_edit(problem: Problem, config: TranscriptConfig, tried: set[str], rng: Random) -> str:
    """The right line or a slip; never what a test has just shown to be wrong."""
    if rng.random() < config.right_edit:
        return problem.right[problem.kind.answer]
    return rng.choice([line for line in problem.slips if line not in tried])


def _observe(call: str, problem: Problem, lines: tuple[str, ...], checks: FunctionChecks) -> str:
    if call.startswith(tools.READ):
        return tools.number_lines("\n".join(lines))
    if call == tools.TEST:
        return _failure(problem, lines, checks) or tools.PASS
    return tools.OK


def _failure(problem: Problem, lines: tuple[str, ...], checks: FunctionChecks) -> str | None:
    """What ``test`` prints for the first visible case that fails."""
    for case in checks.visible:
        got = run_program(lines, problem.function, case.arguments)
        if got != case.expected:
            shown = got[1:] if isinstance(got, str) and got.startswith("!") else repr(got)
            return tools.render_failure(problem.function, case, shown)
    return None

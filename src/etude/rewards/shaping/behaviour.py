"""Behaviour terms: an agent's behaviour in numbers, for a reward that otherwise only sees the result. Pure.

    turns as text, counts, measures ──observe──▶ Conduct ──TERMS──▶ name → value, or ``None``

Composer 2 had to add such terms to its reward during its run (arXiv 2603.24477, section 4.2): for to-dos that were left
open, for long reasoning in code comments, and for a collapse to the terminal as the only tool. Training on real users
showed two more: malformed calls, and questions instead of work.

A term measures bad behaviour, from 0 upwards, so its weight is negative. Its docstring is its exact definition; a
change of the definition raises its version, and recipes for the old version are refused. Each is a coarse measure that
a model can learn to satisfy without being better: use small weights, and inspect the rollouts.

Owns the terms. Does not own how calls are parsed (:mod:`etude.harnesses.actions`), how comments are found
(:mod:`etude.rewards.shaping.comments`) or the weight of a term (:mod:`etude.rewards.shaping.parts`).
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType

from etude.harnesses.actions import THOUGHTS, Action, read_calls
from etude.harnesses.tools import SUBMIT
from etude.rewards.monitor.acts import PATHS, TEXTS, Surface, acts_of
from etude.rewards.shaping.comments import parse_source
from etude.rewards.transcript import SpokenTurn
from etude.sandbox_spec import WORKDIR
from etude.types import TurnKind

MALFORMED = "malformed"
"""Key of a harness's counts: calls that it could not parse."""
CODE_LINES_PER_COMMENT = 4
"""Lines of code per permitted line of comment; the standard library has one for five or six."""
COMMENT_LETTERS = 100
"""Length of a comment that counts as one line, so that joining lines does not help."""
MIN_CALLS = 8
"""Least number of calls for which using only one tool is significant."""
ENDINGS = frozenset({SUBMIT, "answer", "finish", "final_answer"})
"""Tools that end a session: every session calls one once."""
THINKING = re.compile(
    r"\b(?:let me|let's (?:see|try|think|check)|wait\b(?:[,.!—-]| no\b| actually\b)|hmm+|"
    r"(?-i:I) (?:think|guess|wonder|should|will|could|need|can|must|am|was|have to|don't know|realize|realise)\b|"
    r"i'(?:m|ll|d|ve)\b|maybe (?-i:I)\b|not sure (?:if|why|whether|how)|on second thought|what if (?:we|i)\b|"
    r"ok(?:ay)?,? (?:so|now|let)\b|actually,|(?:first|now|next),? (?:i|let)\b|the user (?:wants|asked|said))",
    re.IGNORECASE,
)
"""Words of thinking aloud, in the first person or addressed to oneself; a variable ``i`` does not match."""
HEARD_NUMBER = re.compile(r"\s*\d+[\s:|→-]*")
"""Line number before a line of a file, as a tool shows it."""
HEARD_MARK = re.compile(r"#+|//+|/\*+|<!--|--")
"""Mark before a comment in such a line."""
QUESTION = re.compile(r"\?[\"'”’)\s*_`]*\Z")
"""The end of a text that is a question."""
CODE_BLOCK = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Text that an agent wrote into files, by lines; comments that it read or wrote earlier do not count."""

    code_lines: int = 0
    comment_lines: int = 0
    docstring_lines: int = 0
    thinking_lines: int = 0
    """Lines of comments and docstrings that read like thinking aloud."""

    @property
    def lines(self) -> int:
        """Lines of all kinds."""
        return self.code_lines + self.comment_lines + self.docstring_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """Facts of one rollout that behaviour terms use."""

    counts: Mapping[str, int]
    """The harness's counts: tool → calls; empty if it counts none."""
    measures: Mapping[str, float]
    """The harness's measures."""
    tools: Mapping[str, int]
    """Tool → calls, as parsed from the model's text."""
    written: Written
    acting_turns: int
    """Turns other than summaries."""
    asking_turns: int
    """Turns among them that called no tool and ended in a question."""
    sampled_tokens: int
    """Sampled tokens of all turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One behaviour term."""

    measure: Callable[[Conduct], float | None]
    """Returns ``None`` if the harness does not provide the required figures."""
    version: int
    low: float
    high: float
    """Highest value."""
    optional: bool = False
    """True if the value may be missing, because not every harness provides the required figures."""


def observe(
    turns: Sequence[SpokenTurn],
    *,
    counts: Mapping[str, int],
    measures: Mapping[str, float],
    sampled_tokens: int,
    bare_shell: bool = False,
) -> Conduct:
    """The facts of a rollout for behaviour terms; ``bare_shell`` as in :func:`~etude.harnesses.actions.read_calls`."""
    acting = [(index, turn) for index, turn in enumerate(turns) if turn.kind is TurnKind.ACT]
    calls = [(index, read_calls(turn.text, bare_shell=bare_shell)) for index, turn in acting]
    actions = [Action(tool=tool, arguments=given, turn=index) for index, made in calls for tool, given in made]
    return Conduct(
        counts=counts,
        measures=measures,
        tools=Counter(action.tool for action in actions),
        written=_written(actions, turns),
        acting_turns=len(acting),
        asking_turns=sum(not made and _asks(turns[index].text) for index, made in calls),
        sampled_tokens=sampled_tokens,
    )


def measure(conduct: Conduct) -> dict[str, float]:
    """The value of every measurable behaviour term, by name."""
    values = ((name, term.measure(conduct)) for name, term in TERMS.items())
    return {name: value for name, value in values if value is not None}


def open_todos(conduct: Conduct) -> float | None:
    """To-do items left open / opened; 0 if none was opened, ``None`` if the harness has no to-do list."""
    opened, left = conduct.measures.get("todo_opened"), conduct.measures.get("todo_open")
    if opened is None or left is None:
        return None
    return left / opened if opened else 0.0


def excess_comments(conduct: Conduct) -> float:
    """Lines of comment beyond 1 + ⌊code lines / 4⌋, as a share of all lines written; 0 if nothing was written.

    A comment of more than 100 letters counts as several lines; docstrings are not comments here.
    """
    written = conduct.written
    allowed = 1 + written.code_lines // CODE_LINES_PER_COMMENT
    return max(0, written.comment_lines - allowed) / written.lines if written.lines else 0.0


def thinking_comments(conduct: Conduct) -> float:
    """Lines of comments and docstrings that think aloud (``THINKING``), as a share of all lines written, or 0."""
    written = conduct.written
    return written.thinking_lines / written.lines if written.lines else 0.0


def tool_monoculture(conduct: Conduct) -> float:
    """1 − H, at least 0, where H is the entropy of the called tools in bits: 1 if all calls are of one tool, 0 if two
    are used equally often, or more tools. 0 below 8 calls. Calls that end a session are not counted.
    """
    counts = [count for tool, count in conduct.tools.items() if tool not in ENDINGS]
    total = sum(counts)
    if total < MIN_CALLS:
        return 0.0
    return max(0.0, 1.0 + math.fsum(count / total * math.log2(count / total) for count in counts))


def malformed_calls(conduct: Conduct) -> float | None:
    """Share of calls that the harness could not parse; ``None`` if it counted no calls."""
    total = sum(conduct.counts.values())
    return conduct.counts.get(MALFORMED, 0) / total if total else None


def asking(conduct: Conduct) -> float:
    """Share of turns, other than summaries, that call no tool and end in a question; 0 without turns."""
    return conduct.asking_turns / conduct.acting_turns if conduct.acting_turns else 0.0


def sampled_tokens(conduct: Conduct) -> float:
    """Number of tokens that the model sampled in all turns: a measure of latency."""
    return float(conduct.sampled_tokens)


TERMS: Mapping[str, Term] = MappingProxyType(
    {
        "open_todos": Term(measure=open_todos, version=1, low=0.0, high=1.0, optional=True),
        "excess_comments": Term(measure=excess_comments, version=1, low=0.0, high=1.0),
        "thinking_comments": Term(measure=thinking_comments, version=1, low=0.0, high=1.0),
        "tool_monoculture": Term(measure=tool_monoculture, version=1, low=0.0, high=1.0),
        "malformed_calls": Term(measure=malformed_calls, version=1, low=0.0, high=1.0, optional=True),
        "asking": Term(measure=asking, version=1, low=0.0, high=1.0),
        "sampled_tokens": Term(measure=sampled_tokens, version=1, low=0.0, high=math.inf),
    }
)
"""Name after ``behaviour.`` → the term."""


def _asks(text: str) -> bool:
    text = CODE_BLOCK.sub("", THOUGHTS.sub("", text)).strip()
    return bool(QUESTION.search(text[-COMMENT_LETTERS:]))


def _written(actions: Sequence[Action], turns: Sequence[SpokenTurn]) -> Written:
    """Sum of everything that the agent wrote."""
    code = comments = docstrings = thinking = heard = 0
    seen: set[str] = set()
    for action in actions:
        for turn in turns[heard : action.turn + 1]:
            seen.update(_shown(turn.heard))
        heard = action.turn + 1
        for text, suffix in _texts(action):
            source = parse_source(text, suffix)
            comment_lines = [line for line in source.comments if line not in seen]
            explained = [line for line in source.docstrings if line not in seen]
            code += source.code_lines
            comments += _lines(comment_lines)
            docstrings += _lines(explained)
            thinking += _lines([line for line in (*comment_lines, *explained) if THINKING.search(line)])
            seen.update(comment_lines, explained)
    return Written(code_lines=code, comment_lines=comments, docstring_lines=docstrings, thinking_lines=thinking)


def _texts(action: Action) -> Iterator[tuple[str, str]]:
    """The program texts that an action writes or runs, with the suffix of their file; ``.py`` without a path."""
    acts = acts_of(action, workdir=WORKDIR, existing=frozenset())
    path = next((act.text for act in acts if act.where in PATHS), "")
    for act in acts:
        if act.surface is Surface.CODE and (path or act.where not in TEXTS):
            yield act.text, PurePosixPath(path).suffix if path else ".py"
        elif act.surface in (Surface.CREATE, Surface.ALTER):
            path = act.text


def _shown(heard: str) -> Iterator[str]:
    """Lines of a text that the agent read, in the forms in which they could be a comment or docstring."""
    for line in heard.split("\n"):
        number, mark = HEARD_NUMBER.match(line), HEARD_MARK.search(line)
        yield line[number.end() if number else 0 :].strip()
        if mark:
            yield line[mark.end() :].strip(" \t*")


def _lines(texts: Sequence[str]) -> int:
    return sum(math.ceil(len(text) / COMMENT_LETTERS) for text in texts)

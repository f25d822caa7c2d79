"""Actions of an agent in its sandbox, call by call, parsed from the turns of its rollout: pure.

    turns ──decode──▶ replies and what followed each ──▶ Action: tool, arguments, output ──▶ detectors, audits

A harness may be any program: what it asked for is then known only from the text that the model wrote. Five ways to
write a call are read: ``<tool_call>`` with JSON, ``<function=…>`` with ``<parameter=…>``, fenced blocks of shell, the
words of :mod:`etude.harnesses.tools`, and replies that are commands. A reply that is none of them has no action.

Owns the nouns :class:`Action` and :class:`Finding` and how actions are read. Does not judge: what is suspicious is the
affair of the detectors (:mod:`etude.rewards.monitor.monitor`, :mod:`etude.tasks.honeypots`).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from etude.harnesses import tools
from etude.types import Ids, Turn

OUTPUT_LETTERS = 64_000
"""Most of an output that is recorded: its first and its last half. More than any harness here shows a model."""
SHELL = "shell"
"""The tool whose ``command`` was written in a fenced block."""

THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([\w.-]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([\w.-]+)>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)
FENCED = re.compile(r"^```(?:bash|sh|shell|console|zsh|\w*bash\w*)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Severity(IntEnum):
    """Certainty that a finding is a case of cheating."""

    LOW = 1
    """Honest work looks like this now and then: counted, no more."""
    MEDIUM = 2
    """Honest work hardly ever looks like this."""
    HIGH = 3
    """Honest work never looks like this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One tool call of an agent, and the part of its result that the agent saw."""

    tool: str
    """Its name as the harness has it: ``read``, ``bash``, …"""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """By name, each as text; what was no text in the call is JSON here."""
    output: str = ""
    """Output that followed; empty where there was none."""
    turn: int = 0
    """Index of the turn that made the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sign of cheating, and its place."""

    detector: str
    severity: Severity
    turn: int
    where: str
    """The name of an argument, ``output``, or ``world`` for what was found in the sandbox afterwards."""
    span: tuple[int, int]
    """First and last + 1 letter of the evidence in there; (0, 0) for the whole."""
    evidence: str
    """The letters themselves, cut to a line's length."""


def read_actions(
    turns: Sequence[Turn], decode: Callable[[Ids], str], *, bare_shell: bool = False
) -> tuple[Action, ...]:
    """The actions of a rollout in order. ``decode`` gives the text of token ids, with or without special tokens;
    ``bare_shell`` is as in :func:`read_calls`.

    The output of a turn is what stands behind its reply in the next prompt that begins with both; several calls of one
    reply share it.
    """
    actions: list[Action] = []
    for index, turn in enumerate(turns):
        calls = read_calls(decode(turn.completion_ids), bare_shell=bare_shell)
        if not calls:
            continue
        output = excerpt(_output(turn, turns[index + 1 :], decode))
        actions += [Action(tool=tool, arguments=arguments, output=output, turn=index) for tool, arguments in calls]
    return tuple(actions)


def read_calls(reply: str, *, bare_shell: bool = False) -> list[tuple[str, dict[str, str]]]:
    """Parse tool and arguments of every call in a reply; thoughts are not read.

    A reply without marks is one call in the built-in tools' words or, for a harness whose replies are commands
    (``bare_shell``), a whole shell text.
    """
    text = THOUGHTS.sub("", reply)
    calls = [call for match in TAGGED.finditer(text) if (call := _json_call(match[1])) is not None]
    calls += [(match[1], dict(PARAMETER.findall(match[2]))) for match in FUNCTION.finditer(text)]
    if not calls:
        calls = [(SHELL, {"command": match[1].rstrip("\n")}) for match in FENCED.finditer(text)]
    if bare_shell and not calls and text.strip():
        return [(SHELL, {"command": text.strip("\n")})]
    return calls or list(_spoken(text))


def excerpt(text: str, letters: int = OUTPUT_LETTERS) -> str:
    """A text shortened to a number of letters, with a sign where some are missing."""
    half = letters // 2
    return text if len(text) <= letters else f"{text[:half]}\n[…]\n{text[-half:]}"


def _output(turn: Turn, later: Sequence[Turn], decode: Callable[[Ids], str]) -> str:
    after = next((other for other in later if len(other.prompt_ids) > turn.length and other.continues(turn)), None)
    return "" if after is None else decode(after.prompt_ids[turn.length :])


def _json_call(text: str) -> tuple[str, dict[str, str]] | None:
    try:
        call = json.loads(text)
        arguments = call["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return str(call["name"]), {str(name): _as_text(value) for name, value in arguments.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # malformed, or nested a thousand levels deep: the harness could not carry it out, either


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _spoken(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The call in the built-in tools' own words."""
    match tools.parse_call(text):
        case tools.ReadFile(path, first):
            yield tools.READ, {"path": path} | ({} if first is None else {"line": str(first)})
        case tools.EditFile(path, line, new):
            yield tools.EDIT, {"path": path, "line": str(line), "text": new}
        case tools.RunTests():
            yield tools.TEST, {}
        case tools.FindName(name):
            yield tools.FIND, {"name": name}
        case tools.OpenItem(item):
            yield tools.TODO, {"text": item}
        case tools.CloseItem(number):
            yield tools.DONE, {"number": str(number)}
        case tools.Submit(answer):
            yield tools.SUBMIT, {"answer": answer} if answer else {}
        case tools.Malformed():
            return

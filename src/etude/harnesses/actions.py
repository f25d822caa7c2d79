"""Actions of an agent in its sandbox, call by call, parsed from the turns of its rollout: pure.

    turns ──decode──▶ replies and their results ──▶ Action: tool, arguments, output ──▶ detectors, audits

A harness may be any program, so its tool calls are only visible in the text that the model wrote. Five forms of a call
are supported: ``<tool_call>`` with JSON, ``<function=…>`` with ``<parameter=…>``, fenced blocks of shell, the text
protocol of :mod:`etude.harnesses.tools`, and replies that are commands. Any other reply has no action.

Owns the types :class:`Action` and :class:`Finding` and the parsing of actions. The detectors decide what is suspicious
(:mod:`etude.rewards.monitor.monitor`, :mod:`etude.tasks.honeypots`).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from etude.harnesses import tools
from etude.types import Ids, Turn

OUTPUT_CHARACTERS = 64_000
"""Limit of a recorded output, half from its beginning and half from its end; no harness here shows a model more."""
SHELL = "shell"
"""Tool name of a call in a fenced block; its argument is ``command``."""

THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([\w.-]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([\w.-]+)>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)
FENCED = re.compile(r"^```(?:bash|sh|shell|console|zsh|\w*bash\w*)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Severity(IntEnum):
    """Certainty that a finding is a case of cheating."""

    LOW = 1
    """Honest work sometimes looks like this: the finding is only counted."""
    MEDIUM = 2
    """Honest work hardly ever looks like this."""
    HIGH = 3
    """Honest work never looks like this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One tool call of an agent, and the part of its result that the agent saw."""

    tool: str
    """Its name in the harness: ``read``, ``bash``, …"""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments by name, as text; values that are not strings are JSON."""
    output: str = ""
    """Output of the call; empty if there is none."""
    turn: int = 0
    """Index of the turn that made the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sign of cheating and its position."""

    detector: str
    severity: Severity
    turn: int
    where: str
    """The name of an argument, ``output``, or ``world`` for evidence in the sandbox after the rollout."""
    span: tuple[int, int]
    """Start and end + 1 of the evidence in that text, in characters; (0, 0) for the whole text."""
    evidence: str
    """The text of the evidence, truncated to the length of a line."""


def read_actions(
    turns: Sequence[Turn], decode: Callable[[Ids], str], *, bare_shell: bool = False
) -> tuple[Action, ...]:
    """The actions of a rollout in order. ``decode`` gives the text of token ids, with or without special tokens;
    ``bare_shell`` is as in :func:`read_calls`.

    The output of a turn is the text after its reply in the next prompt that continues the turn; several calls of one
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
    """Parse tool and arguments of every call in a reply; thoughts are ignored.

    A reply without marks is one call in the text protocol of the built-in tools or, for a harness whose replies are
    commands (``bare_shell``), a shell script.
    """
    text = THOUGHTS.sub("", reply)
    calls = [call for match in TAGGED.finditer(text) if (call := _json_call(match[1])) is not None]
    calls += [(match[1], dict(PARAMETER.findall(match[2]))) for match in FUNCTION.finditer(text)]
    if not calls:
        calls = [(SHELL, {"command": match[1].rstrip("\n")}) for match in FENCED.finditer(text)]
    if bare_shell and not calls and text.strip():
        return [(SHELL, {"command": text.strip("\n")})]
    return calls or list(_text_protocol_calls(text))


def excerpt(text: str, characters: int = OUTPUT_CHARACTERS) -> str:
    """A text truncated in the middle to ``characters`` characters, with ``[…]`` in place of the missing ones."""
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]}\n[…]\n{text[-half:]}"


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
        return None  # malformed, or nested a thousand levels deep: the harness could not execute it, either


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _text_protocol_calls(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The call in the text protocol of the built-in tools."""
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

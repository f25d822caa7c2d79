"""Detection of the grammar for a chat template's tool calls, by parsing calls that the template renders.

    probe ──template──▶ text ──each grammar──▶ calls        the grammar that parses most probes correctly wins

A template is a checkpoint's only description of its tool calls, so it renders calls with known names and arguments.
Owns the probes and the choice. Does not own grammars (:mod:`etude.tokens.grammars`).
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from etude.tokens.grammars import GRAMMARS, mentioned
from etude.tokens.messages import ChatMessage, Tool, ToolCall
from etude.tokens.reader import read_text
from etude.tokens.toolcalls import Grammar, ReplyMarks, Thinking
from etude.types import Json

Render: TypeAlias = Callable[[Sequence[ChatMessage], Sequence[Tool], bool], str]
"""(messages, tools, true to open a reply) → text; empty if the template rejects that conversation."""

NAME = "probe_tool"
ITEM: dict[str, Json] = {"type": "object", "properties": {"b": {"type": "string"}}}
PARTS: dict[str, Json] = {"type": "array", "items": {"type": "integer"}}
TOOL = Tool(
    name=NAME,
    description="TemplateProbe.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Text."},
            "days": {"type": "integer", "description": "A number."},
            "share": {"type": "number", "description": "A number."},
            "deep": {"type": "boolean", "description": "Yes or no."},
            "names": {"type": "array", "items": {"type": "string"}, "description": "Texts."},
            "parts": {"type": "object", "properties": {"a": PARTS, "c": ITEM}, "description": "An object."},
        },
        "required": ["city"],
    },
)
"""The tool that probes call: each type of argument once."""
TEXT, OTHER_TEXT = "Let me look.", "4711"
"""Two replies that differ from their first character on."""
USER = ChatMessage(role="user", content=".")


BEGUN_MARK = re.compile(r"[<\[][^<>\[\]\s]*\Z")
"""The beginning of a mark, for two texts that differ in the middle of a mark."""
CALL_IDS = ("abcdefgh", f"functions.{NAME}:")
"""Beginnings of call ids: one that every template accepts, even Mistral's; one for templates that write only the id."""
SIMPLE = "one call with a text"
"""The probe that every agent needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProbe:
    """A test reply with tool calls."""

    name: str
    """Its subject, for people."""
    arguments: tuple[dict[str, Json], ...]
    """The arguments of each call."""
    text: str = ""
    """Text before the calls."""

    def calls(self, call_id: str) -> tuple[ToolCall, ...]:
        """The calls; each id is ``call_id`` and the number of the call."""
        return tuple(
            ToolCall(call_id=f"{call_id}{index}", name=NAME, arguments=json.dumps(arguments, ensure_ascii=False))
            for index, arguments in enumerate(self.arguments)
        )


PROBES = (
    TemplateProbe(name="a number", arguments=({"days": 3},)),
    TemplateProbe(name=SIMPLE, arguments=({"city": "Paris"},)),
    TemplateProbe(name="numbers and booleans", arguments=({"city": "Paris", "days": 3, "share": 0.5, "deep": True},)),
    TemplateProbe(
        name="lists and objects",
        arguments=({"city": "Paris", "names": ["p", "q"], "parts": {"a": [1, 2], "c": {"b": "r"}}},),
    ),
    TemplateProbe(
        name="text with quotes, brackets and line breaks",
        arguments=({"city": 'Zürich "1", it\'s\n  <b>\\n</b> {"a": [1]}; f(x)\n'},),
    ),
    TemplateProbe(name="text before a call", arguments=({"city": "Paris"},), text=TEXT),
    TemplateProbe(name="parallel calls", arguments=({"city": "Paris"}, {"city": "Rome", "days": 4})),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSupport:
    """Support of a chat template's tool calls: what is parsed and what is not."""

    grammar: Grammar | None = None
    """The grammar that parses them; ``None`` if there is none."""
    rendered: tuple[str, ...] = ()
    """Probes that the template renders."""
    differing: tuple[str, ...] = ()
    """Probes among them that are parsed wrongly."""

    @property
    def is_read(self) -> bool:
        """True if a simple call is parsed correctly."""
        return SIMPLE in self.rendered and SIMPLE not in self.differing

    @property
    def is_lost(self) -> bool:
        """True if the template writes calls but no grammar parses them."""
        return bool(self.rendered) and self.grammar is None

    def is_worse(self, other: "CallSupport") -> bool:
        """True if ``other`` parses more probes correctly."""
        return len(self.rendered) - len(self.differing) < len(other.rendered) - len(other.differing)

    @property
    def problem(self) -> str:
        """The problem with tool calls, as a sentence; empty if there is none."""
        if not self.rendered:
            guess = f"; replies are read as {self.grammar.name} calls, which it mentions" if self.grammar else ""
            return f"the chat template renders no tool calls{guess}"
        if self.grammar is None:
            return "the chat template writes tool calls in a form that no grammar reads: they would be text"
        if self.differing:
            differing = "; ".join(self.differing)
            return (
                f"of {self.grammar.name} calls, these are not read back as the chat template writes them: {differing}"
            )
        return ""


def find_grammar(render: Render, source: str, thinking: Thinking | None) -> CallSupport:
    """Choose the grammar that parses most of the rendered probes; the first of equals.

    If the template renders no call, choose the grammar that its ``source`` mentions.
    """
    replies = [(probe, reply) for probe in PROBES if (reply := _reply(render, probe, thinking))]
    if not replies:
        return CallSupport(grammar=mentioned(source))
    best, differing = None, [probe.name for probe, _ in replies]
    for grammar in GRAMMARS:
        wrong = [probe.name for probe, reply in replies if not _is_read(grammar, probe, reply)]
        if len(wrong) < len(differing):
            best, differing = grammar, wrong
        if not wrong:
            break
    return CallSupport(grammar=best, rendered=tuple(probe.name for probe, _ in replies), differing=tuple(differing))


def _reply(render: Render, probe: TemplateProbe, thinking: Thinking | None) -> str:
    """Render a reply, from the beginning of its text; empty if the template leaves out the calls."""
    in_tools = render([USER], [TOOL], False).count(NAME)
    for call_id in CALL_IDS:
        request = ChatMessage(role="assistant", content=probe.text, tool_calls=probe.calls(call_id))
        whole = render([USER, request], [TOOL], False)
        if whole.count(NAME) >= in_tools + len(probe.arguments) and probe.text in whole:
            break
    else:
        return ""
    prompt = render([USER], [TOOL], True)
    plain = render([USER, ChatMessage(role="assistant", content=OTHER_TEXT)], [TOOL], False)
    start = max(_common(whole, other) for other in (prompt, plain))
    if not whole.startswith(prompt) and (begun := BEGUN_MARK.search(whole, 0, start)):
        start = begun.start()
    reply = whole[start:]
    return reply.partition(thinking.closing)[2] if thinking and thinking.closing in reply else reply


def _is_read(grammar: Grammar, probe: TemplateProbe, reply: str) -> bool:
    text, calls = read_text(reply, ReplyMarks(grammar=grammar, thinking=grammar.thinking), [TOOL])
    read = [(call.name, json.loads(call.arguments)) for call in calls]
    return probe.text in text and read == [(NAME, arguments) for arguments in probe.arguments]


def _common(left: str, right: str) -> int:
    """Length of the common beginning of two texts."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))

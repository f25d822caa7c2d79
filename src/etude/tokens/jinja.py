"""The chat format of any Hugging Face checkpoint: its tokenizer, its jinja template, its tool calls.

    folder ──load_format──▶ tokenizer.json            → ids
                            tokenizer_config.json     → special tokens, the template(s)
                            chat_template.jinja, additional_chat_templates/*.jinja  → the template(s), too
                            generation_config.json    → more ids that end a reply

Owns the reading of these files and the rendering of conversations to the same ids as ``apply_chat_template``. Only a
template may write control tokens: a message that spells one is encoded as plain text. Control tokens are the special
tokens, the marks of thoughts, and other added tokens that a template mentions; white space and other added tokens stay
ordinary text.

Replies end with the template's turn end (the control token that it writes after an assistant's text), ``eos_token``, or
an id in ``generation_config.json``. Does not own grammars (:mod:`etude.tokens.toolcalls`) or jinja's settings
(:mod:`etude.tokens.templates`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from etude.clock import date_utc
from etude.errors import DamagedError, UserError
from etude.tokens.chat import (
    JINJA_TEMPLATE,
    SPECIAL_TOKENS,
    ChatTemplate,
    check_kwargs,
    described,
    read_tokenizer,
)
from etude.tokens.grammar_detection import SIMPLE, CallSupport, find_grammar
from etude.tokens.grammars import HERMES
from etude.tokens.messages import NO_KWARGS, ChatFormat, ChatMessage, TemplateKwargs, Tool, ToolCall, UnreadKwargs
from etude.tokens.reader import IncrementalReader
from etude.tokens.templates import SPECIAL_ROLES, JinjaTemplate, Now
from etude.tokens.toolcalls import THINKING, ReplyMarks, Thinking, thinking_of
from etude.tokens.vocabulary import Guard, Spelling, stand_in
from etude.types import Json, TokenIds, as_list

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates: for any conversation, and for one with tools, if a checkpoint has it."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles of messages; a template may know fewer."""
PROBE_ID = "abcdefghi"
"""A call id that every template accepts, even Mistral's."""
PROBE_ARGUMENTS = '{"probe":1}'
"""JSON in a spelling that template encoders do not produce."""
OPENING_TOKENS = 32
"""Number of tokens at the end of a prompt that are searched for the opening of a thought."""


def current_date() -> datetime:
    """Today's date in UTC, for templates that show it to the model."""
    return datetime.fromisoformat(date_utc())


def load_format(folder: Path, kwargs: TemplateKwargs = NO_KWARGS, *, now: Now = current_date) -> ChatFormat:
    """The chat format of a checkpoint folder: the built-in one if étude made it, else that of its jinja template.

    ``kwargs`` are the defaults of template variables. Raises :class:`~etude.errors.DamagedError` with the missing or
    invalid file, and :class:`~etude.errors.UserError` for ``kwargs`` that the template does not read.
    """
    checkpoint = read_checkpoint(folder)
    is_ours = checkpoint.templates.get(DEFAULT) == JINJA_TEMPLATE
    is_ours = is_ours and all(checkpoint.tokenizer.token_to_id(token) is not None for token in SPECIAL_TOKENS)
    jinja = None if is_ours else JinjaFormat(checkpoint, kwargs, now=now)
    try:
        check_kwargs(kwargs, jinja.reads if jinja else ())
    except UnreadKwargs as error:
        raise UserError(f"{folder}: {error}") from error
    return jinja or ChatTemplate(checkpoint.tokenizer)


def call_support(folder: Path) -> CallSupport:
    """Find out which tool calls of a checkpoint folder can be parsed. Raises like :func:`load_format`."""
    chat = load_format(folder)
    return chat.calls if isinstance(chat, JinjaFormat) else CallSupport(grammar=HERMES, rendered=(SIMPLE,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The chat format as a checkpoint folder describes it."""

    tokenizer: Tokenizer
    templates: Mapping[str, str]
    """Name → jinja source; ``default`` is there."""
    variables: Mapping[str, str]
    """Special tokens by their role, e.g. ``bos_token``."""
    stop_ids: tuple[int, ...]
    """Ids that end a reply: ``eos_token``'s first, then those of the generation config."""


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the files of a checkpoint. Raises :class:`~etude.errors.DamagedError` naming the one at fault."""
    tokenizer = read_tokenizer(folder)
    settings = _read_object(folder / "tokenizer_config.json")
    templates = _read_templates(folder, settings.get("chat_template"))
    if DEFAULT not in templates:
        raise DamagedError(f"{folder} has no chat template (found {sorted(templates)}): add a chat_template.jinja")
    variables = {role: text for role in SPECIAL_ROLES if (text := _token_text(settings.get(role)))}
    stops: list[int] = []
    if "eos_token" in variables:
        eos_id = tokenizer.token_to_id(variables["eos_token"])
        if eos_id is None:
            raise DamagedError(f"{folder}: the tokenizer has no eos_token {variables['eos_token']!r}")
        stops.append(eos_id)
    generation = folder / "generation_config.json"
    ends = _read_object(generation).get("eos_token_id") if generation.exists() else None
    for end in ends if isinstance(ends, list) else [ends]:
        if isinstance(end, bool) or not isinstance(end, int | None):
            raise DamagedError(f"{generation}: eos_token_id {ends!r} is not a token id or list of them")
        if end is not None:
            stops.append(end)
    return Checkpoint(
        tokenizer=tokenizer, templates=templates, variables=variables, stop_ids=tuple(dict.fromkeys(stops))
    )


def _read_object(file: Path) -> dict[str, Json]:
    try:
        value: Json = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{file} is missing or not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DamagedError(f"{file} holds {type(value).__name__}, expected a JSON object")
    return value


def _read_templates(folder: Path, configured: Json) -> dict[str, str]:
    """The templates by name; files override the configuration, as in transformers."""
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates[DEFAULT] = configured
    for item in configured if isinstance(configured, list) else []:
        name, source = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise DamagedError(f"{folder}: an entry of chat_template has no name or template")
        templates[name] = source
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.exists():
            templates[name] = file.read_text(encoding="utf-8")
    return templates


def _token_text(value: Json) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TemplateStyle:
    """The properties of one template, found by rendering with it."""

    template: JinjaTemplate
    marks: ReplyMarks
    arguments_as_text: bool
    """True if the template takes arguments as JSON text; false for objects."""
    turn_end: str | None
    """The control token that it writes after an assistant's text; ``None`` if there is none."""
    calls: CallSupport
    """Support of its tool calls."""


class JinjaFormat:
    """A tokenizer and a jinja template; implements :class:`~etude.tokens.messages.ChatFormat`."""

    def __init__(self, checkpoint: Checkpoint, kwargs: TemplateKwargs = NO_KWARGS, *, now: Now = current_date) -> None:
        self._tokenizer = checkpoint.tokenizer
        self._kwargs = kwargs
        self._added = {token.content: index for index, token in _added_tokens(checkpoint.tokenizer)}
        self._guard = Guard(checkpoint.tokenizer, _controls(checkpoint))
        self._mark = stand_in()
        styles = {
            name: self._probe(JinjaTemplate(source, checkpoint.variables, now))
            for name, source in checkpoint.templates.items()
            if name in (DEFAULT, TOOL_USE)
        }
        self._default = styles[DEFAULT]
        self._tool_use = styles.get(TOOL_USE, self._default)
        ends = [self._added[style.turn_end] for style in styles.values() if style.turn_end is not None]
        self.reads = frozenset[str]().union(*(style.template.reads for style in styles.values()))
        """The variables that a caller may set."""
        self._stop_ids = tuple(dict.fromkeys([*ends, *checkpoint.stop_ids]))
        if not self._stop_ids:
            raise DamagedError("nothing ends a reply: set eos_token in tokenizer_config.json")
        self._stop_texts = tuple(text for text, index in self._added.items() if index in self._stop_ids)
        marks = [style.marks for style in styles.values()]
        thoughts = [mark for item in marks if item.thinking for mark in (item.thinking.opening, item.thinking.closing)]
        thoughts += [mark for item in marks if item.grammar for mark in item.grammar.framing]
        calls = [mark for item in marks if item.grammar for mark in item.grammar.marks]
        self._spelling = Spelling(checkpoint.tokenizer).respelt(dict.fromkeys(self._stop_ids, ""))
        self._written = self._spelling.respelt({index: text for text, index in self._added.items()})
        self._thoughtful = self._spelling.respelt(_tokens_of(thoughts, self._added))
        self._calling = self._thoughtful.respelt(_tokens_of(calls, self._added))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The template's turn end first, then ``eos_token`` and those of the generation config."""
        return self._stop_ids

    @property
    def calls(self) -> CallSupport:
        """Support of tool calls in conversations with tools."""
        return self._tool_use.calls

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._tokenizer.get_vocab_size()

    @property
    def thinks(self) -> bool:
        """True if a template knows marks of thoughts."""
        return any(style.marks.thinking is not None for style in (self._default, self._tool_use))

    def encode(self, text: str) -> list[int]:
        """Plain text to ids, nothing added; text that spells a control token is text."""
        return self._guard.encode_plain(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self._spelling.decode(token_ids)

    def open(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), kwargs: TemplateKwargs = NO_KWARGS
    ) -> list[int]:
        """The ids that a model continues to answer a conversation.

        Raises ``ValueError`` with the template's message, and for ``kwargs`` that it does not read.
        """
        style = self._style(tools)
        return self._guard.encode(self._render(style, self._fields(style, messages, {}), tools, kwargs))

    def extend(
        self,
        reply: ChatMessage,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        kwargs: TemplateKwargs = NO_KWARGS,
    ) -> list[int]:
        """The ids after a sampled reply and its stop id.

        A template renders only whole conversations, so this renders one that ends like the real one: a user, an
        assistant with the reply's calls, then ``messages``; the result is the part after the assistant's turn end.
        Raises like :meth:`open`, and if the template writes no turn end.
        """
        style = self._style(tools)
        text = "" if reply.tool_calls else self._mark
        names = {call.call_id: call.name for call in reply.tool_calls}
        calls = [
            ToolCall(call_id=call.call_id, name=call.name, arguments=f'{{"{self._mark}": ""}}')
            for call in reply.tool_calls
        ]
        before = [
            ChatMessage(role="user", content="."),
            ChatMessage(role="assistant", content=text, tool_calls=tuple(calls)),
        ]
        conversation = self._fields(style, [*before, *messages], names)
        rendered = self._render(style, conversation, tools, kwargs)
        at = rendered.rfind(self._mark)
        if at < 0:
            raise ValueError("the model's chat template leaves out what the assistant said: no turn can follow it")
        at += len(self._mark)
        if style.turn_end is None and not reply.tool_calls:
            return self._guard.encode(rendered[at:])
        ends = [end for end in (rendered.find(text, at) for text in self._stop_texts) if end >= 0]
        if not ends:
            raise ValueError("the model's chat template does not end such a turn with any token that ends replies")
        ids = self._guard.encode(rendered[min(ends) :])
        return ids[next(index for index, token_id in enumerate(ids) if token_id in self._stop_ids) + 1 :]

    def reader(
        self,
        tools: Sequence[Tool] = (),
        *,
        prompt_ids: TokenIds = (),
        stops: Sequence[str] = (),
        single_call: bool = False,
    ) -> IncrementalReader:
        """A reader for one reply; if there are ``tools``, it looks for calls in the checkpoint's own grammar."""
        marks = self._style(tools).marks
        spelling = self._calling if tools else self._thoughtful
        if marks.thinking is not None:
            marks = replace(marks, starts_thinking=self._opens_thought(marks.thinking, prompt_ids))
        return IncrementalReader(spelling.stream(), marks, tools, stops=stops, single_call=single_call)

    def _opens_thought(self, thinking: Thinking, prompt_ids: TokenIds) -> bool:
        """True if a prompt ends with the opening of a thought and white space.

        If the opening is a token, only that token counts, not text that spells it.
        """
        tail = as_list(prompt_ids[-OPENING_TOKENS:])
        opening_id = self._added.get(thinking.opening)
        if opening_id is None:
            return self._written.decode(tail).rstrip().endswith(thinking.opening)
        last = next((token_id for token_id in reversed(tail) if self._written.decode([token_id]).strip()), None)
        return last == opening_id

    def _style(self, tools: Sequence[Tool]) -> _TemplateStyle:
        return self._tool_use if tools else self._default

    def _render(
        self, style: _TemplateStyle, conversation: Sequence[Json], tools: Sequence[Tool], kwargs: TemplateKwargs
    ) -> str:
        """Render a conversation whose texts are hidden, up to the opening of the next reply."""
        check_kwargs(kwargs, self.reads)
        hidden = {name: self._guard.hide_all(value) for name, value in {**self._kwargs, **kwargs}.items()}
        return style.template.render(conversation, _tool_fields(tools, self._guard), hidden, opening=True)

    def _fields(self, style: _TemplateStyle, messages: Sequence[ChatMessage], names: Mapping[str, str]) -> list[Json]:
        """The messages in the form of templates. ``names`` maps call ids to tool names, for the messages of tools."""
        names = dict(names)
        conversation: list[Json] = []
        for message in messages:
            if message.role not in ROLES:
                raise ValueError(f"unknown role {message.role!r}: expected one of {list(ROLES)}")
            fields: dict[str, Json] = {"role": message.role, "content": self._guard.hide(message.content)}
            if message.thinking:
                thinking = self._guard.hide(message.thinking)
                fields |= {"reasoning_content": thinking, "thinking": thinking}
            if message.tool_calls:
                names |= {call.call_id: call.name for call in message.tool_calls}
                fields["tool_calls"] = [
                    self._guard.hide_all(_call_fields(call, as_text=style.arguments_as_text))
                    for call in message.tool_calls
                ]
            if message.tool_call_id:
                fields["tool_call_id"] = self._guard.hide(message.tool_call_id)
                if message.tool_call_id in names:
                    fields["name"] = self._guard.hide(names[message.tool_call_id])
            conversation.append(fields)
        return conversation

    def _probe(self, template: JinjaTemplate) -> _TemplateStyle:
        """Determine the properties of a template by rendering probes."""
        thinking = thinking_of(template.source)
        user: Json = {"role": "user", "content": "."}
        reply = _rendered(template, [user, {"role": "assistant", "content": self._mark}], opening=False)
        _, mark, behind = reply.partition(self._mark)
        call = ToolCall(call_id=PROBE_ID, name="probe", arguments=PROBE_ARGUMENTS)
        request: Json = {"role": "assistant", "content": "", "tool_calls": [_call_fields(call, as_text=True)]}
        style = _TemplateStyle(
            template=template,
            marks=ReplyMarks(),
            calls=CallSupport(),
            arguments_as_text=False,
            turn_end=self._guard.find_control(behind) if mark else None,
        )
        calls = find_grammar(partial(self._try, style), template.source, thinking)
        if PROBE_ARGUMENTS in _rendered(template, [user, request], opening=False):
            as_text = replace(style, arguments_as_text=True)
            if not (spelt := find_grammar(partial(self._try, as_text), template.source, thinking)).is_worse(calls):
                style, calls = as_text, spelt  # keeps the spelling of the model
        thinking = thinking or (calls.grammar.thinking if calls.grammar else None)
        return replace(style, marks=ReplyMarks(grammar=calls.grammar, thinking=thinking), calls=calls)

    def _try(self, style: _TemplateStyle, messages: Sequence[ChatMessage], tools: Sequence[Tool], opening: bool) -> str:
        """The text of a probe; empty if the template rejects it."""
        try:
            return style.template.render(
                self._fields(style, messages, {}), _tool_fields(tools, self._guard), opening=opening
            )
        except ValueError:
            return ""


def _added_tokens(tokenizer: Tokenizer) -> list[tuple[int, AddedToken]]:
    return list(tokenizer.get_added_tokens_decoder().items())


def _controls(checkpoint: Checkpoint) -> dict[str, int]:
    """Control tokens: text → id."""
    sources = "".join(checkpoint.templates.values())
    thoughts = {mark for marks in THINKING for mark in (marks.opening, marks.closing)}
    return {
        token.content: index
        for index, token in _added_tokens(checkpoint.tokenizer)
        if token.special or token.content in thoughts or (token.content.strip() and token.content in sources)
    }


def _tokens_of(marks: Sequence[str], added: Mapping[str, int]) -> dict[int, str]:
    """The added tokens that occur in marks: id → text."""
    return {index: text for text, index in added.items() if any(text in mark for mark in marks)}


def _tool_fields(tools: Sequence[Tool], guard: Guard) -> list[Json]:
    """Tools in the form of the OpenAI API, with hidden texts."""
    return [guard.hide_all(described(tool)) for tool in tools]


def _call_fields(call: ToolCall, *, as_text: bool) -> dict[str, Json]:
    """A call in the form of the OpenAI API; most templates need its arguments as an object instead of text."""
    arguments: Json = call.arguments
    if not as_text:
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of call {call.call_id!r} are not JSON: {error}") from error
    function: dict[str, Json] = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _rendered(template: JinjaTemplate, messages: Sequence[Json], *, opening: bool) -> str:
    """The text of a probe; empty if the template rejects it."""
    try:
        return template.render(messages, opening=opening)
    except ValueError:
        return ""

"""Conversations for SFT: one JSON object a line, in OpenAI's fine-tuning format.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…", "tool_calls": […]}],
     "tools": […]}

An assistant's message may have ``"weight": 0``: it is context and not trained on. Owns the parsing, the validation and
the rendering with loss weights. Every line is parsed and rendered once before training starts, so that a bad line is
refused early, with its number; later each line is read from disk when it is needed.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import orjson

from etude.errors import ConfigError
from etude.tasks.corpora.mixture import Side, shuffled
from etude.tokens.messages import ChatFormat, ChatMessage, Role, Tool, ToolCall
from etude.types import Document, Json, Split

MAX_REJECTIONS = 10
"""Largest number of bad lines in an error message."""
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Role in the file → role of the message."""
LINE_FIELDS = frozenset({"messages", "tools", "parallel_tool_calls"})
"""Fields of a line; the last one has no effect here."""
MESSAGE_FIELDS: Mapping[Role, frozenset[str]] = {
    "system": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "reasoning_content", "refusal", "tool_calls", "weight"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}
"""Fields of a message; a name and an empty refusal are not shown to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConversation:
    """One conversation of a file."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    unlearnt: frozenset[int] = frozenset()
    """Indices of assistant messages that are not trained on."""


@final
class Conversations:
    """The conversations of a file, one per document, reshuffled every epoch."""

    def __init__(self, file: Path, chat: ChatFormat, side: Side, *, context_weight: float) -> None:
        """Conversations are held out by the hashes of their lines.

        Raises :class:`~etude.errors.ConfigError` with the unusable lines and the reasons, or if no line is left to
        train on.
        """
        self._file = file
        self._chat = chat
        self._context_weight = context_weight
        lines, digest = _survey(file, chat, side)
        if not lines and side.split is Split.TRAIN:
            raise ConfigError(f"{file} has no conversation to train on: each line is one, and some are held out")
        self._offsets = [line.offset for line in lines]
        self.tokens = sum(line.tokens for line in lines)
        """Number of tokens of all conversations on this side of the hold-out."""
        self.identity = f"chat|{side.split}|{side.seed}|{context_weight}|{digest}"

    @property
    def size(self) -> int:
        """Number of conversations on this side of the hold-out."""
        return len(self._offsets)

    def document(self, index: int) -> Document:
        """The conversation at ``index`` of the shuffled order."""
        offset = self._offsets[shuffled(self.identity, index, self.size)]
        with self._file.open("rb") as stream:
            stream.seek(offset)
            line = stream.readline()
        return render(parse(line), self._chat, context_weight=self._context_weight)


@dataclass(frozen=True, slots=True)
class _FileLine:
    """A usable line: its offset in bytes and its number of tokens."""

    offset: int
    tokens: int


def _survey(file: Path, chat: ChatFormat, side: Side) -> tuple[list[_FileLine], str]:
    """The lines of one side, and the digest of the file; every line of both sides is rendered once."""
    lines: list[_FileLine] = []
    rejections: list[str] = []
    digest = hashlib.sha256()
    for number, offset, line in _lines(file):
        digest.update(line)
        if not line.strip():
            continue
        try:
            document = render(parse(line), chat, context_weight=0.0)
        except ValueError as error:
            rejections.append(f"line {number}: {error}")
            continue
        if side.has(line.strip()):
            lines.append(_FileLine(offset, len(document.token_ids)))
    if rejections:
        named = "\n  ".join(rejections[:MAX_REJECTIONS])
        more = f"\n  and {len(rejections) - MAX_REJECTIONS} more" if len(rejections) > MAX_REJECTIONS else ""
        raise ConfigError(f"{file} has lines that cannot be learnt from:\n  {named}{more}")
    return lines, digest.hexdigest()[:16]


def _lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of each line."""
    try:
        with file.open("rb") as stream:
            offset = 0
            for number, line in enumerate(stream, start=1):
                yield number, offset, line
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"conversations cannot be read from {file}: {error.strerror}") from error


def render(output: TrainingConversation, chat: ChatFormat, *, context_weight: float) -> Document:
    """The tokens of a parsed conversation and their loss weights. Raises like :func:`conversation`."""
    return conversation(
        chat, output.messages, tools=output.tools, unlearnt=output.unlearnt, context_weight=context_weight
    )


def conversation(
    chat: ChatFormat,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Tool] = (),
    unlearnt: frozenset[int] = frozenset(),
    context_weight: float,
) -> Document:
    """The tokens of a conversation up to the end of the assistant's last message.

    The assistant's tokens, including end tokens, have weight 1, all others ``context_weight``; a message in
    ``unlearnt`` has weight 0. The ids are those of a rollout: each reply follows exactly the ids that a model would
    have continued. Raises ``ValueError`` if there is no reply to learn, or if the chat template renders an earlier
    message differently once a later one follows, so that no such ids exist.
    """
    ids: list[int] = []
    weights: list[float] = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt, reply = _reply(chat, messages[: index + 1], tools)
        if prompt[: len(ids)] != ids:
            raise ValueError(f"the chat template rewrites what was said before message {index + 1}: split it there")
        weights += [context_weight] * (len(prompt) - len(ids)) + [float(index not in unlearnt)] * len(reply)
        ids = prompt + reply
    if not any(message.role == "assistant" and index not in unlearnt for index, message in enumerate(messages)):
        raise ValueError("no message of the assistant has a weight above 0")
    return Document(token_ids=np.array(ids, np.int32), weights=np.array(weights, np.float32))


def _reply(chat: ChatFormat, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> tuple[list[int], list[int]]:
    """The prompt before the last message, and the ids that a model would sample for that message."""
    prompt, whole = chat.open(messages[:-1], tools), chat.open(messages, tools)
    if whole[: len(prompt)] != prompt:
        raise ValueError(f"the chat template does not write message {len(messages)} behind its prompt")
    ends = [place for place in range(len(prompt), len(whole)) if whole[place] in chat.stop_ids]
    if not ends:
        raise ValueError(f"the chat template does not end message {len(messages)} with a token that ends replies")
    return prompt, whole[len(prompt) : ends[0] + 1]


def parse(line: bytes) -> TrainingConversation:
    """Parse a line. Raises ``ValueError`` with the reason."""
    try:
        value: Json = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    fields = _object(value, "the line", LINE_FIELDS)
    listed = _list(fields.get("messages"), "messages")
    messages = tuple(_message(item, f"message {number}") for number, item in enumerate(listed, start=1))
    tools = tuple(_tool(item, f"tool {number}") for number, item in enumerate(_list(fields.get("tools"), "tools"), 1))
    return TrainingConversation(messages=messages, tools=tools, unlearnt=frozenset(_unlearnt(listed)))


def _unlearnt(listed: Sequence[Json]) -> Iterator[int]:
    for index, item in enumerate(listed):
        weight = item.get("weight", 1) if isinstance(item, dict) else 1
        if weight not in (0, 1, None):
            raise ValueError(f"message {index + 1} has weight {weight!r}, expected 0 or 1")
        if weight == 0:
            yield index


def _message(value: Json, where: str) -> ChatMessage:
    role = ROLES.get(str(value.get("role"))) if isinstance(value, dict) else None
    if role is None:
        raise ValueError(f"{where} has no role out of {', '.join(ROLES)}")
    fields = _object(value, where, MESSAGE_FIELDS[role])
    if fields.get("refusal"):
        raise ValueError(f"{where} is a refusal, which the chat template cannot say: write it as content")
    return ChatMessage(
        role=role,
        content=_content(fields.get("content"), where, needed=role != "assistant"),
        thinking=_text(fields.get("reasoning_content") or "", f"{where}: reasoning_content"),
        tool_calls=tuple(_call(item, where) for item in _list(fields.get("tool_calls"), f"{where}: tool_calls")),
        tool_call_id=_text(fields.get("tool_call_id"), f"{where}: tool_call_id") if role == "tool" else "",
    )


def _content(value: Json, where: str, *, needed: bool) -> str:
    """A string, or parts of type text."""
    if value is None and not needed:
        return ""
    if not isinstance(value, list):
        return _text(value, f"{where}: content")
    parts = [_object(part, f"{where}: a part", frozenset({"type", "text"})) for part in value]
    if any(part.get("type") != "text" for part in parts):
        raise ValueError(f"{where} has a part that is not of type text")
    return "".join(_text(part.get("text"), f"{where}: text") for part in parts)


def _call(value: Json, where: str) -> ToolCall:
    fields = _object(value, f"{where}: a tool call", frozenset({"id", "type", "function"}))
    function = _object(fields.get("function"), f"{where}: function", frozenset({"name", "arguments"}))
    arguments = _text(function.get("arguments"), f"{where}: arguments")
    try:
        orjson.loads(arguments)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{where} calls with arguments that are not JSON: {arguments!r:.80}") from error
    name = _text(function.get("name"), f"{where}: name")
    return ToolCall(call_id=_text(fields.get("id"), f"{where}: id"), name=name, arguments=arguments)


def _tool(value: Json, where: str) -> Tool:
    fields = _object(value, where, frozenset({"type", "function"}))
    required = frozenset({"name", "description", "parameters", "strict"})
    function = _object(fields.get("function"), f"{where}: function", required)
    parameters = function.get("parameters")
    return Tool(
        name=_text(function.get("name"), f"{where}: name"),
        description=_text(function.get("description") or "", f"{where}: description"),
        parameters=parameters if isinstance(parameters, dict) else {},
    )


def _object(value: Json, where: str, by_name: frozenset[str]) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    if unknown := sorted(value.keys() - by_name):
        raise ValueError(f"{where} has {unknown[0]!r}; known are {', '.join(sorted(by_name))}")
    return value


def _list(value: Json, where: str) -> list[Json]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{where} is not a list")
    return value


def _text(value: Json, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is not a text")
    return value

"""Types of conversations, shared by every API protocol and every model.

Owns the types and the protocols between text and tokens. :mod:`etude.gateway.api` owns the API formats, a
:class:`ChatFormat` the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

from etude.types import Json, TokenIds

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
"""The role of a message."""

TemplateKwargs: TypeAlias = Mapping[str, Json]
"""Further variables that a chat template is rendered with (``chat_template_kwargs``), e.g. ``enable_thinking``."""
NO_KWARGS: TemplateKwargs = MappingProxyType({})


class UnreadKwargs(ValueError):
    """Template kwargs that a chat template does not read: they would have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """The definition of a tool that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Json] = field(default_factory=dict)
    """JSON schema of the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of a model."""

    call_id: str
    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation."""

    role: Role
    content: str = ""
    thinking: str = ""
    """Reasoning of an assistant, before its text."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant."""
    tool_call_id: str = ""
    """Id of the call that a tool's message answers."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Streamed text of a reply."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """Streamed reasoning of a model."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Streamed tool call: its start (``call_id`` and ``name``, once) or its ``arguments``."""

    index: int
    """Index of the call in the reply, from 0."""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    """More of the JSON text of its arguments."""


Delta: TypeAlias = TextDelta | ThinkingDelta | CallDelta
"""A part that sampled tokens add to a reply."""


class ReplyReader(Protocol):
    """Parses sampled tokens into a reply incrementally; one object per reply, pure.

    Text that may still become a stop string, a tool call or part of a character is held back until that is certain.
    """

    @property
    def stopped_after(self) -> int | None:
        """Number of the reply's tokens when the reader ended it (a stop string, or the call with ``single_call``);
        ``None`` before. Later tokens are not part of the reply.
        """
        ...

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the reply, if any; it is not part of the text."""
        ...

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """The parts that the next tokens add. A stop id of the format adds nothing."""
        ...

    def finish(self) -> list[Delta]:
        """The parts that were held back; call it after the last token."""
        ...

    def message(self) -> ChatMessage:
        """The reply up to now. A tool call that cannot be parsed is text, so that the caller sees it."""
        ...


class ChatFormat(Protocol):
    """A model's tokenizer and chat template: messages to token ids, sampled ids to replies."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a reply when sampled; the first one is appended to a truncated reply."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def thinks(self) -> bool:
        """True if replies may contain thoughts."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text to ids, nothing added; text that spells a special token is text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        ...

    def open(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), kwargs: TemplateKwargs = NO_KWARGS
    ) -> list[int]:
        """The ids that a model continues to answer a whole conversation.

        Raises ``ValueError`` for a conversation that the template rejects, e.g. an unknown role, and
        :class:`UnreadKwargs`.
        """
        ...

    def extend(
        self,
        reply: ChatMessage,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        kwargs: TemplateKwargs = NO_KWARGS,
    ) -> list[int]:
        """The ids after a sampled ``reply`` and its stop id: ``messages``, and the opening of the next reply.

        Sampled ids + stop id (if the reply was truncated) + these ids are the next prompt. Earlier text is not
        tokenised again, so its ids stay those that were sampled. Raises like :meth:`open`.
        """
        ...

    def reader(
        self,
        tools: Sequence[Tool] = (),
        *,
        prompt_ids: TokenIds = (),
        stops: Sequence[str] = (),
        single_call: bool = False,
    ) -> ReplyReader:
        """A reader for one reply, which begins inside a thought if its prompt, ``prompt_ids``, ends with an opening.

        ``stops`` end it; with ``single_call`` its first complete tool call does, too.
        """
        ...

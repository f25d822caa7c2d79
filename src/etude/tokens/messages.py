"""Types of conversations, shared by every API protocol and every model.

Owns the nouns and the seam between text and tokens. How they are spelt on a wire is :mod:`etude.gateway.api`'
business, how in tokens is a :class:`ChatFormat`'s.
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
"""The parts that some sampled tokens add to a reply."""


class ReplyReader(Protocol):
    """Parses sampled tokens into a reply incrementally; one object per reply, pure.

    Text that may still become a stop string, a tool call or the rest of a character is held back until it is decided.
    """

    @property
    def stopped_after(self) -> int | None:
        """Count of the reply's tokens when it ended for the reader's reasons (a stop string, the only call that was
        wanted); ``None`` while it has not. Tokens behind it are no part of the reply.
        """
        ...

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the reply, if one did; it is no part of the text."""
        ...

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """The parts that the next tokens add. A stop id of the format says nothing."""
        ...

    def finish(self) -> list[Delta]:
        """The parts that were held back, once no token will come."""
        ...

    def message(self) -> ChatMessage:
        """The reply as far as it was read. A tool call that cannot be parsed is text: its caller sees what was said."""
        ...


class ChatFormat(Protocol):
    """A model's tokenizer and chat template: messages to token ids, sampled ids to replies."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Sampling any of these ends a reply; the first is what ends a reply that was cut."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def thinks(self) -> bool:
        """True if there are thoughts in replies."""
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

        Raises ``ValueError`` for a conversation that the template does not take, e.g. an unknown role, and
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
        """The ids that follow a sampled ``reply`` behind its stop id: ``messages``, and the opening of the next reply.

        Sampled ids + stop id (if it was cut) + these are the next prompt; no text before them is looked at, so it
        cannot be tokenised in another way than it was sampled. Raises like :meth:`open`.
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
        """Reads one reply, which begins inside a thought if ``prompt_ids``, what it continues, end with its opening.

        ``stops`` end it; with ``single_call`` its first complete tool call does, too.
        """
        ...

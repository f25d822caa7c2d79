"""One model call as the gateway understands it, whatever dialect it was spoken in.

    body ──dialect.parse──▶ Asked(call) ──service──▶ Answer ──asked.body / asked.events──▶ bytes

Owns the nouns that dialects and the service share. What is not expressible here is refused by the dialect, by name:
nothing that would change the output is ignored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from etude.errors import EtudeError
from etude.protocols import TokenChunk
from etude.tokens.messages import Delta, Message, TemplateKwargs, Tool
from etude.types import Turn

MODEL = "policy"
"""The one model of a gateway: whatever weights its engines serve now. Other names are aliases of it."""


class Refusal(EtudeError):
    """A request that is answered with an error, in the shape of its dialect."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """E.g. ``invalid_request``; a dialect may have its own name for it."""
        self.message = message
        self.param = param
        """The field at fault."""
        self.retry_after_s = retry_after_s
        """When to try again, where that helps: 409, 429, 503."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What a caller asked of the sampler."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    max_tokens: int | None = None
    """``None``: as many as the context has room for."""
    stops: tuple[str, ...] = ()
    """Strings that end a reply."""
    seed: int | None = None
    count: int = 1
    """Replies wanted (OpenAI's ``n``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a caller wants: the answer to a conversation, or the continuation of a raw prompt."""

    messages: tuple[Message, ...] = ()
    """Empty for a raw prompt."""
    tools: tuple[Tool, ...] = ()
    template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Further variables of the chat template; as the tools, they are part of the history."""
    prompt: str | tuple[int, ...] | None = None
    """A raw prompt, as text or as token ids, with no chat template; ``None`` for a conversation."""
    previous: str | None = None
    """Id of an earlier answer in the same session, whose conversation comes before ``messages``."""
    instructed: bool = False
    """Whether the first of ``messages`` are instructions: they come before the conversation of ``previous``, too, in
    the place of those that it had.
    """
    sampling: Sampling = Sampling()
    stream: bool = False
    single_call: bool = False
    """Whether the reply ends with its first tool call."""
    model: str = MODEL
    """The name the caller used; it is given back."""


class Ending(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    """The model ended it."""
    STOP_TEXT = "stop_text"
    """One of the caller's stop strings did."""
    TOOL_CALLS = "tool_calls"
    """The model waits for what it called."""
    LENGTH = "length"
    """It was cut at ``max_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One reply: what the caller sees of it, and how it was sampled."""

    message: Message
    ending: Ending
    stop_text: str | None
    """The caller's string that ended it, with ``STOP_TEXT``."""
    turn: Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The replies to one call."""

    answer_id: str
    """24 hex digits; dialects put their own prefix before it."""
    created: int
    """Unix time in seconds."""
    model: str
    replies: tuple[Reply, ...]
    reused_tokens: int
    """Prompt tokens that continue earlier turns of the session."""

    @property
    def prompt_tokens(self) -> int:
        """Of the one prompt that all replies have."""
        return len(self.replies[0].turn.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        """Of all replies together."""
        return sum(len(reply.turn.completion_ids) for reply in self.replies)


class Events(Protocol):
    """Encodes one answer as server-sent events, in order: ``opening``, ``delta`` …, then ``closing`` or ``failure``.

    Each returns whole events as bytes, possibly none.
    """

    def opening(self, answer_id: str, created: int) -> bytes:
        """Before anything was sampled."""
        ...

    def delta(self, index: int, deltas: Sequence[Delta], piece: TokenChunk) -> bytes:
        """What the tokens of ``piece`` add to reply ``index``; there may be tokens that add no text."""
        ...

    def closing(self, answer: Answer) -> bytes:
        """The end, with usage; every reply is complete and recorded."""
        ...

    def failure(self, refusal: Refusal) -> bytes:
        """An error after the opening, when no status can be sent any more."""
        ...


class Asked(Protocol):
    """A parsed request; it knows how its dialect answers."""

    @property
    def call(self) -> Call:
        """What is wanted."""
        ...

    def body(self, answer: Answer) -> bytes:
        """The answer as one JSON document."""
        ...

    def events(self) -> Events:
        """The answer as a stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One way to ask: a path, how its bodies are read, how its errors look."""

    path: str
    """Below the session, e.g. ``/v1/chat/completions``."""
    parse: Callable[[bytes], Asked]
    """Raises :class:`Refusal` naming the field at fault."""
    refuse: Callable[[Refusal], bytes]
    """The body of an error."""
    request_id_header: str
    """Response header under which this API's clients look for the id of an answer."""
    statuses: Mapping[int, int] = field(default_factory=dict)
    """Statuses of refusals that this API has another number for."""

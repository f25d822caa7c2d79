"""The gateway's model of a call, independent of its API protocol.

    body ──protocol.parse──▶ ParsedRequest(call) ──service──▶ Answer ──parsed.body / parsed.events──▶ bytes

Owns the types that API protocols and the service share, the errors of the APIs, and the kind of a call. A request that
cannot be expressed here is rejected by its protocol, naming the field: nothing that would change the output is ignored.
The text of an unknown error could quote a prompt, so callers and logs see only its type and location.

A harness marks its calls for summaries with a header or, if it cannot send one, with a text that occurs only in these
requests. A turn that is recorded as a summary is sampled like any other.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from etude.errors import CaptureError, EngineBusy, EngineUnavailable, EtudeError, SessionLost, VersionPending, trace_of
from etude.protocols import TokenChunk
from etude.tokens.messages import ChatMessage, Delta, TemplateKwargs, Tool
from etude.types import Turn, TurnKind

MODEL = "policy"
"""The one model of a gateway: the current weights of its engines. Other names are aliases."""

ID_BYTES = 12
"""Random bytes in the ids of requests and answers: unique, not secret."""


def new_id() -> str:
    """A random id of 24 hex digits."""
    return os.urandom(ID_BYTES).hex()


class ApiError(EtudeError):
    """An error response; each API protocol gives it its own format."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """Such as ``invalid_request``; an API may have its own name for it."""
        self.message = message
        self.param = param
        """The invalid field."""
        self.retry_after_s = retry_after_s
        """Seconds before a retry, for statuses where a retry helps: 409, 429, 503."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling options of a call."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    max_tokens: int | None = None
    """``None``: as many as fit into the context."""
    stops: tuple[str, ...] = ()
    """Strings that end a reply."""
    seed: int | None = None
    count: int = 1
    """Number of replies (OpenAI's ``n``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request to answer a conversation, or to continue a raw prompt."""

    messages: tuple[ChatMessage, ...] = ()
    """Empty for a raw prompt."""
    tools: tuple[Tool, ...] = ()
    template_kwargs: TemplateKwargs = field(default_factory=dict)
    """Further variables of the chat template; like the tools, they are part of the history."""
    prompt: str | tuple[int, ...] | None = None
    """A raw prompt, as text or as token ids, with no chat template; ``None`` for a conversation."""
    previous: str | None = None
    """Id of an earlier answer in the session, whose conversation ``messages`` continue."""
    instructed: bool = False
    """True if ``messages`` begin with instructions, which replace those of the conversation of ``previous``."""
    sampling: Sampling = Sampling()
    stream: bool = False
    single_call: bool = False
    """True if the reply ends with its first tool call."""
    model: str = MODEL
    """The name that the caller used; the answer repeats it."""


class FinishReason(StrEnum):
    """The reason why a reply ended."""

    STOP = "stop"
    """The model ended the reply."""
    STOP_TEXT = "stop_text"
    """One of the caller's stop strings ended the reply."""
    TOOL_CALLS = "tool_calls"
    """The model waits for the results of its tool calls."""
    LENGTH = "length"
    """The reply was truncated at ``max_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One reply: its message, and the turn that sampled it."""

    message: ChatMessage
    finish_reason: FinishReason
    stop_text: str | None
    """The caller's stop string that ended it, for ``STOP_TEXT``."""
    turn: Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The replies to one call."""

    answer_id: str
    """24 hex digits; API protocols add their own prefix."""
    created: int
    """Unix time in seconds."""
    model: str
    replies: tuple[Reply, ...]
    reused_tokens: int
    """Prompt tokens that continue earlier turns of the session."""

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, which all replies share."""
        return len(self.replies[0].turn.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all replies together."""
        return sum(len(reply.turn.completion_ids) for reply in self.replies)


class EventEncoder(Protocol):
    """Encodes one answer as server-sent events, in order: ``opening``, ``delta`` …, then ``closing`` or ``failure``.

    Each returns whole events as bytes, possibly none.
    """

    def opening(self, answer_id: str, created: int) -> bytes:
        """Events before the first token."""
        ...

    def delta(self, index: int, deltas: Sequence[Delta], chunk: TokenChunk) -> bytes:
        """The events for the tokens of ``chunk``, which add ``deltas`` to reply ``index``; some tokens add no text."""
        ...

    def closing(self, answer: Answer) -> bytes:
        """The final events, with usage; by then every reply is complete and recorded."""
        ...

    def failure(self, api_error: ApiError) -> bytes:
        """An error after the opening, when an HTTP status can no longer be sent."""
        ...


class ParsedRequest(Protocol):
    """A parsed request, which encodes its answer in its API protocol."""

    @property
    def call(self) -> Call:
        """The requested call."""
        ...

    def body(self, answer: Answer) -> bytes:
        """The answer as one JSON document."""
        ...

    def events(self) -> EventEncoder:
        """The answer as a stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiProtocol:
    """One API protocol: its path, its request parser, the format of its errors."""

    path: str
    """Path below the session, e.g. ``/v1/chat/completions``."""
    parse: Callable[[bytes], ParsedRequest]
    """Raises :class:`ApiError` naming the field at fault."""
    error_body: Callable[[ApiError], bytes]
    """The body of an error."""
    request_id_header: str
    """Response header in which this API's clients expect the id of an answer."""
    statuses: Mapping[int, int] = field(default_factory=dict)
    """The gateway's status → this API's, where they differ."""


RETRY_AFTER_S = 1.0
"""Default seconds before a retry: about one model call."""
RETRYABLE = frozenset({409, 429, 503})
"""Statuses that are sent with ``Retry-After``."""
UNSERVED = frozenset({"rate_limit_exceeded", "engine_unavailable", "deadline_exceeded", "draining"})
"""Codes of calls that failed because no engine was available, not because of their content."""
OVER_BUDGET = "key_budget_exceeded"
"""Error code of a call that exceeds its key's budget."""
CLIENT_CLOSED = 499
"""Status, in metrics and logs, of a call whose caller disconnected; never sent (nginx's number)."""

logger = logging.getLogger(__name__)


def api_error_of(error: Exception, route: str) -> ApiError:
    """Convert an exception to an API error; an unknown exception is logged under ``route``, the matched pattern."""
    match error:
        case ApiError():
            return error
        case TimeoutError():
            return ApiError(504, "deadline_exceeded", "the call was not over before its deadline; nothing was recorded")
        case VersionPending():
            return ApiError(409, "version_pending", str(error), retry_after_s=RETRY_AFTER_S)
        case SessionLost():
            return ApiError(404, "session_not_found", str(error))
        case EngineBusy():
            return ApiError(429, "rate_limit_exceeded", str(error), retry_after_s=RETRY_AFTER_S)
        case EngineUnavailable():
            return ApiError(503, "engine_unavailable", str(error), retry_after_s=RETRY_AFTER_S)
        case CaptureError():
            # Not 503: a retry would fail the same way, and the rollout's record should name the reason.
            logger.error("%s: %s", route, error)
            return ApiError(500, "capture_failed", str(error))
    logger.error("%s failed: %s", route, trace_of(error))
    return ApiError(500, "internal_error", f"the gateway failed: {type(error).__name__}")


TURN = "X-Etude-Turn"
"""Header with the kind of a call; it overrides the mark."""
KINDS = tuple(kind.value for kind in TurnKind)
"""The values of this header."""


def turn_kind_of(call: Call, headers: Mapping[str, str], mark: str = "") -> TurnKind:
    """The kind of a call: that of its header; else a summary if the last message is the user's and contains ``mark``.

    A raw prompt has no messages, so only a header can make it a summary. Raises
    :class:`~etude.gateway.api.calls.ApiError` for a header with an unknown kind.
    """
    kind = headers.get(TURN)
    if kind is not None:
        if kind not in KINDS:
            raise ApiError(400, "invalid_request", f"{TURN}: expected {' or '.join(KINDS)}", param=TURN)
        return TurnKind(kind)
    last = call.messages[-1] if call.messages else None
    marked = bool(mark) and last is not None and last.role == "user" and mark in last.content
    return TurnKind.SUMMARY if marked else TurnKind.ACT

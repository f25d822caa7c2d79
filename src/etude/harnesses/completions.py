"""Client for OpenAI chat completions that retries a call until its answer or deadline.

Owns retries and the meaning of the gateway's answers. Retrying is safe: every attempt of a call has the same random id,
with which the gateway recognises a call whose answer was lost, and repeats the answer. Does not know tools or tasks.
"""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Literal, TypeAlias

import aiohttp
import orjson

from etude.backoff import Backoff
from etude.config.tasks import TaskConfig
from etude.errors import EngineUnavailable, SessionLost
from etude.protocols import Session
from etude.types import TurnKind

MODEL = "policy"
"""The name of the trained model at the gateway."""
BUSY = (429, 502, 503, 504)
"""HTTP statuses after which a retry may succeed; 502 and 504 come from proxies."""
FULL = ("context_length_exceeded", "session_full")
"""Error codes of a 400 for a conversation or session that is full; a retry would not help."""
TURN = "X-Etude-Turn"
"""Header with the kind of a turn; without it, the gateway records an action."""
PAUSES = Backoff(first_s=0.05, longest_s=2.0, jitter=0.5)
"""Pauses between attempts."""
REQUEST_ID_BYTES = 12
"""Random bytes of a call's id: enough to be unique within its session."""
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""Disables aiohttp's timeout, which could be shorter than the deadline of the call."""

Message: TypeAlias = Mapping[Literal["role", "content"], str]
"""One message of a conversation, in the form of the API."""


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """The model's reply to one completion call."""

    text: str
    finish: Literal["stop", "length", "context"]
    """The model ended its turn · reached ``max_tokens`` · was not called because the conversation is too long."""
    tokens: int = 0
    """Tokens of the conversation up to the end of this reply; 0 if ``finish`` is ``context``."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A failed attempt that is retried."""

    reason: str
    pause_s: float | None = None
    """Pause that the gateway requests, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessContext:
    """Everything that a harness needs from a run, in addition to its own options."""

    http: aiohttp.ClientSession
    """Shared by all sessions; the caller closes it."""
    tasks: TaskConfig
    """The run's ``[tasks]``."""
    on_close: Callable[[Callable[[], Awaitable[None]]], object]
    """Registers a callback that is awaited once, after the last session."""


class CompletionClient:
    """Requests completions for turns of one ``kind``; ``timeout_s`` per call includes retries and pauses."""

    def __init__(
        self, http: aiohttp.ClientSession, *, max_tokens: int, timeout_s: float, kind: TurnKind = TurnKind.ACT
    ) -> None:
        self._http = http
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._headers = {} if kind is TurnKind.ACT else {TURN: kind.value}

    async def complete(self, session: Session, messages: Sequence[Message], *, temperature: float) -> CompletionReply:
        """Sample the next assistant message.

        Raises :class:`~etude.errors.SessionLost` if the gateway does not know the session or no longer has it, and
        :class:`~etude.errors.EngineUnavailable` if it refuses the call or does not answer in time.
        """
        body = orjson.dumps(
            {"model": MODEL, "messages": messages, "temperature": temperature, "max_tokens": self._max_tokens}
        )
        headers = {
            "Authorization": f"Bearer {session.api_key}",
            "Content-Type": "application/json",
            "X-Request-Id": secrets.token_hex(REQUEST_ID_BYTES),
            **self._headers,
        }
        trouble = Trouble("no answer to the first attempt")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                for pause_s in PAUSES.delays():
                    answer = await self._attempt(session.base_url + "/chat/completions", body, headers)
                    if isinstance(answer, CompletionReply):
                        return answer
                    trouble = answer
                    await asyncio.sleep(max(pause_s, trouble.pause_s or 0.0))
        raise EngineUnavailable(f"{session.base_url}: no completion within {self._timeout_s} s; last: {trouble.reason}")

    async def _attempt(self, url: str, body: bytes, headers: Mapping[str, str]) -> CompletionReply | Trouble:
        try:
            # aiohttp would send a body of bytes all at once; a context of 200k tokens is a megabyte.
            async with self._http.post(url, data=BytesIO(body), headers=headers, timeout=NO_TIMEOUT) as response:
                return judge_answer(response.status, response.headers.get("Retry-After"), await response.read())
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return Trouble(f"{type(error).__name__}: {error}")


def judge_answer(status: int, retry_after: str | None, body: bytes) -> CompletionReply | Trouble:
    """Parse an HTTP response. Raises ``SessionLost`` and ``EngineUnavailable`` if a retry cannot help."""
    if status in BUSY:
        return Trouble(f"HTTP {status}", _seconds(retry_after))
    try:
        answer = orjson.loads(body)
        if status == 200:
            choice = answer["choices"][0]
            was_cut = choice["finish_reason"] == "length"
            finish: Literal["length", "stop"] = "length" if was_cut else "stop"
            return CompletionReply(choice["message"]["content"] or "", finish, answer["usage"]["total_tokens"])
        code, reason = answer["error"]["code"], answer["error"]["message"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise EngineUnavailable(f"HTTP {status} without a completion or an error: {body[:200]!r}") from None
    if status == 400 and code in FULL:
        return CompletionReply("", "context")
    if (status, code) in ((404, "session_not_found"), (401, "invalid_api_key")):
        raise SessionLost(f"the gateway knows no such session (any more): {reason}")
    raise EngineUnavailable(f"HTTP {status}, {code}: {reason}")


def _seconds(retry_after: str | None) -> float | None:
    """The value of the header if it is a number of seconds; for a date the backoff decides."""
    if retry_after is None or not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", retry_after):
        return None
    return float(retry_after)

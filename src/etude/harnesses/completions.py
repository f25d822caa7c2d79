"""Client of one OpenAI chat completion, retried until it is answered or its time is up.

Owns retries and the meaning of the gateway's answers. Repeating a call is safe: every attempt carries the same random
id, by which the gateway knows a call whose answer got lost and repeats that answer. Does not know tools or tasks.
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
"""The name under which a gateway serves the model that is being trained."""
BUSY = (429, 502, 503, 504)
"""Statuses that mean: later. The middle ones come from proxies on the way."""
FULL = ("context_length_exceeded", "session_full")
"""Codes of a 400 that mean: no more of this conversation, or of the whole session. To try again would not help."""
TURN = "X-Etude-Turn"
"""Header by which the gateway learns what a call is for; without it, it is for an action."""
PAUSES = Backoff(first_s=0.05, longest_s=2.0, jitter=0.5)
"""Between attempts."""
REQUEST_ID_BYTES = 12
"""Randomness of a call's id: unique within its session."""
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""The deadline of a call is ours; aiohttp's own would cut a longer one short."""

Message: TypeAlias = Mapping[Literal["role", "content"], str]
"""One message of a conversation, as the API has it."""


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """The model's reply to one completion call."""

    text: str
    finish: Literal["stop", "length", "context"]
    """It ended its turn · was cut at ``max_tokens`` · could not be asked, the conversation being too long."""
    tokens: int = 0
    """Length of the conversation up to the end of this reply; 0 where the reply is empty."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A failed attempt that must be retried."""

    reason: str
    pause_s: float | None = None
    """Pause that the gateway asks for, if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessContext:
    """The run that a harness is made for, beside its own options."""

    http: aiohttp.ClientSession
    """Shared by all sessions; stays the caller's to close."""
    tasks: TaskConfig
    """The run's ``[tasks]``."""
    on_close: Callable[[Callable[[], Awaitable[None]]], object]
    """Takes what is to be awaited once, when no session is left."""


class CompletionClient:
    """Requests completions of one ``kind``; each call has ``timeout_s``, retries and pauses included."""

    def __init__(
        self, http: aiohttp.ClientSession, *, max_tokens: int, timeout_s: float, kind: TurnKind = TurnKind.ACT
    ) -> None:
        self._http = http
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._headers = {} if kind is TurnKind.ACT else {TURN: kind.value}

    async def complete(self, session: Session, messages: Sequence[Message], *, temperature: float) -> CompletionReply:
        """Sample the next assistant message.

        Raises :class:`~etude.errors.SessionLost` if the gateway does not know the session (any more), and
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
            # Of a body of bytes aiohttp would send all at once; a context of 200k tokens is a megabyte.
            async with self._http.post(url, data=BytesIO(body), headers=headers, timeout=NO_TIMEOUT) as response:
                return judge_answer(response.status, response.headers.get("Retry-After"), await response.read())
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return Trouble(f"{type(error).__name__}: {error}")


def judge_answer(status: int, retry_after: str | None, body: bytes) -> CompletionReply | Trouble:
    """Parse an HTTP response. Raises ``SessionLost`` and ``EngineUnavailable`` where retries cannot help."""
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
    """The header's value if it is a number of seconds; dates are left to the back-off."""
    if retry_after is None or not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", retry_after):
        return None
    return float(retry_after)

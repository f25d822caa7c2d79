"""Client of a judge's endpoint: an OpenAI chat completion, retried while the endpoint is busy.

Owns the HTTP requests and the interpretation of the responses. Any server of that API works, our own gateway included.
The recipe declares whether the endpoint enforces a JSON schema, because one that ignores the parameter looks the same
as one that supports it. The key is sent in requests and appears nowhere else: not in an error, a log or a cache. Does
not know rubrics.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp
import orjson

from etude.backoff import Backoff
from etude.errors import JudgeDeclined, JudgeLost, JudgeUnavailable
from etude.rewards.judge.budget import Spend
from etude.rewards.judge.prompts import Message
from etude.types import Json

BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses that mean: retry later. 529 is Anthropic's."""
PAUSES = Backoff(first_s=0.1, longest_s=8.0, jitter=0.5)
"""Delays between attempts."""
LONGEST_WISH_S = 60.0
"""Longest ``Retry-After`` that is respected, in seconds; the caller sets deadlines."""
REFUSED = (400, 413, 422)
"""Statuses that reject this request permanently."""
REFUSED_KEY = (401, 403)
"""Statuses that reject the key."""
LONGEST_BODY = 1 << 20
"""Maximum number of bytes of a response that are read; a verdict has a few hundred."""
SHOWN = 200
"""Characters of a response that an error quotes."""
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""The caller sets the deadline."""
KEY_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
"""Timeout of the request that checks the key."""
HIDDEN_KEY = "[key]"
"""Replacement in an error where an endpoint repeated our key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCall:
    """One request to a judge's model."""

    messages: Sequence[Message]
    schema: Json
    """JSON schema of the reply, for an endpoint that enforces one."""
    max_tokens: int
    temperature: float
    seed: int
    """Different for each vote: an endpoint that is deterministic would repeat the same vote otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One chat completion of a judge."""

    text: str
    was_cut: bool
    used: Spend | None
    """``None`` if the endpoint does not report usage."""
    identity: str
    """Name that the endpoint reports: model and fingerprint."""


class ChatEndpoint(Protocol):
    """Protocol of a chat endpoint; :class:`Endpoint` implements it."""

    @property
    def trouble(self) -> str:
        """Reason of the last retry; empty if there was none."""
        ...

    async def ask(self, call: JudgeCall) -> ChatReply:
        """Send a request and return the reply. Raises :class:`~etude.errors.JudgeUnavailable` if retries do not help,
        and its subclass :class:`~etude.errors.JudgeLost` if waiting does not help either.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """URL of a judge's endpoint, and the variant of its API."""

    url: str
    """Base URL of the API, including ``/v1``."""
    model: str
    key: str = ""
    structured: bool = False
    """True if the endpoint supports ``response_format`` with a JSON schema."""
    limit_name: str = "max_tokens"
    """Name of the endpoint's parameter for the maximum length of a reply."""

    def __repr__(self) -> str:
        return f"Address(url={self.url!r}, model={self.model!r})"


class Endpoint:
    """Calls a model over HTTP; implements :class:`ChatEndpoint`. The caller sets deadlines."""

    def __init__(self, http: aiohttp.ClientSession, address: Address) -> None:
        self._http = http
        self._address = address
        self._headers = {"Content-Type": "application/json"}
        self.trouble = ""
        """Reason of the last retry; empty if there was none."""
        self.identity = ""
        """Name that the endpoint reported in its last response."""
        if address.key:
            self._headers["Authorization"] = f"Bearer {address.key}"

    async def ask(self, call: JudgeCall) -> ChatReply:
        """Send a request, with retries, until there is a reply; the caller sets the deadline.

        Raises :class:`~etude.errors.JudgeUnavailable` with the reason if the endpoint returns an error, and its
        subclass :class:`~etude.errors.JudgeDeclined` if it rejects this particular request.
        """
        body = orjson.dumps(self._body(call))
        for pause_s in PAUSES.delays():
            answer = await self._attempt(body)
            if isinstance(answer, ChatReply):
                self.identity = answer.identity
                return answer
            await asyncio.sleep(max(pause_s, answer))
        raise AssertionError("endless")

    async def takes_key(self) -> bool:
        """Check the key by requesting the list of models, which costs nothing: false if the endpoint rejects the key,
        or a request without one. Raises :class:`~etude.errors.JudgeUnavailable` if it does not respond.
        """
        url = self._address.url.rstrip("/") + "/models"
        try:
            async with self._http.get(url, headers=self._headers, timeout=KEY_TIMEOUT, allow_redirects=False) as answer:
                return answer.status not in REFUSED_KEY
        except (aiohttp.ClientError, TimeoutError) as error:
            raise JudgeUnavailable(f"the judge at {self._address.url} does not answer: {_words(error)}") from error

    def _body(self, call: JudgeCall) -> Mapping[str, Json]:
        body: dict[str, Json] = {
            "model": self._address.model,
            "messages": [{"role": message["role"], "content": message["content"]} for message in call.messages],
            self._address.limit_name: call.max_tokens,
            "temperature": call.temperature,
            "seed": call.seed,
        }
        if self._address.structured:
            json_schema: Json = {"name": "verdict", "strict": True, "schema": call.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        return body

    async def _attempt(self, body: bytes) -> ChatReply | float:
        """A reply, or the number of seconds to wait before the next attempt."""
        url = self._address.url.rstrip("/") + "/chat/completions"
        try:
            async with self._http.post(
                url, data=body, headers=self._headers, timeout=NO_TIMEOUT, allow_redirects=False
            ) as response:
                status, wish = response.status, response.headers.get("Retry-After")
                if status in BUSY:
                    self.trouble = f"HTTP {status}"
                    return _seconds(wish)
                raw = await response.content.read(LONGEST_BODY)
                while len(raw) < LONGEST_BODY and (more := await response.content.read(LONGEST_BODY - len(raw))):
                    raw += more
        except aiohttp.ClientError as error:
            self.trouble = _words(error)
            return 0.0
        return self._read(status, raw)

    def _read(self, status: int, raw: bytes) -> ChatReply:
        try:
            answer = orjson.loads(raw)
            if status == 200:
                return read_answer(answer)
        except (orjson.JSONDecodeError, LookupError, TypeError, ValueError):
            pass
        text = raw.decode(errors="replace")
        if self._address.key:
            text = text.replace(self._address.key, HIDDEN_KEY)  # before truncation: half a key is a secret, too
        excerpt = text[:SHOWN]
        words = f"the judge at {self._address.url} answered HTTP {status}: {excerpt!r}"
        if status == 400 and "response_format" in excerpt:
            raise JudgeLost(f"{words}; set judge.options.structured = false")
        raise (JudgeDeclined if status in REFUSED else JudgeUnavailable)(words)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def read_answer(answer: dict[str, object]) -> ChatReply:
    """Parse a chat completion. Raises ``LookupError``, ``TypeError`` or ``ValueError`` for anything else."""
    match answer:
        case {"choices": [{"message": {"content": str() | None as text}, **choice}, *_]}:
            used = None
            match answer.get("usage"):
                case {"prompt_tokens": int(prompt), "completion_tokens": int(completion)}:
                    used = Spend(calls=1, prompt_tokens=prompt, completion_tokens=completion)
            names = [answer.get("model"), answer.get("system_fingerprint")]
            return ChatReply(
                text=text or "",
                was_cut=choice.get("finish_reason") == "length",
                used=used,
                identity=" ".join(str(name) for name in names if name),
            )
    raise ValueError("no completion")


def _seconds(wish: str | None) -> float:
    """Seconds to wait by ``Retry-After``, if it is a number; 0 for a date or a missing header."""
    if wish is None or not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", wish):
        return 0.0
    return min(LONGEST_WISH_S, float(wish))

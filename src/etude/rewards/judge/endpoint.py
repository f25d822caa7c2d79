"""Client of a judge's endpoint: an OpenAI chat completion, retried while the endpoint is busy.

Owns the wire and the meaning of its answers. Any server of that API will do, our own gateway among them; whether
replies are held to a JSON schema is the recipe's to say, for an endpoint that ignores the wish looks like one that has
it. The key is sent and appears nowhere else: not in an error, a log or a cache. Does not know rubrics.
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
"""Statuses that mean: later. Anthropic says 529."""
PAUSES = Backoff(first_s=0.1, longest_s=8.0, jitter=0.5)
"""Between attempts."""
LONGEST_WISH_S = 60.0
"""Pause that an endpoint may ask for; deadlines are the caller's."""
REFUSED = (400, 413, 422)
"""Statuses that mean: not this question, now or later."""
REFUSED_KEY = (401, 403)
"""Statuses that mean: not with this key."""
LONGEST_BODY = 1 << 20
"""Bytes of an answer that are read: a verdict has some hundred."""
SHOWN = 200
"""Characters of an answer that an error quotes."""
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""The caller has the deadline."""
KEY_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
"""For the question whether a key is taken."""
HIDDEN_KEY = "[key]"
"""Replacement in an error where an endpoint repeated our key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCall:
    """One request to a judge's model."""

    messages: Sequence[Message]
    schema: Json
    """JSON schema of the reply, where the endpoint enforces one."""
    max_tokens: int
    temperature: float
    seed: int
    """Different for each vote: an endpoint that repeats itself for equal questions would vote several times alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One chat completion of a judge."""

    text: str
    was_cut: bool
    used: Spend | None
    """``None``: the endpoint does not count."""
    identity: str
    """Name that the endpoint gives itself: model and fingerprint."""


class ChatEndpoint(Protocol):
    """Protocol of a chat endpoint; :class:`Endpoint` implements it."""

    @property
    def trouble(self) -> str:
        """Reason of the last repeated call; empty: none was repeated."""
        ...

    async def ask(self, call: JudgeCall) -> ChatReply:
        """The answer. Raises :class:`~etude.errors.JudgeUnavailable` when repeating the call does not help, and its
        subclass :class:`~etude.errors.JudgeLost` when waiting does not help either.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """URL of a judge's endpoint, and the variant of its API."""

    url: str
    """Base URL of the API, up to and with ``/v1``."""
    model: str
    key: str = ""
    structured: bool = False
    """True if it takes ``response_format`` with a JSON schema."""
    limit_name: str = "max_tokens"
    """Its name for the bound of a reply."""

    def __repr__(self) -> str:
        return f"Address(url={self.url!r}, model={self.model!r})"


class Endpoint:
    """Calls a model over HTTP; implements :class:`ChatEndpoint`. The caller bounds the time."""

    def __init__(self, http: aiohttp.ClientSession, address: Address) -> None:
        self._http = http
        self._address = address
        self._headers = {"Content-Type": "application/json"}
        self.trouble = ""
        """Reason of the last repeated call; empty: none was repeated."""
        self.identity = ""
        """Name that the endpoint gave itself with its last answer."""
        if address.key:
            self._headers["Authorization"] = f"Bearer {address.key}"

    async def ask(self, call: JudgeCall) -> ChatReply:
        """Ask until there is an answer; the caller sets the deadline.

        Raises :class:`~etude.errors.JudgeUnavailable` where the endpoint refuses, with its reason, and its kind
        :class:`~etude.errors.JudgeDeclined` where it refuses this very question.
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
        """Ask for the list of models, which costs nothing: false if the endpoint refuses the key, or a call without
        one. Raises :class:`~etude.errors.JudgeUnavailable` where it does not answer.
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
        """An answer, or for how many seconds the endpoint asks to be left alone."""
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
            text = text.replace(self._address.key, HIDDEN_KEY)  # before it is cut: half a key is a secret, too
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
    """Pause that ``Retry-After`` asks for, if it is a number of seconds; dates are left to the pauses."""
    if wish is None or not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", wish):
        return 0.0
    return min(LONGEST_WISH_S, float(wish))

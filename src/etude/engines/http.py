"""An engine behind HTTP: the client of :mod:`etude.engines.server`.

Owns the wire format of a request and of an answer, and the retries while an engine restarts. An engine keeps nothing
between two calls that an answer depends on, so a call whose answer was lost is simply made again.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import aiohttp
import numpy as np
import orjson

from etude.clock import SystemClock
from etude.errors import EngineUnavailable
from etude.protocols import Clock, Completion, EngineHealth, SamplingParams
from etude.types import Finish

RETRY_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Between two tries; the last one repeats. Short, because an engine on the same machine restarts in seconds."""
ANSWER_TIMEOUT_S = 600.0
"""An engine that took a request may be this long silent: it may be sampling a long completion behind many others."""
CONNECT_TIMEOUT_S = 5.0
"""A machine that does not take a connection in this time is down."""
HEALTH_TIMEOUT_S = 5.0
"""An engine that cannot say its version in this time is not healthy."""

GENERATE_TIMEOUT = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)

SYSTEM_CLOCK = SystemClock()


class HttpEngine:
    """Talks to one engine process; implements :class:`~etude.protocols.Engine`.

    ``timeout_s`` is how long an engine may be down before a call gives up. The connector of ``http`` must allow as many
    connections as there may be calls in flight (aiohttp allows 100 unless told otherwise).
    """

    def __init__(
        self, base_url: str, http: aiohttp.ClientSession, timeout_s: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._http = http
        self._timeout_s = timeout_s
        self._clock = clock

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample one completion, trying again while the engine is down.

        Raises ``ValueError`` with the engine's words if it refuses the request, and
        :class:`~etude.errors.EngineUnavailable` once its outages during the call come to more than ``timeout_s``.
        """
        body = _encode(prompt_ids, params, session)
        down_s = 0.0
        for pause_s in _pauses_s():
            asked_at = self._clock.now()
            try:
                return _completion(await self._call("POST", "/generate", body, GENERATE_TIMEOUT))
            except EngineUnavailable:
                # Time spent on an answer that was then lost is no outage: the engine was up, and is to be had again.
                down_s += min(self._clock.now() - asked_at, CONNECT_TIMEOUT_S) + pause_s
                if down_s > self._timeout_s:
                    raise
            await self._clock.sleep(pause_s)
        raise AssertionError("the pauses are endless")

    async def health(self) -> EngineHealth:
        """Ask once. Raises :class:`~etude.errors.EngineUnavailable` at once if there is no answer."""
        return _health(await self._call("GET", "/health", None, HEALTH_TIMEOUT))

    async def _call(self, method: str, path: str, body: bytes | None, timeout: aiohttp.ClientTimeout) -> bytes:
        """One exchange; everything but an answer or a refusal is an unavailable engine."""
        url = self._base_url + path
        try:
            async with self._http.request(method, url, data=body, timeout=timeout) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnavailable(f"no answer from the engine at {url}: {type(error).__name__}: {error}") from error
        if response.status == 200:
            return answer
        if response.status in (400, 413):
            raise ValueError(_error_message(answer))
        raise EngineUnavailable(f"the engine at {url} answered {response.status}: {_error_message(answer)}")


def _pauses_s() -> Iterator[float]:
    return chain(RETRY_PAUSES_S, repeat(RETRY_PAUSES_S[-1]))


def _encode(prompt_ids: Sequence[int], params: SamplingParams, session: str) -> bytes:
    return orjson.dumps(
        {
            "prompt_ids": np.asarray(prompt_ids, dtype=np.int64),
            "session": session,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "stop_ids": params.stop_ids,
            "seed": params.seed,
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def _completion(answer: bytes) -> Completion:
    try:
        fields = orjson.loads(answer)
        completion = Completion(
            token_ids=np.array(fields["token_ids"], dtype=np.int32),
            logprobs=np.array(fields["logprobs"], dtype=np.float32),
            versions=np.array(fields["versions"], dtype=np.int32),
            finish=Finish(fields["finish"]),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise EngineUnavailable(f"the engine's answer cannot be read: {type(error).__name__}: {error}") from error
    if not np.isfinite(completion.logprobs).all():  # JSON has no NaN: it comes as null and would poison the loss
        raise EngineUnavailable("the engine sent a log probability that is not finite")
    return completion


def _health(answer: bytes) -> EngineHealth:
    try:
        return EngineHealth(**orjson.loads(answer))
    except (orjson.JSONDecodeError, TypeError) as error:
        raise EngineUnavailable(f"the engine's health cannot be read: {type(error).__name__}: {error}") from error


def _error_message(answer: bytes) -> str:
    try:
        return str(orjson.loads(answer)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return answer.decode(errors="replace")[:200]

"""An engine without a model, for tests and simulation.

Tokens are scripted or drawn at random from a seed, with the log-probabilities of the draw. Time is that of the given
clock; the test sets weight versions and injects failures.
"""

import hashlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import count
from random import Random

import numpy as np

from etude.errors import EngineUnavailable
from etude.protocols import Clock, Completion, EngineHealth, SamplingParams, TokenChunk
from etude.types import Finish, TokenIds, as_list

STOP_SHARE = 0.1
"""Probability that a drawn token is a stop token: completions of about ten tokens."""


class FakeEngine:
    """Draws tokens from a seed; implements :class:`~etude.protocols.Engine`.

    ``token_s`` is the time that each sampled token takes on ``clock``.
    """

    def __init__(self, clock: Clock, *, vocab_size: int, max_length: int, seed: int = 0, token_s: float = 0.0) -> None:
        self.version = 0
        """The weight version of the next token; set it to act as if new weights had been swapped in."""
        self._clock = clock
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._seed = seed
        self._token_s = token_s
        self._calls = count()
        self._scripts: deque[Sequence[int]] = deque()
        self._failures = 0
        self._running = 0

    def script(self, *completions: Sequence[int]) -> None:
        """Make the next calls sample these tokens, one completion each; each must end with a stop token or at its
        maximum length.
        """
        self._scripts.extend(completions)

    def fail_next(self, calls: int) -> None:
        """Make the next ``calls`` calls, of either method, raise :class:`~etude.errors.EngineUnavailable`."""
        self._failures = calls

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        """Sample one completion. Raises ``ValueError`` on a request that no engine could serve."""
        self._fail_if_told()
        self._check(prompt_ids, params)
        tokens = iter(self._scripts.popleft()) if self._scripts else self._draws(prompt_ids, params)
        self._running += 1
        try:
            return await self._sample(tokens, params)
        finally:
            self._running -= 1

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Sample one completion, then yield it token by token."""
        whole = await self.generate(prompt_ids, params, session=session)
        last = len(whole.token_ids) - 1
        for token in range(last + 1):
            yield TokenChunk(
                token_ids=whole.token_ids[token : token + 1],
                logprobs=whole.logprobs[token : token + 1],
                versions=whole.versions[token : token + 1],
                completion=whole if token == last else None,
            )

    async def health(self) -> EngineHealth:
        """The version, a digest derived from it, and the load; no request ever waits."""
        self._fail_if_told()
        digest = hashlib.sha256(f"fake weights {self.version}".encode()).hexdigest()
        return EngineHealth(version=self.version, digest=digest, running=self._running, waiting=0)

    def _fail_if_told(self) -> None:
        if self._failures:
            self._failures -= 1
            raise EngineUnavailable("the fake engine was told to fail")

    def _check(self, prompt_ids: TokenIds, params: SamplingParams) -> None:
        if len(prompt_ids) == 0 or not all(0 <= token < self._vocab_size for token in prompt_ids):
            raise ValueError(f"prompt ids must be in 0 … {self._vocab_size - 1} and not empty")
        if params.max_tokens < 1:
            raise ValueError(f"max_tokens={params.max_tokens}: expected at least 1")
        if len(prompt_ids) + params.max_tokens > self._max_length:
            raise ValueError(
                f"{len(prompt_ids)} prompt tokens and max_tokens={params.max_tokens} exceed {self._max_length}"
            )

    def _draws(self, prompt_ids: TokenIds, params: SamplingParams) -> Iterator[int]:
        """Endless tokens: a function of the prompt if greedy, of prompt and seed if seeded, otherwise of the call."""
        if params.temperature == 0:
            key = f"greedy {as_list(prompt_ids)}"
        elif params.seed is not None:
            key = f"seeded {params.seed} {as_list(prompt_ids)}"
        else:
            key = f"call {next(self._calls)}"
        random = Random(f"{self._seed} {key}")
        others = [token for token in range(self._vocab_size) if token not in params.stop_ids]
        while True:
            stops = params.stop_ids and random.random() < STOP_SHARE
            yield random.choice(params.stop_ids if stops else others)

    async def _sample(self, tokens: Iterator[int], params: SamplingParams) -> Completion:
        sampled: list[int] = []
        versions: list[int] = []
        finish = Finish.LENGTH
        for token in tokens:
            if self._token_s:
                await self._clock.sleep(self._token_s)
            sampled.append(token)
            versions.append(self.version)
            if token in params.stop_ids:
                finish = Finish.STOP
                break
            if len(sampled) == params.max_tokens:
                break
        else:
            raise AssertionError(f"a script of {len(sampled)} tokens neither stops nor fills {params.max_tokens}")
        return Completion(
            token_ids=np.array(sampled, dtype=np.int32),
            logprobs=np.array([self._logprob(token, params.stop_ids) for token in sampled], dtype=np.float32),
            versions=np.array(versions, dtype=np.int32),
            finish=finish,
        )

    def _logprob(self, token: int, stop_ids: Sequence[int]) -> float:
        if not stop_ids:
            return -math.log(self._vocab_size)
        if token in stop_ids:
            return math.log(STOP_SHARE / len(stop_ids))
        return math.log((1 - STOP_SHARE) / (self._vocab_size - len(stop_ids)))

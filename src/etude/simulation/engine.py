"""A modelled engine: continuous batching as processor sharing, in the time of the running loop.

    a step of n sequences takes         step_s + n · sequence_s
    if there are prompts to read        step_tokens · prompt_s more, in which it reads step_tokens tokens of them

Every decoded sequence gets one token per step, so all advance equally: a sequence ends when the common token count has
grown by its length since it began. Prompts are read in order of arrival. One timer is enough for any number of
sequences.

Tokens have no ids here: a completion has one number per weight version that sampled in it, the *number* of its tokens;
a prompt has a single number, the number of tokens to read.
"""

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from etude.errors import EngineUnavailable
from etude.protocols import Completion, EngineHealth, SamplingParams, TokenChunk
from etude.simulation.processors import Processors, WorkTimer
from etude.types import Finish, TokenIds

NOT_A_TOKEN = 1e-6
"""Rounding tolerance, in tokens, for the end of a sequence."""
READ_S = 1e-9
"""Rounding tolerance, in seconds, for the end of reading."""
STEP_TOKENS = 512
"""Default number of prompt tokens that an engine reads during one decode step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """Speed of one engine."""

    step_s: float
    sequence_s: float
    prompt_s: float
    max_running: int
    """Maximum number of sequences in progress; others wait."""
    step_tokens: int = STEP_TOKENS
    """Maximum number of prompt tokens that a step reads."""

    def decode_s(self, running: int) -> float:
        """Seconds of a step of ``running`` sequences."""
        return self.step_s + running * self.sequence_s

    def with_places(self, share: float) -> "EngineRates":
        """The engine with a share of its places, each of which represents several and costs as much as they do. Places
        are whole, but a full engine decodes exactly that share of the tokens.
        """
        places = max(1, round(self.max_running * share))
        return replace(
            self,
            step_s=self.step_s * places / (self.max_running * share),
            sequence_s=self.sequence_s / share,
            prompt_s=self.prompt_s / share,
            max_running=places,
        )

    @property
    def chunk_s(self) -> float:
        """Seconds that reading adds to a step."""
        return self.step_tokens * self.prompt_s

    def scaled(self, factor: float) -> "EngineRates":
        """The same engine with all times multiplied."""
        return replace(
            self,
            step_s=factor * self.step_s,
            sequence_s=factor * self.sequence_s,
            prompt_s=factor * self.prompt_s,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """A call that is in progress or waiting for a place."""

    tokens: int
    prompt_tokens: int
    ended: "asyncio.Future[Completion]"
    unread_s: float
    """Seconds of work to read the rest of its prompt."""
    begin: float = 0.0
    """Common token count when its first token was sampled."""


@final
@dataclass(slots=True, eq=False)
class ModelledEngine:
    """Engine with the given rates; implements :class:`~etude.protocols.Engine`."""

    rates: EngineRates
    processors: Processors = field(default_factory=Processors)
    version: int = 0
    is_down: bool = False
    busy_s: float = 0.0
    """Seconds with work in progress, so far."""
    generated_tokens: float = 0.0
    prompt_tokens: int = 0
    refused: int = 0
    """Calls that arrived while it was down, so far."""
    _level: float = 0.0
    """Common token count: tokens per sequence, so far."""
    _at_s: float = 0.0
    _done_s: float = 0.0
    """Work until ``_at_s``."""
    _is_busy: bool = False
    _ends: list[tuple[float, int, _Sequence]] = field(default_factory=list)
    """The sequences in decoding, by their ends."""
    _reading: deque[_Sequence] = field(default_factory=deque)
    _waiting: deque[_Sequence] = field(default_factory=deque)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _timer: WorkTimer | None = None
    _swaps: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    """Common token counts at which versions began to sample."""

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        """Sample ``params.max_tokens`` tokens."""
        if self.is_down:
            self.refused += 1
            raise EngineUnavailable("the engine is down")
        ended: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        prompt_tokens = int(prompt_ids[0])
        sequence = _Sequence(
            tokens=max(1, params.max_tokens),
            prompt_tokens=prompt_tokens,
            unread_s=prompt_tokens * self.rates.prompt_s,
            ended=ended,
        )
        self._advance()
        self._waiting.append(sequence)
        self._begin()
        try:
            return await ended
        except asyncio.CancelledError:
            self._drop(sequence)
            raise

    def stream(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> AsyncGenerator[TokenChunk, None]:
        """Unsupported: rollouts do not stream."""
        raise NotImplementedError("a modelled engine does not stream")

    async def health(self) -> EngineHealth:
        """The current version and load."""
        if self.is_down:
            raise EngineUnavailable("the engine is down")
        waiting = len(self._waiting)
        return EngineHealth(version=self.version, digest=digest_of(self.version), running=self.running, waiting=waiting)

    def swap(self, version: int) -> None:
        """Sample with a newer version from now on."""
        self._advance()
        self.version = version
        self._swaps.append((self._level, version))

    def change(self, rates: EngineRates) -> None:
        """Continue at another speed, with another number of places; no call is lost."""
        self._advance()
        self.rates = rates
        self._begin()

    def die(self) -> None:
        """Lose all calls, and accept none until :meth:`restart`."""
        self._advance()
        self.is_down = True
        for sequence in (*(each for _, _, each in self._ends), *self._reading, *self._waiting):
            if not sequence.ended.done():
                sequence.ended.set_exception(EngineUnavailable("the engine died"))
        self._ends.clear()
        self._reading.clear()
        self._waiting.clear()
        self._begin()

    def restart(self, version: int) -> None:
        """Serve again, with the store's current version."""
        self.is_down = False
        self.swap(version)

    @property
    def running(self) -> int:
        """Sequences in progress."""
        return len(self._ends) + len(self._reading)

    @property
    def waiting(self) -> int:
        """Calls that wait for a place."""
        return len(self._waiting)

    @property
    def steps(self) -> float:
        """Decode steps so far: each adds one token to every sequence."""
        return self._level

    def measure(self) -> float:
        """Busy seconds up to now."""
        self._advance()
        return self.busy_s

    def _advance(self) -> None:
        """Account for the time since the last change."""
        now_s, done_s = asyncio.get_running_loop().time(), self.processors.done_s()
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        work_s, self._done_s = done_s - self._done_s, done_s
        if self._is_busy:
            self.busy_s += elapsed_s
            read_s, steps = self._paces()
            self._level += work_s * steps
            self.generated_tokens += work_s * steps * len(self._ends)
            if self._reading:
                self._reading[0].unread_s -= work_s * read_s

    def _paces(self) -> tuple[float, float]:
        """Seconds of reading, and tokens per sequence, for each second of work."""
        if not self._ends:
            return 1.0, 0.0
        chunk_s = self.rates.chunk_s if self._reading else 0.0
        step_s = self.rates.decode_s(len(self._ends)) + chunk_s
        return chunk_s / step_s, 1 / step_s

    def _begin(self) -> None:
        """Start waiting calls if there are places, decode those that were read, and set the timer."""
        while self._waiting and self.running < self.rates.max_running:
            sequence = self._waiting.popleft()
            self._reading.append(sequence)
            self.prompt_tokens += sequence.prompt_tokens
        while self._reading and self._reading[0].unread_s <= READ_S:
            sequence = self._reading.popleft()
            sequence.begin = self._level
            heapq.heappush(self._ends, (self._level + sequence.tokens, next(self._numbers), sequence))
        if bool(self.running) != self._is_busy:
            self._is_busy = not self._is_busy
            (self.processors.occupy if self._is_busy else self.processors.release)()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_busy:
            read_s, tokens = self._paces()
            left_s = min(
                self._reading[0].unread_s / read_s if self._reading else math.inf,
                (self._ends[0][0] - self._level) / tokens if self._ends else math.inf,
            )
            self._timer = self.processors.call_at(self._done_s + max(0.0, left_s), self._end)

    def _end(self) -> None:
        """End all sequences that have their tokens."""
        self._advance()
        while self._ends and self._ends[0][0] <= self._level + NOT_A_TOKEN:
            _, _, sequence = heapq.heappop(self._ends)
            if not sequence.ended.done():
                sequence.ended.set_result(self._completion(sequence))
        self._begin()

    def _drop(self, sequence: _Sequence) -> None:
        """Remove a call that was cancelled."""
        self._advance()
        for queue in (self._waiting, self._reading):
            if sequence in queue:
                queue.remove(sequence)
        self._ends = [entry for entry in self._ends if entry[2] is not sequence]
        heapq.heapify(self._ends)
        self._begin()

    def _completion(self, sequence: _Sequence) -> Completion:
        """Numbers of tokens by the version that sampled them."""
        parts, until = list[tuple[int, int]](), sequence.begin + sequence.tokens
        for level, version in reversed(self._swaps):
            if level < until:
                parts.append((version, round(until - max(level, sequence.begin))))
                until = level
            if level <= sequence.begin:
                break
        versions, tokens = zip(*reversed([part for part in parts if part[1]]), strict=True)
        return Completion(
            token_ids=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -1.0, np.float32),
            versions=np.array(versions, np.int32),
            finish=Finish.STOP,
        )


def digest_of(version: int) -> str:
    """The digest of a modelled weight version."""
    return f"digest {version}"

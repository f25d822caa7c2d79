"""Sampling from weights that do not change: an engine for each snapshot.

Owns which snapshots are served, and a request's samples. Sampling itself is the native engine's.
"""

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from etude.aio import gather_or_cancel
from etude.config.inference import EngineConfig
from etude.engines.native.engine import NativeEngine, Weights
from etude.engines.native.scoring import PromptScores
from etude.models.decoder import Decoder
from etude.protocols import Completion, SamplingParams, TokenChunk
from etude.tinker.jobs import Gone, ServerBusy
from etude.tokens.messages import ChatFormat
from etude.types import Finish, Ids

MAX_SAMPLES = 1024
"""Samples of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request for completions of one prompt."""

    prompt_ids: Ids
    count: int
    params: SamplingParams
    stop_texts: tuple[str, ...] = ()
    scored_from: int | None = None
    """Index of the first prompt token whose logprob is wanted, with those of all behind it; ``None``: of none."""
    top_k: int = 0
    """Likeliest tokens that are wanted in the place of each of them."""


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """Weights that are served, and do not change."""

    engine: NativeEngine
    stepping: "asyncio.Task[None]"
    calls: int = 0


class Snapshots:
    """At most ``most`` of them; the one that was used longest ago and has no call gives its place up."""

    def __init__(self, most: int, config: EngineConfig, chat: ChatFormat) -> None:
        self._most, self._config, self._chat = most, config, chat
        self._served: OrderedDict[str, Snapshot] = OrderedDict()

    def add(self, model: Decoder) -> str:
        """Serve a model of its own; returns an id. Raises :class:`~etude.tinker.jobs.ServerBusy`."""
        while len(self._served) >= self._most:
            idle = next((name for name, one in self._served.items() if not one.calls), None)
            if idle is None:
                raise ServerBusy(f"all {len(self._served)} samplers are in use")
            self._served.pop(idle).stepping.cancel()
        engine = NativeEngine(Weights(model, 0, ""), self._config, seed=secrets.randbits(64))
        name = f"sampler-{secrets.token_hex(8)}"
        self._served[name] = Snapshot(engine=engine, stepping=asyncio.create_task(engine.run()))
        return name

    def get(self, name: str) -> Snapshot:
        """The one of an id. Raises :class:`~etude.tinker.jobs.Gone`."""
        if name not in self._served:
            raise Gone(f"there is no sampler {name}: newer ones took its place; make another sampling client")
        self._served.move_to_end(name)
        return self._served[name]

    async def sample(
        self, name: str, request: SampleRequest, session: str
    ) -> tuple[list[Completion], PromptScores | None]:
        """All completions of a request, and the scores of its prompt where they are wanted.

        Raises as :meth:`get` and :meth:`etude.engines.native.engine.NativeEngine.generate` do.
        """
        snapshot, seed, scores = self.get(name), request.params.seed, None
        engine = snapshot.engine
        params = [
            request.params if seed is None else replace(request.params, seed=seed + n) for n in range(request.count)
        ]
        snapshot.calls += 1
        try:
            if request.scored_from is not None:  # before sampling, which then finds the prompt in the cache
                scores = await engine.score(
                    request.prompt_ids, first=request.scored_from, top_k=request.top_k, session=session
                )
            calls = (self._complete(engine, request, one, f"{session}-{n}") for n, one in enumerate(params))
            return await gather_or_cancel(calls), scores
        finally:
            snapshot.calls -= 1

    def close(self) -> None:
        """End every engine."""
        for snapshot in self._served.values():
            snapshot.stepping.cancel()

    async def _complete(
        self, engine: NativeEngine, request: SampleRequest, params: SamplingParams, session: str
    ) -> Completion:
        if not request.stop_texts:
            return await engine.generate(request.prompt_ids, params, session=session)
        tokens: list[TokenChunk] = []
        async with contextlib.aclosing(engine.stream(request.prompt_ids, params, session=session)) as chunks:
            async for chunk in chunks:
                if chunk.completion is not None:
                    return chunk.completion
                tokens.append(chunk)
                text = self._chat.decode([token for each in tokens for token in each.token_ids.tolist()])
                if any(stop in text for stop in request.stop_texts):
                    break
        return stopped(tokens)


def stopped(chunks: Sequence[TokenChunk]) -> Completion:
    """The completion that was streamed until a stop text came up."""
    return Completion(
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        versions=np.concatenate([chunk.versions for chunk in chunks]),
        finish=Finish.STOP,
    )

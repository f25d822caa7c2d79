"""Ten thousand random requests: each is answered as if it were the only one, and nothing is left over.

    requests ──▶ callers ──▶ one engine ◀── new weights, repeatedly
                    │
                    └──▶ each answer  ==  the same request, alone, on a fresh engine of the version that answered

Callers hang up, leave streams, request several samples of one prompt, continue conversations, have priority over each
other, and retry when the engine is busy. Cache, queue and batch are so small that requests lose their pages often. The
arithmetic is invariant, so equal means equal to the last bit. Nothing depends on time: the seed reproduces everything
except memory.
"""

import asyncio
import gc
import mmap
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Literal

import numpy as np
import pytest
import torch

from etude.config.inference import EngineConfig, NativeOptions
from etude.engines.native.engine import NativeEngine, Weights
from etude.engines.native.pages import PAGE, PageNode
from etude.engines.native.scheduler import MAX_REREADS, EngineRequest
from etude.errors import EngineBusy
from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import ExpertsSpec, GroupedSpec, ModelSpec
from etude.protocols import Completion, SamplingParams, TokenChunk
from etude.types import Floats, Ids
from native_configs import altered

pytestmark = pytest.mark.heavy("minutes")

torch.set_num_threads(1)

NO_IDS, NO_FLOATS = np.zeros(0, np.int32), np.zeros(0, np.float32)
SwapName = Literal["keep", "recompute", "drain"]

SPEC = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    layers=1,
    attention=GroupedSpec(heads=2, kv_heads=1, head_dim=16),
    experts=ExpertsSpec(count=4, per_token=2, size=16),
    sparse_layers=(0,),
)
CONFIG = EngineConfig(
    max_running=6, max_length=64, options=NativeOptions(max_waiting=10, step_tokens=16, cache_tokens=10 * PAGE)
)
PAGES = CONFIG.native.cache_tokens // PAGE
MODELS = 3
CALLERS = 24
"""More than sit and wait: some are told to come again."""
WAVE = 500
"""Asks between two moments of rest, at which everything is counted."""
STEPS_BETWEEN_SWAPS = (2, 20)
STEMS = 12
"""Conversations that may be continued."""
LONGEST_PROMPT = 44
MAX_TOKENS = (1, 2, 3, 5, 16)
MOST_NODES = 2 * PAGES + 1
"""One for each page; at worst each page is of another version, whose root is one more; and the serving version's."""
GROWTH_BLOCKS = 500
"""Of Python's memory in the second half; half of what leaking one object per request would take."""
GROWTH_BYTES = 4 * 2**20


class Behaviour(StrEnum):
    """The behaviour of a caller."""

    WAITS = "waits"
    STREAMS = "streams"
    HANGS_UP = "hangs up"
    WALKS_AWAY = "walks away"
    """From a stream, in the middle."""


BEHAVIOURS = (*[Behaviour.WAITS] * 6, *[Behaviour.STREAMS] * 2, Behaviour.HANGS_UP, Behaviour.WALKS_AWAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, and the behaviour of its caller."""

    prompt: tuple[int, ...]
    params: SamplingParams
    behaviour: Behaviour
    leaves_after: int
    """Steps until it hangs up, pieces until it walks away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    """The answer that a caller got: [c] tokens, and the completion if it waited for it."""

    ask: Ask
    token_ids: Ids
    logprobs: Floats
    versions: Ids
    completion: Completion | None
    swaps: int
    """How often the weights changed meanwhile."""


@dataclass(slots=True)
class Campaign:
    """One engine, its callers, and their counts."""

    mode: SwapName
    random: Random
    engine: NativeEngine
    models: tuple[Decoder, ...]
    """Version v serves with the weights of number v modulo their count."""
    stems: list[tuple[int, ...]] = field(default_factory=lambda: [(1, 2, 3)])
    tally: Counter[str] = field(default_factory=Counter)

    async def wave(self, count: int) -> list[Got]:
        """Make ``count`` requests while weights are exchanged."""
        asks, answers = self._asks(count), list[Got]()

        async def caller() -> None:
            for ask in asks:  # one iterator for all callers
                answers.append(await self._call(ask))

        swapping = asyncio.create_task(self._exchange_weights())
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        swapping.cancel()
        await asyncio.gather(swapping, return_exceptions=True)
        return answers

    def remember(self, answers: Sequence[Got]) -> None:
        """Choose some of these conversations for later prompts to continue."""
        for got in self.random.sample(answers, 4):
            self.stems.append((*got.ask.prompt, *got.token_ids.tolist()))
        self.stems = self.stems[-STEMS:]

    def _asks(self, count: int) -> Iterator[Ask]:
        random = self.random
        made = 0
        while made < count:
            prompt = self._prompt()
            for _ in range(min(random.choice((1, 1, 1, 2, 4)), count - made)):
                yield Ask(
                    prompt=prompt,
                    params=_params(random),
                    behaviour=random.choice(BEHAVIOURS),
                    leaves_after=random.randint(1, 12),
                )
                made += 1

    def _prompt(self) -> tuple[int, ...]:
        random = self.random
        stem = random.choice(self.stems)[: random.randint(0, LONGEST_PROMPT - 1)]
        fresh = random.randint(1, min(12, LONGEST_PROMPT - len(stem)))
        return (*stem, *(random.randrange(SPEC.vocab_size) for _ in range(fresh)))

    async def _call(self, ask: Ask) -> Got:
        """Make one request, and repeat it while the engine is busy."""
        self.tally[ask.behaviour] += 1
        while True:
            version = self.engine.weights.version
            try:
                if ask.behaviour in (Behaviour.STREAMS, Behaviour.WALKS_AWAY):
                    chunks = await self._listen(ask)
                    return _got(ask, chunks[-1].completion, chunks, self.engine.weights.version - version)
                completion = await self._wait(ask)
                return _got(ask, completion, [], self.engine.weights.version - version)
            except EngineBusy:
                self.tally["busy"] += 1
                await asyncio.sleep(0)

    async def _wait(self, ask: Ask) -> Completion | None:
        task = asyncio.create_task(self.engine.generate(ask.prompt, ask.params, session="s"))
        if ask.behaviour is Behaviour.HANGS_UP:
            await _steps(ask.leaves_after)
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            self.tally["hung up"] += 1
            return None

    async def _listen(self, ask: Ask) -> list[TokenChunk]:
        chunks = list[TokenChunk]()
        async with aclosing(self.engine.stream(ask.prompt, ask.params, session="s")) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if (
                    ask.behaviour is Behaviour.WALKS_AWAY
                    and len(chunks) == ask.leaves_after
                    and chunk.completion is None
                ):
                    self.tally["walked away"] += 1
                    break
        return chunks

    async def _exchange_weights(self) -> None:
        """Again and again, for ever; who is not let in for long gives up and comes back with the same weights."""
        while True:
            await _steps(self.random.randint(*STEPS_BETWEEN_SWAPS))
            self.engine._scheduler.check()
            swap = asyncio.create_task(self.engine.swap(self.weights(self.engine.weights.version + 1)))
            await _steps(self.random.randint(*STEPS_BETWEEN_SWAPS))
            swap.cancel()
            await asyncio.wait([swap])
            self.tally["given up" if swap.cancelled() else "swapped"] += 1

    def weights(self, version: int) -> Weights:
        return Weights(self.models[version % len(self.models)], version, f"digest {version}")


async def _steps(count: int) -> None:
    """Yield to the engine and the other tasks ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


def _params(random: Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=random.choice(MAX_TOKENS),
        temperature=random.choice((0.0, 0.7, 1.0, 1.0)),
        top_p=random.choice((1.0, 1.0, 0.8, 0.9999)),
        top_k=random.choice((0, 0, 5, SPEC.vocab_size)),
        stop_ids=tuple(random.sample(range(SPEC.vocab_size), random.choice((0, 4, 8, 12)))),
        seed=random.randrange(2**63),
        priority=random.choice((0, 0, 0, 1, -1)),
        want_routes=random.random() < 0.5,
    )


def _got(ask: Ask, completion: Completion | None, chunks: Sequence[TokenChunk], swaps: int) -> Got:
    """Pieces and completion are checked against each other."""
    heard = [
        np.concatenate(arrays) for arrays in zip(*((p.token_ids, p.logprobs, p.versions) for p in chunks), strict=True)
    ]
    if completion is None:
        token_ids, logprobs, versions = heard or (np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
    else:
        token_ids, logprobs, versions = completion.token_ids, completion.logprobs, completion.versions
        assert all(map(np.array_equal, heard, (token_ids, logprobs, versions)))
    return Got(ask=ask, token_ids=token_ids, logprobs=logprobs, versions=versions, completion=completion, swaps=swaps)


async def answered_alone(weights: Weights, ask: Ask, max_tokens: int) -> Completion:
    """The completion of a fresh engine without other callers."""
    engine = NativeEngine(weights, EngineConfig(max_running=1, max_length=64), seed=0, record_routes=True)
    params = replace(ask.params, max_tokens=max_tokens)
    call = asyncio.create_task(engine.generate(ask.prompt, params, session="alone"))
    await asyncio.sleep(0)
    while engine.step():
        pass
    return await call


async def compare(campaign: Campaign, got: Got) -> None:
    """Compare the first version's tokens with a lone request, and all tokens if there was only one version.

    In mode keep a prompt may have keys of several versions after ``MAX_REREADS`` exchanges: nothing is promised then.
    """
    tokens = len(got.token_ids)
    if not tokens or (campaign.mode == "keep" and got.swaps > MAX_REREADS):
        return
    version = int(got.versions[0])
    own = int((got.versions == version).sum())
    assert (np.diff(got.versions) >= 0).all()
    assert campaign.mode != "drain" or own == tokens
    alone = await answered_alone(campaign.weights(version), got.ask, own)
    assert np.array_equal(alone.token_ids, got.token_ids[:own]), got
    assert np.array_equal(alone.logprobs, got.logprobs[:own]), got
    campaign.tally["compared"] += 1
    if got.completion is None or own < tokens:
        return
    completion = got.completion
    assert completion.finish is alone.finish
    assert (completion.sampling_mask is None) == (alone.sampling_mask is None)
    if completion.sampling_mask is not None and alone.sampling_mask is not None:
        assert np.array_equal(completion.sampling_mask.offsets, alone.sampling_mask.offsets)
        assert np.array_equal(completion.sampling_mask.token_ids, alone.sampling_mask.token_ids)
    assert (completion.routes is None) == (alone.routes is None) == (not got.ask.params.want_routes)
    if completion.routes is not None and alone.routes is not None:
        assert np.array_equal(completion.routes, alone.routes)
    campaign.tally["whole"] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Counts of what is in the process while there are no requests."""

    requests: int
    futures: int
    nodes: int
    """Of the index of prefixes."""
    blocks: int
    """Of Python's allocator."""
    resident_bytes: int


async def take_rest(engine: NativeEngine) -> Rest:
    """Check that the engine holds nothing for any request, and count the objects of the process."""
    assert not engine.step()
    engine._scheduler.check()
    health = await engine.health()
    assert (health.running, health.waiting, engine.free_pages) == (0, 0, PAGES)
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    return Rest(
        requests=kinds[EngineRequest],
        futures=kinds[asyncio.Future],
        nodes=kinds[PageNode],
        blocks=sys.getallocatedblocks(),
        resident_bytes=_resident_bytes(),
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


async def play(mode: SwapName, seed: int, asks: int) -> tuple[Campaign, list[Rest]]:
    """Run waves of requests, compare each with a lone request, and count the objects after each wave."""
    models = tuple(_model(number) for number in range(MODELS))
    config = altered(CONFIG, swap=mode)
    engine = NativeEngine(Weights(models[0], 0, "digest 0"), config, seed=seed, record_routes=True)
    campaign = Campaign(mode=mode, random=Random(seed), engine=engine, models=models)
    stepping = asyncio.create_task(engine.run())
    await _steps(1)
    rests = [await take_rest(engine)]
    for _ in range(asks // WAVE):
        answers = await campaign.wave(WAVE)
        for got in answers:
            await compare(campaign, got)
        campaign.remember(answers)
        del answers, got
        rests.append(await take_rest(engine))
    stepping.cancel()
    await asyncio.wait([stepping])
    return campaign, rests


def _model(number: int) -> Decoder:
    model = Decoder(SPEC, InvariantArithmetic())
    model.initialise(number, std=0.3)
    return model


@pytest.mark.parametrize(("mode", "seed", "asks"), [("keep", 1, 6_000), ("recompute", 2, 2_000), ("drain", 3, 2_000)])
def test_everybody_gets_what_it_would_have_got_alone(mode: SwapName, seed: int, asks: int) -> None:
    campaign, rests = asyncio.run(play(mode, seed, asks))

    # Everything that was meant to happen did.
    tally, counters = campaign.tally, campaign.engine.take_counters()
    assert sum(tally[behaviour] for behaviour in Behaviour) == asks
    assert tally["compared"] > 0.7 * asks
    assert tally["whole"] > 0.6 * asks
    assert min(tally[what] for what in ("busy", "hung up", "walked away", "swapped")) > asks / 100, tally
    assert min(counters.preempted, counters.evicted_pages, counters.reused_tokens) > asks / 10, counters
    assert (counters.rereads > 0) == (mode != "drain")
    assert (tally["given up"] > 0) == (mode == "drain")

    # Nothing is left of it.
    before, middle, last = rests[0], rests[len(rests) // 2], rests[-1]
    assert {(rest.requests, rest.futures) for rest in rests} == {(before.requests, before.futures)}
    assert max(rest.nodes for rest in rests) < before.nodes + MOST_NODES
    assert last.blocks - middle.blocks < GROWTH_BLOCKS
    assert last.resident_bytes - middle.resident_bytes < GROWTH_BYTES

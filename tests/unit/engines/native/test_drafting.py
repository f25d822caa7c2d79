"""Speculative decoding: for any proposals of the draft head, samples equal those of plain decoding, bit for bit."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config.inference import EngineConfig, NativeOptions
from etude.engines.native.engine import NativeEngine, Weights
from etude.engines.native.scheduler import Counters, SwapMode
from etude.models.decoder import Decoder
from etude.models.fast import FastArithmetic
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY, TINY_DENSE, TINY_GEMMA, TINY_GLM, TINY_LATENT, TINY_OSS
from etude.protocols import Completion, SamplingParams
from etude.types import TokenIds
from native_configs import altered

torch.set_num_threads(1)

CONFIG = EngineConfig(max_running=6, max_length=160, options=NativeOptions(step_tokens=24))
SPECS = {
    "experts": TINY,
    "dense": TINY_DENSE,
    "latent": TINY_LATENT,
    "glm": TINY_GLM,
    "gemma": TINY_GEMMA,
    "oss": TINY_OSS,
}
Call = tuple[list[int], SamplingParams]


@cache
def weights_of(name: str, version: int = 0) -> Weights:
    """A model with nearly even probabilities: a random head that draws with the policy's numbers is often right."""
    model = Decoder(replace(SPECS[name], draft=True), InvariantArithmetic())
    model.initialise(version, std=0.08)
    return Weights(model, version, f"digest {version}")


async def answers(engine: NativeEngine, calls: Sequence[Call]) -> list[Completion]:
    """The completions of concurrent calls."""
    stepping = asyncio.create_task(engine.run())
    try:
        return await asyncio.gather(*(engine.generate(prompt, params, session="") for prompt, params in calls))
    finally:
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)


def sampled(weights: Weights, config: EngineConfig, *batches: Sequence[Call]) -> tuple[list[Completion], Counters]:
    """The completions of batches of calls, one batch after the other, and the engine's counters."""
    has_experts = weights.model.spec.experts is not None

    async def play() -> tuple[list[Completion], Counters]:
        engine = NativeEngine(weights, config, seed=0, record_routes=has_experts)
        completions = [one for calls in batches for one in await answers(engine, calls)]
        engine._scheduler.check()
        assert engine.free_pages == engine._scheduler._pages
        return completions, engine.take_counters()

    return asyncio.run(play())


def assert_same(ours: Completion, theirs: Completion) -> None:
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.finish is theirs.finish
    assert ours.versions.tolist() == theirs.versions.tolist()
    assert np.array_equal(ours.logprobs, theirs.logprobs)
    assert (ours.routes is None) == (theirs.routes is None)
    if ours.routes is not None and theirs.routes is not None:
        assert np.array_equal(ours.routes, theirs.routes)
    assert (ours.sampling_mask is None) == (theirs.sampling_mask is None)
    if ours.sampling_mask is not None and theirs.sampling_mask is not None:
        assert np.array_equal(ours.sampling_mask.offsets, theirs.sampling_mask.offsets)
        assert np.array_equal(ours.sampling_mask.token_ids, theirs.sampling_mask.token_ids)


@st.composite
def batches_of_calls(draw: st.DrawFn, *, experts: bool) -> list[list[Call]]:
    """Calls whose prompts share beginnings and often repeat, with any sampling parameters."""
    shared = draw(st.lists(st.integers(0, 49), min_size=0, max_size=40))
    calls = []
    for _ in range(draw(st.integers(1, 6))):
        tail = draw(st.lists(st.integers(0, 49), min_size=1, max_size=40))
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 60)),
            temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.0, 1.5])),
            top_k=draw(st.sampled_from([0, 0, 5, 30])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.5, 0.95])),
            stop_ids=tuple(draw(st.lists(st.integers(0, 49), max_size=3))),
            seed=draw(st.integers(0, 1 << 40)),
            priority=draw(st.integers(0, 1)),
            want_routes=experts,
        )
        calls.append((shared[: draw(st.integers(0, len(shared)))] + tail, params))
    return [calls, calls[: draw(st.integers(0, len(calls)))]]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_all_that_is_recorded_is_that_of_plain_decoding(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SPECS)))
    weights = weights_of(name)
    batches = data.draw(batches_of_calls(experts=weights.model.spec.experts is not None))
    config = altered(CONFIG, cache_tokens=data.draw(st.sampled_from([160, 256, 960])))
    drafting = altered(config, draft_tokens=data.draw(st.integers(1, 5)))
    plain, drafted = sampled(weights, config, *batches)[0], sampled(weights, drafting, *batches)[0]
    for ours, theirs in zip(drafted, plain, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", SPECS)
def test_right_drafts_spare_steps_and_stop_tokens_end_inside_them(name: str) -> None:
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=80, seed=1)
    (plain,), before = sampled(weights_of(name), CONFIG, [(prompt, params)])
    drafting = altered(CONFIG, draft_tokens=4)
    (drafted,), counters = sampled(weights_of(name), drafting, [(prompt, params)])
    assert_same(drafted, plain)
    assert (before.drafted_tokens, before.accepted_tokens) == (0, 0)
    assert counters.generated_tokens == 80
    assert 5 < counters.accepted_tokens < counters.drafted_tokens
    for place in range(0, 80, 7):  # of some it is a right draft
        ending = replace(params, stop_ids=(int(plain.token_ids[place]),))
        assert_same(*(sampled(weights_of(name), one, [(prompt, ending)])[0][0] for one in (drafting, CONFIG)))


def test_a_perfect_head_is_always_right_and_a_new_policy_meets_no_old_drafts() -> None:
    """Without its block's updates and with gains of zero, policy and head give every token the same probability."""
    model = Decoder(replace(TINY_DENSE, draft=True), InvariantArithmetic())
    model.initialise(0)
    assert model.draft is not None
    with torch.no_grad():
        model.gain.zero_()
        model.draft.gain.zero_()
    (one,), counters = sampled(
        Weights(model, 0, ""), altered(CONFIG, draft_tokens=4), [([1], SamplingParams(max_tokens=51, seed=3))]
    )
    assert len(set(one.token_ids.tolist())) > 10
    assert counters.accepted_tokens == counters.drafted_tokens == 40


@pytest.mark.parametrize("mode", SwapMode)
@pytest.mark.parametrize("name", SPECS)
def test_a_swap_inside_a_completion_is_that_of_plain_decoding(name: str, mode: SwapMode) -> None:
    config = altered(CONFIG, swap=str(mode))

    async def swapped(config: EngineConfig, at_least: int) -> Completion:
        engine = NativeEngine(weights_of(name), config, seed=0)
        prompt: TokenIds = np.array([4, 5, 6, 7], np.int32)
        task = asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=60, seed=5), session=""))
        await asyncio.sleep(0)
        (request,) = engine._calls
        while request.sampled < at_least:
            engine.step()
        if config.native.draft_tokens:
            assert request.drafts
        swapping = asyncio.create_task(engine.swap(weights_of(name, 1)))
        await asyncio.sleep(0)
        assert mode is SwapMode.DRAIN or not request.drafts
        while engine.step():
            await asyncio.sleep(0)
        await swapping
        return await task

    drafted = asyncio.run(swapped(altered(config, draft_tokens=3), 20))
    plain = asyncio.run(swapped(config, int((drafted.versions == 0).sum()) if mode is not SwapMode.DRAIN else 20))
    assert set(drafted.versions.tolist()) == ({0} if mode is SwapMode.DRAIN else {0, 1})
    assert_same(drafted, plain)


def test_fast_arithmetic_samples_the_same_up_to_its_rounding() -> None:
    model = Decoder(replace(TINY, draft=True), FastArithmetic())
    model.load_state_dict(weights_of("experts").model.state_dict())
    calls = [([1, 2, n], SamplingParams(max_tokens=40, seed=n)) for n in range(6)]
    plain, _ = sampled(Weights(model, 0, ""), CONFIG, calls)
    drafted, counters = sampled(Weights(model, 0, ""), altered(CONFIG, draft_tokens=3), calls)
    assert counters.accepted_tokens
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


def test_drafts_without_a_head_are_refused() -> None:
    with pytest.raises(ValueError, match="draft_tokens = 2 needs a model with a draft head"):
        NativeEngine(Weights(Decoder(TINY), 0, ""), altered(CONFIG, draft_tokens=2), seed=0)

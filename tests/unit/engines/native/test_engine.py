"""The native engine: its reported logprobs are the model's own, and every caller gets its answer."""

import asyncio
import gc
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from etude.config.inference import EngineConfig, NativeOptions
from etude.engines.native.engine import NativeEngine, Weights
from etude.errors import DivergedError, EngineBusy, EngineUnavailable
from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY, TINY_DENSE, ModelSpec
from etude.protocols import Completion, SamplingParams, TokenChunk
from etude.types import Finish
from native_configs import altered

torch.set_num_threads(1)

CONFIG = EngineConfig(max_running=8, max_length=200, options=NativeOptions(step_tokens=32))
SMALL_CACHE = altered(CONFIG, cache_tokens=208)
LONG = SamplingParams(max_tokens=60, seed=1)

Scene = Callable[[NativeEngine], Awaitable[None]]


def make_weights(version: int, spec: ModelSpec = TINY) -> Weights:
    model = Decoder(spec, InvariantArithmetic())
    model.initialise(version, std=0.15)
    return Weights(model, version, f"digest {version}")


def run(
    scene: Scene, config: EngineConfig = CONFIG, *, weights: Weights | None = None, record_routes: bool = False
) -> None:
    async def play() -> None:
        engine = NativeEngine(
            make_weights(0) if weights is None else weights, config, seed=0, record_routes=record_routes
        )
        stepping = asyncio.create_task(engine.run())
        try:
            await scene(engine)
        finally:
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)

    asyncio.run(play())


async def steps(count: int) -> None:
    """Yield to the engine ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def at_rest(engine: NativeEngine) -> bool:
    """Return true if no request holds anything in the engine."""
    await steps(3)
    engine._scheduler.check()
    health = await engine.health()
    return (health.running, health.waiting, engine.free_pages) == (0, 0, engine._scheduler._pages)


def assert_same(one: Completion, other: Completion) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert np.array_equal(one.logprobs, other.logprobs)
    assert one.finish is other.finish


def true_logprobs(weights: Weights, prompt: list[int], completion: Completion, temperature: float) -> torch.Tensor:
    """The logprobs of a completion from one plain forward pass over everything."""
    ids = torch.tensor([*prompt, *completion.token_ids.tolist()])
    with torch.no_grad():
        logits = weights.model.logits(weights.model.forward_packed(ids))
    sampled = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return sampled.gather(1, ids[len(prompt) :].unsqueeze(1)).squeeze(1)


async def converse(
    engine: NativeEngine, name: str, turns: int, temperature: float
) -> list[tuple[list[int], Completion]]:
    """A session in which every prompt continues the last one."""
    rng = Random(name)
    prompt = [rng.randrange(50) for _ in range(rng.randint(1, 30))]
    history = []
    for _ in range(turns):
        params = SamplingParams(max_tokens=rng.randint(1, 12), temperature=temperature)
        completion = await engine.generate(prompt, params, session=name)
        history.append((prompt, completion))
        prompt = [*prompt, *completion.token_ids.tolist(), *(rng.randrange(50) for _ in range(rng.randint(1, 20)))]
    return history


@pytest.mark.parametrize("slots", [3, 8, 32], ids=["evicting", "tight", "roomy"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_model_whatever_was_batched_or_reused(slots: int, temperature: float) -> None:
    async def scene(engine: NativeEngine) -> None:
        sessions = [converse(engine, f"session {i}", 4, temperature) for i in range(12)]
        for history in await asyncio.gather(*sessions):
            for prompt, completion in history:
                expected = true_logprobs(engine.weights, prompt, completion, temperature)
                np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-5)

    run(scene, altered(CONFIG, max_running=slots))


def test_after_a_swap_whole_turns_have_the_new_weights_numbers() -> None:
    async def scene(engine: NativeEngine) -> None:
        for version in range(3):
            if version:
                await engine.swap(make_weights(version))
            for prompt, completion in await converse(engine, "the one session", 3, 1.0):
                assert set(completion.versions.tolist()) == {version}
                expected = true_logprobs(engine.weights, prompt, completion, 1.0)
                np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-5)

    run(scene)


def test_a_swap_inside_a_turn_is_seen_token_by_token() -> None:
    async def scene(engine: NativeEngine) -> None:
        turn = asyncio.create_task(engine.generate([1, 2, 3], SamplingParams(max_tokens=60), session="s"))
        await asyncio.sleep(0)
        while engine.take_counters().generated_tokens == 0:
            await asyncio.sleep(0)
        await engine.swap(make_weights(1))
        versions = (await turn).versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}

    run(scene)


def test_greedy_takes_the_likeliest_token_and_says_it_was_certain() -> None:
    async def scene(engine: NativeEngine) -> None:
        completion = await engine.generate([4, 5], SamplingParams(max_tokens=1, temperature=0.0), session="s")
        with torch.no_grad():
            model = engine.weights.model
            best = model.logits(model.forward_packed(torch.tensor([4, 5]))[-1:]).argmax()
        assert completion.token_ids.tolist() == [int(best)]
        assert completion.logprobs.tolist() == [0.0]

    run(scene)


def test_samples_follow_the_distribution() -> None:
    async def scene(engine: NativeEngine) -> None:
        draws = 4_000
        calls = [engine.generate([7, 8], SamplingParams(max_tokens=1), session=str(i)) for i in range(draws)]
        tokens = [int(completion.token_ids[0]) for completion in await asyncio.gather(*calls)]
        with torch.no_grad():
            model = engine.weights.model
            expected = model.logits(model.forward_packed(torch.tensor([7, 8]))[-1:])[0].softmax(-1).numpy()
        seen = np.bincount(tokens, minlength=50) / draws
        # Six standard errors of the largest cell: false alarms are rarer than one in a million runs.
        assert np.abs(seen - expected).max() < 6 * np.sqrt(expected.max() / draws)

    run(scene, altered(CONFIG, max_running=64, step_tokens=2048))


def test_a_caller_that_goes_away_frees_its_slot() -> None:
    async def scene(engine: NativeEngine) -> None:
        call = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=150), session="s"))
        while (await engine.health()).running == 0:
            await steps(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await at_rest(engine)

    run(scene)


# Streams


async def listen(
    engine: NativeEngine, prompt: Sequence[int], params: SamplingParams, chunks: int = 10_000
) -> list[TokenChunk]:
    """The first chunks of a stream, which is closed then."""
    heard = list[TokenChunk]()
    async with aclosing(engine.stream(prompt, params, session="s")) as stream:
        async for chunk in stream:
            heard.append(chunk)
            if len(heard) == chunks:
                break
    return heard


def test_a_stream_hands_out_the_tokens_of_the_completion_one_by_one() -> None:
    async def scene(engine: NativeEngine) -> None:
        for params in (LONG, replace(LONG, stop_ids=tuple(range(10)), seed=2), replace(LONG, max_tokens=1)):
            whole = await engine.generate([1, 2, 3], params, session="s")
            chunks = await listen(engine, [1, 2, 3], params)
            assert len(chunks) == len(whole.token_ids)
            assert [chunk.completion is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
            assert np.array_equal(np.concatenate([chunk.token_ids for chunk in chunks]), whole.token_ids)
            assert np.array_equal(np.concatenate([chunk.logprobs for chunk in chunks]), whole.logprobs)
            assert np.array_equal(np.concatenate([chunk.versions for chunk in chunks]), whole.versions)
            assert chunks[-1].completion is not None
            assert_same(chunks[-1].completion, whole)

    run(scene)


def test_the_first_chunk_comes_while_the_rest_is_being_sampled() -> None:
    async def scene(engine: NativeEngine) -> None:
        (first,) = await listen(engine, [1], LONG, chunks=1)
        assert first.completion is None
        assert engine.take_counters().generated_tokens < 5

    run(scene)


@pytest.mark.parametrize("how", ["closed", "cancelled", "dropped"])
def test_an_abandoned_stream_frees_its_place(how: str) -> None:
    async def scene(engine: NativeEngine) -> None:
        if how == "closed":
            await listen(engine, [1, 2], LONG, chunks=3)
        elif how == "cancelled":
            reader = asyncio.create_task(listen(engine, [1, 2], LONG))
            await steps(6)
            reader.cancel()
            await asyncio.wait([reader])
            assert reader.cancelled()
        else:
            stream = engine.stream([1, 2], LONG, session="s")
            await anext(stream)
            del stream
            gc.collect()
        assert await at_rest(engine)
        assert engine.take_counters().generated_tokens < LONG.max_tokens

    run(scene)


def test_a_slow_reader_misses_nothing_and_delays_no_other() -> None:
    async def scene(engine: NativeEngine) -> None:
        async with aclosing(engine.stream([1, 2], LONG, session="s")) as stream:
            first = await anext(stream)
            await engine.generate([3], replace(LONG, max_tokens=100), session="t")
            assert await at_rest(engine)
            chunks = [first] + [chunk async for chunk in stream]
        assert len(chunks) == LONG.max_tokens

    run(scene)


# A step that fails


def broken_weights() -> Weights:
    weights = make_weights(1)
    with torch.no_grad():
        weights.model.embedding.fill_(math.nan)
    return weights


def test_a_step_that_fails_is_told_to_everybody_now_and_later() -> None:
    async def play() -> None:
        engine = NativeEngine(make_weights(0), CONFIG, seed=0)
        stepping = asyncio.create_task(engine.run())
        calls = [asyncio.create_task(engine.generate([one], LONG, session="s")) for one in range(3)]
        readers = [asyncio.create_task(listen(engine, [one], LONG)) for one in range(3)]
        stream = engine.stream([4], LONG, session="s")
        await anext(stream)
        await engine.swap(broken_weights())
        await asyncio.wait([stepping])
        assert isinstance(stepping.exception(), DivergedError)
        for failed in await asyncio.gather(*calls, *readers, return_exceptions=True):
            assert isinstance(failed, EngineUnavailable)
            assert "DivergedError" in str(failed)
        with pytest.raises(EngineUnavailable, match="step failed"):
            [chunk async for chunk in stream]
        with pytest.raises(EngineUnavailable, match="step failed"):
            await engine.generate([1], LONG, session="s")
        with pytest.raises(EngineUnavailable, match="step failed"):
            await engine.health()
        assert engine.free_pages == NativeEngine(make_weights(0), CONFIG, seed=0).free_pages

    asyncio.run(play())


def test_an_exchange_does_not_wait_for_turns_that_will_never_end() -> None:
    async def play() -> None:
        engine = NativeEngine(broken_weights(), altered(CONFIG, swap="drain"), seed=0)
        stream = engine.stream([4], LONG, session="s")
        reading = asyncio.create_task(anext(stream))
        await steps(1)
        swap = asyncio.create_task(engine.swap(make_weights(0)))
        with pytest.raises(DivergedError):
            await engine.run()
        await swap
        with pytest.raises(EngineUnavailable):
            await reading

    asyncio.run(play())


# What was asked for


CUTTING = (
    SamplingParams(max_tokens=20, top_k=3),
    SamplingParams(max_tokens=20, top_p=0.7, temperature=1.5),
    SamplingParams(max_tokens=20, top_p=0.9, top_k=7, temperature=0.8),
    SamplingParams(max_tokens=20, top_k=TINY.vocab_size),
    SamplingParams(max_tokens=20, top_p=math.nextafter(1.0, 0.0)),
)
NOT_CUTTING = (SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=0.0, top_k=3, top_p=0.5))


def expected_kept(weights: Weights, ids: Sequence[int], params: SamplingParams) -> list[list[int]]:
    """The set that each token but the first was sampled from, found by sorting; empty for the whole vocabulary."""
    with torch.no_grad():
        logits_TV = weights.model.logits(weights.model.forward_packed(torch.tensor(ids))).double()
    mask = []
    for logits_V in logits_TV[:-1]:
        order = logits_V.argsort(descending=True, stable=True)[: params.top_k or None]
        shares = (logits_V[order] / params.temperature).softmax(0)
        enough = int((shares.cumsum(0) < params.top_p * (1 - 1e-9)).sum()) + 1
        chosen = sorted(order[:enough].tolist()) if params.top_p < 1 else sorted(order.tolist())
        mask.append([] if len(chosen) == len(logits_V) else chosen)
    return mask


def test_sampling_masks_are_what_top_k_and_top_p_left_in_any_batch() -> None:
    async def scene(engine: NativeEngine) -> None:
        prompts = [[1 + index, 7] for index in range(len(CUTTING + NOT_CUTTING))]
        calls = [engine.generate(p, one, session="s") for p, one in zip(prompts, CUTTING + NOT_CUTTING, strict=True)]
        batched = await asyncio.gather(*calls)
        for prompt, params, completion in zip(prompts, CUTTING + NOT_CUTTING, batched, strict=True):
            if not params.truncates:
                assert completion.sampling_mask is None
                continue
            assert completion.sampling_mask is not None
            expected = expected_kept(engine.weights, [*prompt, *completion.token_ids.tolist()], params)
            assert [completion.sampling_mask[token].tolist() for token in range(20)] == expected[len(prompt) - 1 :]
            assert completion.sampling_mask.holds(completion.token_ids)

    run(scene)


@pytest.mark.parametrize("params", CUTTING, ids=("top-k", "top-p", "both", "all of k", "nearly all of p"))
def test_each_token_has_a_sampling_mask_even_without_truncation(params: SamplingParams) -> None:
    async def scene(engine: NativeEngine) -> None:
        completion = await engine.generate([1, 2], params, session="s")
        assert completion.sampling_mask is not None
        assert len(completion.sampling_mask) == len(completion.token_ids) == 20

    run(scene)


def test_routes_that_were_not_recorded_are_refused() -> None:
    async def scene(engine: NativeEngine) -> None:
        with pytest.raises(ValueError, match=r"numerics\.replay"):
            await engine.generate([1], replace(LONG, want_routes=True), session="s")
        assert (await engine.generate([1], LONG, session="s")).routes is None
        assert await at_rest(engine)

    run(scene)


def test_routes_come_with_who_asks_for_them() -> None:
    async def scene(engine: NativeEngine) -> None:
        routed, plain = await asyncio.gather(
            engine.generate([1, 2, 3], replace(LONG, want_routes=True), session="s"),
            engine.generate([1, 2, 3], LONG, session="s"),
        )
        assert plain.routes is None
        assert routed.routes is not None
        assert routed.routes.dtype == np.uint16
        assert routed.routes.shape == (3 + 60 - 1, *TINY.routes_shape)
        assert routed.routes.max() < 4
        assert (routed.routes[..., 0] != routed.routes[..., 1]).all()

    run(scene, record_routes=True)


def test_a_model_without_experts_has_no_routes_to_refuse() -> None:
    async def scene(engine: NativeEngine) -> None:
        assert (await engine.generate([1], replace(LONG, want_routes=True), session="s")).routes is None

    run(scene, weights=make_weights(0, TINY_DENSE))


def test_samples_of_one_prompt_share_its_prefill() -> None:
    async def scene(engine: NativeEngine) -> None:
        prompt = [index % 50 for index in range(96)]
        calls = [engine.generate(prompt, replace(LONG, seed=seed), session="s") for seed in range(8)]
        completions = await asyncio.gather(*calls)
        assert len({tuple(one.token_ids.tolist()) for one in completions}) == 8
        counters = engine.take_counters()
        assert counters.reused_tokens == 7 * 80  # all full pages but the last, whose last token has to be computed
        assert counters.prefill_tokens == 96 + 7 * 16

    run(scene)


def test_steps_are_counted_however_many_sequences_each_of_them_has() -> None:
    async def scene(engine: NativeEngine) -> None:
        params = SamplingParams(max_tokens=20)
        await asyncio.gather(*(engine.generate([1, 2], params, session=name) for name in "ab"))
        counters = engine.take_counters()
        assert (counters.steps, counters.generated_tokens) == (20, 40)
        assert not engine.step()
        assert engine.take_counters().steps == 0

    run(scene)


# Exchanges of weights


def swapping(mode: str) -> EngineConfig:
    return altered(CONFIG, swap=mode)


async def swap_inside(engine: NativeEngine) -> Completion:
    """A turn during which new weights arrive."""
    turn = asyncio.create_task(engine.generate([1, 2, 3], LONG, session="s"))
    await steps(20)
    await engine.swap(make_weights(1))
    return await turn


def test_recomputed_keys_are_those_of_the_new_weights() -> None:
    async def scene(engine: NativeEngine) -> None:
        old = engine.weights
        completion = await swap_inside(engine)
        assert set(completion.versions.tolist()) == {0, 1}
        for weights in (old, engine.weights):
            own = completion.versions == weights.version
            expected = true_logprobs(weights, [1, 2, 3], completion, 1.0).numpy()
            np.testing.assert_allclose(completion.logprobs[own], expected[own], atol=2e-5)
        assert engine.take_counters().rereads == 1

    run(scene, swapping("recompute"))


def test_kept_keys_are_those_of_the_old_weights() -> None:
    async def scene(engine: NativeEngine) -> None:
        completion = await swap_inside(engine)
        new = completion.versions == 1
        expected = true_logprobs(engine.weights, [1, 2, 3], completion, 1.0).numpy()
        assert np.abs(completion.logprobs - expected)[new].max() > 1e-3
        assert engine.take_counters().rereads == 0

    run(scene, swapping("keep"))


def test_draining_waits_for_turns_in_progress_and_holds_back_new_ones() -> None:
    async def scene(engine: NativeEngine) -> None:
        begun = asyncio.create_task(engine.generate([1, 2, 3], LONG, session="s"))
        await steps(20)
        swap = asyncio.create_task(engine.swap(make_weights(1)))
        await steps(1)
        late = asyncio.create_task(engine.generate([1, 2, 3], LONG, session="s"))
        await steps(5)
        health = await engine.health()
        assert (health.version, health.running, health.waiting, swap.done()) == (0, 1, 1, False)
        assert set((await begun).versions.tolist()) == {0}
        await swap
        assert set((await late).versions.tolist()) == {1}
        assert (await engine.health()).digest == "digest 1"

    run(scene, swapping("drain"))


def test_draining_ends_when_the_turns_in_progress_are_given_up() -> None:
    async def scene(engine: NativeEngine) -> None:
        begun = asyncio.create_task(engine.generate([1, 2, 3], LONG, session="s"))
        await steps(5)
        swap = asyncio.create_task(engine.swap(make_weights(1)))
        await steps(1)
        begun.cancel()
        await swap
        assert await at_rest(engine)
        assert engine.weights.version == 1

    run(scene, swapping("drain"))


def test_an_idle_engine_has_nothing_to_drain() -> None:
    async def scene(engine: NativeEngine) -> None:
        for version in range(1, 4):
            await engine.swap(make_weights(version))
            assert set((await engine.generate([1], LONG, session="s")).versions.tolist()) == {version}

    run(scene, swapping("drain"))


def test_a_drain_that_is_given_up_lets_everybody_in_again() -> None:
    async def scene(engine: NativeEngine) -> None:
        begun = asyncio.create_task(engine.generate([1, 2, 3], LONG, session="s"))
        await steps(5)
        swap = asyncio.create_task(engine.swap(make_weights(1)))
        late = asyncio.create_task(engine.generate([4], LONG, session="s"))
        await steps(5)
        swap.cancel()
        await asyncio.wait([swap])
        for completion in await asyncio.gather(begun, late):
            assert set(completion.versions.tolist()) == {0}
        await engine.swap(make_weights(2))
        assert engine.weights.version == 2

    run(scene, swapping("drain"))


# Room


def test_the_urgent_are_served_first_and_take_the_place_of_others() -> None:
    async def scene(engine: NativeEngine) -> None:
        order = list[str]()

        async def call(name: str, priority: int) -> Completion:
            completion = await engine.generate([1, 2, 3], replace(LONG, priority=priority), session=name)
            order.append(name)
            return completion

        first = [asyncio.create_task(call(name, priority)) for name, priority in (("late", 2), ("soon", 1))]
        await steps(10)
        second = [asyncio.create_task(call(name, priority)) for name, priority in (("now", -1), ("soon too", 1))]
        completions = await asyncio.gather(*first, *second)
        assert order == ["now", "soon", "soon too", "late"]
        assert engine.take_counters().preempted > 0
        for completion in completions:
            assert_same(completion, completions[0])

    run(scene, altered(CONFIG, max_running=1))


def test_who_finds_the_line_full_is_told_to_come_again() -> None:
    async def scene(engine: NativeEngine) -> None:
        taken = list[asyncio.Task[Completion]]()
        for _ in range(2):  # the first two sit down, then two more are in line
            taken += [asyncio.create_task(engine.generate([one], LONG, session="s")) for one in range(2)]
            await steps(3)
        assert (await engine.health()).waiting == 2
        with pytest.raises(EngineBusy, match="2 requests are waiting"):
            await engine.generate([1], LONG, session="s")
        with pytest.raises(EngineBusy):
            await listen(engine, [1], LONG)
        assert [len(one.token_ids) for one in await asyncio.gather(*taken)] == [60] * 4
        await engine.generate([1], LONG, session="s")
        assert await at_rest(engine)

    run(scene, altered(CONFIG, max_running=2, max_waiting=2))


def test_a_small_cache_makes_callers_wait_and_changes_nothing_else() -> None:
    prompts = [[(7 * one + place) % 50 for place in range(20 + 5 * one)] for one in range(10)]
    params = [SamplingParams(max_tokens=40, seed=seed, top_p=0.9) for seed in range(10)]
    answers = list[list[Completion]]()
    sizes = list[int]()

    async def scene(engine: NativeEngine) -> None:
        calls = [engine.generate(ids, one, session="s") for ids, one in zip(prompts, params, strict=True)]
        answers.append(await asyncio.gather(*calls))
        sizes.append(engine.cache_bytes)
        assert (engine.take_counters().preempted > 0) == (len(answers) == 2)
        assert await at_rest(engine)

    run(scene, CONFIG)
    run(scene, SMALL_CACHE)
    for roomy, small in zip(*answers, strict=True):
        assert_same(roomy, small)
    assert sizes[1] * 7 < sizes[0]


def test_what_could_never_be_served_is_refused_at_once() -> None:
    async def scene(engine: NativeEngine) -> None:
        for prompt, max_tokens in (([], 1), ([50], 1), ([-1], 1), ([1] * 200, 1), ([1], 200), ([1], 0)):
            with pytest.raises(ValueError, match=r"prompt|max_tokens"):
                await engine.generate(prompt, SamplingParams(max_tokens=max_tokens), session="s")
        completion = await engine.generate([1] * 199, SamplingParams(max_tokens=1), session="s")
        assert completion.finish is Finish.LENGTH
        assert await at_rest(engine)

    run(scene, SMALL_CACHE)


def test_no_request_goes_beyond_the_positions_of_the_model() -> None:
    async def scene(engine: NativeEngine) -> None:
        with pytest.raises(ValueError, match="model's 32 positions"):
            await engine.generate([1] * 30, SamplingParams(max_tokens=3), session="s")
        assert len((await engine.generate([1] * 30, SamplingParams(max_tokens=2), session="s")).token_ids) == 2

    run(scene, weights=make_weights(0, replace(TINY, max_positions=32)))

"""The native engine's numbers: what it says it sampled with is what the model gives."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import numpy as np
import pytest
import torch

from etude.config import EngineConfig
from etude.engines.native import NativeEngine, Weights
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.protocols import Completion, SamplingParams

CONFIG = EngineConfig(max_running=8, max_length=200, step_tokens=32)


def make_weights(version: int) -> Weights:
    model = Decoder(TINY)
    model.initialise(version, std=0.15)
    return Weights(model, version, f"digest {version}")


def run(scene: Callable[[NativeEngine], Awaitable[None]], config: EngineConfig = CONFIG) -> None:
    async def play() -> None:
        engine = NativeEngine(make_weights(0), config, seed=0)
        stepping = asyncio.create_task(engine.run())
        try:
            await scene(engine)
        finally:
            stepping.cancel()

    asyncio.run(play())


def true_logprobs(weights: Weights, prompt: list[int], completion: Completion, temperature: float) -> torch.Tensor:
    """The logprobs of a completion from one plain forward pass over everything."""
    ids = torch.tensor([*prompt, *completion.token_ids.tolist()])
    with torch.no_grad():
        logits = weights.model.logits(weights.model.forward_padded(ids.unsqueeze(0))[0])
    sampled = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return sampled.gather(1, ids[len(prompt) :].unsqueeze(1)).squeeze(1)


async def converse(
    engine: NativeEngine, name: str, turns: int, temperature: float
) -> list[tuple[list[int], Completion]]:
    """A session whose every prompt continues the last."""
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

    run(scene, CONFIG.model_copy(update={"max_running": slots}))


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
            best = model.logits(model.forward_padded(torch.tensor([[4, 5]]))[0, -1]).argmax()
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
            expected = model.logits(model.forward_padded(torch.tensor([[7, 8]]))[0, -1]).softmax(-1).numpy()
        seen = np.bincount(tokens, minlength=50) / draws
        # Six standard errors of the largest cell: false alarms are rarer than one in a million runs.
        assert np.abs(seen - expected).max() < 6 * np.sqrt(expected.max() / draws)

    run(scene, CONFIG.model_copy(update={"max_running": 64, "step_tokens": 2048}))


def test_a_caller_that_goes_away_frees_its_slot() -> None:
    async def scene(engine: NativeEngine) -> None:
        call = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=150), session="s"))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert (await engine.health()).running == 0

    run(scene)

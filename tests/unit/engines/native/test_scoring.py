"""Log-probabilities of prompts are the model's own, to the last bit, on every path through the engine."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import numpy as np
import pytest
import torch

from etude.config.inference import EngineConfig, NativeOptions
from etude.engines.native.engine import NativeEngine, Weights
from etude.engines.native.scoring import PromptScores
from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY, TINY_DENSE, ModelSpec
from etude.protocols import SamplingParams
from etude.types import Floats
from native_configs import altered

CONFIG = EngineConfig(max_running=8, max_length=200, options=NativeOptions(step_tokens=32))

Scene = Callable[[NativeEngine], Awaitable[None]]


def make_weights(version: int, spec: ModelSpec = TINY) -> Weights:
    model = Decoder(spec, InvariantArithmetic())
    model.initialise(version, std=0.15)
    return Weights(model, version, "")


def run(scene: Scene, spec: ModelSpec = TINY, config: EngineConfig = CONFIG) -> None:
    async def play() -> None:
        engine = NativeEngine(make_weights(0, spec), config, seed=0)
        stepping = asyncio.create_task(engine.run())
        await scene(engine)
        stepping.cancel()

    asyncio.run(play())


def own_logits(weights: Weights, prompt: list[int]) -> torch.Tensor:
    """[P − 1, V] of the model itself, in one plain pass over all of the prompt."""
    with torch.no_grad():
        return weights.model.logits(weights.model.forward_packed(torch.tensor(prompt))[:-1])


def own_logprobs(weights: Weights, prompt: list[int], token_ids: torch.Tensor) -> Floats:
    """[P − 1] the model's logprobs of tokens in the places of the prompt's tokens."""
    logits = own_logits(weights, prompt)
    logprobs: Floats = weights.model.arithmetic.logprobs(logits, token_ids, torch.ones(len(token_ids)), None).numpy()
    return logprobs


def assert_own(weights: Weights, prompt: list[int], scores: PromptScores, first: int) -> None:
    """Check that scores from token ``first`` on are the model's own, to the last bit, and that no others exist."""
    expected = own_logprobs(weights, prompt, torch.tensor(prompt[1:]))
    assert scores.logprobs_P[first:].tobytes() == expected[first - 1 :].tobytes()
    assert np.isnan(scores.logprobs_P[:first]).all() and np.isnan(scores.top_logprobs_PK[:first]).all()
    for ids, logprobs in zip(scores.top_ids_PK.T, scores.top_logprobs_PK.T, strict=True):
        expected = own_logprobs(weights, prompt, torch.from_numpy(ids[1:]).long())
        assert logprobs[first:].tobytes() == expected[first - 1 :].tobytes()


@pytest.mark.parametrize("cache_tokens", [0, 208], ids=["roomy", "evicting"])
@pytest.mark.parametrize("spec", [TINY, TINY_DENSE], ids=["experts", "dense"])
def test_logprobs_of_prompts_are_the_models_own_whatever_is_cached_or_read_beside_them(
    cache_tokens: int, spec: ModelSpec
) -> None:
    rng = Random(0)
    shared = [rng.randrange(50) for _ in range(70)]  # more than two steps of 32 tokens, and four pages
    prompts = [shared + [rng.randrange(50) for _ in range(rng.randint(1, 40))] for _ in range(6)]

    async def scene(engine: NativeEngine) -> None:
        await engine.generate(shared, SamplingParams(max_tokens=1), session="all of it is cached")
        sampling = SamplingParams(max_tokens=40)
        others = [engine.generate(prompt[n:], sampling, session=f"other {n}") for n, prompt in enumerate(prompts)]
        firsts = [1, 1, 17, 64, 69, 70]
        calls = [
            engine.score(prompt, first=first, top_k=3, session=str(first))
            for prompt, first in zip(prompts, firsts, strict=True)
        ]
        _, scores = await asyncio.gather(asyncio.gather(*others), asyncio.gather(*calls))
        for prompt, first, one in zip(prompts, firsts, scores, strict=True):
            assert_own(engine.weights, prompt, one, first)
            assert (
                one.top_ids_PK[first:].tolist()
                == own_logits(engine.weights, prompt).topk(3).indices[first - 1 :].tolist()
            )
        engine._scheduler.check()
        assert (engine.take_counters().preempted > 0) == (cache_tokens > 0)

    run(scene, spec, altered(CONFIG, cache_tokens=cache_tokens))


def test_only_what_lies_before_the_wanted_logprobs_is_reused() -> None:
    prompt = [Random(1).randrange(50) for _ in range(100)]

    async def scene(engine: NativeEngine) -> None:
        await engine.score(prompt, session="first")
        for first, reused in ((1, 0), (16, 0), (17, 16), (99, 96)):
            engine.take_counters()
            await engine.score(prompt, first=first, session="again")
            counters = engine.take_counters()
            assert (counters.reused_tokens, counters.prefill_tokens) == (reused, 100 - reused)
        sample = await engine.generate(prompt, SamplingParams(max_tokens=1), session="sample")
        assert engine.take_counters().reused_tokens == 96 and len(sample.token_ids) == 1

    run(scene)


def test_a_prompt_that_is_read_again_under_new_weights_has_their_logprobs() -> None:
    prompt = [Random(2).randrange(50) for _ in range(100)]

    async def scene(engine: NativeEngine) -> None:
        scoring = asyncio.create_task(engine.score(prompt, session="s"))
        for _ in range(3):
            await asyncio.sleep(0)
        await engine.swap(make_weights(1))
        assert_own(engine.weights, prompt, await scoring, 1)
        assert engine.take_counters().rereads == 1

    run(scene)


@pytest.mark.parametrize(("first", "top_k"), [(0, 0), (3, 0), (1, -1), (1, TINY.vocab_size + 1)])
def test_logprobs_that_there_are_not_are_refused(first: int, top_k: int) -> None:
    async def scene(engine: NativeEngine) -> None:
        with pytest.raises(ValueError, match=f"first={first}, top_k={top_k} of a prompt of 3 tokens"):
            await engine.score([1, 2, 3], first=first, top_k=top_k, session="s")
        one = await engine.score([1], session="nothing predicts the first token")
        assert np.isnan(one.logprobs_P).tolist() == [True]

    run(scene)

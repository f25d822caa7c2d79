"""The engine's reported logprobs are those that the trainer computes, to the last bit in invariant arithmetic.

    engine:  batches, chunks, reused prefixes, lost pages, new weights   ──▶  logprobs, routes, sampling masks
    trainer: one pass over whole sequences, back to back                 ──▶  the same

Models are built and published as in a run, so that both sides round and quantise as they do there. The trainer's pass
is the one of training, with gradients. With fast arithmetic both agree within 1e-4.

Shape legend: T tokens of a sequence, P tokens of a prompt, C of a completion.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.config.inference import EngineConfig, NativeOptions, NumericsConfig
from etude.engines.native.engine import NativeEngine, Weights
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.spec import TINY, TINY_DENSE, TINY_GEMMA, TINY_GLM, TINY_LATENT, TINY_OSS, ModelSpec
from etude.protocols import Completion, SamplingParams
from etude.run.numerics import decoded_state, load_published, published_state, serving_model, training_model
from etude.trainer.batching.build import build_trajectories
from etude.trainer.mismatch import MismatchProbe
from etude.trainer.scores import sampled_logprobs, sampled_tokens
from etude.types import Floats, Rollout, RolloutStatus, Routes, Trajectory, Turn
from native_configs import altered

torch.set_num_threads(1)

Dtype = Literal["float32", "bfloat16"]

ROOMY = EngineConfig(max_running=16, max_length=160, options=NativeOptions(step_tokens=256))
TIGHT = EngineConfig(max_running=5, max_length=160, options=NativeOptions(step_tokens=16, cache_tokens=208))
"""Prompts are read in small chunks, and running requests lose their pages."""
TURNS, CONVERSATIONS = 4, 8
CUTS = (
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=1, temperature=0.7),
    SamplingParams(max_tokens=1, temperature=1.3, top_p=0.8),
    SamplingParams(max_tokens=1, temperature=0.9, top_k=5),
    SamplingParams(max_tokens=1, top_k=12, top_p=0.9),
    SamplingParams(max_tokens=1, temperature=0.0),
)
"""Ways to sample; conversations take turns with them."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is computed."""

    name: str
    spec: ModelSpec
    numerics: NumericsConfig


def make_cases(arithmetic: Literal["invariant", "fast"], dtypes: Sequence[Dtype]) -> list[Case]:
    """Mixture of experts, dense, latent attention, and experts in four bits."""
    plain = {"grouped": TINY, "dense": TINY_DENSE, "latent": TINY_LATENT}
    plain |= {"glm": TINY_GLM, "gemma": TINY_GEMMA, "oss": TINY_OSS}
    cases = []
    for dtype in dtypes:
        numerics = NumericsConfig(arithmetic=arithmetic, dtype=dtype)
        cases += [Case(f"{name}-{dtype}", spec, numerics) for name, spec in plain.items()]
        cases.append(Case(f"nvfp4-{dtype}", TINY, numerics.model_copy(update={"experts": "nvfp4"})))
    return cases


def name_of(case: Case) -> str:
    return case.name


INVARIANT = make_cases("invariant", ("float32", "bfloat16"))
FAST = [case for case in make_cases("fast", ("float32",)) if case.numerics.experts == "plain"]
"""In four bits a difference in the last digit may become one in the first."""
VERSIONS = (0, 1, 2)
STEPS_PER_VERSION = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call of the engine."""

    prompt: tuple[int, ...]
    params: SamplingParams
    completion: Completion

    @property
    def token_ids(self) -> list[int]:
        """[T]"""
        return [*self.prompt, *self.completion.token_ids.tolist()]


@cache
def state_of_version(case: Case, version: int) -> dict[str, Tensor]:
    """A published state."""
    model = training_model(case.spec, case.numerics, "cpu")
    assert isinstance(model, Decoder)
    model.initialise(version, std=0.2)
    return published_state(model, case.numerics)


def make_weights(case: Case, version: int) -> Weights:
    model = serving_model(case.spec, case.numerics, "cpu")
    load_published(model, state_of_version(case, version), case.numerics)
    return Weights(model, version, f"digest {version}")


def make_trainer(case: Case, version: int = 0) -> Decoder:
    model = training_model(case.spec, case.numerics, "cpu")
    assert isinstance(model, Decoder)
    load_published(model, state_of_version(case, version), case.numerics)
    return model


def sample(
    case: Case, config: EngineConfig, scene: Callable[[NativeEngine], Awaitable[list[Sample]]]
) -> tuple[list[Sample], NativeEngine]:
    """Run a scene on a new engine, and return its samples and the engine."""

    async def play() -> tuple[list[Sample], NativeEngine]:
        engine = NativeEngine(make_weights(case, 0), config, seed=0, record_routes=True)
        stepping = asyncio.create_task(engine.run())
        try:
            return await scene(engine), engine
        finally:
            stepping.cancel()

    return asyncio.run(play())


async def converse(engine: NativeEngine, number: int, cut: SamplingParams) -> list[Sample]:
    """A conversation in which every prompt continues the last one; two conversations have the same beginning."""
    random = Random(number // 2)
    prompt = tuple(random.randrange(50) for _ in range(random.randint(1, 40)))
    samples = list[Sample]()
    for turn in range(TURNS):
        params = replace(cut, max_tokens=random.randint(4, 14), seed=100 * number + turn, want_routes=True)
        completion = await engine.generate(prompt, params, session=str(number))
        samples.append(Sample(prompt=prompt, params=params, completion=completion))
        prompt = (*samples[-1].token_ids, *(random.randrange(50) for _ in range(random.randint(1, 12))))
    return samples


async def converse_all(engine: NativeEngine) -> list[Sample]:
    """Conversations side by side."""
    talks = [converse(engine, number, CUTS[number % len(CUTS)]) for number in range(CONVERSATIONS)]
    return [one for talk in await asyncio.gather(*talks) for one in talk]


def swapping(case: Case) -> Callable[[NativeEngine], Awaitable[list[Sample]]]:
    """Conversations side by side while weights are exchanged twice."""
    later = [make_weights(case, version) for version in VERSIONS[1:]]

    async def scene(engine: NativeEngine) -> list[Sample]:
        talks = asyncio.create_task(converse_all(engine))
        for weights in later:
            for _ in range(STEPS_PER_VERSION):
                await asyncio.sleep(0)
            await engine.swap(weights)
        return await talks

    return scene


def trajectory_of(one: Sample) -> Trajectory:
    turn = Turn(
        prompt_ids=np.array(one.prompt, np.int32),
        completion_ids=one.completion.token_ids,
        logprobs=one.completion.logprobs,
        versions=one.completion.versions,
        finish=one.completion.finish,
        temperature=one.params.temperature,
        routes=one.completion.routes,
        sampling_mask=one.completion.sampling_mask,
    )
    rollout = Rollout(
        rollout_id="r",
        group_index=0,
        slot=0,
        attempt=0,
        status=RolloutStatus.GRADED,
        reward=0.0,
        turns=(turn,),
    )
    (trajectory,) = build_trajectories(rollout, 0.0)
    return trajectory


def score(model: Decoder, samples: Sequence[Sample]) -> tuple[list[Floats], list[Routes | None]]:
    """The trainer's [C] logprobs and [P + C − 1, layers, k] routes of each sample, from one pass over all of them."""
    trajectories = [trajectory_of(one) for one in samples]
    masks = [trajectory.loss_mask for trajectory in trajectories]
    tokens = sampled_tokens(trajectories, masks, torch.device("cpu"))
    routing = Routing(record=True) if model.spec.experts else None
    logprobs_N = sampled_logprobs(model, tokens, routing)
    assert logprobs_N.requires_grad
    ends = np.cumsum([mask.sum() for mask in masks])
    logprobs = np.split(logprobs_N.detach().numpy(), ends[:-1])
    if routing is None:
        return logprobs, [None] * len(samples)
    parts = routing.recorded().split(tokens.lengths)
    return logprobs, [part.numpy().astype(np.uint16)[:-1] for part in parts]


def same(one: Routes | None, other: Routes | None) -> bool:
    """Return true if both are ``None`` or both are equal."""
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def assert_equal(model: Decoder, samples: Sequence[Sample]) -> None:
    """Logprobs and routes, bit by bit."""
    logprobs, routes = score(model, samples)
    for one, ours, row in zip(samples, logprobs, routes, strict=True):
        assert np.array_equal(one.completion.logprobs, ours)
        assert same(one.completion.routes, row)


@pytest.mark.parametrize("case", INVARIANT, ids=name_of)
def test_nothing_differs_whatever_was_batched_chunked_reused_or_read_again(case: Case) -> None:
    samples, engine = sample(case, TIGHT, converse_all)
    counters = engine.take_counters()
    assert min(counters.preempted, counters.evicted_pages, counters.reused_tokens) > 0, counters
    assert_equal(make_trainer(case), samples)
    greedy = [one.completion.logprobs for one in samples if one.params.temperature == 0]
    assert not np.concatenate(greedy).any()
    assert len(np.unique(np.concatenate([one.completion.logprobs for one in samples]))) > 100


@pytest.mark.parametrize("case", INVARIANT, ids=name_of)
def test_how_an_engine_is_configured_changes_no_bit(case: Case) -> None:
    tight, _ = sample(case, TIGHT, converse_all)
    roomy, _ = sample(case, ROOMY, converse_all)
    for one, other in zip(tight, roomy, strict=True):
        assert one.token_ids == other.token_ids
        assert np.array_equal(one.completion.logprobs, other.completion.logprobs)
        assert same(one.completion.routes, other.completion.routes)


@pytest.mark.parametrize("case", FAST, ids=name_of)
def test_fast_arithmetic_differs_by_rounding(case: Case) -> None:
    samples, _ = sample(case, TIGHT, converse_all)
    logprobs, routes = score(make_trainer(case), samples)
    differences = np.concatenate([one.completion.logprobs - ours for one, ours in zip(samples, logprobs, strict=True)])
    assert 0 < np.abs(differences).max() < 1e-4
    for one, row in zip(samples, routes, strict=True):
        assert same(one.completion.routes, row)


@pytest.mark.parametrize("case", INVARIANT, ids=name_of)
def test_turns_of_one_version_have_its_numbers_when_keys_are_kept(case: Case) -> None:
    samples, _ = sample(case, altered(ROOMY, swap="keep"), swapping(case))
    probe = MismatchProbe.alone(make_trainer(case), case.numerics.model_copy(update={"replay": "off"}), versions=3)
    pure = 0
    for version in VERSIONS:
        own = [one for one in samples if (one.completion.versions == version).all()]
        assert_equal(make_trainer(case, version), own)
        pure += sum(len(one.completion.token_ids) for one in own)
        probe.remember(version, decoded_state(state_of_version(case, version), case.numerics))
    mixed = [one for one in samples if len(set(one.completion.versions.tolist())) > 1]
    ours = score(make_trainer(case, VERSIONS[-1]), mixed)[0]
    tails = [one.completion.versions == VERSIONS[-1] for one in mixed]
    assert any(  # what was sampled on keys of other versions is rightly left out
        not np.array_equal(one.completion.logprobs[tail], row[tail])
        for one, row, tail in zip(mixed, ours, tails, strict=True)
    )
    total = probe.measure([trajectory_of(one) for one in samples], max_tokens=1_000).total
    assert (total.tokens, total.equal, total.max) == (pure, pure, 0.0)
    assert pure > 50


@pytest.mark.parametrize("case", INVARIANT, ids=name_of)
def test_every_token_has_its_versions_numbers_when_keys_are_recomputed(case: Case) -> None:
    samples, engine = sample(case, altered(TIGHT, swap="recompute"), swapping(case))
    assert engine.take_counters().rereads > 0
    assert any(len(set(one.completion.versions.tolist())) > 1 for one in samples)
    for version in VERSIONS:
        logprobs, routes = score(make_trainer(case, version), samples)
        for one, ours, row in zip(samples, logprobs, routes, strict=True):
            own = one.completion.versions == version
            assert np.array_equal(one.completion.logprobs[own], ours[own])
            if row is not None and one.completion.routes is not None:
                first = len(one.prompt) - 1
                assert np.array_equal(one.completion.routes[first:][own], row[first:][own])

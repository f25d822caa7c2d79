"""The gain of speculative decoding: one model with and without its draft head's guesses, before and after training it.

The policy has random weights and the head learns from what the engine sampled, as beside a policy in a run. A pair of
engines gets the same calls in turn, round after round; tokens are the same by construction, and compared.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bench.engine.models import INIT_STD
from etude.aio import background_task
from etude.config.inference import EngineConfig, NativeOptions, NumericsConfig
from etude.config.training import LossConfig, OptimiserConfig
from etude.engines.native.engine import NativeEngine, Weights
from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import ModelSpec
from etude.protocols import Completion, SamplingParams
from etude.trainer.losses import Totals
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
from etude.trainer.policy import MicroBatch, PolicyTrainer
from etude.types import UNSAMPLED, Json, Trajectory

PROMPT_TOKENS = 16
RATE = 2e-3
TEMPERATURE = 0.4
"""Random weights are near-uniform at 1, where no model that is served is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """Options of the measurement."""

    batches: tuple[int, ...] = (1, 16)
    draft_tokens: tuple[int, ...] = (1, 3)
    new_tokens: int = 96
    steps: int = 40
    """Training steps of the head, each on ``rollouts`` completions."""
    rollouts: int = 16
    rounds: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Results for one batch and number of drafts, after a number of training steps."""

    batch: int
    draft_tokens: int
    steps: int
    plain_per_s: float
    drafted_per_s: float
    accepted_share: float
    per_step: float
    """Tokens per step and sequence."""

    def to_json(self) -> dict[str, Json]:
        """The printed row."""
        return {
            "case": f"batch {self.batch}, {self.draft_tokens} drafts, head of {self.steps} steps",
            "tokens_per_s": round(self.drafted_per_s, 1),
            "without": round(self.plain_per_s, 1),
            "ratio": round(self.drafted_per_s / self.plain_per_s, 3),
            "accepted_share": round(self.accepted_share, 3),
            "tokens_per_step": round(self.per_step, 3),
        }


def measure(spec: ModelSpec, threads: int, plan: DraftPlan) -> list[Drafting]:
    """Measure a new head, train it, and measure again."""
    torch.set_num_threads(threads)
    model = Decoder(replace(spec, draft=True), InvariantArithmetic())
    model.initialise(0, INIT_STD)
    return asyncio.run(_measure(model, plan))


async def _measure(model: Decoder, plan: DraftPlan) -> list[Drafting]:
    rows = list[Drafting]()
    for steps in (0, plan.steps):
        if steps:
            await _train(model, plan)
        rows += [
            await _compare(model, batch, most, steps, plan) for batch in plan.batches for most in plan.draft_tokens
        ]
    return rows


async def _compare(model: Decoder, batch: int, drafts: int, steps: int, plan: DraftPlan) -> Drafting:
    plain, drafting = (_engine(model, batch, most) for most in (0, drafts))
    rates: dict[NativeEngine, list[float]] = {plain: [], drafting: []}
    for turn in range(plan.rounds + 1):
        answers = [await _timed(engine, batch, plan.new_tokens, seed=turn) for engine in rates]
        assert all(
            np.array_equal(one.token_ids, two.token_ids) for one, two in zip(answers[0][0], answers[1][0], strict=True)
        ), "drafts changed what is sampled"
        if turn:  # the first compiles
            for each, (_, seconds) in zip(rates.values(), answers, strict=True):
                each.append(batch * plan.new_tokens / seconds)
    counters = drafting.take_counters()
    generated, accepted = counters.generated_tokens, counters.accepted_tokens
    return Drafting(
        batch=batch,
        draft_tokens=drafts,
        steps=steps,
        plain_per_s=statistics.median(rates[plain]),
        drafted_per_s=statistics.median(rates[drafting]),
        accepted_share=accepted / counters.drafted_tokens,
        per_step=generated / (generated - accepted),
    )


def _engine(model: Decoder, batch: int, drafts: int) -> NativeEngine:
    config = EngineConfig(max_running=max(batch, 16), max_length=256, options=NativeOptions(draft_tokens=drafts))
    return NativeEngine(Weights(model, 0, ""), config, seed=0)


async def _timed(engine: NativeEngine, batch: int, tokens: int, *, seed: int) -> tuple[list[Completion], float]:
    prompts = _prompts(engine.weights.model, batch, seed)
    async with background_task(engine.run()):
        started_s = time.perf_counter()
        calls = (
            engine.generate(
                prompt, SamplingParams(max_tokens=tokens, temperature=TEMPERATURE, seed=seed * batch + n), session=""
            )
            for n, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*calls), time.perf_counter() - started_s


def _prompts(model: Decoder, count: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(model.spec.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def _train(model: Decoder, plan: DraftPlan) -> None:
    """Let the head learn from completions of a policy that, without advantages, stays as it is."""
    optimiser = build_optimiser(
        model, OptimiserConfig(), learning_rate=0.0, betas=(0.9, 0.95), draft_learning_rate=RATE
    )
    optimisation = Optimisation(
        model, optimiser, RateSchedule(steps=plan.steps, warmup_steps=4, decay_share=0.4), clip_norm=1.0
    )
    trainer = PolicyTrainer(optimisation, LossConfig(draft_learning_rate=RATE), NumericsConfig(replay="off"))
    engine = _engine(model, plan.rollouts, 0)
    for step in range(1, plan.steps + 1):
        seed = 1000 + step
        completions, _ = await _timed(engine, plan.rollouts, plan.new_tokens, seed=seed)
        batch = _batch(_prompts(model, plan.rollouts, seed), completions)
        tokens = plan.rollouts * plan.new_tokens
        trainer.step(step, [batch], Totals(tokens=tokens, trajectories=plan.rollouts))


def _batch(prompts: Sequence[list[int]], completions: Sequence[Completion]) -> MicroBatch:
    return [
        Trajectory(
            rollout_id="",
            token_ids=np.array([*prompt, *one.token_ids], np.int32),
            loss_mask=np.arange(len(prompt) + len(one.token_ids)) >= len(prompt),
            logprobs=np.append(np.zeros(len(prompt), np.float32), one.logprobs),
            versions=np.append(np.full(len(prompt), UNSAMPLED, np.int32), one.versions),
            temperatures=np.full(len(prompt) + len(one.token_ids), TEMPERATURE, np.float32),
            turn_starts=(len(prompt),),
            advantages=np.zeros(len(prompt) + len(one.token_ids), np.float32),
        )
        for prompt, one in zip(prompts, completions, strict=True)
    ]

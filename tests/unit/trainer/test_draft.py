"""The draft head learns to predict the policy's next tokens, without any effect on the policy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from etude.config.inference import NumericsConfig
from etude.config.training import LossConfig, OptimiserConfig
from etude.models.checkpoint import state_of
from etude.models.decoder import Decoder
from etude.models.spec import TINY, TINY_GEMMA, TINY_LATENT, TINY_OSS, ModelSpec
from etude.trainer.losses import Totals
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
from etude.trainer.policy import PolicyTrainer
from etude.types import UNSAMPLED, Trajectory


def make_trajectory(ids: list[int], sampled: int, advantage: float) -> tuple[Trajectory, ...]:
    """A micro-batch with one trajectory, whose last tokens an engine sampled."""
    mask = np.arange(len(ids)) >= len(ids) - sampled
    trajectory = Trajectory(
        rollout_id="r",
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -3.0, 0).astype(np.float32),
        versions=np.where(mask, 0, UNSAMPLED).astype(np.int32),
        temperatures=np.ones(len(ids), np.float32),
        turn_starts=(len(ids) - sampled,),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
    )
    return (trajectory,)


BATCH = [make_trajectory([1, 2, 3, 4, 5], 2, 0.5), make_trajectory([1, 2, 3, 6], 1, -0.5)]


def make_trainer(spec: ModelSpec, rate: float, kind: str = "adamw", *, policy_rate: float = 1e-2) -> PolicyTrainer:
    model = Decoder(spec)
    model.initialise(0, std=0.2)
    config = OptimiserConfig.model_validate({"kind": kind})
    optimiser = build_optimiser(model, config, learning_rate=policy_rate, betas=(0.9, 0.95), draft_learning_rate=rate)
    optimisation = Optimisation(model, optimiser, RateSchedule(steps=100, warmup_steps=1), clip_norm=0.01)
    return PolicyTrainer(optimisation, LossConfig(draft_learning_rate=rate), NumericsConfig(replay="off"))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_policy_takes_the_very_same_steps_with_and_without_a_head(kind: str) -> None:
    bare, headed = make_trainer(TINY, 0.0, kind), make_trainer(replace(TINY, draft=True), 0.1, kind)
    for step in (1, 2, 3):
        metrics = [each.step(step, BATCH, Totals(tokens=3, trajectories=2)) for each in (bare, headed)]
        assert metrics[0]["grad_norm"] == metrics[1]["grad_norm"]
        assert "draft_kl" not in metrics[0] and metrics[1]["draft_kl"] > 0
    ours, theirs = state_of(bare.model), state_of(headed.model)
    assert ours.keys() < theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("spec", [TINY, TINY_LATENT, TINY_GEMMA, TINY_OSS], ids=["experts", "latent", "gemma", "oss"])
def test_the_head_comes_closer_to_the_policy_wherever_tokens_were_sampled(spec: ModelSpec) -> None:
    trainer = make_trainer(replace(spec, draft=True), 1e-2, policy_rate=0.0)
    nats = [trainer.step(step, BATCH, Totals(tokens=3, trajectories=2))["draft_kl"] for step in range(1, 40)]
    assert nats[-1] < 0.2 * nats[0]


def test_a_head_that_nothing_trains_stays_as_it_is() -> None:
    trainer = make_trainer(replace(TINY, draft=True), 0.0)
    before = {name: tensor.clone() for name, tensor in state_of(trainer.model).items()}
    trainer.step(1, BATCH, Totals(tokens=3, trajectories=2))
    changed = {name for name, tensor in state_of(trainer.model).items() if not torch.equal(tensor, before[name])}
    assert changed and not any(name.startswith("model.layers.2.") for name in changed)

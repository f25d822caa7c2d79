"""Every loss, with its baseline and each correction, learns from rollouts of a policy that is two steps old.

In the task, one of all texts of two tokens has reward 1, and those with the same first token have a quarter. The policy
has one distribution of the first token, and one of the second token for each first. Its expected reward is exact.

Shape legend: B rollouts of a step (P groups of G), V vocabulary.
"""

import pytest
import torch
from torch import Tensor

from etude.config.training import BASELINES, CorrectionKind, LossConfig, LossKind, corrections
from etude.trainer.batching.advantage import group_advantages
from etude.trainer.corrections import proximal_logprobs
from etude.trainer.losses import LossTokens, Totals, policy_loss

VOCABULARY, GROUPS, GROUP_SIZE, STALENESS = 4, 8, 8, 2
STEPS, STEP_SIZE = 40, 0.2
ROLLOUTS = GROUPS * GROUP_SIZE
REWARDS_VV = torch.zeros(VOCABULARY, VOCABULARY)
REWARDS_VV[2] = 0.25
REWARDS_VV[2, 1] = 1.0
CHOICES = [(kind, correction) for kind in BASELINES for correction in corrections(kind)]


def make_config(kind: LossKind, correction: CorrectionKind) -> LossConfig:
    """A config with the paper's bounds, except for GSPO, whose bounds suit large models that hardly move in a step."""
    own: dict[str, dict[str, dict[str, float]]] = {
        "dr_grpo": {"aggregation_options": {"sequence_tokens": 2}},
        "gspo": {"options": {"clip_low": 0.2, "clip_high": 0.2}},
    }
    return LossConfig.model_validate({"kind": kind, "correction": correction, **own.get(kind, {})})


def expected_reward(logits: Tensor) -> float:
    """``logits`` [1 + V, V]: of the first token, then of the second after each first."""
    first_V, second_VV = logits[0].softmax(-1), logits[1:].softmax(-1)
    return float((first_V.unsqueeze(1) * second_VV * REWARDS_VV).sum())


def logprobs(logits: Tensor, texts_B2: Tensor) -> Tensor:
    """[2B] of both tokens of each text, text by text."""
    logs = logits.log_softmax(-1)
    both = (logs[0, texts_B2[:, 0]], logs[1 + texts_B2[:, 0], texts_B2[:, 1]])
    return torch.stack(both, 1).flatten()


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """[B,2]"""
    first_B = torch.multinomial(logits[0].softmax(-1), ROLLOUTS, replacement=True, generator=generator)
    second_B1 = torch.multinomial(logits[1 + first_B].softmax(-1), 1, generator=generator)
    return torch.cat([first_B.unsqueeze(1), second_B1], 1)


def step_loss(logits: Tensor, sampler: Tensor, config: LossConfig, generator: torch.Generator) -> Tensor:
    """The loss of one step on rollouts of ``sampler``."""
    texts_B2 = sample(sampler, generator)
    rewards_PG = REWARDS_VV[texts_B2[:, 0], texts_B2[:, 1]].view(GROUPS, GROUP_SIZE).numpy()
    advantages_B = torch.cat([torch.from_numpy(group_advantages(row, config.baseline)) for row in rewards_PG])
    ours, engine = logprobs(logits, texts_B2), logprobs(sampler, texts_B2)
    ages = torch.full_like(ours, STALENESS, dtype=torch.int64)
    tokens = LossTokens(
        logprobs_N=ours,
        engine_logprobs_N=engine,
        advantages_N=advantages_B.repeat_interleave(2),
        trajectories_N=torch.arange(ROLLOUTS).repeat_interleave(2),
        proximal_logprobs_N=proximal_logprobs(ours, engine, ages) if config.correction == "decoupled" else None,
    )
    return policy_loss(tokens, config, Totals(tokens=2 * ROLLOUTS, trajectories=ROLLOUTS)).loss


@pytest.mark.parametrize(("kind", "correction"), CHOICES)
def test_every_choice_learns_from_a_policy_two_steps_old(kind: LossKind, correction: CorrectionKind) -> None:
    config, generator = make_config(kind, correction), torch.Generator().manual_seed(0)
    logits = torch.zeros(1 + VOCABULARY, VOCABULARY, requires_grad=True)
    past = [logits.detach().clone()] * STALENESS
    before = expected_reward(logits.detach())
    for _ in range(STEPS):
        past.append(logits.detach().clone())
        loss = step_loss(logits, past[-1 - STALENESS], config, generator)
        (slope,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= STEP_SIZE * slope / (slope.norm() + 1e-12)  # losses differ in scale
    assert before < 0.15
    assert expected_reward(logits.detach()) > 0.9

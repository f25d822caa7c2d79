"""The reinforcement-learning optimiser: one batch in, one changed policy out.

Owns the model's weights, AdamW's moments and the step count. Does not wait for batches, publish or commit; that order
is :mod:`etude.run.trainer`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from etude.config import TrainerConfig
from etude.errors import DivergedError
from etude.models.checkpoint import load_state, state_of
from etude.models.qwen3_moe import Qwen3Moe
from etude.trainer.loss import PolicyLoss, policy_loss
from etude.trainer.padding import pad_rows
from etude.types import Trajectory

Member = TypeVar("Member")
MicroBatch = Sequence[Trajectory]
"""Trajectories that go through the model together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one optimiser step measured."""

    trained_tokens: int
    """Tokens in the forward and backward pass, prompts included, padding not."""
    grad_norm: float
    entropy: float
    """Mean nats per loss token."""
    truncated_share: float


class PolicyTrainer:
    """Full-parameter AdamW on the policy-gradient loss."""

    def __init__(self, model: Qwen3Moe, config: TrainerConfig) -> None:
        self.model = model
        self._config = config
        self._optimiser = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=0.0, fused=True
        )

    def step(
        self,
        step: int,
        microbatches: Sequence[MicroBatch],
        num_loss_tokens: int,
        before_update: Callable[[], None] = lambda: None,
    ) -> StepStats:
        """Update the weights once from all micro-batches; an empty batch leaves them as they are.

        ``before_update`` is called when the gradients are there and the weights are about to change. Raises
        :class:`~etude.errors.DivergedError`, before anything changed, when the gradient is not finite.
        """
        if not microbatches:
            return StepStats(trained_tokens=0, grad_norm=0.0, entropy=0.0, truncated_share=0.0)
        self._optimiser.zero_grad()
        losses = [self._backward(microbatch, num_loss_tokens) for microbatch in microbatches]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip_norm)
        if not torch.isfinite(norm):
            raise DivergedError(f"step {step}: the gradient's norm is {float(norm)}; nothing was changed or published")
        for group in self._optimiser.param_groups:
            group["lr"] = self._config.learning_rate * min(1.0, step / self._config.warmup_steps)
        before_update()
        self._optimiser.step()
        return StepStats(
            trained_tokens=sum(len(t.token_ids) for microbatch in microbatches for t in microbatch),
            grad_norm=float(norm),
            entropy=sum(loss.entropy_sum for loss in losses) / num_loss_tokens,
            truncated_share=sum(loss.truncated for loss in losses) / num_loss_tokens,
        )

    def _backward(self, microbatch: MicroBatch, num_loss_tokens: int) -> PolicyLoss:
        """Forward and backward of one micro-batch; gradients add up in the model."""
        device = self.model.embedding.device
        ids_BT = torch.from_numpy(pad_rows([t.token_ids for t in microbatch])).to(device).long()
        mask_BT = torch.from_numpy(pad_rows([t.loss_mask for t in microbatch])).to(device)[:, 1:]
        logprobs_BT = torch.from_numpy(pad_rows([t.logprobs for t in microbatch])).to(device)[:, 1:]
        advantages_BT = torch.from_numpy(pad_rows([t.advantages for t in microbatch])).to(device)[:, 1:]
        hidden_NH = self.model.forward_padded(ids_BT)[:, :-1][mask_BT]
        loss = policy_loss(
            self.model.logits(hidden_NH),
            ids_BT[:, 1:][mask_BT],
            logprobs_BT[mask_BT],
            advantages_BT[mask_BT],
            cap=self._config.importance_cap,
            normaliser=num_loss_tokens,
        )
        loss.loss.backward()
        return loss

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name, for :mod:`etude.trainer.checkpoint`."""
        tensors = {f"model/{name}": tensor for name, tensor in state_of(self.model).items()}
        for index, parameter in enumerate(self.model.parameters()):
            for key, value in self._optimiser.state.get(parameter, {}).items():
                tensors[f"adamw/{index}/{key}"] = value
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what :meth:`tensors` returned. Raises :class:`~etude.errors.DamagedError` on a missing one."""
        load_state(self.model, {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")})
        for index, parameter in enumerate(self.model.parameters()):
            prefix = f"adamw/{index}/"
            moments = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            if moments:
                device = parameter.device
                self._optimiser.state[parameter] = {k: v.to(device, copy=True) for k, v in moments.items()}


def sample_share(members: Sequence[Member], share: float, step: int) -> list[Member]:
    """A reproducible random share of a batch's members, at least one unless ``share`` is 0."""
    if not members or share == 0:
        return []
    count = max(1, round(share * len(members)))
    chosen = np.random.default_rng(step).choice(len(members), size=count, replace=False)
    return [members[index] for index in sorted(chosen)]

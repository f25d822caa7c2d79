"""The reinforcement-learning optimiser: one batch in, one changed policy out.

Owns the model's weights, AdamW's moments and the step count. Does not wait for batches, publish or commit; that order
is :mod:`etude.run.trainer`'s.

Shape legend: B rows, T positions, N loss tokens, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from etude.config import NumericsConfig, TrainerConfig
from etude.errors import DivergedError
from etude.models.checkpoint import load_state, state_of
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.trainer.kept import gather_kept, score
from etude.trainer.loss import policy_loss
from etude.trainer.padding import pad_rows
from etude.trainer.replay import replay, replayed_rows
from etude.trainer.schedule import rate_share
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
    """Mean nats per loss token, of the distribution that it was sampled from."""
    truncated_share: float
    replayed_pairs: int = 0
    """Pairs of token and expert that were routed as the engine had routed them, over all sparse layers."""
    flipped_pairs: int = 0
    """Of those, the pairs that the live router would have routed otherwise."""
    replaced_pairs: int = 0
    """Of those, the pairs that it found implausible and routed otherwise after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PieceStats:
    """What one micro-batch adds to the step's statistics."""

    entropy_sum: float
    truncated: int
    routing: Routing | None


class PolicyTrainer:
    """Full-parameter AdamW on the policy-gradient loss.

    ``numerics`` says which routes of the engine are replayed; ``auto`` must have been decided for the device.
    """

    def __init__(self, model: Decoder, config: TrainerConfig, numerics: NumericsConfig) -> None:
        if numerics.replay == "auto":
            raise ValueError("numerics.replay = 'auto' depends on the device: decide it before a trainer is made")
        self.model = model
        self._config = config
        self._replay = numerics.replay
        self._replay_floor = numerics.replay_floor
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
        pieces = [self._backward(microbatch, num_loss_tokens) for microbatch in microbatches]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip_norm)
        if not torch.isfinite(norm):
            raise DivergedError(f"step {step}: the gradient's norm is {float(norm)}; nothing was changed or published")
        config = self._config
        share = rate_share(step - 1, config.steps, warmup_steps=config.warmup_steps, decay_share=config.decay_share)
        for group in self._optimiser.param_groups:
            group["lr"] = config.learning_rate * share
        before_update()
        self._optimiser.step()
        return StepStats(
            trained_tokens=sum(len(t.token_ids) for microbatch in microbatches for t in microbatch),
            grad_norm=float(norm),
            entropy=sum(piece.entropy_sum for piece in pieces) / num_loss_tokens,
            truncated_share=sum(piece.truncated for piece in pieces) / num_loss_tokens,
            replayed_pairs=sum(piece.routing.pairs for piece in pieces if piece.routing),
            flipped_pairs=sum(piece.routing.flips for piece in pieces if piece.routing),
            replaced_pairs=sum(piece.routing.replaced for piece in pieces if piece.routing),
        )

    def _backward(self, microbatch: MicroBatch, num_loss_tokens: int) -> _PieceStats:
        """Forward and backward of one micro-batch; gradients add up in the model."""
        device = self.model.embedding.device
        ids_BT = torch.from_numpy(pad_rows([t.token_ids for t in microbatch])).to(device).long()
        mask_BT = torch.from_numpy(pad_rows([t.loss_mask for t in microbatch])).to(device)[:, 1:]
        logprobs_BT = torch.from_numpy(pad_rows([t.logprobs for t in microbatch])).to(device)[:, 1:]
        advantages_BT = torch.from_numpy(pad_rows([t.advantages for t in microbatch])).to(device)[:, 1:]
        temperatures_BT = torch.from_numpy(pad_rows([t.temperatures for t in microbatch])).to(device)[:, 1:]
        kept = gather_kept(microbatch, [t.loss_mask for t in microbatch], device)
        routing = self._routing(microbatch, device)
        hidden_NH = self.model.forward_padded(ids_BT, routing)[:, :-1][mask_BT]
        scores = score(self.model, hidden_NH, ids_BT[:, 1:][mask_BT], temperatures_BT[mask_BT], kept)
        loss = policy_loss(
            scores.logprobs_N,
            logprobs_BT[mask_BT],
            advantages_BT[mask_BT],
            cap=self._config.importance_cap,
            normaliser=num_loss_tokens,
        )
        loss.loss.backward()
        return _PieceStats(entropy_sum=float(scores.entropies_N.sum()), truncated=loss.truncated, routing=routing)

    def _routing(self, microbatch: MicroBatch, device: torch.device) -> Routing | None:
        if self._replay == "off":
            return None
        routes = replay([(t, replayed_rows(t, self._replay)) for t in microbatch], device)
        return Routing(replay=routes, floor=self._replay_floor)

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

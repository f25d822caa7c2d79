"""The policy trainer of reinforcement learning: one batch in, one optimiser step done.

    micro-batch ──▶ tokens ──▶ model ──▶ log-probabilities ──▶ its share of the loss ─┬─▶ gradients add up ──▶ one step
    examples ──────▶ student and teacher ──▶ divergences ─────▶ their share of it ─────┘

Owns the computation of a micro-batch's loss and the metrics of a step. The step itself is in
:mod:`etude.trainer.optimisation`, the loss in :mod:`etude.trainer.losses`, that of hinted turns in
:mod:`etude.trainer.distillation`. :mod:`etude.run.trainer` waits for batches, splits, publishes and commits them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from etude.config.hints import HintsConfig
from etude.config.inference import NumericsConfig
from etude.config.training import LossConfig
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.hf import CausalModel
from etude.trainer.corrections import proximal_logprobs
from etude.trainer.distillation import Distillation, DistillationExample
from etude.trainer.draft import draft_divergences
from etude.trainer.losses import LossTokens, Totals, distillation_normaliser, policy_loss
from etude.trainer.optimisation import Optimisation
from etude.trainer.parallel_context import ContextParallel
from etude.trainer.replay import routing_of
from etude.trainer.scores import sampled_tokens, score
from etude.types import Trajectory

Member = TypeVar("Member")
MicroBatch: TypeAlias = Sequence[Trajectory]
"""Trajectories that go through the model together, concatenated; empty: the pass only serves the collectives."""


NOTHING_LEARNT: Mapping[str, float] = {"trained_tokens": 0}
"""The metrics of a batch without loss tokens, whose step changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatchStats:
    """A micro-batch's part of the step's metrics."""

    entropy_sum: float = 0.0
    truncated: int = 0
    masked: int = 0
    routing: Routing | None = None
    hinted: int = 0
    hint_nats: float = 0.0
    draft_nats: float = 0.0


NO_HINTS = HintsConfig()


class PolicyTrainer:
    """Takes optimiser steps on a policy-gradient loss.

    ``numerics`` says which routes of the engine are replayed. With a ``context`` the ranks that share it get the same
    micro-batches and compute them together. Raises ``ValueError`` if ``numerics.replay`` is ``auto``: it must be
    resolved for the device first.
    """

    def __init__(
        self,
        optimisation: Optimisation,
        loss: LossConfig,
        numerics: NumericsConfig,
        context: ContextParallel | None = None,
        hints: HintsConfig = NO_HINTS,
    ) -> None:
        if numerics.replay == "auto":
            raise ValueError("numerics.replay = 'auto' depends on the device: decide it before a trainer is made")
        self.optimisation = optimisation
        """The model's weights and all other state that the next step depends on."""
        self._config = loss
        self._replay = numerics.replay
        self.replay_floor = numerics.replay_floor
        """``numerics.replay_floor``, for other callers that score with this model."""
        self._context = context
        self._distillation = Distillation(
            config=hints, replay=numerics.replay, floor=numerics.replay_floor, context=context
        )

    @property
    def model(self) -> CausalModel:
        """The model in training."""
        return self.optimisation.model

    def step(
        self,
        step: int,
        microbatches: Sequence[MicroBatch],
        totals: Totals,
        before_update: Callable[[], None] = lambda: None,
        examples: Sequence[Sequence[DistillationExample]] = (),
    ) -> dict[str, float]:
        """Update the weights once from all micro-batches and examples; a batch without either leaves them as they are.

        ``totals`` are those of the whole batch, over all ranks. ``microbatches`` and ``examples`` are this rank's, with
        the same number of passes on every rank. ``before_update`` is called once the gradients are complete, right
        before the weights change. Raises :class:`~etude.errors.DivergedError`, before anything changes, if the gradient
        is not finite.
        """
        if not totals.tokens and not examples:
            return dict(NOTHING_LEARNT)
        counted: list[_MicroBatchStats] = []

        def losses() -> Iterator[Tensor]:
            for microbatch in microbatches:
                loss, stats = self._loss(step, microbatch, totals)
                counted.append(stats)
                yield loss
            for chunk in examples:
                loss, stats = self._distillation_loss(chunk, totals)
                counted.append(stats)
                yield loss

        norm = self.optimisation.step(step, losses(), before_update)
        read = [t for microbatch in microbatches for t in microbatch]
        read += [example.student for chunk in examples for example in chunk]
        metrics: dict[str, float] = {
            "trained_tokens": sum(len(t.token_ids) for t in read),
            "grad_norm": norm,
            "replayed_pairs": sum(stats.routing.pairs for stats in counted if stats.routing),
            "flipped_pairs": sum(stats.routing.flips for stats in counted if stats.routing),
            "replaced_pairs": sum(stats.routing.replaced for stats in counted if stats.routing),
            "hinted_tokens": sum(stats.hinted for stats in counted),
            "hint_nats": sum(stats.hint_nats for stats in counted),
        }
        if totals.tokens:  # 0: a step on hints only
            metrics |= {
                "entropy": sum(stats.entropy_sum for stats in counted) / totals.tokens,
                "truncated_share": sum(stats.truncated for stats in counted) / totals.tokens,
                "masked_share": sum(stats.masked for stats in counted) / totals.tokens,
            }
            if self._config.draft_learning_rate:
                metrics["draft_kl"] = sum(stats.draft_nats for stats in counted) / totals.tokens
        return metrics

    def _loss(self, step: int, microbatch: MicroBatch, totals: Totals) -> tuple[Tensor, _MicroBatchStats]:
        """A micro-batch's share of the step's loss."""
        device = self.model.embedding.device
        tokens = sampled_tokens(microbatch, [t.loss_mask for t in microbatch], device)
        routing = routing_of(microbatch, self._replay, self.replay_floor, device)
        with_entropies = self._config.entropy_coef > 0
        scores = score(self.model, tokens, routing, self._context, differentiate_entropies=with_entropies)
        if not microbatch:
            return scores.logprobs_N.sum(), _MicroBatchStats()
        proximal_N = tokens.old_logprobs_N
        assert proximal_N is not None or self._config.old_policy == "engine", "the loss asks for the old policy"
        if self._config.correction == "decoupled":
            staleness_N = step - 1 - tokens.versions_N
            proximal_N = proximal_logprobs(scores.logprobs_N, tokens.engine_logprobs_N, staleness_N)
        of_loss = LossTokens(
            logprobs_N=scores.logprobs_N,
            engine_logprobs_N=tokens.engine_logprobs_N,
            advantages_N=tokens.advantages_N,
            trajectories_N=tokens.trajectories_N,
            proximal_logprobs_N=proximal_N,
            reference_logprobs_N=tokens.reference_logprobs_N,
            entropies_N=scores.entropies_N,
        )
        token_scores = policy_loss(of_loss, self._config, totals)
        entropy_sum = float(scores.entropies_N.detach().sum())
        loss, draft_nats = token_scores.loss, 0.0
        if self._config.draft_learning_rate and scores.hidden_TH is not None:
            assert isinstance(self.model, Decoder), "refused with the recipe"
            draft_sum = draft_divergences(self.model, tokens, scores.hidden_TH).sum()
            loss, draft_nats = loss + draft_sum / totals.tokens, float(draft_sum.detach())
        stats = _MicroBatchStats(
            entropy_sum=entropy_sum,
            truncated=token_scores.truncated,
            masked=token_scores.masked,
            routing=routing,
            draft_nats=draft_nats,
        )
        return loss, stats

    def _distillation_loss(
        self, examples: Sequence[DistillationExample], totals: Totals
    ) -> tuple[Tensor, _MicroBatchStats]:
        """The share of a micro-batch of examples in the step's loss."""
        scores = self._distillation.teach(self.model, examples, distillation_normaliser(self._config, totals))
        return scores.loss, _MicroBatchStats(hinted=scores.tokens, hint_nats=scores.nats)


def sample_share(members: Sequence[Member], share: float, step: int) -> list[Member]:
    """A reproducible random share of a batch's members, at least one unless ``share`` is 0."""
    if not members or share == 0:
        return []
    count = max(1, round(share * len(members)))
    chosen = np.random.default_rng(step).choice(len(members), size=count, replace=False)
    return [members[index] for index in sorted(chosen)]

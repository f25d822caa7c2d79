"""Inputs of :func:`etude.rewards.score.penalty`: rollouts of groups, and their distance from the reference."""

from collections.abc import Sequence

from etude.config.recipe import RunConfig
from etude.rewards.score import penalty
from etude.trainer.batching.build import build_trajectories
from etude.trainer.batching.packing import Cost, pack
from etude.trainer.reference import Reference
from etude.types import Group, Rollout, Trajectory


class Penalties:
    """Computes the penalties of a recipe."""

    def __init__(self, config: RunConfig, reference: Reference | None) -> None:
        """``reference`` is given exactly if ``loss.reference_beta`` is above 0."""
        if (reference is not None) != (config.loss.reference_beta > 0):
            raise ValueError(f"loss.reference_beta = {config.loss.reference_beta:g} does not go with {reference!r}")
        self._effort = config.effort
        self._beta = config.loss.reference_beta
        self._max_tokens = config.trainer.microbatch_tokens
        self._reference = reference

    def of(self, groups: Sequence[Group]) -> dict[str, float]:
        """Rollout → penalty, for :func:`~etude.trainer.batching.batch.build_batch`; empty if effort and reference are
        off. Payloads of turns must have been fetched.
        """
        if not self._effort.weight and self._reference is None:
            return {}
        rollouts = [rollout for group in groups for rollout in group.rollouts if not rollout.is_quarantined]
        nats = dict.fromkeys((rollout.rollout_id for rollout in rollouts), 0.0)
        if self._reference is not None:
            for rollout_id, divergence in self._divergences(self._reference, rollouts):
                nats[rollout_id] += divergence
        return {
            rollout.rollout_id: penalty(rollout, self._effort, reference_beta=self._beta, nats=nats[rollout.rollout_id])
            for rollout in rollouts
        }

    def _divergences(self, reference: Reference, rollouts: Sequence[Rollout]) -> list[tuple[str, float]]:
        """(Rollout, k1) of every trajectory."""
        trajectories = [trajectory for rollout in rollouts for trajectory in build_trajectories(rollout, 0.0)]
        return [
            (trajectories[index].rollout_id, nats)
            for chunk in passes(trajectories, self._max_tokens)
            for index, nats in zip(chunk, reference.divergences([trajectories[i] for i in chunk]), strict=True)
        ]


def passes(trajectories: Sequence[Trajectory], max_tokens: int) -> Sequence[Sequence[int]]:
    """Group trajectory indices into forward passes, for scoring only."""
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    (chunks,) = pack(lengths, max_tokens=max_tokens, ranks=1, cost=Cost(per_token=1, per_pair=0))
    return chunks

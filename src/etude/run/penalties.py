"""What is taken off rewards before the rollouts of a group are compared: their effort, their way from the reference.

Neither is part of the reward that a grader gave: the ledger and every statistic keep that one, evaluations are measured
with it, and it decides what a rollout that cheated is worth.
"""

from collections import defaultdict
from collections.abc import Sequence

from etude.config.recipe import RunConfig
from etude.rewards.shaping.effort import effort_penalty
from etude.trainer.batching.build import build_trajectories
from etude.trainer.batching.packing import Cost, pack
from etude.trainer.reference import Reference
from etude.types import Group, Rollout, Trajectory


class Penalties:
    """The penalties that a recipe asks for."""

    def __init__(self, config: RunConfig, reference: Reference | None) -> None:
        """``reference`` is there exactly where ``loss.reference_beta`` is above 0."""
        if (reference is not None) != (config.loss.reference_beta > 0):
            raise ValueError(f"loss.reference_beta = {config.loss.reference_beta:g} does not go with {reference!r}")
        self._effort = config.effort
        self._beta = config.loss.reference_beta
        self._max_tokens = config.trainer.microbatch_tokens
        self._reference = reference

    def of(self, groups: Sequence[Group]) -> dict[str, float]:
        """Rollout → weight · C(effort) + β · k1, for :func:`~etude.trainer.batching.batch.build_batch`; empty if both
        are off. Payloads of turns must have been fetched.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts if not rollout.is_quarantined]
        penalties: defaultdict[str, float] = defaultdict(float)
        for rollout in rollouts if self._effort.weight else ():
            penalties[rollout.rollout_id] += effort_penalty(rollout, self._effort)
        if self._reference is not None:
            for rollout_id, nats in self._divergences(self._reference, rollouts):
                penalties[rollout_id] += self._beta * nats
        return dict(penalties)

    def _divergences(self, reference: Reference, rollouts: Sequence[Rollout]) -> list[tuple[str, float]]:
        """k1 of every trajectory, with the rollout that it belongs to."""
        trajectories = [trajectory for rollout in rollouts for trajectory in build_trajectories(rollout, 0.0)]
        return [
            (trajectories[index].rollout_id, nats)
            for piece in passes(trajectories, self._max_tokens)
            for index, nats in zip(piece, reference.divergences([trajectories[i] for i in piece]), strict=True)
        ]


def passes(trajectories: Sequence[Trajectory], max_tokens: int) -> Sequence[Sequence[int]]:
    """Split trajectories, by their index, into passes that go through a model together where they are only scored."""
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    (pieces,) = pack(lengths, max_tokens=max_tokens, ranks=1, cost=Cost(per_token=1, per_pair=0))
    return pieces

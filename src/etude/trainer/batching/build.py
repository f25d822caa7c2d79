"""Rollouts to trajectories: turns that continue each other, token for token, are joined.

A conversation is a tree. A turn whose prompt begins with all tokens of an earlier turn continues that turn's branch;
any other turn (a sub-agent, an edited history, a summary) opens a new weighted. Each branch is weighted trajectory:

    turn 1   prompt ▒▒▒▒ sampled ███
    turn 2   prompt ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ sampled ██           branch = ▒▒▒▒███▒▒▒▒▒██   (█ trained, ▒ context)

Tokens that a new branch shares with an older one are context in it, so every sampled token is trained exactly once. A
turn that must not be trained on is context in every branch, and a branch ends with its last trained turn.

The run time is linear in the tokens of all branches, not of all prompts: prompts that are views of one array
(:mod:`etude.ledger.turns`) share their common length without a comparison. Others are compared.

Routes are joined in the same way. A token's row of experts matters twice: for the token sampled after it and, as
context, for all later ones. The rows that produced sampled tokens come from the turn that sampled; all others from the
newest turn that read them, so the last token of a branch has none. Pure.

Array legend: T turns of a rollout, L tokens of a trajectory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etude.types import NO_ROUTE, UNSAMPLED, Floats, Mask, Rollout, Routes, SamplingMask, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightedTurn:
    """A turn with sampled tokens, its advantage, and whether it is trained."""

    turn: Turn
    advantage: np.float32
    trained: bool

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return self.turn.length

    @property
    def sampled(self) -> slice:
        """Span of the turn's sampled tokens in its branch."""
        return slice(len(self.turn.prompt_ids), self.length)


def build_trajectories(
    rollout: Rollout, advantage: float | Floats, trained: Mask | None = None
) -> tuple[Trajectory, ...]:
    """One trajectory per branch of the rollout, in order of their first turns.

    ``advantage`` applies to all sampled tokens or, with shape [T], to each turn's. ``trained`` [T] marks the turns to
    train on, ``None`` all of them; a branch without any makes no trajectory. Turns without sampled tokens are left out.
    Payloads of turns must have been fetched. Raises ``ValueError`` if the turns of a branch have routes of different
    shapes.
    """
    branches = _trained_branches(rollout, advantage, trained)
    return tuple(_trajectory(rollout.rollout_id, branch) for branch in branches)


def count_trajectories(rollout: Rollout, trained: Mask | None = None) -> int:
    """Number of trajectories that :func:`build_trajectories` would make."""
    return len(_trained_branches(rollout, 0.0, trained))


def _trained_branches(rollout: Rollout, advantage: float | Floats, trained: Mask | None) -> list[list[_WeightedTurn]]:
    """The turns of each branch up to its last trained one; branches without any are left out."""
    turns = len(rollout.turns)
    advantages_T = np.broadcast_to(np.asarray(advantage, np.float32), turns)
    trained_T = np.broadcast_to(True if trained is None else trained, turns)
    branches: list[list[_WeightedTurn]] = []
    for index, turn in enumerate(rollout.turns):
        if not len(turn.completion_ids):
            continue
        weighted = _WeightedTurn(turn=turn, advantage=advantages_T[index], trained=bool(trained_T[index]))
        if branch := _longest_continued(turn, branches):
            branch.append(weighted)
        else:
            branches.append([weighted])
    ends = [max((end for end, weighted in enumerate(branch, 1) if weighted.trained), default=0) for branch in branches]
    return [branch[:end] for branch, end in zip(branches, ends, strict=True) if end]


def _longest_continued(turn: Turn, branches: Sequence[list[_WeightedTurn]]) -> list[_WeightedTurn] | None:
    """The longest branch that the turn's prompt begins with."""
    candidates = [branch for branch in branches if turn.continues(branch[-1].turn)]
    return max(candidates, key=lambda branch: branch[-1].length, default=None)


def _trajectory(rollout_id: str, branch: Sequence[_WeightedTurn]) -> Trajectory:
    """The trajectory of a branch: the last turn's prompt has all earlier tokens, and each turn has its span."""
    assert all(weighted.turn.payload is None for weighted in branch), (
        f"payloads of rollout {rollout_id} were not fetched"
    )
    last, trained, length = branch[-1].turn, [weighted for weighted in branch if weighted.trained], branch[-1].length
    loss_mask = np.zeros(length, bool)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, UNSAMPLED, np.int32)
    temperatures = np.ones(length, np.float32)
    advantages = np.zeros(length, np.float32)
    for weighted in trained:
        loss_mask[weighted.sampled] = True
        logprobs[weighted.sampled] = weighted.turn.logprobs
        versions[weighted.sampled] = weighted.turn.versions
        temperatures[weighted.sampled] = weighted.turn.temperature
        advantages[weighted.sampled] = weighted.advantage
    return Trajectory(
        rollout_id=rollout_id,
        token_ids=np.concatenate([last.prompt_ids, last.completion_ids]).astype(np.int32, copy=False),
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        temperatures=temperatures,
        turn_starts=tuple(weighted.sampled.start for weighted in trained),
        advantages=advantages,
        routes=_routes(rollout_id, branch),
        sampling_mask=_sampling_mask(trained, length),
    )


def _routes(rollout_id: str, branch: Sequence[_WeightedTurn]) -> Routes | None:
    """[L, layers, k], ``NO_ROUTE`` where no turn recorded one; ``None`` if no turn recorded any."""
    recorded = [(weighted, weighted.turn.routes) for weighted in branch if weighted.turn.routes is not None]
    if not recorded:
        return None
    shapes = {routes.shape[1:] for _, routes in recorded}
    if len(shapes) > 1:
        raise ValueError(f"rollout {rollout_id}: its turns have routes of different shapes {shapes}: of which model?")
    stitched = np.full((branch[-1].length, *shapes.pop()), NO_ROUTE, np.uint16)
    newest, routes = recorded[-1]  # it read everything that the others read
    context = max(newest.sampled.start - 1, 0)
    stitched[:context] = routes[:context]
    for weighted, routes in recorded:
        sampling = slice(max(weighted.sampled.start - 1, 0), weighted.length - 1)
        stitched[sampling] = routes[sampling]
    return stitched


def _sampling_mask(trained: Sequence[_WeightedTurn], length: int) -> SamplingMask | None:
    """[L], empty for tokens that were not sampled or not truncated; ``None`` if no token was truncated."""
    recorded = [
        (weighted.sampled, weighted.turn.sampling_mask)
        for weighted in trained
        if weighted.turn.sampling_mask is not None
    ]
    if not recorded:
        return None
    sizes = np.zeros(length, np.int64)
    for sampled, mask in recorded:
        sizes[sampled] = mask.sizes
    return SamplingMask(
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        token_ids=np.concatenate([mask.token_ids for _, mask in recorded]),
    )

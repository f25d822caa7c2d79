"""Rollouts to trajectories: which turns continue each other, token for token.

A conversation is a tree. A turn whose prompt begins with all tokens of an earlier turn continues that turn's branch;
any other turn (a sub-agent, an edited history, a summary) opens a new one. Each branch is one trajectory:

    turn 1   prompt ▒▒▒▒ sampled ███
    turn 2   prompt ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ sampled ██           branch = ▒▒▒▒███▒▒▒▒▒██   (█ trained, ▒ context)

What a new branch shares with an older one is context in it, so every sampled token is trained exactly once.

Routes are stitched likewise. A token's row of experts matters twice: for the token that was sampled after it and, as
context, for all later ones. Rows that sampled something come from the turn that did; all others from the newest turn
that read them, so the last token of a branch has none. Pure.

Array legend: L tokens of a trajectory.
"""

from collections.abc import Sequence

import numpy as np

from etude.types import NO_ROUTE, UNSAMPLED, Ids, KeptSets, Rollout, Routes, Trajectory, Turn


def build_trajectories(rollout: Rollout, advantage: float) -> tuple[Trajectory, ...]:
    """One trajectory per branch of the rollout, in order of their first turns; all share the rollout's advantage.

    Turns that sampled nothing carry nothing to train on and are left out. Payloads of turns must have been fetched.
    Raises ``ValueError`` where the turns of a branch have routes of different shapes.
    """
    branches: list[list[Turn]] = []
    for turn in rollout.turns:
        if not len(turn.completion_ids):
            continue
        if branch := _continued_by(turn, branches):
            branch.append(turn)
        else:
            branches.append([turn])
    return tuple(_trajectory(rollout.rollout_id, branch, advantage) for branch in branches)


def _continued_by(turn: Turn, branches: Sequence[list[Turn]]) -> list[Turn] | None:
    """The longest branch that the turn's prompt begins with."""
    candidates = [branch for branch in branches if _begins_with(turn.prompt_ids, branch[-1])]
    return max(candidates, key=lambda branch: _length(branch[-1]), default=None)


def _begins_with(prompt_ids: Ids, turn: Turn) -> bool:
    middle, end = len(turn.prompt_ids), _length(turn)
    return (
        len(prompt_ids) >= end
        and np.array_equal(prompt_ids[middle:end], turn.completion_ids)
        and np.array_equal(prompt_ids[:middle], turn.prompt_ids)
    )


def _length(turn: Turn) -> int:
    return len(turn.prompt_ids) + len(turn.completion_ids)


def _trajectory(rollout_id: str, branch: Sequence[Turn], advantage: float) -> Trajectory:
    """The last turn's prompt holds every token before it; each turn knows where its own were sampled."""
    assert all(turn.payload is None for turn in branch), f"payloads of rollout {rollout_id} were not fetched"
    length = _length(branch[-1])
    loss_mask = np.zeros(length, bool)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, UNSAMPLED, np.int32)
    temperatures = np.ones(length, np.float32)
    for turn in branch:
        sampled = slice(len(turn.prompt_ids), _length(turn))
        loss_mask[sampled] = True
        logprobs[sampled] = turn.logprobs
        versions[sampled] = turn.versions
        temperatures[sampled] = turn.temperature
    return Trajectory(
        rollout_id=rollout_id,
        token_ids=np.concatenate([branch[-1].prompt_ids, branch[-1].completion_ids]).astype(np.int32, copy=False),
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        temperatures=temperatures,
        turn_starts=tuple(len(turn.prompt_ids) for turn in branch),
        advantages=np.where(loss_mask, np.float32(advantage), np.float32(0)),
        routes=_routes(rollout_id, branch),
        kept=_kept(branch),
    )


def _routes(rollout_id: str, branch: Sequence[Turn]) -> Routes | None:
    """[L, layers, k], ``NO_ROUTE`` where no turn says; ``None`` where none says anything."""
    known = [(turn, turn.routes) for turn in branch if turn.routes is not None]
    if not known:
        return None
    shapes = {routes.shape[1:] for _, routes in known}
    if len(shapes) > 1:
        raise ValueError(f"rollout {rollout_id}: its turns have routes of different shapes {shapes}: of which model?")
    stitched = np.full((_length(branch[-1]), *shapes.pop()), NO_ROUTE, np.uint16)
    for turn, routes in known:
        context = max(len(turn.prompt_ids) - 1, 0)
        stitched[:context] = routes[:context]
    for turn, routes in known:
        sampling = slice(max(len(turn.prompt_ids) - 1, 0), _length(turn) - 1)
        stitched[sampling] = routes[sampling]
    return stitched


def _kept(branch: Sequence[Turn]) -> KeptSets | None:
    """[L], empty where nothing was sampled or nothing was cut; ``None`` where nothing was cut at all."""
    known = [(turn, turn.kept) for turn in branch if turn.kept is not None]
    if not known:
        return None
    sizes = np.zeros(_length(branch[-1]), np.int64)
    for turn, kept in known:
        sizes[len(turn.prompt_ids) : _length(turn)] = kept.sizes
    return KeptSets(
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        token_ids=np.concatenate([kept.token_ids for _, kept in known]),
    )

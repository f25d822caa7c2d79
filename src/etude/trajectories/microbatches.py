"""A batch cut into pieces that fit into one forward and backward pass. Pure."""

from collections.abc import Sequence

from etude.types import Trajectory


def microbatches(trajectories: Sequence[Trajectory], max_tokens: int) -> list[tuple[Trajectory, ...]]:
    """Trajectories packed so that rows × longest ≤ ``max_tokens``, each exactly once, longest first.

    Neighbours in length share a piece, so little of it is padding. A trajectory that is longer than ``max_tokens`` by
    itself gets a piece of its own: it is trained on, never cut.
    """
    ordered = sorted(trajectories, key=lambda trajectory: len(trajectory.token_ids), reverse=True)
    pieces = []
    start = 0
    while start < len(ordered):
        rows = max(1, max_tokens // len(ordered[start].token_ids))
        pieces.append(tuple(ordered[start : start + rows]))
        start += rows
    return pieces

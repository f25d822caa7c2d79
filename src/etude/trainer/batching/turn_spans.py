"""Spans of a rollout's turns in its trajectories.

Trajectories are built from many turns; this module finds each turn again, by comparing tokens. Pure.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from etude.types import Trajectory, Turn

Place: TypeAlias = tuple[int, slice]
"""Index of a trajectory, and the sampled tokens of one turn in it."""


def places(turns: Sequence[Turn], trajectories: Sequence[Trajectory]) -> list[Place | None]:
    """The span in which each turn is trained; ``None`` for a turn that is only context or absent.

    ``trajectories`` are those built from the turns. Turns with equal prompts and completions are distinguished by their
    order.
    """
    free: defaultdict[int, list[int]] = defaultdict(list)
    for index, trajectory in enumerate(trajectories):
        for start in trajectory.turn_starts:
            free[start].append(index)
    spans: list[Place | None] = []
    for turn in turns:
        start, end = len(turn.prompt_ids), turn.length
        holder = next((index for index in free[start] if _has(trajectories[index], turn)), None)
        if holder is not None:
            free[start].remove(holder)
        spans.append(None if holder is None else (holder, slice(start, end)))
    return spans


def _has(trajectory: Trajectory, turn: Turn) -> bool:
    start, end = len(turn.prompt_ids), turn.length
    is_same = np.array_equal(trajectory.token_ids[start:end], turn.completion_ids)
    return is_same and end > start and np.array_equal(trajectory.token_ids[:start], turn.prompt_ids)

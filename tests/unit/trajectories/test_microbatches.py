"""How a batch is cut: nothing lost, nothing twice, nothing too large."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.trajectories.microbatches import microbatches
from etude.types import Trajectory


def trajectory(name: str, length: int) -> Trajectory:
    return Trajectory(
        rollout_id=name,
        token_ids=np.zeros(length, np.int32),
        loss_mask=np.zeros(length, bool),
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        temperatures=np.ones(length, np.float32),
        turn_starts=(),
        advantages=np.zeros(length, np.float32),
    )


def lengths_of(lengths: list[int], max_tokens: int) -> list[list[int]]:
    pieces = microbatches([trajectory(str(i), length) for i, length in enumerate(lengths)], max_tokens)
    return [[len(one.token_ids) for one in piece] for piece in pieces]


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 100))
def test_every_trajectory_is_in_one_piece_and_no_piece_is_too_large(lengths: list[int], max_tokens: int) -> None:
    pieces = microbatches([trajectory(str(i), length) for i, length in enumerate(lengths)], max_tokens)
    names = [one.rollout_id for piece in pieces for one in piece]
    assert sorted(names) == sorted(str(i) for i in range(len(lengths)))
    for piece in pieces:
        longest = max(len(one.token_ids) for one in piece)
        assert len(piece) * longest <= max_tokens or len(piece) == 1


def test_neighbours_in_length_share_a_piece() -> None:
    assert lengths_of([2, 10, 3, 9, 2, 3], 20) == [[10, 9], [3, 3, 2, 2]]


def test_a_trajectory_beyond_the_limit_has_a_piece_of_its_own() -> None:
    assert lengths_of([5, 30, 5], 20) == [[30], [5, 5]]


def test_nothing_becomes_nothing() -> None:
    assert microbatches([], 100) == []

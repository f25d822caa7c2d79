"""Which turns become one trajectory, token for token."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.trajectories.build import build_trajectories
from etude.types import UNSAMPLED, Finish, Rollout, RolloutStatus, Turn


def turn(prompt: list[int], completion: list[int], version: int = 0) -> Turn:
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=-np.array(completion, np.float32),
        versions=np.full(len(completion), version, np.int32),
        finish=Finish.STOP,
    )


def rollout(*turns: Turn) -> Rollout:
    return Rollout(
        rollout_id="r", group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0, turns=turns
    )


def test_turns_that_continue_each_other_are_one_trajectory() -> None:
    (trajectory,) = build_trajectories(rollout(turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 9], [6], 7)), 0.5)
    assert trajectory.rollout_id == "r"
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 9, 6]
    assert trajectory.loss_mask.tolist() == [False, False, True, True, False, True]
    assert trajectory.logprobs.tolist() == [0, 0, -3, -4, 0, -6]
    assert trajectory.versions.tolist() == [UNSAMPLED, UNSAMPLED, 5, 5, UNSAMPLED, 7]
    assert trajectory.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0.5]
    assert trajectory.turn_starts == (2, 5)
    assert trajectory.token_ids.dtype == np.int32
    assert trajectory.advantages.dtype == np.float32


def test_an_edited_history_opens_a_branch_whose_shared_prefix_is_context() -> None:
    original, edited = build_trajectories(rollout(turn([1, 2], [3, 4]), turn([1, 2, 3, 8], [5])), 1.0)
    assert original.token_ids.tolist() == [1, 2, 3, 4]
    assert edited.token_ids.tolist() == [1, 2, 3, 8, 5]
    assert edited.loss_mask.tolist() == [False, False, False, False, True]


def test_a_repeated_call_is_a_branch_of_its_own() -> None:
    assert len(build_trajectories(rollout(turn([1], [2]), turn([1], [2])), 1.0)) == 2


def test_a_turn_returns_to_the_branch_it_continues() -> None:
    main, side = turn([1], [2]), turn([7], [8])
    first, second = build_trajectories(rollout(main, side, turn([1, 2, 3], [4]), turn([7, 8], [9])), 1.0)
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert second.token_ids.tolist() == [7, 8, 9]


def test_the_longest_of_several_branches_is_continued() -> None:
    short, long = turn([1], [2]), turn([1], [2, 3])
    first, second = build_trajectories(rollout(short, long, turn([1, 2, 3, 4], [5])), 1.0)
    assert first.token_ids.tolist() == [1, 2]
    assert second.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_turns_without_a_sampled_token_are_left_out() -> None:
    assert build_trajectories(rollout(turn([1], [])), 1.0) == ()


TOKENS = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Turns that continue, branch off or start afresh, over an alphabet small enough to collide."""
    turns: list[Turn] = []
    for version in range(draw(st.integers(1, 6))):
        prefix = list[int]()
        if turns:
            parent = turns[draw(st.integers(0, len(turns) - 1))]
            prefix = [*parent.prompt_ids.tolist(), *parent.completion_ids.tolist()]
            prefix = prefix[: draw(st.integers(0, len(prefix)) | st.just(len(prefix)))]
        turns.append(turn([*prefix, *draw(TOKENS)], draw(TOKENS), version))
    return turns


@settings(deadline=None)
@given(conversations())
def test_every_sampled_token_is_trained_exactly_once_in_its_own_context(turns: list[Turn]) -> None:
    trained = []
    for trajectory in build_trajectories(rollout(*turns), 1.0):
        starts = (*trajectory.turn_starts, len(trajectory.token_ids))
        for start, bound in pairwise(starts):
            span = range(start, next((i for i in range(start, bound) if not trajectory.loss_mask[i]), bound))
            ids = trajectory.token_ids.tolist()
            versions = set(trajectory.versions[span.start : span.stop].tolist())
            trained.append((ids[:start], ids[span.start : span.stop], versions))
        assert (trajectory.loss_mask == (trajectory.versions != UNSAMPLED)).all()
    sampled = [
        (one.prompt_ids.tolist(), one.completion_ids.tolist(), set(one.versions.tolist()))
        for one in turns
        if len(one.completion_ids)
    ]
    assert sorted(trained, key=repr) == sorted(sampled, key=repr)

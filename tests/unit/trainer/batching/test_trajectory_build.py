"""Turns that become one trajectory, token for token."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.trainer.batching.build import build_trajectories
from etude.types import NO_ROUTE, UNSAMPLED, Finish, Ids, Rollout, RolloutStatus, SamplingMask, Turn


def turn(prompt: list[int], completion: list[int], version: int = 0, *, routed: bool = True) -> Turn:
    """A turn at temperature 0.5 whose routes all equal its version."""
    read = len(prompt) + len(completion) - 1
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=-np.array(completion, np.float32),
        versions=np.full(len(completion), version, np.int32),
        finish=Finish.STOP,
        temperature=0.5,
        routes=np.full((read, 1, 1), version, np.uint16) if routed and completion else None,
    )


def routes_of(*turns: Turn) -> list[int]:
    """The routes of the only trajectory."""
    (trajectory,) = build_trajectories(rollout(*turns), 1.0)
    assert trajectory.routes is not None
    return [int(route) for route in trajectory.routes[:, 0, 0]]


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
    assert trajectory.temperatures.tolist() == [1, 1, 0.5, 0.5, 1, 0.5]
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


def test_replies_that_continue_one_node_train_what_they_share_once() -> None:
    shared, one, two = turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 3], [5])
    first, second = build_trajectories(rollout(shared, one, two, turn([1, 2, 3, 5, 6], [7])), 1.0)
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert first.loss_mask.tolist() == [False, True, False, True]
    assert second.token_ids.tolist() == [1, 2, 3, 5, 6, 7]
    assert second.loss_mask.tolist() == [False, False, False, True, False, True]


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


def test_rows_that_sampled_are_their_turns_and_all_others_the_newest_readers() -> None:
    first, second = turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 9], [6], 7)
    assert routes_of(first) == [5, 5, 5, NO_ROUTE]
    assert routes_of(first, second) == [7, 5, 5, 7, 7, NO_ROUTE]


def test_turns_that_say_nothing_leave_gaps() -> None:
    first, second = turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 9], [6], 7)
    silent = [turn([1, 2], [3, 4], 5, routed=False), turn([1, 2, 3, 4, 9], [6], 7, routed=False)]
    assert routes_of(first, silent[1]) == [5, 5, 5, NO_ROUTE, NO_ROUTE, NO_ROUTE]
    assert routes_of(silent[0], second) == [7, 7, 7, 7, 7, NO_ROUTE]
    (trajectory,) = build_trajectories(rollout(*silent), 1.0)
    assert trajectory.routes is None


def test_routes_of_two_models_do_not_mix() -> None:
    other = replace(turn([1, 2, 3], [4]), routes=np.zeros((3, 2, 1), np.uint16))
    with pytest.raises(ValueError, match=r"rollout r: .* different shapes"):
        build_trajectories(rollout(turn([1], [2]), other), 1.0)


def test_sampling_masks_are_at_the_positions_of_their_tokens() -> None:
    sets = SamplingMask(offsets=np.array([0, 2, 2], np.int64), token_ids=np.array([3, 8], np.int32))
    last = SamplingMask(offsets=np.array([0, 1], np.int64), token_ids=np.array([6], np.int32))
    first, third = (
        replace(turn([1, 2], [3, 4]), sampling_mask=sets),
        replace(turn([1, 2, 3, 4, 9, 5, 1], [6]), sampling_mask=last),
    )
    (trajectory,) = build_trajectories(rollout(first, turn([1, 2, 3, 4, 9], [5]), third), 1.0)
    assert trajectory.sampling_mask is not None
    assert trajectory.sampling_mask.sizes.tolist() == [0, 0, 2, 0, 0, 0, 0, 1]
    assert trajectory.sampling_mask.token_ids.tolist() == [3, 8, 6]


def test_each_turn_has_its_own_advantage() -> None:
    turns = [turn([1], [2]), turn([1, 2], []), turn([1, 2, 3], [4, 5]), turn([9], [8])]
    first, second = build_trajectories(rollout(*turns), np.array([0.5, 7, -2, 3], np.float32))
    assert first.advantages.tolist() == [0, 0.5, 0, -2, -2]
    assert second.advantages.tolist() == [0, 3]
    with pytest.raises(ValueError, match="broadcast"):
        build_trajectories(rollout(*turns), np.zeros(3, np.float32))


def test_a_turn_that_is_not_trained_is_context_to_those_that_are() -> None:
    sets = SamplingMask(offsets=np.array([0, 1], np.int64), token_ids=np.array([4], np.int32))
    turns = [turn([1], [2], 5), replace(turn([1, 2, 3], [4], 6), sampling_mask=sets), turn([1, 2, 3, 4], [5], 7)]
    (trajectory,) = build_trajectories(rollout(*turns), 1.0, np.array([True, False, True]))
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert trajectory.loss_mask.tolist() == [False, True, False, False, True]
    assert trajectory.logprobs.tolist() == [0, -2, 0, 0, -5]
    assert trajectory.versions.tolist() == [UNSAMPLED, 5, UNSAMPLED, UNSAMPLED, 7]
    assert trajectory.advantages.tolist() == [0, 1, 0, 0, 1]
    assert trajectory.temperatures.tolist() == [1, 0.5, 1, 1, 0.5]
    assert trajectory.turn_starts == (1, 4)
    assert trajectory.sampling_mask is None
    assert trajectory.routes is not None
    assert trajectory.routes[:, 0, 0].tolist() == [5, 7, 6, 7, NO_ROUTE]


def test_a_branch_ends_with_its_last_trained_turn_and_one_without_any_is_left_out() -> None:
    turns = [turn([1], [2]), turn([1, 2, 3], [4]), turn([9], [8])]
    (trajectory,) = build_trajectories(rollout(*turns), 1.0, np.array([True, False, False]))
    assert trajectory.token_ids.tolist() == [1, 2]
    assert build_trajectories(rollout(*turns), 1.0, np.zeros(3, bool)) == ()


def test_prompts_in_one_memory_are_one_branch_and_so_are_copies() -> None:
    memory = np.arange(1, 10, dtype=np.int32)
    shared = [replace(turn(list(range(1, n)), [n]), prompt_ids=memory[: n - 1]) for n in (2, 4, 7)]
    strided = replace(turn([1, 3], [5]), prompt_ids=memory[:3:2])
    mixed = [shared[0], turn([1, 2, 3], [4]), shared[2], strided, turn([1, 3, 5, 6], [7])]
    for turns, lengths in ((shared, [7]), (mixed, [7, 5])):
        built = build_trajectories(rollout(*turns), 1.0)
        assert [len(trajectory.token_ids) for trajectory in built] == lengths


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


def plainly_branched(turns: list[Turn]) -> list[list[Turn]]:
    """The branches of turns by the definition: whole prompts compared, token for token."""
    branches: list[list[Turn]] = []
    for one in turns:
        ends = [[*branch[-1].prompt_ids.tolist(), *branch[-1].completion_ids.tolist()] for branch in branches]
        fitting = [i for i, ids in enumerate(ends) if one.prompt_ids.tolist()[: len(ids)] == ids]
        if not len(one.completion_ids):
            continue
        if fitting:
            branches[max(fitting, key=lambda i: (len(ends[i]), -i))].append(one)
        else:
            branches.append([one])
    return branches


def in_one_memory(turns: list[Turn]) -> list[Turn]:
    """The same turns; a prompt that is a prefix of another one is a view of that array."""
    buffers = sorted((one.prompt_ids for one in turns), key=len, reverse=True)
    return [
        replace(
            one, prompt_ids=next(ids for ids in buffers if is_beginning(one.prompt_ids, ids))[: len(one.prompt_ids)]
        )
        for one in turns
    ]


def is_beginning(one: Ids, other: Ids) -> bool:
    return len(one) <= len(other) and bool((other[: len(one)] == one).all())


@settings(deadline=None)
@given(conversations(), st.booleans())
def test_branches_are_those_of_comparing_whole_prompts_wherever_they_lie(turns: list[Turn], shared: bool) -> None:
    expected = plainly_branched(turns)
    built = build_trajectories(rollout(*(in_one_memory(turns) if shared else turns)), 1.0)
    assert [trajectory.turn_starts for trajectory in built] == [
        tuple(len(one.prompt_ids) for one in branch) for branch in expected
    ]
    for trajectory, branch in zip(built, expected, strict=True):
        assert trajectory.token_ids.tolist() == [*branch[-1].prompt_ids.tolist(), *branch[-1].completion_ids.tolist()]
        sampled = np.concatenate([one.versions for one in branch])
        assert trajectory.versions[trajectory.loss_mask].tolist() == sampled.tolist()


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


@settings(deadline=None)
@given(conversations())
def test_every_sampled_token_has_the_routes_that_sampled_it(turns: list[Turn]) -> None:
    for trajectory in build_trajectories(rollout(*turns), 1.0):
        assert trajectory.routes is not None
        routes = trajectory.routes[:, 0, 0]
        sampled = np.flatnonzero(trajectory.loss_mask[1:])
        assert (routes[sampled] == trajectory.versions[1:][sampled]).all()
        assert routes[-1] == NO_ROUTE
        assert (routes[:-1] != NO_ROUTE).all()

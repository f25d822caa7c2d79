"""Every trained token is found again where its trajectory has it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.trainer.batching.build import build_trajectories
from etude.trainer.batching.turn_spans import places
from etude.types import Finish, Rollout, RolloutStatus, Turn

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


def make_turn(prompt: list[int], completion: list[int]) -> Turn:
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.full(len(completion), -1.0, np.float32),
        versions=np.zeros(len(completion), np.int32),
        finish=Finish.STOP,
    )


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), TOKENS, TOKENS), min_size=1, max_size=6))
def test_every_turn_has_a_place_in_which_its_tokens_are_trained(steps: list[tuple[bool, list[int], list[int]]]) -> None:
    turns, context = list[Turn](), list[int]()
    for begins_anew, heard, text in steps:
        context = heard if begins_anew else context + heard
        turns.append(make_turn(context, text))
        context = context + text
    rollout = Rollout(
        rollout_id="r", group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0, turns=tuple(turns)
    )
    trajectories = build_trajectories(rollout, 0.5)
    result = places(turns, trajectories)
    for turn, place in zip(turns, result, strict=True):
        assert place is not None
        trajectory, where = trajectories[place[0]], place[1]
        assert trajectory.token_ids[where].tolist() == turn.completion_ids.tolist()
        assert trajectory.token_ids[: where.start].tolist() == turn.prompt_ids.tolist()
        assert trajectory.loss_mask[where].all()
    assert len({(place[0], place[1].start) for place in result if place}) == len(turns)
    assert sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories) == sum(
        len(t.completion_ids) for t in turns
    )


def test_a_turn_that_no_trajectory_has_has_no_place() -> None:
    assert places([make_turn([1, 2], [3])], ()) == [None]
    rollout = Rollout(
        rollout_id="r", group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0,
        turns=(make_turn([1, 2], [3]),),
    )  # fmt: skip
    strangers = [make_turn([1, 1], [3]), make_turn([1, 2], [])]
    assert places(strangers, build_trajectories(rollout, 0.0)) == [None, None]


def test_turns_that_are_alike_have_places_of_their_own() -> None:
    turns = (make_turn([1, 2], [3]), make_turn([1, 2], [3]), make_turn([1, 2, 3, 4], [5]))
    rollout = Rollout(
        rollout_id="r", group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0, turns=turns
    )
    trajectories = build_trajectories(rollout, np.array([0.1, 0.2, 0.3], np.float32))
    result = [(trajectories[place[0]].advantages[place[1]].tolist()) for place in places(turns, trajectories) if place]
    assert result == [[np.float32(advantage)] for advantage in (0.1, 0.2, 0.3)]

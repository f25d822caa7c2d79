"""Nouns are frozen, and check at creation what the rest of the system relies on."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from etude import types
from etude.types import (
    NO_ROUTE,
    UNSAMPLED,
    Case,
    Document,
    Finish,
    FunctionChecks,
    Ids,
    PayloadRef,
    Rollout,
    RolloutStatus,
    Routes,
    RouteSpace,
    SamplingMask,
    Trajectory,
    Turn,
    WeightPack,
    WeightVersion,
)

NOUNS = [noun for noun in vars(types).values() if isinstance(noun, type) and dataclasses.is_dataclass(noun)]


def turn(**changes: Any) -> Turn:
    """A turn of two prompt tokens and three sampled ones."""
    fields: dict[str, Any] = {
        "prompt_ids": np.array([1, 2], np.int32),
        "completion_ids": np.array([3, 4, 5], np.int32),
        "logprobs": np.array([-0.1, -0.2, -0.3], np.float32),
        "versions": np.array([7, 7, 8], np.int32),
        "finish": Finish.STOP,
    }
    return Turn(**(fields | changes))


def rollout(**changes: Any) -> Rollout:
    """A graded rollout of one turn."""
    fields: dict[str, Any] = {
        "rollout_id": "r1",
        "group_index": 0,
        "slot": 0,
        "attempt": 0,
        "status": RolloutStatus.GRADED,
        "reward": 0.0,
        "turns": (turn(),),
    }
    return Rollout(**(fields | changes))


def trajectory(**changes: Any) -> Trajectory:
    """The example of the docstring: a prompt of 3, two sampled tokens."""
    fields: dict[str, Any] = {
        "rollout_id": "r1",
        "token_ids": np.arange(5, dtype=np.int32),
        "loss_mask": np.array([False, False, False, True, True]),
        "logprobs": np.array([0, 0, 0, -0.5, -0.5], np.float32),
        "versions": np.array([UNSAMPLED] * 3 + [7, 7], np.int32),
        "temperatures": np.ones(5, np.float32),
        "turn_starts": (3,),
        "advantages": np.array([0, 0, 0, 1, 1], np.float32),
    }
    return Trajectory(**(fields | changes))


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.__name__)
def test_every_noun_is_frozen_slotted_and_keyword_only(noun: Any) -> None:
    assert noun.__dataclass_params__.frozen
    assert "__slots__" in vars(noun)
    assert all(field.kw_only for field in dataclasses.fields(noun))
    assert noun.__doc__


def test_the_examples_of_the_docstrings_hold() -> None:
    assert Case(arguments=([3, 1], 2), expected=6).expected == 6
    assert len(trajectory().token_ids) == 5


def test_a_task_without_a_hidden_case_cannot_be_graded() -> None:
    case = Case(arguments=(1,), expected=2)
    with pytest.raises(ValueError, match="'double' has no hidden case"):
        FunctionChecks(path="double.py", function="double", visible=(case,), hidden=())


def test_a_document_has_a_weight_per_token() -> None:
    with pytest.raises(ValueError, match="document has 3 tokens but 2 weights"):
        Document(token_ids=np.arange(3, dtype=np.int32), weights=np.ones(2, np.float32))


@pytest.mark.parametrize("name", ["completion_ids", "logprobs", "versions"])
def test_a_turn_has_a_logprob_and_a_version_per_sampled_token(name: str) -> None:
    shorter = getattr(turn(), name)[:-1]
    with pytest.raises(ValueError, match=r"one logprob and one version per sampled token, got lengths \{2, 3\}"):
        turn(**{name: shorter})


def test_a_sampled_token_has_a_weight_version() -> None:
    with pytest.raises(ValueError, match="no weight version"):
        turn(versions=np.array([7, UNSAMPLED, 8], np.int32))


def test_a_turn_may_sample_nothing() -> None:
    none = np.array([], np.int32)
    assert len(turn(completion_ids=none, logprobs=none.astype(np.float32), versions=none).versions) == 0


def test_a_graded_rollout_has_a_reward_and_a_turn() -> None:
    with pytest.raises(ValueError, match="rollout r1: status graded with reward None"):
        rollout(reward=None)
    with pytest.raises(ValueError, match="r1 is graded but has no turn"):
        rollout(turns=())


@pytest.mark.parametrize("status", [RolloutStatus.FAILED_INFRA, RolloutStatus.DROPPED])
def test_what_is_not_graded_has_no_reward(status: RolloutStatus) -> None:
    with pytest.raises(ValueError, match=rf"status {status} with reward 0\.0"):
        rollout(status=status)
    assert rollout(status=status, reward=None, turns=()).reward is None


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "versions", "temperatures", "advantages"])
def test_the_arrays_of_a_trajectory_are_as_long_as_its_tokens(name: str) -> None:
    with pytest.raises(ValueError, match=rf"trajectory of r1: {name} is not \[5\]"):
        trajectory(**{name: getattr(trajectory(), name)[:-1]})


def test_routes_and_sampling_masks_have_one_entry_per_token() -> None:
    with pytest.raises(ValueError, match=r"routes is not \[5\]"):
        trajectory(routes=np.zeros((4, 1, 2), np.uint16))
    with pytest.raises(ValueError, match=r"sampling_mask is not \[5\]"):
        trajectory(sampling_mask=mask_of([3], []))


def mask_of(*sets: list[int]) -> SamplingMask:
    offsets = np.cumsum([0, *map(len, sets)], dtype=np.int64)
    return SamplingMask(offsets=offsets, token_ids=np.array([token for one in sets for token in one], np.int32))


def test_sampling_masks_know_their_sizes_and_token_ids() -> None:
    sets = mask_of([1, 3], [], [2])
    assert len(sets) == 3
    assert sets.sizes.tolist() == [2, 0, 1]
    assert sets.holds(np.array([3, 9, 2], np.int32))
    assert not sets.holds(np.array([2, 9, 2], np.int32))


@pytest.mark.parametrize("offsets", [[], [1, 3], [0, 2], [0, 2, 1, 3]])
def test_offsets_of_sampling_masks_ascend_over_all_ids(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="sampling masks of 3 ids have offsets"):
        SamplingMask(offsets=np.array(offsets, np.int64), token_ids=np.arange(3, dtype=np.int32))


def test_each_token_of_a_turn_is_in_its_sampling_mask() -> None:
    assert turn(sampling_mask=mask_of([2, 3], [], [5])).sampling_mask is not None
    for wrong in (mask_of([2], [], [5]), mask_of([3], [4])):
        with pytest.raises(ValueError, match="not all in its sampling mask"):
            turn(sampling_mask=wrong)


def test_a_turn_has_routes_of_every_token_that_was_read() -> None:
    assert turn(routes=np.zeros((4, 2, 1), np.uint16)).routes is not None
    for shape in ((5, 2, 1), (3, 2, 1), (4, 2)):
        with pytest.raises(ValueError, match="a turn that read 4 tokens has routes of shape"):
            turn(routes=np.zeros(shape, np.uint16))


def test_a_turn_holds_its_payload_or_refers_to_it() -> None:
    ref = PayloadRef(digest="ab" * 32, size_bytes=9)
    assert turn(payload=ref).payload == ref
    with pytest.raises(ValueError, match=r"refers to payload abab.* and holds"):
        turn(payload=ref, sampling_mask=mask_of([3], [], []))
    with pytest.raises(ValueError, match=r"'\.\./etc' is not a SHA-256"):
        PayloadRef(digest="../etc", size_bytes=9)


def test_a_temperature_is_not_negative() -> None:
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            turn(temperature=wrong)


SPACE = RouteSpace(layers=2, slots=2, experts=8)


def routes(*row: list[int]) -> Routes:
    """One token's routes in two layers."""
    return np.array([row], np.uint16)


def test_routes_name_different_experts_that_exist_or_none() -> None:
    SPACE.check(routes([0, 7], [NO_ROUTE, NO_ROUTE]), 1)
    for wrong, named in (
        (routes([0, 1], [3, 3]), r"layer 1: \[3, 3\]"),
        (routes([0, 8], [1, 2]), r"layer 0: \[0, 8\]"),
        (routes([0, 1], [NO_ROUTE, 2]), rf"layer 1: \[{NO_ROUTE}, 2\]"),
    ):
        with pytest.raises(ValueError, match=named):
            SPACE.check(wrong, 1)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 2, 2), "uint16"), ((1, 1, 2), "uint16"), ((1, 2, 2), "int64")])
def test_routes_of_another_shape_or_type_are_refused(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(ValueError, match=r"expected uint16\[1, 2, 2\]"):
        SPACE.check(np.zeros(shape, dtype), 1)


def test_a_trained_token_has_a_weight_version() -> None:
    with pytest.raises(ValueError, match="a trained token has no weight version"):
        trajectory(versions=np.array([UNSAMPLED] * 4 + [7], np.int32))
    masked = np.array([False] * 4 + [True])
    trajectory(versions=np.array([UNSAMPLED] * 4 + [7], np.int32), loss_mask=masked)


@pytest.mark.parametrize(("base", "kind"), [(None, "full"), (0, "delta"), (4, "delta")])
def test_a_weight_version_without_a_base_is_full(base: int | None, kind: str) -> None:
    version = WeightVersion(
        version=5,
        base=base,
        base_digest=None,
        digest="d",
        layout="l",
        packs=(WeightPack(digest="p", size_bytes=7, first=0, last=3),),
        step=5,
        recipe="r",
        writer="w",
        created="2026-01-01T00:00:00+00:00",
    )
    assert version.kind == kind
    assert version.size_bytes == 7


def turn_after(prompt_ids: Ids, text_of: int = 1) -> Turn:
    one = np.array([text_of], np.int32)
    zero = np.zeros(1, np.int32)
    return Turn(
        prompt_ids=prompt_ids, completion_ids=one, logprobs=zero.astype(np.float32), versions=zero, finish=Finish.STOP
    )


def test_a_turn_continues_another_if_its_prompt_has_that_ones_prompt_and_what_was_said() -> None:
    memory = np.array([1, 1, 1, 2, 1, 1], np.int32)
    earlier = turn_after(memory[:2])  # [1, 1], and then 1
    for prompt in (memory[:3], memory[:5], memory.copy(), np.repeat(memory, 2)[::2]):
        assert turn_after(prompt).continues(earlier)
    for prompt in (memory[:2], memory[1:], np.array([1, 2, 1], np.int32), memory[:0]):
        assert not turn_after(prompt).continues(earlier)
    strided = turn_after(np.array([1, 9, 2, 1, 1], np.int32)[::2])  # [1, 2, 1], and then 1
    base = strided.prompt_ids.base
    assert base is not None
    assert not turn_after(base).continues(strided)  # it begins at the same byte, and has a 1 in the right place

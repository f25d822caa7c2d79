"""What goes into a record comes out of it, and damage is noticed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.ledger.records import decode_rollout, encode_rollout
from etude.types import Disposition, Finish, PayloadRef, Rollout, RolloutStatus, Turn, Verdict

REFS = st.builds(PayloadRef, digest=st.text("0123456789abcdef", min_size=64, max_size=64), size_bytes=st.integers(0))
TEXT = st.text(max_size=20)
VERDICTS = st.builds(
    Verdict,
    disposition=st.sampled_from(Disposition),
    reward=st.floats(allow_nan=False),
    reason=TEXT,
    flags=st.lists(TEXT, max_size=2).map(tuple),
    hacked=st.booleans(),
    graded=st.floats(allow_nan=False),
    impossible=st.booleans(),
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    prompt, completion = draw(st.integers(0, 20)), draw(st.integers(0, 10))
    return Turn(
        prompt_ids=random.integers(0, 2**31 - 1, prompt, np.int32),
        completion_ids=random.integers(0, 2**31 - 1, completion, np.int32),
        logprobs=-random.random(completion, np.float32),
        versions=random.integers(0, 1000, completion, np.int32),
        finish=draw(st.sampled_from(Finish)),
        temperature=draw(st.floats(0, 2)),
        payload=draw(st.none() | REFS),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    its_turns = tuple(draw(st.lists(turns(), max_size=4)))
    status = draw(st.sampled_from(RolloutStatus)) if its_turns else RolloutStatus.FAILED_INFRA
    numbers = st.floats(allow_nan=False)
    return Rollout(
        rollout_id=draw(TEXT),
        group_index=draw(st.integers(0)),
        slot=draw(st.integers(0, 127)),
        attempt=draw(st.integers(0, 9)),
        status=status,
        reward=draw(numbers) if status is RolloutStatus.GRADED else None,
        reward_parts=draw(st.dictionaries(TEXT, numbers, max_size=3)),
        reason=draw(TEXT),
        counts=draw(st.dictionaries(TEXT, st.integers(0), max_size=3)),
        turns=its_turns,
        seconds=draw(st.floats(0, 1e6)),
        verdict=draw(st.none() | VERDICTS),
    )


def scalars(rollout: Rollout) -> tuple[object, ...]:
    return tuple(getattr(rollout, name) for name in Rollout.__slots__ if name != "turns")


@settings(deadline=None, max_examples=50)
@given(rollouts())
def test_a_rollout_survives_its_record_bit_for_bit(rollout: Rollout) -> None:
    decoded = decode_rollout(encode_rollout(rollout))
    assert scalars(decoded) == scalars(rollout)
    assert len(decoded.turns) == len(rollout.turns)
    for ours, theirs in zip(decoded.turns, rollout.turns, strict=True):
        assert ours.finish is theirs.finish
        assert (ours.temperature, ours.payload) == (theirs.temperature, theirs.payload)
        for name in ("prompt_ids", "completion_ids", "logprobs", "versions"):
            array, original = getattr(ours, name), getattr(theirs, name)
            assert array.dtype == original.dtype
            assert array.tobytes() == original.tobytes()


@settings(deadline=None, max_examples=50)
@given(rollouts(), st.data())
def test_a_cut_or_lengthened_rollout_record_is_damaged(rollout: Rollout, data: st.DataObject) -> None:
    record = encode_rollout(rollout)
    cut = record[: data.draw(st.integers(0, len(record) - 1))]
    for damaged in (cut, record + b"\0"):
        with pytest.raises(DamagedError, match="unreadable rollout record"):
            decode_rollout(damaged)


def test_routes_never_get_into_a_record() -> None:
    ids = np.array([1], np.int32)
    turn = Turn(
        prompt_ids=ids,
        completion_ids=ids,
        logprobs=-ids.astype(np.float32),
        versions=ids,
        finish=Finish.STOP,
        routes=np.zeros((1, 1, 2), np.uint16),
    )
    rollout = Rollout(
        rollout_id="r", group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0, turns=(turn,)
    )
    with pytest.raises(ValueError, match="stow them first"):
        encode_rollout(rollout)

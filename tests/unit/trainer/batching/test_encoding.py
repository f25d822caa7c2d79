"""Trajectories are read back from bytes exactly, field by field."""

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etude.trainer.batching.encoding import decode_trajectories, encode_trajectories
from etude.types import UNSAMPLED, SamplingMask, Trajectory


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = random.random(length) < 0.5
    offsets = np.concatenate([[0], np.cumsum(random.integers(0, 4, length))]).astype(np.int64)
    return Trajectory(
        rollout_id=draw(st.text(max_size=8)),
        token_ids=random.integers(0, 2**31 - 1, length).astype(np.int32),
        loss_mask=mask,
        logprobs=random.standard_normal(length).astype(np.float32),
        versions=np.where(mask, 3, UNSAMPLED).astype(np.int32),
        temperatures=random.random(length).astype(np.float32),
        turn_starts=tuple(np.flatnonzero(mask)[:2].tolist()),
        advantages=random.standard_normal(length).astype(np.float32),
        routes=random.integers(0, 65_536, (length, 2, 3)).astype(np.uint16) if draw(st.booleans()) else None,
        sampling_mask=SamplingMask(offsets=offsets, token_ids=np.arange(offsets[-1], dtype=np.int32))
        if draw(st.booleans())
        else None,
        old_logprobs=random.standard_normal(length).astype(np.float32) if draw(st.booleans()) else None,
        reference_logprobs=random.standard_normal(length).astype(np.float32) if draw(st.booleans()) else None,
    )


def assert_same(a: object, b: object) -> None:
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, SamplingMask):
        assert isinstance(b, SamplingMask)
        assert_same(a.offsets, b.offsets)
        assert_same(a.token_ids, b.token_ids)
    else:
        assert a == b


@given(st.lists(trajectories(), max_size=4))
def test_what_is_decoded_is_what_was_encoded(originals: list[Trajectory]) -> None:
    result = decode_trajectories(encode_trajectories(originals))
    assert len(result) == len(originals)
    for one, other in zip(originals, result, strict=True):
        for field in fields(Trajectory):
            assert_same(getattr(one, field.name), getattr(other, field.name))

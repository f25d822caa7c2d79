"""A share moves on several threads, gives out frames in order, and comes back when it came to nothing."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import islice
from threading import Event
from typing import ParamSpec, TypeVar

import numpy as np
import pytest

from etude.types import TensorSpec
from etude.weights.chunks import Layout
from etude.weights.digest import content_digest
from etude.weights.encoding import WINDOW, DeltaEncoding, full_frames
from etude.weights.frames import Codec, parse
from etude.weights.shards import Share
from etude.weights.state import State, StoredTensor, snapshot

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")

NUMBERS = 4000
CHUNK_NUMBERS = 100


@pytest.fixture
def encoders() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


class CountingExecutor(Executor):
    """Does everything at once and counts it."""

    def __init__(self) -> None:
        self.submitted = 0

    def submit(  # type: ignore[override]  # typeshed marks the function as positional-only
        self, fn: Callable[Parameters, Answer], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Answer]:
        self.submitted += 1
        future: Future[Answer] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def make_state(seed: int = 0) -> State:
    data = np.random.default_rng(seed).integers(0, 256, 2 * NUMBERS, np.uint8)
    return {"w": StoredTensor(spec=TensorSpec(name="w", dtype="BF16", shape=(NUMBERS,)), data=data)}


def nudged(state: State, places: slice) -> State:
    moved = snapshot(state)
    moved["w"].numbers[places] += np.uint16(1)
    return moved


def share_of(state: State) -> Share:
    return Share.copy_of(Layout.of(state, CHUNK_NUMBERS), state)


@pytest.mark.parametrize("places", [slice(5, None, 170), slice(1000, 2000), slice(0, 0)])
def test_frames_come_in_order_and_lead_to_the_target(encoders: ThreadPoolExecutor, places: slice) -> None:
    state = make_state()
    target = nudged(state, places)
    share, receiver = share_of(state), share_of(state)
    encoding = DeltaEncoding(share, target, Codec.GAPS, encoders)
    frames = list(encoding.frames())
    changed = range(*places.indices(NUMBERS))
    assert [chunk for chunk, _ in frames] == sorted({place // CHUNK_NUMBERS for place in changed})
    for chunk, frame in frames:
        receiver.apply(share.layout.chunks[chunk], parse(frame))
    assert np.array_equal(receiver.tensors["w"].data, target["w"].data)
    assert encoding.changed() == len(changed)
    assert share.content() == content_digest(target)


@pytest.mark.parametrize("codec", [Codec.GAPS, Codec.CLASSES])
@pytest.mark.parametrize("taken", [0, 1, 40])
def test_a_share_is_taken_back_from_wherever_it_is(encoders: ThreadPoolExecutor, codec: Codec, taken: int) -> None:
    state = make_state()
    target = nudged(state, slice(0, 3000, 7))
    target["w"].numbers[:CHUNK_NUMBERS] = 0
    share = share_of(state)
    encoding = DeltaEncoding(share, target, codec, encoders)
    assert len(list(islice(encoding.frames(), taken))) == min(taken, 30)
    encoding.take_back()
    assert np.array_equal(share.tensors["w"].data, state["w"].data)
    assert share.content() == content_digest(state)
    assert share.scrub() == []


def test_work_that_has_not_begun_is_never_done() -> None:
    state, gate = make_state(), Event()
    share = share_of(state)
    encoders = ThreadPoolExecutor(1)
    encoders.submit(gate.wait)
    encoding = DeltaEncoding(share, nudged(state, slice(None)), Codec.GAPS, encoders)
    encoding.take_back()
    gate.set()
    encoders.shutdown()
    assert np.array_equal(share.tensors["w"].data, state["w"].data)


def test_a_share_is_taken_back_after_its_threads_were_stopped() -> None:
    state, gate = make_state(), Event()
    share = share_of(state)
    encoders = ThreadPoolExecutor(1)
    encoders.submit(gate.wait)
    encoding = DeltaEncoding(share, nudged(state, slice(None)), Codec.GAPS, encoders)
    gate.set()
    encoders.shutdown(cancel_futures=True)
    encoding.take_back()
    assert np.array_equal(share.tensors["w"].data, state["w"].data)


def test_a_share_is_taken_back_when_a_chunk_fails(encoders: ThreadPoolExecutor) -> None:
    state = make_state()
    share = share_of(state)
    target = nudged(state, slice(None))
    shorter = StoredTensor(
        spec=TensorSpec(name="w", dtype="BF16", shape=(NUMBERS // 2,)), data=target["w"].data[:NUMBERS].copy()
    )
    encoding = DeltaEncoding(share, {"w": shorter}, Codec.GAPS, encoders)
    with pytest.raises(ValueError, match="same pieces"):
        list(encoding.frames())
    encoding.take_back()
    assert np.array_equal(share.tensors["w"].data, state["w"].data)
    assert share.content() == content_digest(state)


def test_after_it_was_taken_back_a_share_can_go_elsewhere(encoders: ThreadPoolExecutor) -> None:
    state, target = make_state(), make_state(seed=1)
    share, receiver = share_of(state), share_of(state)
    DeltaEncoding(share, nudged(state, slice(None)), Codec.GAPS, encoders).take_back()
    for chunk, frame in DeltaEncoding(share, target, Codec.CLASSES, encoders).frames():
        receiver.apply(share.layout.chunks[chunk], parse(frame))
    assert np.array_equal(receiver.tensors["w"].data, target["w"].data)


def test_full_frames_hold_everything(encoders: ThreadPoolExecutor) -> None:
    state = make_state()
    share = share_of(state)
    receiver = Share.empty(share.layout)
    frames = list(full_frames(share, encoders))
    assert [chunk for chunk, _ in frames] == list(range(NUMBERS // CHUNK_NUMBERS))
    for chunk, frame in frames:
        receiver.apply(share.layout.chunks[chunk], parse(frame))
    assert np.array_equal(receiver.tensors["w"].data, state["w"].data)


def test_full_frames_are_not_encoded_far_ahead() -> None:
    state = make_state()
    share = Share.copy_of(Layout.of(state, 10), state)
    encoders = CountingExecutor()
    taken = 0
    for _ in full_frames(share, encoders):
        taken += 1
        assert encoders.submitted - taken < WINDOW
    assert taken == encoders.submitted == NUMBERS // 10

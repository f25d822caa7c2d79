"""A replica advances on several threads, gives frames in order, and goes back if the version fails."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import islice
from threading import Event
from typing import ParamSpec, TypeVar

import numpy as np
import pytest

from etude.types import TensorSpec
from etude.weights.chunks import Layout
from etude.weights.codecs.classes import CLASSES
from etude.weights.codecs.codec import Codec
from etude.weights.codecs.gaps import GAPS
from etude.weights.digest import state_digest
from etude.weights.frames import parse
from etude.weights.publish import WINDOW, DeltaEncoding, full_frames
from etude.weights.replica import Replica
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


def replica_of(state: State) -> Replica:
    return Replica.copy_of(Layout.of(state, CHUNK_NUMBERS), state)


@pytest.mark.parametrize("places", [slice(5, None, 170), slice(1000, 2000), slice(0, 0)])
def test_frames_come_in_order_and_lead_to_the_target(encoders: ThreadPoolExecutor, places: slice) -> None:
    state = make_state()
    target = nudged(state, places)
    replica, receiver = replica_of(state), replica_of(state)
    encoding = DeltaEncoding(replica, target, GAPS, encoders)
    frames = list(encoding.frames())
    changed = range(*places.indices(NUMBERS))
    assert [chunk for chunk, _ in frames] == sorted({place // CHUNK_NUMBERS for place in changed})
    for chunk, frame in frames:
        receiver.apply(replica.layout.chunks[chunk], parse(frame))
    assert np.array_equal(receiver.tensors["w"].data, target["w"].data)
    assert replica.state_digest() == state_digest(target)


@pytest.mark.parametrize("codec", [GAPS, CLASSES])
@pytest.mark.parametrize("taken", [0, 1, 40])
def test_a_replica_is_taken_back_from_wherever_it_is(encoders: ThreadPoolExecutor, codec: Codec, taken: int) -> None:
    state = make_state()
    target = nudged(state, slice(0, 3000, 7))
    target["w"].numbers[:CHUNK_NUMBERS] = 0
    replica = replica_of(state)
    encoding = DeltaEncoding(replica, target, codec, encoders)
    assert len(list(islice(encoding.frames(), taken))) == min(taken, 30)
    encoding.take_back()
    assert np.array_equal(replica.tensors["w"].data, state["w"].data)
    assert replica.state_digest() == state_digest(state)
    assert replica.scrub() == []


def test_work_that_has_not_begun_is_never_done() -> None:
    state, gate = make_state(), Event()
    replica = replica_of(state)
    encoders = ThreadPoolExecutor(1)
    encoders.submit(gate.wait)
    encoding = DeltaEncoding(replica, nudged(state, slice(None)), GAPS, encoders)
    encoding.take_back()
    gate.set()
    encoders.shutdown()
    assert np.array_equal(replica.tensors["w"].data, state["w"].data)


def test_a_replica_is_taken_back_after_its_threads_were_stopped() -> None:
    state, gate = make_state(), Event()
    replica = replica_of(state)
    encoders = ThreadPoolExecutor(1)
    encoders.submit(gate.wait)
    encoding = DeltaEncoding(replica, nudged(state, slice(None)), GAPS, encoders)
    gate.set()
    encoders.shutdown(cancel_futures=True)
    encoding.take_back()
    assert np.array_equal(replica.tensors["w"].data, state["w"].data)


def test_a_replica_is_taken_back_when_a_chunk_fails(encoders: ThreadPoolExecutor) -> None:
    state = make_state()
    replica = replica_of(state)
    target = nudged(state, slice(None))
    shorter = StoredTensor(
        spec=TensorSpec(name="w", dtype="BF16", shape=(NUMBERS // 2,)), data=target["w"].data[:NUMBERS].copy()
    )
    encoding = DeltaEncoding(replica, {"w": shorter}, GAPS, encoders)
    with pytest.raises(ValueError, match="same segments"):
        list(encoding.frames())
    encoding.take_back()
    assert np.array_equal(replica.tensors["w"].data, state["w"].data)
    assert replica.state_digest() == state_digest(state)


def test_after_it_was_taken_back_a_replica_can_go_elsewhere(encoders: ThreadPoolExecutor) -> None:
    state, target = make_state(), make_state(seed=1)
    replica, receiver = replica_of(state), replica_of(state)
    DeltaEncoding(replica, nudged(state, slice(None)), GAPS, encoders).take_back()
    for chunk, frame in DeltaEncoding(replica, target, CLASSES, encoders).frames():
        receiver.apply(replica.layout.chunks[chunk], parse(frame))
    assert np.array_equal(receiver.tensors["w"].data, target["w"].data)


def test_full_frames_hold_everything(encoders: ThreadPoolExecutor) -> None:
    state = make_state()
    replica = replica_of(state)
    receiver = Replica.empty(replica.layout)
    frames = list(full_frames(replica, encoders))
    assert [chunk for chunk, _ in frames] == list(range(NUMBERS // CHUNK_NUMBERS))
    for chunk, frame in frames:
        receiver.apply(replica.layout.chunks[chunk], parse(frame))
    assert np.array_equal(receiver.tensors["w"].data, state["w"].data)


def test_full_frames_are_not_encoded_far_ahead() -> None:
    state = make_state()
    replica = Replica.copy_of(Layout.of(state, 10), state)
    encoders = CountingExecutor()
    taken = 0
    for _ in full_frames(replica, encoders):
        taken += 1
        assert encoders.submitted - taken < WINDOW
    assert taken == encoders.submitted == NUMBERS // 10

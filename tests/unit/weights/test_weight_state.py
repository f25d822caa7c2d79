"""A state's digest sees everything, and impossible tensors are refused at birth."""

import hashlib

import numpy as np
import pytest

from etude.types import TensorSpec
from etude.weights.state import State, StoredTensor, layout_digest, snapshot, spec_bytes, state_bytes, state_digest


def tensor(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> StoredTensor:
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    return StoredTensor(spec=spec, data=np.frombuffer(data, np.uint8))


def state_of(*tensors: StoredTensor) -> State:
    return {tensor.spec.name: tensor for tensor in tensors}


def test_digest_hashes_what_its_docstring_says() -> None:
    hashed = b"\x0e" + bytes(7) + b'["a","U8",[2]]' + b"xy" + b"\x0e" + bytes(7) + b'["b","F32",[]]' + b"1234"
    state = state_of(tensor("b", "F32", (), b"1234"), tensor("a", "U8", (2,), b"xy"))
    assert state_digest(state) == hashlib.sha256(hashed).hexdigest()


def test_digest_ignores_the_order_of_insertion() -> None:
    one, other = tensor("a", "U8", (1,), b"1"), tensor("b", "U8", (1,), b"2")
    assert state_digest(state_of(one, other)) == state_digest(state_of(other, one))


def test_digest_sees_names_types_shapes_bytes_and_boundaries() -> None:
    states = [
        state_of(),
        state_of(tensor("a", "U8", (4,), b"abcd")),
        state_of(tensor("b", "U8", (4,), b"abcd")),
        state_of(tensor("a", "I8", (4,), b"abcd")),
        state_of(tensor("a", "U8", (2, 2), b"abcd")),
        state_of(tensor("a", "U8", (4,), b"abce")),
        state_of(tensor("a", "U8", (2,), b"ab"), tensor("b", "U8", (2,), b"cd")),
        state_of(tensor("a", "U8", (4,), b"abcd"), tensor("b", "U8", (0,), b"")),
        state_of(tensor("a", "U8", (), b"a")),
        state_of(tensor("a", "U8", (1,), b"a")),
    ]
    assert len({state_digest(state) for state in states}) == len(states)


def test_layout_digest_sees_all_but_the_bytes() -> None:
    one = state_of(tensor("a", "U8", (2,), b"ab"))
    assert layout_digest(one) == layout_digest(state_of(tensor("a", "U8", (2,), b"cd")))
    assert layout_digest(one) != layout_digest(state_of(tensor("a", "U8", (2, 1), b"ab")))


def test_state_bytes_counts_tensor_bytes() -> None:
    assert state_bytes(state_of(tensor("a", "F32", (2,), bytes(8)), tensor("b", "BF16", (), bytes(2)))) == 10


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("F32", (), 4), ("BF16", (3, 5), 30), ("I64", (2, 0), 0), ("U8", (7,), 7)]
)
def test_spec_bytes(dtype: str, shape: tuple[int, ...], size: int) -> None:
    assert spec_bytes(TensorSpec(name="w", dtype=dtype, shape=shape)) == size


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "message"),
    [
        ("float32", (1,), bytes(4), "unknown dtype 'float32'"),
        ("F32", (2,), bytes(7), "is 8 bytes, got 7"),
        ("F32", (-1,), b"", "impossible shape"),
        ("U8", (0, 2**63), b"", "impossible shape"),
    ],
)
def test_impossible_tensors_are_refused(dtype: str, shape: tuple[int, ...], data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensor("w", dtype, shape, data)


@pytest.mark.parametrize("data", [np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2], np.zeros(4, np.int8)])
def test_bytes_must_be_flat_and_contiguous(data: np.ndarray) -> None:
    with pytest.raises(ValueError, match="pass its raw bytes"):
        StoredTensor(spec=TensorSpec(name="w", dtype="U8", shape=(4,)), data=data)


def test_a_tensor_under_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' is filed under 'b'"):
        state_digest({"b": tensor("a", "U8", (1,), b"1")})


def test_snapshot_survives_training_in_place() -> None:
    live = np.zeros(4, np.uint8)
    state = state_of(StoredTensor(spec=TensorSpec(name="w", dtype="F32", shape=()), data=live))
    kept, digest = snapshot(state), state_digest(state)
    live[0] = 1
    assert state_digest(kept) == digest != state_digest(state)

"""Checkpoints of others are read bit for bit, ours are read by others, and no file is trusted."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import orjson
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from etude.errors import DamagedError, UserError
from etude.types import Json, TensorSpec
from etude.weights.interop.checkpoint import (
    INDEX_FILE,
    WEIGHTS_FILE,
    parse_tensor_file,
    read_checkpoint,
    read_tensor_file,
    write_checkpoint,
    write_tensor_file,
)
from etude.weights.state import ELEMENTS, State, StoredTensor, spec_bytes

TORCH_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int = 0) -> StoredTensor:
    """Any bits at all, except that a truth value is 0 or 1."""
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    top = 2 if dtype == "BOOL" else 256
    return StoredTensor(spec=spec, data=np.random.default_rng(seed).integers(0, top, spec_bytes(spec), np.uint8))


def state_of(*tensors: StoredTensor) -> State:
    return {tensor.spec.name: tensor for tensor in tensors}


def every_type() -> State:
    return state_of(*(tensor(f"w.{dtype}", dtype, (3, 5), seed) for seed, dtype in enumerate(ELEMENTS)))


def assert_equal(actual: Mapping[str, StoredTensor], expected: State) -> None:
    assert list(actual) == sorted(expected)
    for name, stored in actual.items():
        assert stored.spec == expected[name].spec
        assert stored.data.tobytes() == expected[name].data.tobytes()


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def file_of(header: Json, body: bytes = b"") -> bytes:
    text = orjson.dumps(header)
    return len(text).to_bytes(8, "little") + text + body


def entry(
    dtype: Json = "U8", shape: list[Json] | None = None, data_offsets: list[Json] | None = None
) -> dict[str, Json]:
    """An entry of a header, of four bytes by default."""
    return {"dtype": dtype, "shape": shape or [4], "data_offsets": data_offsets or [0, 4]}


# --- Others ---------------------------------------------------------------------------------------------------------


def test_every_type_has_its_torch_type() -> None:
    assert TORCH_TYPES.keys() == ELEMENTS.keys()


def test_torch_opens_what_we_write(tmp_path: Path) -> None:
    state = every_type()
    write_checkpoint(tmp_path, state)
    with safe_open(tmp_path / WEIGHTS_FILE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    loaded = safetensors.torch.load_file(tmp_path / WEIGHTS_FILE)
    assert loaded.keys() == state.keys()
    for name, value in loaded.items():
        assert value.dtype == TORCH_TYPES[state[name].spec.dtype]
        assert tuple(value.shape) == (3, 5)
        assert raw(value) == state[name].data.tobytes()


def test_we_open_what_torch_writes(tmp_path: Path) -> None:
    state = every_type()
    values = {
        name: torch.frombuffer(bytearray(stored.data), dtype=TORCH_TYPES[stored.spec.dtype]).reshape(3, 5)
        for name, stored in state.items()
    }
    safetensors.torch.save_file(values, tmp_path / WEIGHTS_FILE, {"format": "pt"})
    assert_equal(read_checkpoint(tmp_path), state)


def test_the_file_equals_that_of_the_safetensors_library(tmp_path: Path) -> None:
    values = {name: np.arange(size, dtype=np.float32) for name, size in (("b", 3), ("ä", 4), ("a", 0))}
    tensors = [
        StoredTensor(
            spec=TensorSpec(name=name, dtype="F32", shape=value.shape), data=np.frombuffer(value.tobytes(), np.uint8)
        )
        for name, value in values.items()
    ]
    write_tensor_file(tmp_path / "ours", tensors, {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == safetensors.numpy.save(values, {"format": "pt"})


# --- Folders --------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32), shard_bytes=st.integers(1, 400))
@settings(max_examples=25, deadline=None)
def test_a_state_survives_any_split(tmp_path_factory: pytest.TempPathFactory, seed: int, shard_bytes: int) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    chance = random.Random(seed)
    shapes = [(), (0, 3), (7,), (2, 3), (11, 1, 2)]
    state = state_of(
        *(
            tensor(f"layer.{place}", chance.choice(list(ELEMENTS)), chance.choice(shapes), seed + place)
            for place in range(chance.randrange(8))
        )
    )
    write_checkpoint(folder, state, shard_bytes=shard_bytes)
    assert_equal(read_checkpoint(folder), state)
    for file in folder.glob("*.safetensors"):
        content = read_tensor_file(file).tensors
        assert len(content) <= 1 or sum(len(stored.data) for stored in content.values()) <= shard_bytes


def test_the_index_is_that_of_hugging_face(tmp_path: Path) -> None:
    state = state_of(tensor("a", "F32", (4,)), tensor("b", "BF16", (8,)), tensor("c", "U8", (100,)))
    write_checkpoint(tmp_path, state, shard_bytes=32)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert json.loads((tmp_path / INDEX_FILE).read_text()) == {
        "metadata": {"total_size": 132},
        "weight_map": {"a": first, "b": first, "c": second},
    }
    assert sorted(file.name for file in tmp_path.iterdir()) == [first, second, INDEX_FILE]


def test_what_is_read_is_a_view_of_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, every_type())
    for stored in read_checkpoint(tmp_path).values():
        assert not stored.data.flags.owndata
        assert not stored.data.flags.writeable
        assert stored.numbers.flags.aligned


def test_tensors_at_odd_addresses_are_copied() -> None:
    header: Json = {
        "a": entry(shape=[3], data_offsets=[0, 3]),
        "b": entry(dtype="F32", shape=[2], data_offsets=[3, 11]),
    }
    tensors = parse_tensor_file(file_of(header, bytes(range(11))), "odd").tensors
    assert tensors["b"].data.tobytes() == bytes(range(3, 11))
    assert tensors["b"].numbers.flags.aligned


# --- Refusals -------------------------------------------------------------------------------------------------------


def test_weights_are_not_mixed_with_others(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, every_type())
    with pytest.raises(UserError, match="holds weights already"):
        write_checkpoint(tmp_path, every_type())


def test_a_folder_without_weights_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a safetensors checkpoint"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"[]", "needs a weight_map"),
        (b'{"weight_map": 1}', "needs a weight_map"),
        (b'{"metadata": [], "weight_map": {}}', "needs a weight_map"),
        (b"{", "JSON is damaged"),
        (b"\xff", "JSON is damaged"),
        (b"[" * 100_000, "JSON is damaged"),
        (b'{"weight_map": {"a": "../model.safetensors"}}', "not a plain"),
        (b'{"weight_map": {"a": "/etc/x.safetensors"}}', "not a plain"),
        (b'{"weight_map": {"a": "x\\u0000.safetensors"}}', "not a plain"),
        (b'{"weight_map": {"a": "config.json"}}', "not a plain"),
        (b'{"weight_map": {"a": 7}}', "not a plain"),
        (b'{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors is missing"),
        (b'{"weight_map": {"b": "model.safetensors"}}', r"lacks \['b'\], also has \['a'\]"),
        (b'{"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}', r"lacks \['b'\], also has \[\]"),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, index: bytes, message: str) -> None:
    write_checkpoint(tmp_path, state_of(tensor("a", "U8", (1,))))
    (tmp_path / INDEX_FILE).write_bytes(index)
    with pytest.raises(DamagedError, match=message):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "header is list"),
        ({"a": 1}, "needs dtype"),
        ({"a": {**entry(), "more": 1}}, "needs dtype"),
        ({"__metadata__": 1}, "expected an object"),
        ({"__metadata__": {"x": 1}}, "texts only"),
        ({"a": entry(dtype=3)}, "has dtype 3"),
        ({"a": entry(dtype="F4")}, "unknown dtype 'F4'"),
        ({"a": entry(shape=[-4])}, "shape"),
        ({"a": entry(shape=[True])}, "shape"),
        ({"a": entry(shape=[4.0])}, "shape"),
        ({"a": entry(shape=[1] * 65)}, "shape"),
        ({"a": entry(shape=[2**63])}, "impossible shape"),
        ({"a": entry(shape=[2**63 - 1] * 64)}, "got 4"),
        ({"a": entry(shape=[5])}, "is 5 bytes, got 4"),
        ({"a": entry(data_offsets=[4, 0])}, "data_offsets"),
        ({"a": entry(data_offsets=[0])}, "data_offsets"),
        ({"a": entry(data_offsets=[0, 2**60])}, "cut short"),
        ({"a": entry(shape=[3], data_offsets=[1, 4])}, "starts at byte 1, not 0"),
        ({"a": entry(), "b": entry()}, "starts at byte 0, not 4"),
        ({"a": entry(shape=[3], data_offsets=[0, 3])}, "1 bytes after its last"),
        ({}, "4 bytes after its last"),
    ],
)
def test_a_bad_header_is_named(header: Json, message: str) -> None:
    with pytest.raises(DamagedError, match=message) as caught:
        parse_tensor_file(file_of(header, b"1234"), "w.safetensors")
    assert "w.safetensors" in str(caught.value)


@pytest.mark.parametrize("start", [b"", b"1234567", b"\xff" * 8, b"\0" * 8, (9).to_bytes(8, "little") + b"{}"])
def test_a_bad_start_is_named(tmp_path: Path, start: bytes) -> None:
    (tmp_path / WEIGHTS_FILE).write_bytes(start)
    with pytest.raises(DamagedError, match=WEIGHTS_FILE):
        read_checkpoint(tmp_path)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    write_tensor_file(tmp_path / "w", every_type().values(), {})
    content = (tmp_path / "w").read_bytes()
    for length in range(len(content)):
        with pytest.raises(DamagedError):
            parse_tensor_file(content[:length], "w")


def test_no_flipped_bit_escapes_as_another_error(tmp_path: Path) -> None:
    """A flipped bit in a name or a value is none of the format's business; any other makes the file damaged."""
    write_tensor_file(tmp_path / "w", every_type().values(), {"format": "pt"})
    content = (tmp_path / "w").read_bytes()
    sizes = [len(stored.data) for stored in parse_tensor_file(content, "w").tensors.values()]
    refused = 0
    for place in range(8 * 1200):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        try:
            tensors = parse_tensor_file(bytes(flipped), "w").tensors
        except DamagedError:
            refused += 1
        else:
            assert [len(stored.data) for stored in tensors.values()] == sizes
    assert refused > 8 * 600


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_escape_as_another_error(content: bytes, with_length: bool) -> None:
    prefix = len(content).to_bytes(8, "little") if with_length else b""
    try:
        parse_tensor_file(prefix + content, "w")
    except DamagedError as error:
        assert str(error).startswith("w")

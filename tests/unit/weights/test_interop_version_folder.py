"""Deltas of slime and miles are read, ours have their bytes, and nothing damaged or misplaced is applied."""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError, UserError
from etude.types import Json, TensorSpec
from etude.weights.interop.checkpoint import INDEX_FILE, read_checkpoint, read_tensor_file
from etude.weights.interop.version_folder import (
    Checksum,
    Encoding,
    apply_change,
    checksum,
    encode_change,
    read_version,
    version_folder,
    write_delta,
    write_full,
)
from etude.weights.state import ELEMENTS, Bytes1d, State, StoredTensor, spec_bytes

FIXTURES = Path(__file__).parent / "fixtures"
THEIRS = MappingProxyType(
    {
        "slime-xor-xxh3-128": (Encoding.XOR, Checksum.XXH3_128),
        "miles-overwrite-adler32": (Encoding.OVERWRITE, Checksum.ADLER32),
    }
)
DELTA_FILE = "model-00000-of-00001.safetensors"


def tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int = 0) -> StoredTensor:
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    return StoredTensor(spec=spec, data=np.random.default_rng(seed).integers(0, 256, spec_bytes(spec), np.uint8))


def some_state() -> dict[str, StoredTensor]:
    tensors = [tensor(f"w.{dtype}", dtype, (9, 7), seed) for seed, dtype in enumerate(ELEMENTS)]
    tensors += [tensor("empty", "F32", (0, 3)), tensor("scalar", "F32", ())]
    return {tensor.spec.name: tensor for tensor in tensors}


def trained(state: State, seed: int, share: float = 0.05) -> dict[str, StoredTensor]:
    """Some bits flipped in every other tensor."""
    chance = np.random.default_rng(seed)
    new = dict(state)
    for name in sorted(state)[seed % 2 :: 2]:
        old = state[name]
        flips = (chance.random(len(old.data)) < share) * chance.integers(1, 256, len(old.data), np.uint8)
        new[name] = StoredTensor(spec=old.spec, data=old.data ^ flips.astype(np.uint8))
    return new


def assert_equal(actual: Mapping[str, StoredTensor], expected: State) -> None:
    assert actual.keys() == expected.keys()
    for name, stored in actual.items():
        assert stored.spec == expected[name].spec
        assert stored.data.tobytes() == expected[name].data.tobytes(), name


def array(data: bytes) -> Bytes1d:
    return np.frombuffer(data, np.uint8)


# --- Others ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", THEIRS)
def test_deltas_of_others_are_read(name: str) -> None:
    root = FIXTURES / name
    expected = read_tensor_file(root / "expected.safetensors").tensors
    base = read_checkpoint(root / "base")
    first = read_version(root, 1, base=base)
    assert_equal(read_version(root, 2, base=base), expected)
    assert_equal(read_version(root, 2, base=first, at=1), expected)
    changed = [tensor for tensor in first if first[tensor].data.tobytes() != base[tensor].data.tobytes()]
    assert len(changed) == 6


@pytest.mark.parametrize("name", THEIRS)
def test_our_deltas_have_the_bytes_of_others(tmp_path: Path, name: str) -> None:
    encoding, kind = THEIRS[name]
    old = read_checkpoint(FIXTURES / name / "base")
    for version in (1, 2):
        new = read_version(FIXTURES / name, version, base=old, at=version - 1)
        ours = write_delta(tmp_path, version, old, new, encoding=encoding, checksum_kind=kind)
        theirs = version_folder(FIXTURES / name, version)
        assert json.loads((ours / INDEX_FILE).read_text()) == json.loads((theirs / INDEX_FILE).read_text())
        actual, expected = read_tensor_file(ours / DELTA_FILE), read_tensor_file(theirs / DELTA_FILE)
        assert_equal(actual.tensors, expected.tensors)
        assert actual.metadata == expected.metadata
        old = new


@pytest.mark.parametrize(
    ("encoding", "change"),
    [
        (Encoding.XOR, bytes([0, 2 ^ 9, 0, 0, 4 ^ 7])),
        (Encoding.OVERWRITE, struct.pack("<III", 2, 1, 4) + bytes([9, 7])),
        (Encoding.XOR_SPARSE, struct.pack("<QQQ", 2, 1, 4) + bytes([2 ^ 9, 4 ^ 7])),
    ],
)
def test_encodings_are_as_documented(encoding: Encoding, change: bytes) -> None:
    old, new = array(bytes([1, 2, 3, 3, 4])), array(bytes([1, 9, 3, 3, 7]))
    payload = encode_change(old, new, encoding, level=1)
    assert zstandard.decompress(payload) == change
    assert apply_change(array(payload), old, encoding, "w").tobytes() == new.tobytes()


def test_checksums_are_as_documented() -> None:
    assert checksum(array(b""), Checksum.XXH3_128) == "99aa06d3014798d86001c324468d497f"
    assert checksum(array(b""), Checksum.ADLER32) == "00000001"
    assert checksum(array(b"Wikipedia"), Checksum.ADLER32) == "11e60398"
    empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert checksum(array(b""), Checksum.BLAKE3) == empty


# --- Streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", Checksum)
@pytest.mark.parametrize("encoding", Encoding)
def test_a_chain_leads_to_every_version(tmp_path: Path, encoding: Encoding, kind: Checksum) -> None:
    states = [some_state()]
    for version in range(1, 5):
        states.append(trained(states[-1], version))
        write_delta(tmp_path, version, states[-2], states[-1], encoding=encoding, checksum_kind=kind)
    for at, base in enumerate(states):
        before = {name: stored.data.copy() for name, stored in base.items()}
        for target in range(at, len(states)):
            assert_equal(read_version(tmp_path, target, base=base, at=at), states[target])
        assert all(np.array_equal(base[name].data, data) for name, data in before.items())


@given(
    old=st.binary(max_size=300),
    flips=st.dictionaries(st.integers(0, 299), st.integers(1, 255), max_size=40),
    encoding=st.sampled_from(Encoding),
)
def test_any_change_is_exact(old: bytes, flips: dict[int, int], encoding: Encoding) -> None:
    new = array(bytes(byte ^ flips.get(place, 0) for place, byte in enumerate(old)))
    payload = encode_change(array(old), new, encoding, level=1)
    assert apply_change(array(payload), array(old), encoding, "w").tobytes() == new.tobytes()


def test_a_full_version_needs_no_base(tmp_path: Path) -> None:
    one, two, three = some_state(), trained(some_state(), 1), trained(some_state(), 2)
    write_delta(tmp_path, 1, one, two)
    write_full(tmp_path, 2, three, shard_bytes=500)
    write_delta(tmp_path, 3, three, two)
    assert_equal(read_version(tmp_path, 2, base={}), three)
    assert_equal(read_version(tmp_path, 3, base={}), two)
    index = json.loads((version_folder(tmp_path, 2) / INDEX_FILE).read_text())
    assert index["metadata"]["version"] == "000002"


def test_a_full_version_of_others_needs_no_index(tmp_path: Path) -> None:
    folder = version_folder(tmp_path, 1)
    folder.mkdir()
    values = {"a": np.arange(3, dtype=np.float32)}
    safetensors.numpy.save_file(values, folder / "model.safetensors")
    assert read_version(tmp_path, 1, base={})["a"].data.tobytes() == values["a"].tobytes()


def test_nothing_changed_is_a_version_too(tmp_path: Path) -> None:
    state = some_state()
    folder = write_delta(tmp_path, 1, state, dict(state))
    assert [file.name for file in folder.iterdir()] == [INDEX_FILE]
    assert_equal(read_version(tmp_path, 1, base=state), state)


def test_a_writer_that_died_leaves_nothing_to_read(tmp_path: Path) -> None:
    state = some_state()
    partial = tmp_path / ".weight_v000001.partial"
    partial.mkdir()
    (partial / DELTA_FILE).write_bytes(b"half")
    with pytest.raises(UserError, match="not published, or not yet"):
        read_version(tmp_path, 1, base=state)
    write_delta(tmp_path, 1, state, trained(state, 1))
    assert [folder.name for folder in tmp_path.iterdir()] == ["weight_v000001"]
    assert_equal(read_version(tmp_path, 1, base=state), trained(state, 1))


# --- Refusals -------------------------------------------------------------------------------------------------------


def test_states_of_other_tensors_have_no_delta(tmp_path: Path) -> None:
    one = {"a": tensor("a", "F32", (4,))}
    for other in ({}, {"a": tensor("a", "I32", (4,))}, {"a": tensor("a", "F32", (2, 2))}):
        with pytest.raises(UserError, match="same tensors"):
            write_delta(tmp_path, 1, one, other)
    assert not list(tmp_path.iterdir())


def test_a_version_is_published_once(tmp_path: Path) -> None:
    state = some_state()
    write_full(tmp_path, 1, state)
    with pytest.raises(UserError, match="published already"):
        write_full(tmp_path, 1, state)
    with pytest.raises(UserError, match="published already"):
        write_delta(tmp_path, 1, state, state)
    for version in (0, -1, 1_000_000):
        with pytest.raises(UserError, match="numbered from 1"):
            write_full(tmp_path, version, state)


def test_versions_before_the_base_are_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pass an older base"):
        read_version(tmp_path, 1, base=some_state(), at=2)


def test_a_wrong_base_is_noticed(tmp_path: Path) -> None:
    old, new = some_state(), trained(some_state(), 1)
    for encoding in Encoding:
        root = tmp_path / encoding
        write_delta(root, 1, old, new, encoding=encoding)
        name = next(name for name in new if new[name] is not old[name])
        wrong = old | {name: StoredTensor(spec=old[name].spec, data=old[name].data ^ np.uint8(1))}
        with pytest.raises(DamagedError, match="wrong base or damaged"):
            read_version(root, 1, base=wrong)
        with pytest.raises(DamagedError, match="which the base lack"):
            read_version(root, 1, base={})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", "000002", "takes version 0 to 2, not 0 to 1"),
        ("version", "-1", "expected a number"),
        ("version", "9" * 5000, "expected a number"),
        ("version", 1.0, "expected a number"),
        ("base_version", "000001", "takes version 1 to 1"),
        ("base_version", None, "expected a number"),
        ("delta_encoding", "xor3", "known are xor, overwrite, xor_sparse"),
        ("delta_encoding", [], "known are xor"),
        ("compression_format", "lz4", "'lz4' is unknown"),
        ("checksum_format", "md5", "known are xxh3-128, blake3, adler32"),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, key: str, value: Json, message: str) -> None:
    state = some_state()
    index = write_delta(tmp_path, 1, state, trained(state, 1)) / INDEX_FILE
    content = json.loads(index.read_text())
    content["metadata"][key] = value
    index.write_text(json.dumps(content))
    with pytest.raises(DamagedError, match=message):
        read_version(tmp_path, 1, base=state)


def test_a_delta_is_never_taken_for_a_full_version(tmp_path: Path) -> None:
    state = some_state()
    index = write_delta(tmp_path, 1, state, trained(state, 1)) / INDEX_FILE
    content = json.loads(index.read_text())
    del content["metadata"]["delta_encoding"]
    for damaged in (content, {"weight_map": content["weight_map"]}):
        index.write_text(json.dumps(damaged))
        with pytest.raises(DamagedError, match="neither a delta's nor a full version's"):
            read_version(tmp_path, 1, base=state)


@pytest.mark.parametrize(
    ("encoding", "change", "message"),
    [
        (Encoding.XOR, b"1234", "4 bytes long, the tensor 5"),
        (Encoding.XOR, b"123456", "unpacks to 6 bytes, at most 5"),
        (Encoding.OVERWRITE, b"", "cannot be 0 bytes"),
        (Encoding.OVERWRITE, struct.pack("<I", 2**32 - 1), "cannot be 4 bytes"),
        (Encoding.OVERWRITE, struct.pack("<II", 1, 5) + b"x", "do not ascend within"),
        (Encoding.OVERWRITE, struct.pack("<III", 2, 1, 1) + b"xy", "do not ascend within"),
        (Encoding.OVERWRITE, struct.pack("<III", 2, 7, 1) + b"xy", "do not ascend within"),
        (Encoding.XOR_SPARSE, struct.pack("<QQ", 1, 2**64 - 1) + b"x", "do not ascend within"),
        (Encoding.XOR_SPARSE, struct.pack("<Q", 2**63), "cannot be 8 bytes"),
    ],
)
@pytest.mark.parametrize("with_size", [True, False])
def test_a_bad_change_is_named(encoding: Encoding, change: bytes, message: str, with_size: bool) -> None:
    payload = zstandard.ZstdCompressor(write_content_size=with_size).compress(change)
    message = message if with_size else message.replace("6 bytes, at most 5", "more than the 5 bytes")
    with pytest.raises(DamagedError, match=message):
        apply_change(array(payload), array(b"12345"), encoding, "w")


def test_a_bomb_is_not_unpacked() -> None:
    bomb = array(zstandard.ZstdCompressor().compress(bytes(10**8)))
    endless = array(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10**8)))
    for encoding in Encoding:
        for payload in (bomb, endless):
            with pytest.raises(DamagedError, match="make sense"):
                apply_change(payload, array(bytes(10)), encoding, "w")


@pytest.mark.parametrize("payload", [b"", b"nothing of the kind", zstandard.compress(b"12345") + b"more"])
def test_what_is_not_one_zstd_frame_is_named(payload: bytes) -> None:
    with pytest.raises(DamagedError, match="w cannot be unpacked"):
        apply_change(array(payload), array(b"12345"), Encoding.XOR, "w")


@pytest.mark.parametrize("file", [DELTA_FILE, INDEX_FILE])
@pytest.mark.parametrize("name", THEIRS)
def test_no_flipped_bit_gets_through(tmp_path: Path, name: str, file: str) -> None:
    """Either the damage is named or the outcome is right all the same (white space, an unused bit of zstd)."""
    root = tmp_path / "root"
    shutil.copytree(FIXTURES / name, root)
    base = read_checkpoint(root / "base")
    expected = read_version(root, 1, base=base)
    path = version_folder(root, 1) / file
    content = path.read_bytes()
    refused = 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            assert_equal(read_version(root, 1, base=base), expected)
        except (DamagedError, UserError):
            refused += 1
    assert refused > 0.9 * len(content)


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0, 0.999))
def test_a_delta_cut_short_is_refused(share: float) -> None:
    root = FIXTURES / "slime-xor-xxh3-128"
    delta = read_tensor_file(version_folder(root, 1) / DELTA_FILE).tensors["layer.0.w"].data
    old = read_checkpoint(root / "base")["layer.0.w"].data
    with pytest.raises(DamagedError):
        apply_change(delta[: int(share * len(delta))], old, Encoding.XOR, "w")

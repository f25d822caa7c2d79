"""``arc_v2`` against the package that Fireworks publishes: each reads what the other writes."""

import zlib
from pathlib import Path

import fireworks_delta_compression as fireworks  # type: ignore[import-untyped]  # it carries no annotations
import numpy as np
import pytest
import safetensors.torch
import torch

from etude.errors import DamagedError, UserError
from etude.types import TensorSpec
from etude.weights.interop.arc import read_arc, write_arc
from etude.weights.interop.checkpoint import WEIGHTS_FILE, read_checkpoint, write_checkpoint
from etude.weights.interop.tensor_file import read_tensor_file, write_tensor_file
from etude.weights.state import State, StoredTensor, spec_bytes

DTYPES = ("U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "F16", "BF16", "I32", "F32", "I64", "F64")
FORMAT = "arc_v2"


def tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int = 0) -> StoredTensor:
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    return StoredTensor(spec=spec, data=np.random.default_rng(seed).integers(0, 256, spec_bytes(spec), np.uint8))


def before() -> dict[str, StoredTensor]:
    tensors = [tensor(f"w.{dtype}", dtype, (16, 24), seed) for seed, dtype in enumerate(DTYPES)]
    tensors += [tensor("scalar", "F32", (1,)), tensor("same", "BF16", (5, 5)), tensor("empty", "BF16", (0, 4))]
    return {tensor.spec.name: tensor for tensor in tensors}


def after() -> dict[str, StoredTensor]:
    chance = np.random.default_rng(1)
    new = before()
    for name, old in before().items():
        if name != "same":
            flips = (chance.random(len(old.data)) < 0.03) * chance.integers(1, 256, len(old.data), np.uint8)
            new[name] = StoredTensor(spec=old.spec, data=old.data ^ flips.astype(np.uint8))
    return new


def as_torch(folder: Path, state: State) -> dict[str, torch.Tensor]:
    if not (folder / WEIGHTS_FILE).exists():
        write_checkpoint(folder, state)
    return safetensors.torch.load_file(folder / WEIGHTS_FILE)


def assert_equal(found: State, expected: State) -> None:
    assert list(found) == sorted(expected)
    for name, stored in found.items():
        assert stored.spec == expected[name].spec
        assert stored.data.tobytes() == expected[name].data.tobytes(), name


def their_file(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.safetensors"
    fireworks.delta_compress_dicts_to_file(
        src=as_torch(tmp_path / "old", before()),
        dst=as_torch(tmp_path / "new", after()),
        diff_file=str(path),
        compression_format=FORMAT,
    )
    return path


def test_we_read_what_they_write(tmp_path: Path) -> None:
    assert_equal(read_arc(their_file(tmp_path), before()), after())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # their reader never writes to it
def test_they_read_what_we_write(tmp_path: Path) -> None:
    write_arc(tmp_path / "ours", before(), after())
    found = fireworks.delta_decompress_dict_from_file(
        src=as_torch(tmp_path / "old", before()), diff_file=str(tmp_path / "ours"), compression_format=FORMAT
    )
    expected = as_torch(tmp_path / "new", after())
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)), name


def test_they_patch_a_file_with_what_we_write(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "old", before())
    write_arc(tmp_path / "ours", before(), after())
    fireworks.delta_decompress_inplace(
        base_path=str(tmp_path / "old" / WEIGHTS_FILE), diff_path=str(tmp_path / "ours"), compression_format=FORMAT
    )
    assert_equal(read_checkpoint(tmp_path / "old"), after())


def test_payloads_and_checksums_are_theirs_byte_for_byte(tmp_path: Path) -> None:
    write_arc(tmp_path / "ours", before(), after())
    ours, theirs = read_tensor_file(tmp_path / "ours"), read_tensor_file(their_file(tmp_path))
    assert ours.metadata == theirs.metadata
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, payload in ours.tensors.items():
        assert payload.data.tobytes() == theirs.tensors[name].data.tobytes(), name


def test_we_read_what_they_compress_in_several_jobs(tmp_path: Path) -> None:
    """From some ten megabytes on their zstd divides the work among the processors, so its bytes are the machine's."""
    size = 24_000_000
    chance = np.random.default_rng(0)
    spec = TensorSpec(name="w", dtype="BF16", shape=(size // 2,))
    old = np.zeros(size, np.uint8)
    new = old.copy()
    new[chance.integers(0, size, size // 50)] = 7
    payload, digest = fireworks.delta_compress(
        src=torch.from_numpy(old).view(torch.bfloat16),
        dst=torch.from_numpy(new).view(torch.bfloat16),
        compression_format=FORMAT,
    )
    compressed = StoredTensor(spec=TensorSpec(name="w", dtype="U8", shape=tuple(payload.shape)), data=payload.numpy())
    write_tensor_file(tmp_path / "theirs", [compressed], {"w": digest})
    found = read_arc(tmp_path / "theirs", {"w": StoredTensor(spec=spec, data=old)})
    assert np.array_equal(found["w"].data, new)


# --- Refusals -------------------------------------------------------------------------------------------------------


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    write_arc(tmp_path / "ours", before(), after())
    fewer = {name: stored for name, stored in before().items() if name != "same"}
    with pytest.raises(UserError, match="'same'"):
        read_arc(tmp_path / "ours", fewer)
    with pytest.raises(UserError, match="same tensors"):
        write_arc(tmp_path / "other", fewer, after())


def test_a_wrong_base_is_noticed(tmp_path: Path) -> None:
    write_arc(tmp_path / "ours", before(), after())
    with pytest.raises(DamagedError, match="wrong base or damaged"):
        read_arc(tmp_path / "ours", after())


def test_arc_v1_is_refused(tmp_path: Path) -> None:
    old = {"a": tensor("a", "U8", (4,))}
    zipped = zlib.compress(bytes(4))
    spec = TensorSpec(name="a", dtype="U8", shape=(len(zipped),))
    write_tensor_file(tmp_path / "v1", [StoredTensor(spec=spec, data=np.frombuffer(zipped, np.uint8))], {"a": "1"})
    with pytest.raises(DamagedError, match="'a' cannot be unpacked"):
        read_arc(tmp_path / "v1", old)


def test_a_missing_checksum_is_noticed(tmp_path: Path) -> None:
    write_arc(tmp_path / "ours", before(), after())
    write_tensor_file(tmp_path / "bare", read_tensor_file(tmp_path / "ours").tensors.values(), {})
    with pytest.raises(DamagedError, match="not missing"):
        read_arc(tmp_path / "bare", before())


def test_no_damage_gets_through(tmp_path: Path) -> None:
    """Cut short or with a flipped bit, a file is refused, or its outcome is right all the same."""
    old = {"a": tensor("a", "BF16", (40, 3)), "b": tensor("b", "F32", (17,), seed=1)}
    new = {name: StoredTensor(spec=stored.spec, data=stored.data ^ np.uint8(1)) for name, stored in old.items()}
    path = tmp_path / "ours"
    write_arc(path, old, new)
    content = path.read_bytes()
    refused = 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        for damaged in (content[:place], bytes(flipped)):
            path.write_bytes(damaged)
            try:
                assert_equal(read_arc(path, old), new)
            except (DamagedError, UserError):
                refused += 1
    assert refused > 1.8 * len(content)

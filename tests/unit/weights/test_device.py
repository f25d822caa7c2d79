"""torch makes the same bytes and digests as numba, and applies the same changes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.weights.device import (
    STORED_TYPES,
    apply_changes_,
    digest_tensor,
    encode_changes_on_device,
    encode_extracted,
    extract,
)
from etude.weights.digest import Digest, digest_numbers
from etude.weights.elements import ELEMENTS
from etude.weights.frames import Codec, decode, encode, parse
from etude.weights.state import NUMBER_TYPES, Numbers, Region

torch.set_num_threads(1)

BEFORE, AFTER = Digest(1, 2), Digest(3, 4)
dtypes = pytest.mark.parametrize("dtype", STORED_TYPES, ids=STORED_TYPES.values())
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
devices = pytest.mark.parametrize("device", DEVICES)


def random_tensor(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Every bit pattern; only truth values where the type is one."""
    rng = np.random.default_rng(seed)
    high = 2 if dtype is torch.bool else 256
    values = torch.from_numpy(rng.integers(0, high, count * dtype.itemsize).astype(np.uint8))
    return values.view(dtype)


def nudged(tensor: Tensor, density: float, seed: int) -> Tensor:
    """Small and large steps, up and down, at some places."""
    rng = np.random.default_rng(seed)
    raw = tensor.view(torch.uint8).numpy().copy()
    if tensor.dtype is torch.bool:
        raw ^= rng.random(len(raw)) < density
    else:
        places = rng.random(len(raw)) < density
        raw[places] += rng.choice([1, 255, 2, 7], int(places.sum())).astype(np.uint8)
    return torch.from_numpy(raw).view(tensor.dtype)


def numbers_of(tensor: Tensor, size_bytes: int) -> Numbers:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().view(NUMBER_TYPES[size_bytes])


@dtypes
@devices
@pytest.mark.parametrize("density", [0.0, 0.0005, 0.02, 0.7])
def test_frames_are_the_same_bytes(dtype: torch.dtype, device: str, density: float) -> None:
    element = ELEMENTS[STORED_TYPES[dtype]]
    old = random_tensor(dtype, 5001, 0)
    new = nudged(old, density, 1)
    expected = encode(
        Codec.GAPS,
        [numbers_of(old, element.size_bytes)],
        [numbers_of(new, element.size_bytes)],
        element,
        before=BEFORE,
        after=AFTER,
    )
    assert encode_changes_on_device(old.to(device), new.to(device), element, before=BEFORE, after=AFTER) == expected


@devices
def test_long_gaps_and_large_steps_are_the_same_bytes(device: str) -> None:
    old = torch.zeros(400_000, dtype=torch.bfloat16)
    new = old.clone()
    values = torch.tensor([1e-40, -1e-40, 1.0, -1.0, float("nan"), float("-inf")])
    new[[0, 255, 511, 70_000, 140_000, 399_999]] = values.bfloat16()
    element = ELEMENTS["BF16"]
    expected = encode(Codec.GAPS, [numbers_of(old, 2)], [numbers_of(new, 2)], element, before=BEFORE, after=AFTER)
    assert encode_changes_on_device(old.to(device), new.to(device), element, before=BEFORE, after=AFTER) == expected


@dtypes
@devices
def test_what_is_extracted_can_be_applied(dtype: torch.dtype, device: str) -> None:
    old = random_tensor(dtype, 3000, 2).to(device)
    new = nudged(old.cpu(), 0.1, 3).to(device)
    positions, steps = extract(old, new)
    assert positions.dtype is torch.int64
    assert steps.dtype is torch.int32
    apply_changes_(old, positions, steps)
    assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_a_decoded_frame_can_be_applied_on_a_device() -> None:
    element = ELEMENTS["F32"]
    old = random_tensor(torch.float32, 1000, 4)
    new = nudged(old, 0.05, 5)
    changes = decode(parse(encode_changes_on_device(old, new, element, before=BEFORE, after=AFTER)))
    assert changes is not None
    matrix = old.view(10, 100)
    apply_changes_(matrix, torch.from_numpy(changes.positions.astype(np.int64)), torch.from_numpy(changes.steps))
    assert torch.equal(matrix.view(-1).view(torch.int32), new.view(torch.int32))


def test_pieces_of_a_chunk_are_concatenated() -> None:
    element = ELEMENTS["BF16"]
    old = [random_tensor(torch.bfloat16, count, count) for count in (300, 77)]
    new = [nudged(tensor, 0.1, 9) for tensor in old]
    first, second = (extract(*pair) for pair in zip(old, new, strict=True))
    positions, steps = torch.cat((first[0], second[0] + 300)), torch.cat((first[1], second[1]))
    expected = encode(
        Codec.GAPS,
        [numbers_of(tensor, 2) for tensor in old],
        [numbers_of(tensor, 2) for tensor in new],
        element,
        before=BEFORE,
        after=AFTER,
    )
    assert encode_extracted(positions, steps, element, 377, (BEFORE, AFTER)) == expected


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2"])
def test_floats_stored_as_bytes_are_read_as_told(name: str) -> None:
    element = ELEMENTS[name]
    old = random_tensor(torch.uint8, 2000, 6)
    new = nudged(old, 0.1, 7)
    expected = encode(Codec.GAPS, [numbers_of(old, 1)], [numbers_of(new, 1)], element, before=BEFORE, after=AFTER)
    assert encode_changes_on_device(old, new, element, before=BEFORE, after=AFTER) == expected
    positions, steps = extract(old, new, element)
    apply_changes_(old, positions, steps, element)
    assert torch.equal(old, new)


@dtypes
@devices
def test_digests_are_the_same(dtype: torch.dtype, device: str) -> None:
    element = ELEMENTS[STORED_TYPES[dtype]]
    tensor = random_tensor(dtype, 60 * 35, 8).view(60, 35)
    numbers = numbers_of(tensor, element.size_bytes)
    key = 0xFFEE_DDCC_BBAA_9988
    width = 35 * element.per_value
    region = Region(offset=(1 << 33) + 5, width=width, stride=3 * width, rows=60)
    assert digest_tensor(tensor.to(device), key, region) == digest_numbers(numbers, key, region)


def test_digests_of_many_blocks_are_the_same() -> None:
    tensor = random_tensor(torch.uint8, (1 << 22) + 12_345, 10)
    region = Region.run(7, 7 + len(tensor))
    assert digest_tensor(tensor, 3, region) == digest_numbers(numbers_of(tensor, 1), 3, region)


def test_tensors_that_are_not_alike_or_not_contiguous_are_refused() -> None:
    square = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="cannot compare"):
        extract(square, square.view(16))
    with pytest.raises(ValueError, match="not contiguous"):
        apply_changes_(square[:, 1:], torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="not stored"):
        extract(square.to(torch.complex128), square.to(torch.complex128))
    with pytest.raises(ValueError, match="has 4 numbers"):
        digest_tensor(square, 0, Region.run(0, 4))

"""torch makes the same digests as numba."""

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.weights.device import STORED_TYPES, digest_tensor
from etude.weights.digest import digest_numbers
from etude.weights.state import ELEMENTS, NUMBER_TYPES, Numbers, Region

torch.set_num_threads(1)

dtypes = pytest.mark.parametrize("dtype", STORED_TYPES, ids=STORED_TYPES.values())
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
devices = pytest.mark.parametrize("device", DEVICES)


def random_tensor(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Every bit pattern; only truth values where the type is one."""
    rng = np.random.default_rng(seed)
    high = 2 if dtype is torch.bool else 256
    values = torch.from_numpy(rng.integers(0, high, count * dtype.itemsize).astype(np.uint8))
    return values.view(dtype)


def numbers_of(tensor: Tensor, size_bytes: int) -> Numbers:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().view(NUMBER_TYPES[size_bytes])


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


def test_tensors_that_do_not_fit_are_refused() -> None:
    square = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="not contiguous"):
        digest_tensor(square[:, 1:], 0, Region.run(0, 12))
    with pytest.raises(ValueError, match="not stored"):
        digest_tensor(square.to(torch.complex128), 0, Region.run(0, 16))
    with pytest.raises(ValueError, match="has 4 numbers"):
        digest_tensor(square, 0, Region.run(0, 4))

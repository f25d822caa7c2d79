"""Byte sequences of frames: stored as they are or compressed, checked when they are read, and byte planes."""

from collections.abc import Callable

import numpy as np
import pytest
import zstandard

from etude.errors import DamagedError
from etude.weights.codecs.streams import Stream, join_planes, planes
from etude.weights.state import Bytes1d

ZEROS = np.zeros(5000, np.uint8)
COMPRESSED = zstandard.compress(ZEROS.tobytes())


def noise(size: int) -> Bytes1d:
    return np.random.default_rng(0).integers(0, 256, size, np.uint8)


def with_noise(size: int, start: int, stop: int) -> Bytes1d:
    """Zeros, with noise from ``start`` to ``stop``."""
    content = np.zeros(size, np.uint8)
    content[start:stop] = noise(stop - start)
    return content


LONG = 1 << 18
PROBE = 1 << 16


@pytest.mark.parametrize(
    ("content", "is_compressed"),
    [
        (with_noise(100_000, 0, 97_500), True),
        (with_noise(100_000, 0, 98_200), False),
        (with_noise(LONG, LONG // 2, LONG // 2 + PROBE), True),
        (with_noise(LONG + 1, LONG // 2, LONG // 2 + PROBE), False),
        (with_noise(LONG + 1, LONG // 2 + PROBE, LONG), True),
        (with_noise(LONG + 1, LONG // 2, LONG // 2 + PROBE * 975 // 1000), True),
        (with_noise(LONG + 1, LONG // 2, LONG // 2 + PROBE * 982 // 1000), False),
        (noise(LONG + 1), False),
    ],
    ids=["2.5%", "1.8%", "not-long", "noisy-probe", "noise-elsewhere", "probe-2.5%", "probe-1.8%", "noise"],
)
def test_a_stream_is_compressed_if_it_saves_2_percent_and_a_long_one_if_its_middle_does(
    content: Bytes1d, is_compressed: bool
) -> None:
    stream = Stream.of(content)
    assert stream.size == len(content)
    assert (len(stream.stored) < len(content)) == is_compressed
    assert np.array_equal(stream.read(), content)


def without_size(content: bytes) -> bytes:
    """A zstd frame that does not say how much it holds."""
    return zstandard.ZstdCompressor(write_content_size=False).compress(content)


@pytest.mark.parametrize(
    ("size", "stored", "message"),
    [
        (4999, COMPRESSED, "holds 5000 bytes where 4999 are declared"),
        (5001, COMPRESSED, "holds 5000 bytes where 5001 are declared"),
        (5000, without_size(ZEROS.tobytes()), "bytes where 5000 are declared"),
        (5000, COMPRESSED + b"\0", "cannot be decompressed"),
        (5000, COMPRESSED[:-1], "cannot be decompressed"),
        (5000, b"\0" * 40, "cannot be decompressed"),
        (40 * (1 << 15) + 1, b"\0" * 40, "a stream of 40 bytes cannot hold the 1310721 that are declared"),
    ],
    ids=["less", "more", "unknown", "trailing", "cut", "junk", "impossible"],
)
def test_a_stream_that_does_not_hold_what_it_declares_is_damage(size: int, stored: bytes, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        Stream(size=size, stored=stored).read()


@pytest.mark.parametrize("store", [bytes, memoryview])
def test_content_is_read_only_however_it_is_stored(store: Callable[[bytes], bytes | memoryview]) -> None:
    for size, stored in ((5000, COMPRESSED), (len(COMPRESSED), COMPRESSED)):
        content = Stream(size=size, stored=store(stored)).read()
        assert len(content) == size
        assert not content.flags.writeable


def test_planes_are_the_lowest_bytes_first() -> None:
    numbers = np.array([0x04030201, 0x08070605], np.uint32)
    streams = list(planes(numbers))
    assert [stream.read().tolist() for stream in streams] == [[1, 5], [2, 6], [3, 7], [4, 8]]
    joined = np.zeros_like(numbers)
    join_planes(streams, joined)
    assert joined.tolist() == numbers.tolist()

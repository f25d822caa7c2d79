"""The dense codec: the zigzagged steps of all numbers, and a header that counts them."""

from dataclasses import replace

import numpy as np
import pytest

from etude.errors import DamagedError
from etude.weights.codecs.dense import DENSE
from etude.weights.digest import Digest
from etude.weights.frames import encode, parse
from etude.weights.state import ELEMENTS

BF16 = ELEMENTS["BF16"]
OLD = [np.array([10, 20], np.uint16), np.array([30, 4000, 50], np.uint16)]
NEW = [np.array([10, 19], np.uint16), np.array([31, 4300, 50], np.uint16)]
FRAME = parse(encode(DENSE, OLD, NEW, BF16, digests=(Digest(1, 2), Digest(3, 4))))


def test_streams_are_the_bytes_of_all_zigzagged_steps() -> None:
    """Steps 0, −1, 1, 300, 0 → 0, 1, 2, 600, 0."""
    assert [stream.read().tolist() for stream in FRAME.streams] == [[0, 1, 2, 600 % 256, 0], [0, 0, 0, 600 // 256, 0]]
    assert FRAME.changed == 3
    assert DENSE.limits(FRAME) == [(5, 5), (5, 5)]


def test_a_header_that_counts_other_changes_is_refused_before_anything_is_written() -> None:
    numbers = [segment.copy() for segment in OLD]
    for damaged in (replace(FRAME, changed=2), replace(FRAME, changed=4)):
        with pytest.raises(DamagedError, match=f"a frame changes 3 numbers, its header says {damaged.changed}"):
            DENSE.apply(damaged, numbers)
        with pytest.raises(DamagedError, match="its header says"):
            DENSE.decode(damaged, None)
    assert [segment.tolist() for segment in numbers] == [segment.tolist() for segment in OLD]

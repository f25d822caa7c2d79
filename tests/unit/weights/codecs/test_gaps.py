"""The gaps codec: its streams byte by byte, their limits, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from etude.errors import DamagedError
from etude.weights.codecs.codec import Changes, Frame
from etude.weights.codecs.gaps import GAPS
from etude.weights.codecs.streams import Stream
from etude.weights.digest import Digest
from etude.weights.state import ELEMENTS

CHANGES = Changes(positions=np.array([0, 5, 300, 809], np.uint32), steps=np.array([1, -1, 7, -300], np.int32))
GAP_BYTES = [0, 4, 255, 39, 255, 253]
"""Unchanged numbers before each: 0, 4, 294, 508."""


def frame_of(name: str, *streams: list[int], elements: int = 810, changed: int = 4) -> Frame:
    return Frame(
        codec=GAPS, element=ELEMENTS[name], elements=elements, changed=changed, before=Digest.ZERO, after=Digest.ZERO,
        streams=tuple(Stream.of(np.array(stream, np.uint8)) for stream in streams),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        ("BF16", [GAP_BYTES, [0b11_10_01_00], [7 - 2, 255, 300 % 256, 300 // 256]]),
        ("F32", [GAP_BYTES, [2, 1, 14, 599 % 256], [0, 0, 0, 599 // 256], [0] * 4, [0] * 4]),  # zigzags 2, 1, 14, 599
    ],
)
def test_changes_are_gaps_and_steps(name: str, streams: list[list[int]]) -> None:
    element = ELEMENTS[name]
    assert [stream.read().tolist() for stream in GAPS.streams(CHANGES, element, 810)] == streams
    read = GAPS.decode(frame_of(name, *streams), None)
    assert (read.positions.tolist(), read.steps.tolist()) == (CHANGES.positions.tolist(), CHANGES.steps.tolist())


@pytest.mark.parametrize(
    ("name", "changed", "limits"),
    [
        ("I8", 0, [(0, 0 + 1000 // 255), (0, 0), (0, 0)]),
        ("BF16", 9, [(9, 9 + 991 // 255), (3, 3), (0, 27)]),
        ("BF16", 8, [(8, 8 + 992 // 255), (2, 2), (0, 24)]),
        ("F32", 745, [(745, 745 + 1), *[(745, 745)] * 4]),
        ("F32", 1000, [(1000, 1000), *[(1000, 1000)] * 4]),
    ],
)
def test_the_numbers_that_change_limit_the_streams(name: str, changed: int, limits: list[tuple[int, int]]) -> None:
    assert GAPS.limits(frame_of(name, elements=1000, changed=changed)) == limits


def test_steps_reach_to_the_lowest_number_of_the_width_and_no_further() -> None:
    widest = GAPS.decode(frame_of("I8", [0, 0], [0b10_11], [126, 125], changed=2), None)
    assert widest.steps.tolist() == [-128, 127]
    widest = GAPS.decode(frame_of("I16", [0, 0], [0b10_11], [255, 0, 128, 255, 255, 127], changed=2), None)
    assert widest.steps.tolist() == [-32768, 32767]


INTACT = frame_of("BF16", GAP_BYTES, [0b11_10_01_00], [5, 255, 44, 1])


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (replace(INTACT, elements=809), "gaps do not make 4 positions below 809"),
        (frame_of("F32", GAP_BYTES, [2, 1, 0, 87], [0, 0, 0, 2], [0] * 4, [0] * 4), "some of a frame's 4 steps are 0"),
        (frame_of("BF16", GAP_BYTES, [0b11_10_01_00], [5]), "codes do not make 4 steps"),
        (frame_of("I8", [0, 0], [0b10_11], [127, 125], changed=2), "codes do not make 2 steps"),
        (frame_of("I8", [0, 0], [0b10_11], [126, 126], changed=2), "codes do not make 2 steps"),
        (frame_of("I16", [0], [0b11], [255, 1, 128], changed=1), "codes do not make 1 steps"),
    ],
)
def test_what_makes_no_changes_is_refused_before_anything_is_written(damaged: Frame, message: str) -> None:
    numbers = np.zeros(damaged.elements, f"u{damaged.element.size_bytes}")
    with pytest.raises(DamagedError, match=message):
        GAPS.apply(damaged, [numbers])
    assert not numbers.any()

"""Packs give back the frames that were put in, and nothing else."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.weights.packs import fill_packs, read_pack

FRAMES = st.dictionaries(st.integers(0, 2**32 - 1), st.binary(max_size=30), max_size=20).map(
    lambda frames: sorted(frames.items())
)


def one_pack(frames: list[tuple[int, bytes]]) -> bytes:
    (pack,) = fill_packs(frames)
    return pack.data


def contents(data: bytes) -> list[tuple[int, bytes]] | None:
    """The frames in some bytes, ``None`` when they are no pack."""
    try:
        return [(chunk, bytes(frame)) for chunk, frame in read_pack(data)]
    except DamagedError:
        return None


@given(frames=FRAMES, pack_bytes=st.integers(0, 100))
def test_frames_come_back_in_order(frames: list[tuple[int, bytes]], pack_bytes: int) -> None:
    packs = list(fill_packs(frames, pack_bytes))
    assert [pair for pack in packs for pair in contents(pack.data) or []] == frames
    for pack in packs:
        chunks = [chunk for chunk, _ in read_pack(pack.data)]
        assert (pack.first, pack.last) == (chunks[0], chunks[-1])


@given(frames=FRAMES, pack_bytes=st.integers(1, 100))
def test_packs_are_closed_when_they_are_full(frames: list[tuple[int, bytes]], pack_bytes: int) -> None:
    sizes = [[len(frame) for _, frame in read_pack(pack.data)] for pack in fill_packs(frames, pack_bytes)]
    assert all(sum(frames) >= pack_bytes for frames in sizes[:-1])
    assert all(sum(frames[:-1]) < pack_bytes for frames in sizes)


def test_a_pack_is_given_out_before_the_next_frame_is_asked_for() -> None:
    frames = iter([(0, b"aaaa"), (1, b"bbbb")])
    packs = fill_packs(frames, 4)
    assert next(packs).last == 0
    assert next(frames) == (1, b"bbbb")
    assert list(packs) == []


def test_no_pack_has_more_frames_than_readers_allow() -> None:
    frames = ((chunk, b"") for chunk in range((1 << 20) + 1))
    assert [(pack.first, pack.last) for pack in fill_packs(frames, 1 << 40)] == [(0, (1 << 20) - 1), (1 << 20, 1 << 20)]


def test_the_format_is_what_the_docstring_says() -> None:
    expected = b"ETP2" + struct.pack("<5I", 2, 3, 2, 9, 1) + b"abc"
    assert one_pack([(3, b"ab"), (9, b"c")]) == expected


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_a_pack_or_damage(rubbish: bytes, with_magic: bool) -> None:
    data = b"ETP2" * with_magic + rubbish
    frames = contents(data)
    if frames:
        assert one_pack(frames) == data


@given(frames=FRAMES.filter(len), data=st.data())
def test_damage_is_noticed_or_lies_within_frames(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    pack = one_pack(frames)
    cut = data.draw(st.integers(0, len(pack) - 1))
    assert contents(pack[:cut]) is None
    assert contents(pack + b"\0") is None
    damaged = bytearray(pack)
    damaged[cut] ^= 1 << data.draw(st.integers(0, 7))
    read = contents(bytes(damaged))
    if read is not None:
        assert read != frames
        assert one_pack(read) == bytes(damaged)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "cut off after 0 bytes"),
        (b"ETP2\1\0\0", "cut off after 7 bytes"),
        (b"ETP1" + bytes(4), "holds no frames"),
        (b"ETP2\xff\xff\xff\xff", "holds no frames"),
        (b"ETP2" + struct.pack("<3I", 2, 0, 0), "index of 24 bytes is cut off"),
        (b"ETP2" + struct.pack("<3I", 1, 0, 2**32 - 1), "declares frames up to byte"),
        (b"ETP2" + struct.pack("<5I", 2, 5, 0, 5, 0), "not in ascending order"),
        (b"ETP2" + struct.pack("<5I", 2, 5, 0, 4, 0), "not in ascending order"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, why: str) -> None:
    with pytest.raises(DamagedError, match=why):
        list(read_pack(data))


def test_a_pack_without_frames_is_empty() -> None:
    assert contents(b"ETP2" + bytes(4)) == []

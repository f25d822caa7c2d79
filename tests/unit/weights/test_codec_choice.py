"""The codec follows the link: bytes decide over slow ones, coding over fast ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.weights.codec_choice import COSTS, CodecChoice, CodecWish, faster_codec
from etude.weights.frames import Codec

MEGABYTE = 1 << 20
SLOW, FAST = 25e6, 5e9
SPEEDS = st.floats(1e3, 1e12)


def observed(choice: CodecChoice, bytes_per_s: float, seconds: float = 1.0) -> Codec:
    choice.observe(round(bytes_per_s * seconds), seconds)
    return choice.current


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_bytes_decide_over_slow_links_and_coding_over_fast_ones(cores: int) -> None:
    assert faster_codec(1e6, cores) is Codec.CLASSES
    assert faster_codec(1e11, cores) is Codec.GAPS


def test_where_the_docstring_says() -> None:
    assert faster_codec(SLOW, 8) is Codec.CLASSES
    assert faster_codec(FAST, 8) is Codec.GAPS


@given(speed=SPEEDS, slower=st.floats(0.001, 1), cores=st.integers(1, 64))
def test_the_choice_changes_once_with_the_speed(speed: float, slower: float, cores: int) -> None:
    if faster_codec(speed, cores) is Codec.CLASSES:
        assert faster_codec(speed * slower, cores) is Codec.CLASSES
        assert faster_codec(speed, cores + 1) is Codec.CLASSES


@given(speed=SPEEDS, cores=st.integers(1, 64))
def test_no_codec_arrives_earlier_than_the_chosen_one(speed: float, cores: int) -> None:
    arrival = {codec: max(cost.size_bytes / speed, cost.seconds / cores) for codec, cost in COSTS.items()}
    assert arrival[faster_codec(speed, cores)] == min(arrival.values())


@pytest.mark.parametrize(("wish", "codec"), [("gaps", Codec.GAPS), ("classes", Codec.CLASSES)])
def test_a_wish_is_a_wish(wish: CodecWish, codec: Codec) -> None:
    choice = CodecChoice(wish, cores=8)
    assert {choice.current, observed(choice, SLOW), observed(choice, 1e12)} == {codec}


def test_before_anything_is_known_it_is_what_can_be_merged() -> None:
    choice = CodecChoice("auto", cores=8)
    assert choice.current is Codec.GAPS
    assert observed(choice, SLOW) is Codec.CLASSES


@pytest.mark.parametrize(("size_bytes", "seconds"), [(MEGABYTE - 1, 1.0), (0, 1.0), (MEGABYTE, 0.0), (MEGABYTE, -1.0)])
def test_what_says_nothing_about_the_link_is_ignored(size_bytes: int, seconds: float) -> None:
    choice = CodecChoice("auto", cores=8)
    for known in (Codec.GAPS, Codec.CLASSES):
        choice.observe(size_bytes, seconds)
        assert choice.current is known
        assert observed(choice, SLOW) is Codec.CLASSES


def test_a_single_slow_upload_decides_nothing_and_many_do() -> None:
    choice = CodecChoice("auto", cores=8)
    assert observed(choice, FAST) is Codec.GAPS
    assert observed(choice, SLOW) is Codec.GAPS
    assert [observed(choice, SLOW) for _ in range(30)][-1] is Codec.CLASSES

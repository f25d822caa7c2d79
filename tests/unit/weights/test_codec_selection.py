"""The codec follows the link: bytes decide over slow ones, coding over fast ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.weights.codecs.classes import CLASSES
from etude.weights.codecs.codec import Codec
from etude.weights.codecs.gaps import GAPS
from etude.weights.frames import sparse_codecs
from etude.weights.publish import CodecSelection, faster_codec

MEGABYTE = 1 << 20
SLOW, FAST = 25e6, 5e9
SPEEDS = st.floats(1e3, 1e12)


def observed(choice: CodecSelection, bytes_per_s: float, seconds: float = 1.0) -> Codec:
    choice.observe(round(bytes_per_s * seconds), seconds)
    return choice.current


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_bytes_decide_over_slow_links_and_coding_over_fast_ones(cores: int) -> None:
    assert faster_codec(1e6, cores) is CLASSES
    assert faster_codec(1e11, cores) is GAPS


def test_where_the_docstring_says() -> None:
    assert faster_codec(SLOW, 8) is CLASSES
    assert faster_codec(FAST, 8) is GAPS


@given(speed=SPEEDS, slower=st.floats(0.001, 1), cores=st.integers(1, 64))
def test_the_choice_changes_once_with_the_speed(speed: float, slower: float, cores: int) -> None:
    if faster_codec(speed, cores) is CLASSES:
        assert faster_codec(speed * slower, cores) is CLASSES
        assert faster_codec(speed, cores + 1) is CLASSES


@given(speed=SPEEDS, cores=st.integers(1, 64))
def test_no_codec_arrives_earlier_than_the_chosen_one(speed: float, cores: int) -> None:
    arrival = {
        codec: max(codec.cost.size_bytes / speed, codec.cost.seconds / cores)
        for codec in sparse_codecs()
        if codec.cost is not None
    }
    assert arrival[faster_codec(speed, cores)] == min(arrival.values())


@pytest.mark.parametrize(("name", "codec"), [("gaps", GAPS), ("classes", CLASSES)])
def test_a_named_codec_stays(name: str, codec: Codec) -> None:
    choice = CodecSelection(name, cores=8)
    assert {choice.current, observed(choice, SLOW), observed(choice, 1e12)} == {codec}


def test_before_anything_is_known_it_is_what_can_be_merged() -> None:
    choice = CodecSelection("auto", cores=8)
    assert choice.current is GAPS
    assert observed(choice, SLOW) is CLASSES


@pytest.mark.parametrize(("size_bytes", "seconds"), [(MEGABYTE - 1, 1.0), (0, 1.0), (MEGABYTE, 0.0), (MEGABYTE, -1.0)])
def test_what_says_nothing_about_the_link_is_ignored(size_bytes: int, seconds: float) -> None:
    choice = CodecSelection("auto", cores=8)
    for current in (GAPS, CLASSES):
        choice.observe(size_bytes, seconds)
        assert choice.current is current
        assert observed(choice, SLOW) is CLASSES


def test_a_single_slow_upload_decides_nothing_and_many_do() -> None:
    choice = CodecSelection("auto", cores=8)
    assert observed(choice, FAST) is GAPS
    assert observed(choice, SLOW) is GAPS
    assert [observed(choice, SLOW) for _ in range(30)][-1] is CLASSES

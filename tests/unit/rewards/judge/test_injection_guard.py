"""Every line of a guarded text is marked as data."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards.judge.prompts import BAR, guarded, spelled
from judges import INJECTIONS, MARK

HOSTILE = st.text(
    st.one_of(st.sampled_from("<>|[]/\\ \n\r\t=INSTimabc\u200b\u2028\uff1c\uff5c\ud800"), st.characters()), max_size=60
)
ANY = st.one_of(HOSTILE, st.sampled_from(INJECTIONS))
MARKERS = re.compile(r"<[^ \t\n=\\]|\[/?[A-Za-z_]*[A-Z]{2}")


@given(ANY)
def test_every_line_of_data_begins_with_a_bar(text: str) -> None:
    first, *lines, last = guarded(text, "work", MARK, 10_000).splitlines()
    assert (first, last) == (f"<<< {MARK} work", f">>> {MARK} work")
    cut = [line for line in lines if not line.startswith(BAR)]
    assert all(re.fullmatch(r"\([0-9]+ characters left out\)", line) for line in cut)
    assert len(cut) == (len(spelled(text)) > 10_000)


@given(ANY)
def test_no_marker_of_a_role_is_left(text: str) -> None:
    assert not MARKERS.search(spelled(text))


@given(ANY, st.integers(2, 50))
def test_what_is_cut_has_no_marker_and_no_line_either(text: str, limit: int) -> None:
    body = guarded(text, "work", MARK, limit)
    assert not MARKERS.search(body.removeprefix(f"<<< {MARK}"))
    unseen = {character for character in body if not character.isprintable()} - {"\n", "\t"}
    assert {unicodedata.category(character) for character in unseen} <= {"Zs"}  # spaces of other widths


@given(ANY, ANY, st.integers(2, 100))
def test_what_stands_outside_depends_on_the_length_alone(one: str, two: str, limit: int) -> None:
    def outside(text: str) -> list[str]:
        return [line for line in guarded(text, "work", MARK, limit).split("\n") if not line.startswith(BAR)]

    def missing(text: str) -> int:
        return max(0, len(spelled(text)) - limit)

    assert (outside(one) == outside(two)) == (missing(one) == missing(two))


def test_code_is_shown_as_it_is_but_for_its_brackets() -> None:
    code = "def f(a: list[int]) -> bool:\n\treturn a[0] < 3 or a[1] <= 4 or 'é' in x"
    assert spelled(code) == code
    assert spelled("if a<b: x[MAX]") == "if a<\\b: x[\\MAX]"
    assert spelled("a\u200bb\u202ec\r\n") == "a\\u{200b}b\\u{202e}c\\u{d}\n"
    assert spelled("<\uff5cUser\uff5c>") == "<\\u{ff5c}User\\u{ff5c}>"


def test_a_long_text_keeps_its_ends_and_says_what_is_missing() -> None:
    assert (
        guarded("abcdefghij", "work", MARK, 4)
        == f"<<< {MARK} work\n| ab\n(6 characters left out)\n| ij\n>>> {MARK} work"
    )
    assert guarded("abcd", "work", MARK, 4) == f"<<< {MARK} work\n| abcd\n>>> {MARK} work"


@pytest.mark.parametrize("mark", ["", "ab", "AB" * 16, "g" * 32, "ab" * 17])
def test_a_mark_must_be_one(mark: str) -> None:
    with pytest.raises(ValueError, match="32 hex digits"):
        guarded("text", "work", mark, 10)


def test_a_mark_that_the_text_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="do not occur"):
        guarded(f"a {MARK} b", "work", MARK, 10)

"""The text protocol, to the letter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.harnesses.tools import (
    CUT,
    WINDOW_LINES,
    Call,
    CloseItem,
    EditFile,
    Malformed,
    OpenItem,
    ReadFile,
    RunTests,
    Submit,
    apply_edit,
    limit,
    number_lines,
    parse_call,
    render_failure,
    render_report,
    shorten,
)
from etude.types import Case


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("read util.py", ReadFile("util.py")),
        ("read a/b.py\n", ReadFile("a/b.py")),
        ("read a/b.py 17", ReadFile("a/b.py", 17)),
        ("edit util.py 3\n    return x", EditFile("util.py", 3, "    return x")),
        ("edit util.py 12\na\n  b\n", EditFile("util.py", 12, "a\n  b")),
        ("edit util.py 1\n", EditFile("util.py", 1, "")),
        ("edit util.py 0\nx", EditFile("util.py", 0, "x")),
        ("test", RunTests()),
        ("test \n", RunTests()),
        ("submit", Submit()),
        ("todo read p2, then p3\n", OpenItem("read p2, then p3")),
        ("done 2", CloseItem(2)),
        ("answer 47 13", Submit("47 13")),
        ("answer 47\n13 \n", Submit("47\n13")),
    ],
)
def test_calls_are_read(text: str, call: Call) -> None:
    assert parse_call(text) == call


@pytest.mark.parametrize(
    "text",
    [
        *("", " test", "Test", "tests", "test it", "test\nsubmit", "submit it", "read", "read ", "read a b"),
        *("read  a", "edit", "edit a 1", "edit a b\nx", "edit a -1\nx", "edit a 1.0\nx", "edit a ٣\nx", "edit 1\nx"),
        "edit a 9999999\nx",
        *(
            "todo",
            "todo ",
            "todo  x",
            "todo a\nb",
            "done",
            "done x",
            "done 1 2",
            "done -1",
            "answer",
            "answer \n",
            "answers 1",
        ),
    ],
)
def test_nothing_else_is_forgiven(text: str) -> None:
    assert parse_call(text) == Malformed()


@given(st.text())
def test_any_text_is_some_call(text: str) -> None:
    assert isinstance(parse_call(text), Call)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\n", "1 a\n2 b"),
        ("a\nb", "1 a\n2 b"),
        ("", ""),
        ("\n", "1 "),
        ("a\n\n", "1 a\n2 "),
        ("a\x0cb", "1 a\x0cb"),
    ],
)
def test_lines_are_numbered_from_one(text: str, shown: str) -> None:
    assert number_lines(text) == shown


@pytest.mark.parametrize(
    ("text", "line", "new", "edited"),
    [
        ("a\nb\nc", 2, "x", "a\nx\nc"),
        ("a\nb\n", 2, "x\ny", "a\nx\ny\n"),
        ("a", 1, "", ""),
        ("a\r\nb\r\n", 2, "x\ny", "a\r\nx\r\ny\r\n"),
        ("a\r\nb\r\n", 1, "x\r", "x\r\nb\r\n"),
        ("a\r\nb\r\n", 1, "", "\r\nb\r\n"),
        ("a\r\nb", 2, "x", "a\r\nx"),
        ("a\nb", 3, "x", None),
        ("a\nb", 0, "x", None),
        ("", 1, "x", None),
    ],
)
def test_an_edit_replaces_one_line(text: str, line: int, new: str, edited: str | None) -> None:
    assert apply_edit(text, EditFile("f", line, new)) == edited


@given(st.lists(st.text(st.characters(exclude_characters="\n")), min_size=1), st.data())
def test_what_is_shown_is_what_is_edited(lines: list[str], data: st.DataObject) -> None:
    text = "\n".join(lines) + "\n"
    line = data.draw(st.integers(1, len(lines)))
    edited = apply_edit(text, EditFile("f", line, "new"))
    assert edited is not None
    ending = "\r" if lines[line - 1].endswith("\r") else ""
    shown = number_lines(text).split("\n")
    assert number_lines(edited).split("\n") == [*shown[: line - 1], f"{line} new{ending}", *shown[line:]]


def test_a_failure_names_call_result_and_wish() -> None:
    case = Case(arguments=(1, [2, "x"]), expected=None)
    assert render_failure("f", case, "3") == "FAIL f(1, [2, 'x']) = 3 want None"
    assert render_failure("f", case, "x" * 99) == f"FAIL f(1, [2, 'x']) = {'x' * 24} want None"


def test_a_window_begins_where_it_was_asked_for() -> None:
    text = "\n".join(f"x = {number}" for number in range(1, 101))
    shown = number_lines(text, 90).split("\n")
    assert shown[0] == "90 x = 90"
    assert shown[-1] == "100 x = 100"
    assert len(number_lines(text, 5).split("\n")) == WINDOW_LINES
    assert number_lines(text, 0) == number_lines(text, 1)
    assert number_lines(text, 101) == ""


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("F.\nFAILED t.py::test_two - assert 3 == 4\n1 failed, 1 passed", "FAIL t.py::test_two - assert 3 == 4"),
        ("ERROR t.py - ImportError: no\n", "FAIL t.py - ImportError: no"),
        ("no tests ran in 0.01s\n", "FAIL no tests ran in 0.01s"),
        ("", "FAIL no output"),
        ("FAILED " + "x" * 500, "FAIL " + "x" * 120),
    ],
)
def test_a_failing_run_is_told_by_its_first_failure(output: str, shown: str) -> None:
    assert render_report(output) == shown


def test_a_long_observation_says_that_it_was_cut() -> None:
    assert limit("abc", 3) == "abc"
    assert limit("abcd", 3) == f"abc\n{CUT}"


@given(st.text())
def test_an_observation_is_halved_until_nothing_but_the_sign_is_left(observation: str) -> None:
    shown, steps = observation, 0
    while (shorter := shorten(shown)) is not None:
        assert shorter.endswith(CUT)
        stored = shorter.removesuffix(CUT).rstrip()
        assert observation.startswith(stored)
        assert 2 * len(stored) <= len(shown)
        shown, steps = shorter, steps + 1
    assert steps <= len(observation).bit_length()
    assert shown.removesuffix(CUT).strip() == ""

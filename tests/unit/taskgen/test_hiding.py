"""The part of the tests that the agent sees."""

import ast

from etude.taskgen.hiding import place_of, view_tests

FILE = """import pytest
from pkg import (
    keep,
    lost,
)


@pytest.mark.parametrize("x", [1, 2])
def test_one(x):
    assert keep(x)


class TestMore:
    def test_two(self):
        assert lost(1)

    def test_three(self):
        assert keep(2)


class TestLost:
    def test_four(self):
        assert lost(2)
"""
FAILS = ["t.py::test_one[1]", "t.py::TestMore::test_two", "t.py::TestLost::test_four"]


def test_a_place_is_file_and_function() -> None:
    assert place_of("a/t.py::TestMore::test_two[x::y]") == ("a/t.py", "TestMore.test_two")


def test_failing_tests_are_cut_by_the_function() -> None:
    view = view_tests({"t.py": FILE}, FAILS, show=False)
    text = view.changed["t.py"]
    assert text is not None
    assert ast.parse(text)
    assert "test_one" not in text
    assert "test_two" not in text
    assert "parametrize" not in text
    assert "test_three" in text
    assert "class TestLost:\n    pass\n" in text
    assert (view.hidden, view.visible) == (frozenset(FAILS), frozenset())


def test_a_part_of_a_bug_s_failing_tests_stays() -> None:
    view = view_tests({"t.py": FILE}, FAILS, show=True, salt="1")
    assert len(view.visible) == 1
    assert view.hidden | view.visible == set(FAILS)
    assert view_tests({"t.py": FILE}, FAILS[:1], show=True).visible == frozenset()
    assert {frozenset(view_tests({"t.py": FILE}, FAILS, show=True, salt=str(salt)).visible) for salt in range(20)} == {
        frozenset({fail}) for fail in FAILS
    }


def test_a_name_that_is_gone_is_gone_from_the_tests() -> None:
    view = view_tests(
        {"t.py": FILE, "u.py": "from pkg import keep\n\ndef test_u(): pass\n"}, FAILS[1:2], show=False, gone="lost"
    )
    text = view.changed["t.py"]
    assert text is not None
    assert "lost" not in text
    assert "from pkg import (\n    keep,\n)" in text
    assert "test_one" in text
    assert view.changed.keys() == {"t.py"}


def test_a_file_that_cannot_be_cut_is_left_out() -> None:
    assert view_tests({"t.py": FILE}, ["t.py::TestMore::inherited"], show=False).changed == {"t.py": None}
    assert view_tests({"t.py": "def broken(:"}, ["t.py::test"], show=False).changed == {"t.py": None}
    only = "def test_a():\n    pass\n"
    assert view_tests({"t.py": only}, ["t.py::test_a"], show=False).changed == {"t.py": None}
    assert view_tests({"t.py": "x = lost\n" + only}, [], show=False, gone="lost").changed == {"t.py": None}

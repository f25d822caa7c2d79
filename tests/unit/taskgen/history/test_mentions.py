"""Tests that speak of a name, and no others, are those that can tell whether it was made."""

from etude.taskgen.history.mentions import functions_naming, is_named, words_of_functions

TEXT = """
from tally import mean, total


def check(numbers):
    assert total(numbers)


def test_total():
    assert total([]) == 0


class mean_tests:
    def test_of_one(self):
        assert mean([1]) == 1

    def test_totals(self):
        assert totals


class total:
    def test_inside(self):
        assert True
"""


def test_words_count_and_no_parts_of_words() -> None:
    texts = {"tests/test_a.py": TEXT, "tests/test_broken.py": "def test_total(:\n"}
    named = ["test_total", "mean_tests::test_totals", "mean_tests::test_of_one[1-2]", "total::test_inside"]
    assert [is_named(texts, f"tests/test_a.py::{place}", "total") for place in named] == [True, False, False, True]
    assert is_named(texts, "tests/test_a.py::mean_tests::test_of_one[1-2]", "mean")
    assert not is_named(texts, "tests/test_broken.py::test_total", "total")
    assert not is_named(texts, "tests/test_b.py::test_total", "total")
    assert is_named(texts, "tests/test_b.py::test_total", "")  # all of a commit's tests


def test_a_module_is_asked_for_its_functions_and_classes() -> None:
    assert functions_naming(TEXT, ["total"]) == ["check", "test_total", "total"]
    assert functions_naming(TEXT, ["mean", "totals"]) == ["test_of_one", "test_totals"]
    assert functions_naming(TEXT, ["median"]) == []
    assert words_of_functions("not Python (") == {}

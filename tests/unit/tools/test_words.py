"""Faults that tools/words.py reports, on sources made for the test."""

import pytest

import words

LIST = """
word plea, pleas => full-snapshot request
name found => matches
word guest => principal @ src/etude/gateway/* !src/etude/gateway/http/*
opening What => open with a noun phrase
"""
RULES = words.read_list(LIST)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("def send_plea(): ...", 1),
        ("class OpenPleas: ...", 1),
        ("x = 1\nPLEAS = 2", 2),
        ("def f(plea): ...", 1),
        ("self.plea = 1", 1),
        ("import a as plea", 1),
        ("found = 1", 1),
        ("_found = 1", 1),
    ],
)
def test_a_retired_word_is_refused_where_a_name_is_given(source: str, line: int) -> None:
    (fault,) = words.inspect({"src/etude/a.py": source}, RULES)
    assert fault.startswith(f"src/etude/a.py:{line}: ")
    assert fault.endswith(
        ("name the thing itself, which may be: full-snapshot request", "name the thing itself, which may be: matches")
    )


@pytest.mark.parametrize("source", ["plead = 1", "found_words = 1", "print(plea)", "# plea", "guest = 1"])
def test_other_words_pass(source: str) -> None:
    assert words.inspect({"src/etude/a.py": source}, RULES) == []


def test_a_file_name_counts_and_patterns_say_where() -> None:
    assert len(words.inspect({"src/etude/pleas.py": ""}, RULES)) == 1
    assert len(words.inspect({"src/etude/gateway/a.py": "guest = 1"}, RULES)) == 1
    assert words.inspect({"src/etude/gateway/http/a.py": "guest = 1"}, RULES) == []


def test_docstrings_of_the_package_name_the_thing() -> None:
    source = 'A = 1\n"""What a is."""\n\n\ndef f():\n    """What f does."""\n'
    assert len(words.inspect({"src/etude/a.py": source}, RULES)) == 2
    assert words.inspect({"tests/test_a.py": source}, RULES) == []


def test_one_class_name_is_one_thing() -> None:
    sources = {
        "src/etude/a.py": "class Line: ...",
        "src/etude/b.py": "class _Line: ...",
        "tests/c.py": "class Line: ...",
    }
    (fault,) = words.inspect(sources, RULES)
    assert "class 'Line' means 2 things: src/etude/a.py:1, src/etude/b.py:1" in fault


def test_a_line_of_the_list_that_says_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"words\.txt:2: .* 'wrod a => b'"):
        words.read_list("# a comment\nwrod a => b")

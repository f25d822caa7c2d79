"""Canary twins of tests: with correct code the test passes and its twin fails, for every change."""

import random
import textwrap

import pytest

from etude.rewards.graders.canaries import SiteKind, TestSource

RIGHT = """
import contextlib, pytest, unittest

def double(x):
    if x is None:
        raise TypeError("nothing")
    return x + x
"""
"""What the tests below are about."""
BODIES = {
    "an int": "assert double(2) == 4",
    "a literal on the left": "assert 4 == double(2)",
    "a long literal": "assert {'a': [double(1), (double('b'), None)]} == {'a': [2, ('bb', None)]}",
    "an empty list": "assert double([]) == []",
    "an empty string": "assert double('') == ''",
    "marks alone": "assert double('+ ') == '+ + '",
    "a negative number": "assert double(-3) == -6",
    "a truth": "assert (double(1) == 2) == True",
    "nothing": "assert {}.get(double(1)) == None",
    "bytes": "assert double(b'a\\xff') == b'a\\xffa\\xff'",
    "a set": "assert {double(1), double(2)} == {2, 4}",
    "a tolerance": "assert double(0.1) == pytest.approx(0.2)",
    "a tolerance of an int": "assert double(500_000) == pytest.approx(1_000_000)",
    "a tolerance with options": "assert double(1) == pytest.approx(2.4, abs=1)",
    "a message": "assert double(2) == 4, f'not {double(2)}'",
    "a variable": "expected = [1, 1]\nassert double([1]) == expected",
    "a variable that is used twice": "expected = [1, 1]\nassert len(expected) == 2\nassert double([1]) == expected",
    "two calls": "assert double(2) == double(1) + 2",
    "a conditional side": "assert double(2) == (4 if True else 5)",
    "a tuple": "assert (double(1), 1) == tuple([2, 1])",
    "other operators": "assert double(1) != 3\nassert 1 < double(1) <= 2\nassert double(1) >= 2\nassert double(1) > 1",
    "membership": "assert double('a') in 'caab'\nassert 3 not in [double(1)]",
    "identity": "assert double.__name__ is double.__name__\nassert double(1) is not None",
    "a truthy value": "assert double(1)\nassert isinstance(double(1), int) and double(1) == 2",
    "a falsy value": "assert not double(0)\nassert not (double(0) or double(''))",
    "an exception": "with pytest.raises(TypeError):\n    double(None)",
    "an exception's text": "with pytest.raises(TypeError, match='noth') as e:\n    double(None)\nassert e.value",
    "a context": "with contextlib.nullcontext(4) as four:\n    assert double(2) == four",
    "an alias": "import builtins\nwith pytest.raises(builtins.TypeError):\n    double(None)",
    "nothing to change": "for x in (1, 2):\n    assert double(x) == 2 * x",
    "a return in the middle": "if double(1) == 2:\n    return\nassert double(1) == 3",
    "a docstring first": "'''What it does.'''\nfor x in (1,):\n    double(x)",
    "a decorated function first": "@contextlib.contextmanager\ndef inner():\n    yield\nwith inner():\n    pass",
    "suppression": "with contextlib.suppress(AssertionError):\n    assert double(1) == 3",
    "letters of all kinds": "assert double('ß…') == 'ß…ß…'",
}
METHODS = {
    "assertEqual": "self.assertEqual(double(2), 4)",
    "assertEqual, reversed": "self.assertEqual([2, 2], double([2]), 'not so')",
    "assertEqual, calls": "self.assertEqual(double(2), double(1) + 2)",
    "assertDictEqual": "self.assertDictEqual({1: double(1)}, {1: 2})",
    "opposites": "self.assertTrue(double(1))\nself.assertIsNone({}.get(double(1)))\nself.assertLess(double(1), 3)",
    "assertRaises": "with self.assertRaises(TypeError):\n    double(None)",
    "assertRaises of a call": "self.assertRaises(TypeError, double, None)",
    "a helper": "self.check(double(1))",
}


@pytest.mark.parametrize("name", BODIES)
def test_a_function_passes_and_its_twin_does_not(name: str) -> None:
    source = "def test_it():\n" + textwrap.indent(BODIES[name], "    ")
    play(source, "test_it")
    for seed in range(30):
        with pytest.raises(BaseException):  # noqa: B017 - a failed expectation of pytest's is no Exception
            play(twin(source, "test_it", seed), "test_it")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_passes_and_its_twin_does_not(name: str) -> None:
    source = (
        "class T(unittest.TestCase):\n    def check(self, x):\n        assert x\n\n    def test_it(self):\n"
        + textwrap.indent(METHODS[name], "        ")
    )
    play(source, "T::test_it")
    for seed in range(10):
        with pytest.raises(BaseException):  # noqa: B017
            play(twin(source, "T::test_it", seed), "T::test_it")


ROWS = """
@pytest.mark.parametrize(("x", "expected"), [(1, 2), ("a", "aa"),
    ([-1], [-1, -1]),  # a list
], ids=["one", "two", "three"])
@pytest.mark.parametrize("other", [5, 6])
def test_it(x, expected, other):
    assert double(x) == expected
    assert double(other) > other
"""


def test_all_rows_of_a_test_with_parameters_are_changed() -> None:
    before = rows_of(ROWS)
    play_rows(ROWS)
    kinds = set()
    for seed in range(30):
        source = TestSource(ROWS)
        change = source.alteration("test_it", random.Random(seed))
        kinds.add(change.kind)
        altered = source.altered([change])
        if change.kind is SiteKind.ROWS:
            after = rows_of(altered)
            assert [x for x, _ in after] == [x for x, _ in before]
            assert all(new != old for (_, new), (_, old) in zip(after, before, strict=True))
            assert altered.count("# a list") == 1
        with pytest.raises(AssertionError):
            play_rows(altered)
    assert kinds == {SiteKind.ROWS, SiteKind.FLIPPED}


@pytest.mark.parametrize(
    ("decorator", "body"),
    [
        ("'x, expected', [(1, 2), pytest.param(1, 2)]", "assert double(x) == expected"),
        ("'x, expected', [(1, 2), (1, len('ab'))]", "assert double(x) == expected"),
        ("'x, expected', [(1, 2)], indirect=True", "assert double(x) == expected"),
        ("'x, expected', [(1, 2)]", "print(expected)\n    assert double(x) == expected"),
        ("NAMES, [(1, 2)]", "assert double(x) == expected"),
        ("'x, expected', ROWS", "assert double(x) == expected"),
        ("'x, expected', []", "assert double(x) == expected"),
        ("'x, expected', [(1, [])]", "assert double(x) == expected"),
    ],
)
def test_rows_that_cannot_be_changed_are_left(decorator: str, body: str) -> None:
    source = TestSource(f"@pytest.mark.parametrize({decorator})\ndef test_it(x, expected):\n    {body}\n")
    kind = source.alteration("test_it", random.Random(1)).kind
    assert kind is (SiteKind.ROWS if "[])]" in decorator else SiteKind.WRAPPED)


def test_a_value_is_changed_and_nothing_else() -> None:
    source = "def test_it():\n    # as it was\n    assert double( 'Ab1' )  ==  'Ab1Ab1'  # so be it\n"
    for seed in range(20):
        before, changed, after = twin(source, "test_it", seed).partition("==  ")[0], "", ""
        assert before == source.partition("==  ")[0]
        changed, _, after = twin(source, "test_it", seed).partition("==  ")[2].partition("  #")
        assert after == " so be it\n"
        word = changed[1:-1]
        pairs = [pair for pair in zip(word, "Ab1Ab1", strict=True) if pair[0] != pair[1]]
        assert len(pairs) == 1
        (new, old), *_ = pairs
        assert (new.isdigit(), new.isupper()) == (old.isdigit(), old.isupper())


def test_lies_are_seen_by_changed_values_not_by_opposites() -> None:
    kinds = {alteration_kind("assert f() == 3\nassert f() != 4\nassert g()", seed) for seed in range(60)}
    assert kinds == {SiteKind.VALUE, SiteKind.FLIPPED}
    assert {alteration_kind("assert f() == g()", seed) for seed in range(5)} == {SiteKind.WRAPPED}
    assert {alteration_kind("x = f()\nassert x in g()", seed) for seed in range(5)} == {SiteKind.WRAPPED}


@pytest.mark.parametrize(
    "body",
    [
        "if x:\n    assert f() == 3",
        "try:\n    assert f() == 3\nexcept Exception:\n    pass",
        "with expectation:\n    assert f() == 3",
        "with pytest.raises(Exception):\n    assert f() == 3",
        "with expecting_failure():\n    assert f() == 3",
        "with pytest.raises((KeyError, ValueError)):\n    f()",
        "while f():\n    return\nassert f() == 3",
        "yield 1\nassert f() == 3",
        "def inner():\n    assert f() == 3",
        "assert_right(f())",
    ],
)
def test_what_may_not_be_reached_is_left_alone(body: str) -> None:
    assert alteration_kind(body, 1) is SiteKind.PLANTED


def test_a_twin_fails_where_nothing_is_left_to_be_done_if_it_can() -> None:
    """The change is in the last statements if possible, so that later tests find the usual state."""
    body = "assert double(1) == 2\n    state.clear()\n    assert double(2) == 4\n    assert double(3) == 6"
    for seed in range(20):
        assert "assert double(1) == 2" in twin(f"def test_it():\n    {body}\n", "test_it", seed)
    cleans_up = "def test_it():\n    assert double(1) == 2\n    state.clear()\n"
    assert "== 2\n" not in twin(cleans_up, "test_it", 1)


def test_a_test_is_found_where_it_is_inherited_from() -> None:
    source = TestSource(
        "class Base:\n    def test_a(self): pass\nclass T(Base):\n    class In:\n        def test_b(self): pass\n"
        "class U(T): pass\nclass Loop(Loop): pass\ndef test_c(): pass\n"
    )
    assert source.definition_of("U::test_a") == "Base::test_a"
    assert source.definition_of("T::In::test_b") == "T::In::test_b"
    assert source.definition_of("test_c") == "test_c"
    assert source.definition_of("Loop::test_a") is None
    assert source.definition_of("test_d") is None
    assert source.line_of("test_c") == 8


def test_of_two_functions_of_a_name_the_last_counts() -> None:
    source = "def test_it():\n    assert 1 == 2\n\ndef test_it():\n    assert double(1) == 2\n"
    assert twin(source, "test_it", 1).startswith("def test_it():\n    assert 1 == 2\n")


def test_several_tests_of_a_module_are_changed_at_once() -> None:
    source = TestSource(
        "def test_a():\r\n    assert double('é') == 'éé'\r\ndef test_b():\r\n    assert double(1) == 2\r\n"
    )
    changes = [source.alteration(name, random.Random(3)) for name in ("test_a", "test_b")]
    text = source.altered(changes)
    for name in ("test_a", "test_b"):
        play(source.text, name)
        with pytest.raises(AssertionError):
            play(text, name)


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(ValueError, match="not Python"):
        TestSource("def test_a(:\n")


def play(source: str, name: str) -> None:
    """Run one test of a module with correct code under test."""
    names: dict[str, object] = {}
    exec(RIGHT + source, names)
    owner, _, leaf = name.rpartition("::")
    if owner:
        kind = names[owner]
        assert isinstance(kind, type)
        getattr(kind(leaf), leaf)()
    else:
        function = names[leaf]
        assert callable(function)
        function()


def rows_of(source: str) -> list[tuple[object, object]]:
    """The rows of the outer decorator, which is applied last."""
    names: dict[str, object] = {}
    exec(RIGHT + source, names)
    rows = vars(names["test_it"])["pytestmark"][-1].args[1]
    assert isinstance(rows, list)
    return rows


def play_rows(source: str) -> None:
    """Run a test that has parameters for all of its rows; all of them, or none, must fail."""
    names: dict[str, object] = {}
    exec(RIGHT + source, names)
    function = names["test_it"]
    assert callable(function)
    failed = []
    for x, expected in rows_of(source):
        try:
            function(x, expected, 5)
        except AssertionError as error:
            failed.append(error)
    if failed:
        assert len(failed) == len(rows_of(source)), "some rows passed"
        raise failed[0]


def twin(source: str, definition: str, seed: int) -> str:
    """The module with one of its tests made to fail."""
    parsed = TestSource(source)
    return parsed.altered([parsed.alteration(definition, random.Random(seed))])


def alteration_kind(body: str, seed: int) -> SiteKind:
    """The kind of the change in a test."""
    source = TestSource("def test_it():\n" + textwrap.indent(body, "    "))
    return source.alteration("test_it", random.Random(seed)).kind

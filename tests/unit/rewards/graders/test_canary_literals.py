"""Changed literals: another value of the same type and shape."""

import ast
import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.rewards.graders.canaries import changed_constant, changed_literal, is_literal

LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.binary(max_size=8)
LITERALS = st.recursive(
    LEAVES | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(LITERALS, st.integers(0, 100))
@example(1.7e308, 1)
@example([-1.7e308, 5e-324], 2)
def test_a_changed_literal_is_not_equal_and_of_the_same_kind(value: object, seed: int) -> None:
    text = repr(value)
    assert is_literal(ast.parse(text, mode="eval").body)
    changed = changed_literal(text, random.Random(seed))
    if changed is None:
        return
    other = ast.literal_eval(changed)
    assert other != value
    assert value is None or type(other) is type(value)
    assert not isinstance(value, list) or not value or len(other) == len(value)


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False, max_value=1e300, min_value=-1e300))
def test_a_changed_number_is_beyond_usual_tolerances(value: float) -> None:
    changed = changed_constant(value, random.Random(1))
    assert isinstance(changed, int | float)
    assert not math.isclose(changed, value, rel_tol=1e-3, abs_tol=1e-12) or abs(value) < 1e-9


def test_a_changed_text_differs_in_more_than_case() -> None:
    for seed in range(50):
        changed = changed_constant("aB", random.Random(seed))
        assert isinstance(changed, str)
        assert changed.casefold() != "ab"
        assert changed.swapcase().islower() == "aB".swapcase().islower()


@pytest.mark.parametrize("text", ["f(x)", "[x]", "{**x}", "f'{x}'", "...", "1j", "-x", "not 1", "[1 for _ in x]"])
def test_what_is_no_literal(text: str) -> None:
    assert not is_literal(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize(
    ("text", "changed"),
    [("[]", "[0]"), ("()", "(0,)"), ("{}", "{0: 0}"), ("[[], True]", "[[0], False]"), ("{'a': False}", "{'a': True}")],
)
def test_what_is_empty_gets_something(text: str, changed: str) -> None:
    assert changed_literal(text, random.Random(1)) == changed


def test_every_part_is_changed() -> None:
    for seed in range(30):
        changed = changed_literal("{'one': [1, -2.5, b'x-y'], 'two': ('1.2.3+build.4', None)}", random.Random(seed))
        assert changed is not None
        value = ast.literal_eval(changed)
        assert list(value) == ["one", "two"]
        before = [1, -2.5, *(b"x-y".split(b"-"))]
        first = [*value["one"][:2], *value["one"][2].split(b"-")]
        assert all(new != old for new, old in zip(first, before, strict=True))
        words = value["two"][0].replace("+", ".").split(".")
        assert all(new != old for new, old in zip(words, ["1", "2", "3", "build", "4"], strict=True))


def test_what_is_equal_by_chance_is_none() -> None:
    drawn = [changed_literal("{True, False}", random.Random(seed)) for seed in range(3)]
    assert drawn == [None] * 3

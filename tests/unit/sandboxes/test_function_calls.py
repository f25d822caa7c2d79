"""Function calls in a real sandbox, and programs that try to be mistaken for something else."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandboxes.function_calls import CallOutcome, call_function, same_value
from etude.sandboxes.local.provider import LocalSandboxes
from etude.types import Json


def call(source: str, *calls: list[Json], function: str = "f", timeout_s: float = 10.0) -> list[CallOutcome]:
    """Outcomes of calls of one function of a program."""

    async def act() -> list[CallOutcome]:
        provider = LocalSandboxes(1)
        try:
            sandbox = await provider.create({"a.py": source})
            return await call_function(sandbox, "a.py", function, calls, timeout_s)
        finally:
            await provider.close()

    return asyncio.run(act())


def returned(value: Json) -> CallOutcome:
    return CallOutcome(True, value, "")


def failed(error: str) -> CallOutcome:
    return CallOutcome(False, None, error)


def test_each_call_has_its_own_outcome() -> None:
    source = "def f(x):\n    print('noise', x)\n    return {'q': [10 // x, None, 0.5, True, 'é\\n']}"
    assert call(source, [5], [0], ["x"]) == [
        returned({"q": [2, None, 0.5, True, "é\n"]}),
        failed("ZeroDivisionError"),
        failed("TypeError"),
    ]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("g = 1", "KeyError"),
        ("f = 3", "TypeError"),
        ("import os; os._exit(0)", "SystemExit"),
        ("raise SystemExit(0)", "SystemExit"),
        ("def f(): return (1, 2)", "tuple"),
        ("def f(): return {1: 2}", "dict"),
        ("class C(int):\n    def __eq__(self, other): return True\ndef f(): return [C(1)]", "list"),
        ("def f():\n    x = []\n    x.append(x)\n    return x", "RecursionError"),
        ("def f(): return 10 ** 9999", "ValueError"),
        ("def f(): return bytearray(1 << 30)", "MemoryError"),
        ("def f(): return f()", "RecursionError"),
        ("raise type('É', (Exception,), {})", "\\xc9"),
        ("class M(type): __name__ = '\\ud800'\nraise M('E', (Exception,), {})", "\\ud800"),
    ],
)
def test_what_is_no_plain_value_is_named(source: str, error: str) -> None:
    assert call(source, []) == [failed(error)]


def test_no_file_is_an_outcome_too() -> None:
    async def act() -> list[CallOutcome]:
        provider = LocalSandboxes(1)
        try:
            return await call_function(await provider.create({}), "a.py", "f", [[]])
        finally:
            await provider.close()

    assert asyncio.run(act()) == [failed("FileNotFoundError")]


def test_calls_before_the_end_count() -> None:
    hang = "def f(x):\n    while x: pass\n    return x"
    assert call(hang, [0], [1], [0], timeout_s=5.0) == [returned(0), failed("TimeoutError"), failed("TimeoutError")]
    leave = "import os\ndef f(x):\n    return os._exit(0) if x else x"
    assert call(leave, [0], [1], [0]) == [returned(0), failed("SystemExit"), failed("SystemExit")]


def test_output_is_not_mistaken_for_results() -> None:
    flood = (
        "import os\ndef f():\n    print('0 [true, 1]\\n' * 99999)\n    os.write(1, b'x 0 [true, 1]\\n')\n    return 2"
    )
    assert call(flood, []) == [returned(2)]


def test_forged_lines_may_lie_but_not_break() -> None:
    """A program can find the nonce in its own process; nonsense under it must not reach the caller as an error."""
    forge = (
        "import sys, os\n"
        "frame = sys._getframe()\n"
        "while 'nonce' not in frame.f_locals: frame = frame.f_back\n"
        "nonce = frame.f_locals['nonce']\n"
        "for line in ('', ' 0', ' x [true, 1]', ' 0 {{', ' 0 7', ' 0 [1]', ' 0 ' + '[' * 9999, ' 7 [true, 1]',\n"
        "             ' ' + '9' * 5000 + ' [true, 1]', ' 0 [true, ' + '9' * 5000 + ']', ' 1 [true, \"forged\"]'):\n"
        "    os.write(frame.f_locals['results'], (nonce + line + '\\n').encode())\n"
        "def f(x): return x\n"
    )
    assert call(forge, [1], [2]) == [returned(1), returned("forged")]


def test_a_program_that_breaks_its_tools_breaks_only_itself() -> None:
    source = "import json, builtins, os\njson.dumps = builtins.print = os.write = None\ndef f(): return 1"
    assert call(source, []) == [returned(1)]


def test_a_value_too_deep_to_show_has_a_name() -> None:
    deep: Json = []
    for _ in range(100_000):
        deep = [deep]
    assert returned(deep).shown == "RecursionError"
    while deep:
        assert isinstance(deep, list)
        deep = deep.pop()  # Python would recurse to free it


def test_whatever_is_shown_is_text() -> None:
    (outcome,) = call("def f(): return ['\\ud800', {'\\udfff': 'é'}]", [])
    assert outcome.shown.encode() == "['\\ud800', {'\\udfff': 'é'}]".encode()


@pytest.mark.parametrize(
    ("got", "expected"),
    [(True, 1), (1, True), (1.0, 1), (0, False), ([1], [True]), ({"a": 1}, {"a": 1.0}), ([1], [1, 2]), (None, 0)],
)
def test_types_are_part_of_a_value(got: Json, expected: Json) -> None:
    assert not same_value(got, expected)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(PLAIN, PLAIN)
def test_a_value_is_the_same_as_itself_and_never_the_same_but_unequal(one: Json, other: Json) -> None:
    assert same_value(one, one)
    assert same_value(one, other) <= (one == other)

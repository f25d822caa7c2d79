"""Facts read from the syntax of a test module."""

import ast

from etude.rewards.graders.canaries import (
    FunctionNode,
    Lines,
    assigned_once,
    called,
    last_name,
    rows_by_parameter,
)


def function(source: str) -> FunctionNode:
    (node,) = ast.parse(source).body
    assert isinstance(node, FunctionNode)
    return node


def test_places_are_bytes() -> None:
    lines = Lines("é = 1\n\tß = f('…')\n")
    assert lines.place(2, 1) == len("é = 1\n\t".encode())
    call = ast.parse("é = 1\nß = f('…')\n").body[1]
    assert isinstance(call, ast.Assign)
    assert Lines("é = 1\nß = f('…')\n").text(call.value) == "f('…')"
    assert (lines.indent(1), lines.indent(2)) == ("", "\t")


def test_variables_that_are_set_and_read_once() -> None:
    node = function(
        "def f():\n    a = 1\n    b = [2]\n    c = 3\n    c = 4\n    d = g()\n    e = 5\n    if a: h = 6\n"
        "    return b, b, c, d, e, h\n"
    )
    assert set(assigned_once(node)) == {"a", "e"}


def test_columns_of_rows() -> None:
    node = function(
        "@mark.parametrize('one', [1, 2])\n@mark.parametrize(['x', 'y'], ((1, g()), (3, 4)))\n@other\n"
        "def f(one, x, y):\n    assert x + y == one\n"
    )
    assert {name: [ast.unparse(cell) for cell in rows.cells] for name, rows in rows_by_parameter(node).items()} == {
        "one": ["1", "2"],
        "x": ["1", "3"],
    }


def test_names_of_what_is_called() -> None:
    names = ("f(1)", "a.b.f(1)", "f", "f(1)(2)", "(lambda: 1)()")
    assert [called(ast.parse(text, mode="eval").body) for text in names] == ["f", "f", "", "", ""]
    assert last_name(ast.parse("a.b", mode="eval").body) == "b"

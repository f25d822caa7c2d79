"""What the syntax of a test module says: what is where, and what sets it; for :mod:`etude.rewards.graders.canaries`.
Pure.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from etude.rewards.graders.canary_literals import is_literal

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Lines:
    """Bytes of a source by ``ast``'s lines and columns."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self._starts = [0]
        for line in self.data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def place(self, line: int, column: int) -> int:
        """Its byte."""
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """First byte of an expression and the one behind it."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Source of an expression."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def indent(self, line: int) -> str:
        """White space before a line's first mark."""
        whole = self.data[self._starts[line - 1] : self._starts[line]]
        return whole[: len(whole) - len(whole.lstrip(b" \t"))].decode()


def functions_in(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, FunctionNode]]:
    """Functions by qualified name; a later one of a name is the one that counts."""
    for node in body:
        if isinstance(node, FunctionNode):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions_in(node.body, f"{prefix}{node.name}::")


def classes_in(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Bases by qualified name of the class."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, tuple(base.id for base in node.bases if isinstance(base, ast.Name))
            yield from classes_in(node.body, f"{prefix}{node.name}::")


def assigned_once(function: FunctionNode) -> Mapping[str, ast.expr]:
    """Literals by the variable that holds them, if it is set once, at the top of the test, and read once."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    uses = [(node.id, isinstance(node.ctx, ast.Load)) for node in names]
    return {
        node.targets[0].id: node.value
        for node in function.body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        if is_literal(node.value) and uses.count((node.targets[0].id, True)) == 1
        if uses.count((node.targets[0].id, False)) == 1
    }


@dataclass(frozen=True, slots=True)
class Rows:
    """The column of one parameter."""

    table: ast.expr
    """All rows."""
    cells: tuple[ast.expr, ...]
    """One of each row."""


def rows_by_parameter(function: FunctionNode) -> Mapping[str, Rows]:
    """Columns of literals, by the parameter that gets them, which the test reads once."""
    found: dict[str, Rows] = {}
    loads = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    for call in function.decorator_list:
        if not isinstance(call, ast.Call) or called(call) != "parametrize" or len(call.args) != 2:
            continue
        if any(keyword.arg != "ids" for keyword in call.keywords) or not isinstance(call.args[1], ast.List | ast.Tuple):
            continue
        names, rows = _parameters(call.args[0]), call.args[1].elts
        for place, name in enumerate(names):
            cells = [row if len(names) == 1 else _cell(row, place, len(names)) for row in rows]
            whole = [cell for cell in cells if cell is not None and is_literal(cell)]
            if rows and len(whole) == len(rows) and loads.count(name) == 1:
                found[name] = Rows(call.args[1], tuple(whole))
    return found


def _parameters(node: ast.expr) -> Sequence[str]:
    """Names of the parameters that a decorator sets."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [name.strip() for name in node.value.split(",") if name.strip()]
    texts = node.elts if isinstance(node, ast.List | ast.Tuple) else []
    return [text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)]


def _cell(row: ast.expr, place: int, width: int) -> ast.expr | None:
    is_row = isinstance(row, ast.List | ast.Tuple) and len(row.elts) == width
    return row.elts[place] if is_row and isinstance(row, ast.List | ast.Tuple) else None


def called(node: ast.expr) -> str:
    """The last name of what is called; empty for anything else."""
    return last_name(node.func) if isinstance(node, ast.Call) else ""


def last_name(node: ast.expr) -> str:
    """The name of a variable or an attribute; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""

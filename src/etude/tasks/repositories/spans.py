"""Exact offsets in Python source, from the syntax tree's lines and bytes, and edits of the text.

Owns the text of one file and the functions in it. All text outside of an edit stays unchanged, including white space.
Does not choose edits (:mod:`~etude.taskgen.deletions`, :mod:`~etude.tasks.repositories.mutations`).
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)
LINE_END = re.compile(r"\r\n|\r|\n")
"""Line ends of Python source; ``str.splitlines`` splits at further characters."""


class Located(Protocol):
    """Protocol of a syntax-tree node with a position in the text."""

    lineno: int
    col_offset: int
    end_lineno: int | None
    end_col_offset: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Replacement of the characters from ``start`` up to ``end`` of a text."""

    start: int
    end: int
    text: str

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"an edit from {self.start} to {self.end} is not a stretch of a text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function or method that is not inside another function."""

    qualname: str
    """Its name in the module, with dots for a method."""
    node: FunctionNode
    parents: tuple[ast.ClassDef, ...]
    """The enclosing classes, the outermost first."""

    @property
    def line(self) -> int:
        """The first line, including decorators, as in its code object."""
        return min([self.node.lineno, *(decorator.lineno for decorator in self.node.decorator_list)])

    @property
    def top(self) -> str:
        """The top-level name of the module that contains it: its own or that of the outermost class."""
        return self.qualname.partition(".")[0]

    @property
    def code(self) -> Sequence[ast.stmt]:
        """The statements of its body without the docstring."""
        return self.node.body[1:] if ast.get_docstring(self.node, clean=False) is not None else self.node.body


class SourceText:
    """A Python file: its text, its syntax tree, and the positions of nodes in the text."""

    def __init__(self, path: str, text: str) -> None:
        """``path`` is only for messages and ids. Raises ``SyntaxError`` or ``ValueError`` for invalid Python."""
        self.path = path
        self.text = text
        self.tree = ast.parse(text)
        ends = [match.end() for match in LINE_END.finditer(text)]
        self._starts = (0, *ends)
        self._ascii = text.isascii()

    def offset(self, line: int, column_bytes: int) -> int:
        """The offset in the text of a line, from 1, and a column in UTF-8 bytes, as in a syntax tree."""
        start = self._starts[line - 1]
        if self._ascii:
            return start + column_bytes
        return start + len(self.line(line).encode()[:column_bytes].decode())

    def line(self, number: int) -> str:
        """Line ``number``, from 1, with its line end."""
        end = self._starts[number] if number < len(self._starts) else len(self.text)
        return self.text[self._starts[number - 1] : end]

    @property
    def lines(self) -> int:
        """The number of lines."""
        return len(self._starts)

    def line_start(self, number: int) -> int:
        """The offset at which a line begins; one past the last line is the end of the text."""
        return self._starts[number - 1] if number <= len(self._starts) else len(self.text)

    def span(self, node: Located) -> tuple[int, int]:
        """The offsets at which a node begins and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def segment(self, node: Located) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def replace(self, node: Located, text: str) -> Edit:
        """The edit that replaces a node by ``text``."""
        start, end = self.span(node)
        return Edit(start=start, end=end, text=text)

    def remove_lines(self, first: int, last: int) -> Edit:
        """The edit that removes the lines ``first`` to ``last``, from 1."""
        return Edit(start=self.line_start(first), end=self.line_start(last + 1), text="")

    def indent(self, line: int) -> str:
        """The leading blanks and tabs of a line."""
        text = self.line(line)
        return text[: len(text) - len(text.lstrip(" \t"))]

    def functions(self) -> Iterator[Function]:
        """Every function at the top level of the module or of a class, including branches of ``if`` and ``try``, in the
        order of the text.
        """
        yield from _functions(self.tree.body, (), ())

    def classes(self) -> Iterator[ast.ClassDef]:
        """The classes at the top level of the module."""
        return (node for node in self.tree.body if isinstance(node, ast.ClassDef))


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Apply edits to a text. Raises ``ValueError`` if two of them overlap or one is outside the text."""
    chunks: list[str] = []
    done = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if edit.start < done or edit.end > len(text):
            raise ValueError(f"the edit of {edit.start}..{edit.end} overlaps another or leaves the text")
        chunks += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join((*chunks, text[done:]))


def last_line(node: Located) -> int:
    """The number of a node's last line."""
    assert node.end_lineno is not None
    return node.end_lineno


def _functions(
    body: Sequence[ast.stmt], names: tuple[str, ...], parents: tuple[ast.ClassDef, ...]
) -> Iterator[Function]:
    """Descend only into classes, ``if`` and ``try`` (without ``finally``)."""
    for node in body:
        if isinstance(node, FUNCTION_NODES):
            yield Function(qualname=".".join((*names, node.name)), node=node, parents=parents)
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, (*names, node.name), (*parents, node))
        elif isinstance(node, ast.If):
            yield from _functions([*node.body, *node.orelse], names, parents)
        elif isinstance(node, ast.Try):
            inner = [*node.body, *(line for handler in node.handlers for line in handler.body), *node.orelse]
            yield from _functions(inner, names, parents)

"""Bugs that are planted by moving, dropping or changing whole statements.

The other half of the catalogue, beside :mod:`~etude.tasks.repositories.expression_bugs`; the same rules hold.
"""

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import MappingProxyType

from etude.tasks.repositories.spans import Edit, Function, SourceText, last_line

BLOCKS = ("body", "orelse", "finalbody")
"""Fields of a node that hold statements."""
OTHER_ERRORS = MappingProxyType(
    {
        "ValueError": "TypeError",
        "TypeError": "ValueError",
        "KeyError": "IndexError",
        "IndexError": "KeyError",
        "AttributeError": "KeyError",
        "RuntimeError": "ValueError",
        "StopIteration": "IndexError",
        "ZeroDivisionError": "ValueError",
        "OverflowError": "ValueError",
        "NotImplementedError": "ValueError",
        "OSError": "ValueError",
        "UnicodeDecodeError": "KeyError",
        "ImportError": "KeyError",
    }
)
SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Delete)
"""Statements that may trade places."""


def dropped_branch(source: SourceText, function: Function) -> Iterator[Edit]:
    """An ``if`` that is gone with all its branches, or one that lost its last branch."""
    for block in _blocks(function):
        for node in block:
            if not isinstance(node, ast.If) or not _alone(source, node):
                continue
            if node.orelse and not _is_chain(source, node):
                yield _without_else(source, node)
            elif not node.orelse:
                yield _drop(source, node, block)


def dropped_statement(source: SourceText, function: Function) -> Iterator[Edit]:
    """A call for its effect, or an update of a variable, that is missing."""
    for block in _blocks(function):
        for node in block:
            is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
            if (is_call or isinstance(node, ast.AugAssign)) and _alone(source, node):
                yield _drop(source, node, block)


def reordered_statements(source: SourceText, function: Function) -> Iterator[Edit]:
    """Two neighbours of which the second needs what the first does, in the wrong order."""
    for block in _blocks(function):
        for first, second in pairwise(block):
            if isinstance(first, SIMPLE) and isinstance(second, SIMPLE) and _depends(second, first):
                texts = source.segment(first), source.segment(second)
                (start, first_end), (second_start, end) = source.span(first), source.span(second)
                yield Edit(start=start, end=end, text=texts[1] + source.text[first_end:second_start] + texts[0])


def missing_return(source: SourceText, function: Function) -> Iterator[Edit]:
    """A value that is worked out and not given back."""
    for node in _statements(function):
        if isinstance(node, ast.Return) and node.value is not None:
            start, _ = source.span(node)
            inner, _ = source.span(node.value)
            if source.text[start:inner].strip() == "return":
                yield Edit(start=start, end=inner, text="")


def wrong_exception(source: SourceText, function: Function) -> Iterator[Edit]:
    """Another exception raised, or another one caught."""
    for node in _statements(function):
        names: list[ast.expr | None] = []
        if isinstance(node, ast.Raise):
            names = [node.exc.func if isinstance(node.exc, ast.Call) else node.exc]
        elif isinstance(node, ast.Try):
            kinds = [handler.type for handler in node.handlers]
            names = [part for kind in kinds for part in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
        for name in names:
            if isinstance(name, ast.Name) and name.id in OTHER_ERRORS:
                yield source.replace(name, OTHER_ERRORS[name.id])


def break_for_continue(source: SourceText, function: Function) -> Iterator[Edit]:
    """``break`` for ``continue``, and the other way round."""
    for node in _statements(function):
        if isinstance(node, ast.Break | ast.Continue):
            yield source.replace(node, "continue" if isinstance(node, ast.Break) else "break")


def lost_accumulation(source: SourceText, function: Function) -> Iterator[Edit]:
    """``=`` where ``+=`` was meant: only the last one counts."""
    for node in _statements(function):
        if isinstance(node, ast.AugAssign):
            target, value = source.span(node.target), source.span(node.value)
            if "(" not in source.text[target[1] : value[0]]:
                yield Edit(start=target[1], end=value[0], text=" = ")


def early_return(source: SourceText, function: Function) -> Iterator[Edit]:
    """A ``return`` inside of the loop that should come before it."""
    for block in _blocks(function):
        for loop, end in pairwise(block):
            if isinstance(loop, ast.For | ast.While) and isinstance(end, ast.Return) and not loop.orelse:
                if not _alone(source, loop.body[-1]) or not _alone(source, end):
                    continue
                indent, start = source.indent(loop.body[-1].lineno), source.line_start(last_line(loop) + 1)
                text = "".join(source.line(number) for number in range(last_line(loop) + 1, end.lineno))
                inner = source.segment(end)
                if "\n" not in inner and not text.strip():
                    yield Edit(start=start, end=source.span(end)[1], text=f"{indent}{inner}")


def _statements(function: Function) -> Iterator[ast.stmt]:
    for statement in function.code:
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.stmt))


def _blocks(function: Function) -> Iterator[Sequence[ast.stmt]]:
    """Every list of statements of the function, its own without the docstring."""
    yield function.code
    for node in _statements(function):
        for name in BLOCKS:
            block = getattr(node, name, None)
            if block:
                yield block
        for handler in getattr(node, "handlers", ()):
            yield handler.body


def _alone(source: SourceText, node: ast.stmt) -> bool:
    """Return true if nothing but a comment shares the lines of a statement."""
    start, end = source.span(node)
    before = source.text[source.line_start(node.lineno) : start]
    after = source.text[end : source.line_start(last_line(node) + 1)].strip()
    return not before.strip() and (not after or after.startswith("#"))


def _drop(source: SourceText, node: ast.stmt, block: Sequence[ast.stmt]) -> Edit:
    if len(block) == 1:
        return source.replace(node, "pass")
    return source.remove_lines(node.lineno, last_line(node))


def _is_chain(source: SourceText, node: ast.If) -> bool:
    """Return true if what follows is an ``elif``."""
    inner = node.orelse[0]
    return isinstance(inner, ast.If) and source.segment(inner).startswith("elif")


def _without_else(source: SourceText, node: ast.If) -> Edit:
    """From the end of the last statement before ``else`` to the end of the branch."""
    return Edit(start=source.span(node.body[-1])[1], end=source.span(node.orelse[-1])[1], text="")


def _depends(second: ast.stmt, first: ast.stmt) -> bool:
    """Return true if the second statement reads a name that the first one writes, or the other way round."""

    def names(node: ast.stmt, context: type[ast.expr_context]) -> set[str]:
        return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, context)}

    shared = names(first, ast.Store) & (names(second, ast.Load) | names(second, ast.Store))
    return bool(shared or names(second, ast.Store) & names(first, ast.Load))

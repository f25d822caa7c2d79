"""Bugs that are planted inside of expressions: each operator finds the places in a function where it could.

Owns the slips that leave the statements where they are. An operator yields one edit per place; whether the program
still compiles, and whether any test notices, is for others to see (:mod:`~etude.tasks.repositories.mutations`).
"""

import ast
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

from etude.tasks.repositories.spans import Edit, Function, SourceText

Operator: TypeAlias = Callable[[SourceText, Function], Iterator[Edit]]
"""Finds every place in a function where one kind of bug could be."""

NEIGHBOURS = MappingProxyType({ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"})
OPPOSITES = MappingProxyType(
    {ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
)
SWAPPABLE = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift)
"""Operators whose operands have an order, whatever they are."""
OTHER_SIGNS = MappingProxyType(
    {
        ast.Add: "-",
        ast.Sub: "+",
        ast.Mult: "+",
        ast.Div: "//",
        ast.FloorDiv: "/",
        ast.Mod: "//",
        ast.BitAnd: "|",
        ast.BitOr: "&",
        ast.LShift: ">>",
        ast.RShift: "<<",
    }
)
SIGNS = MappingProxyType(
    {
        ast.Add: "+",
        ast.Sub: "-",
        ast.Mult: "*",
        ast.Div: "/",
        ast.FloorDiv: "//",
        ast.Mod: "%",
        ast.BitAnd: "&",
        ast.BitOr: "|",
        ast.LShift: "<<",
        ast.RShift: ">>",
    }
)
TWINS = MappingProxyType(
    {
        "append": "extend",
        "extend": "append",
        "lower": "upper",
        "upper": "lower",
        "lstrip": "rstrip",
        "rstrip": "lstrip",
        "startswith": "endswith",
        "endswith": "startswith",
        "find": "rfind",
        "rfind": "find",
        "index": "rindex",
        "split": "rsplit",
        "rsplit": "split",
        "partition": "rpartition",
        "keys": "values",
        "rpartition": "partition",
        "values": "keys",
        "popleft": "pop",
        "min": "max",
        "max": "min",
        "any": "all",
        "all": "any",
        "floor": "ceil",
        "ceil": "floor",
        "issubclass": "isinstance",
        "union": "intersection",
        "intersection": "union",
        "update": "setdefault",
        "appendleft": "append",
        "ljust": "rjust",
    }
)
"""Functions and methods that one may take for one another."""
COPIES = frozenset({"list", "dict", "set", "tuple", "copy", "deepcopy", "bytearray"})
CLEANERS = frozenset({"strip", "lstrip", "rstrip", "lower", "upper", "casefold", "sorted", "reversed", "abs", "str"})
"""Calls that tidy a value, and are easily forgotten."""


def boundary(source: SourceText, function: Function) -> Iterator[Edit]:
    """``<`` for ``<=``, ``>`` for ``>=``, and the other way round."""
    yield from _comparisons(source, function, NEIGHBOURS)


def inverted_comparison(source: SourceText, function: Function) -> Iterator[Edit]:
    """``==`` for ``!=``, ``is`` for ``is not``, ``in`` for ``not in``, and the other way round."""
    yield from _comparisons(source, function, OPPOSITES)


def inverted_condition(source: SourceText, function: Function) -> Iterator[Edit]:
    """A condition with a ``not`` too many, or too few."""
    for node in _inside(function):
        if not isinstance(node, ast.If | ast.While | ast.IfExp):
            continue
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            yield source.replace(node.test, source.segment(node.test.operand))
        elif not isinstance(node.test, ast.Compare | ast.Constant):
            yield source.replace(node.test, f"not ({source.segment(node.test)})")


def swapped_operands(source: SourceText, function: Function) -> Iterator[Edit]:
    """``b - a`` for ``a - b``."""
    for node in _inside(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, SWAPPABLE) and not _is_text(node.left):
            left, right = source.segment(node.left), source.segment(node.right)
            if left != right:
                (start, _), (_, end) = source.span(node.left), source.span(node.right)
                between = source.text[source.span(node.left)[1] : source.span(node.right)[0]]
                if "(" not in between and ")" not in between:
                    yield Edit(
                        start=start, end=end, text=f"{_grouped(node.right, right)}{between}{_grouped(node.left, left)}"
                    )


def wrong_sign(source: SourceText, function: Function) -> Iterator[Edit]:
    """``+`` for ``-``, ``//`` for ``/``, ``|`` for ``&``, and the like."""
    for node in _inside(function):
        if isinstance(node, ast.BinOp) and type(node.op) in OTHER_SIGNS:
            yield from _between(source, node.left, node.right, SIGNS[type(node.op)], OTHER_SIGNS[type(node.op)])


def and_for_or(source: SourceText, function: Function) -> Iterator[Edit]:
    """``and`` for ``or``, and the other way round."""
    for node in _inside(function):
        if isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            if len(node.values) == 2:  # of more, one alone would change what belongs together
                yield from _between(source, node.values[0], node.values[1], old, new)


def off_by_one(source: SourceText, function: Function) -> Iterator[Edit]:
    """One more or less in an index, the bound of a slice or of a range."""
    for node in _inside(function):
        places: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript):
            inner = node.slice
            places = [inner.lower, inner.upper] if isinstance(inner, ast.Slice) else [inner]
        elif isinstance(node, ast.Call) and _called(node) == "range":
            places = list(node.args[:2])
        for place in places:
            if place is not None and _is_number(place):
                yield from (source.replace(place, text) for text in _next_to(source, place))


def mutated_constant(source: SourceText, function: Function) -> Iterator[Edit]:
    """Another number, another truth value."""
    for node in _inside(function):
        if not isinstance(node, ast.Constant):
            continue
        if isinstance(node.value, bool):
            yield source.replace(node, str(not node.value))
        elif isinstance(node.value, int):
            yield source.replace(node, str(node.value + 1))
            if node.value:
                yield source.replace(node, "0")
        elif isinstance(node.value, float):
            yield source.replace(node, repr(node.value * 2 + 1))


def wrong_text(source: SourceText, function: Function) -> Iterator[Edit]:
    """A piece of text that lost its last character, or is empty."""
    fragments = {id(part) for node in _inside(function) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in _inside(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value and id(node) not in fragments:
            yield source.replace(node, repr(node.value[:-1]))


def wrong_key(source: SourceText, function: Function) -> Iterator[Edit]:
    """One key of a mapping in place of another that the function uses."""
    keys = [node for node in _inside(function) for node in _keys(node)]
    texts = sorted({key.value for key in keys if isinstance(key.value, str)})
    for key in keys:
        others = [text for text in texts if text != key.value]
        if isinstance(key.value, str):
            yield source.replace(key, repr(others[0] if others else key.value + "_"))


def wrong_default(source: SourceText, function: Function) -> Iterator[Edit]:
    """A parameter whose default is another."""
    arguments = function.node.args
    for default in (*arguments.defaults, *arguments.kw_defaults):
        if not isinstance(default, ast.Constant):
            continue
        value = default.value
        if isinstance(value, bool):
            yield source.replace(default, str(not value))
        elif isinstance(value, int | float):
            yield source.replace(default, repr(value + 1))
        elif isinstance(value, str):
            yield source.replace(default, repr(value[:-1] if value else " "))
        elif value is None:
            yield source.replace(default, "False")


def lost_copy(source: SourceText, function: Function) -> Iterator[Edit]:
    """The thing itself where a copy of it was wanted."""
    for node in _inside(function):
        if isinstance(node, ast.Call) and not node.keywords:
            if len(node.args) == 1 and _called(node) in COPIES and not isinstance(node.args[0], ast.GeneratorExp):
                yield source.replace(node, _grouped(node.args[0], source.segment(node.args[0])))
            elif not node.args and isinstance(node.func, ast.Attribute) and node.func.attr == "copy":
                yield source.replace(node, source.segment(node.func.value))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_all(node.slice):
            yield source.replace(node, source.segment(node.value))


def lost_cleaning(source: SourceText, function: Function) -> Iterator[Edit]:
    """A value that was not stripped, folded, sorted or turned round."""
    for node in _inside(function):
        if not isinstance(node, ast.Call) or _called(node) not in CLEANERS:
            continue
        if isinstance(node.func, ast.Attribute):
            yield source.replace(node, source.segment(node.func.value))
        elif len(node.args) == 1 and not isinstance(node.args[0], ast.GeneratorExp | ast.Starred):
            yield source.replace(node, _grouped(node.args[0], source.segment(node.args[0])))


def swapped_arguments(source: SourceText, function: Function) -> Iterator[Edit]:
    """Two neighbouring arguments of a call in each other's place."""
    for node in _inside(function):
        if isinstance(node, ast.Call):
            for first, second in pairwise(node.args):
                texts = source.segment(first), source.segment(second)
                if texts[0] != texts[1] and not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                    (start, first_end), (second_start, end) = source.span(first), source.span(second)
                    between = source.text[first_end:second_start]
                    yield Edit(start=start, end=end, text=f"{texts[1]}{between}{texts[0]}")


def lost_keyword(source: SourceText, function: Function) -> Iterator[Edit]:
    """A call without one of its keyword arguments."""
    for node in _inside(function):
        if isinstance(node, ast.Call) and node.keywords:
            before = [*node.args, *(keyword.value for keyword in node.keywords[:-1])]
            last = node.keywords[-1]
            if last.arg is not None and before and last.lineno >= (before[-1].end_lineno or 0):
                yield Edit(start=source.span(before[-1])[1], end=source.span(last)[1], text="")


def wrong_twin(source: SourceText, function: Function) -> Iterator[Edit]:
    """``max`` for ``min``, ``rstrip`` for ``lstrip``, ``any`` for ``all``, and the like."""
    for node in _inside(function):
        if isinstance(node, ast.Call) and (twin := TWINS.get(_called(node))) is not None:
            end = source.span(node.func)[1]
            yield Edit(start=end - len(_called(node)), end=end, text=twin)


def wrong_name(source: SourceText, function: Function) -> Iterator[Edit]:
    """One parameter in place of another."""
    arguments = function.node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names = [name for name in names if name not in ("self", "cls")]
    for node in _inside(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
            yield source.replace(node, names[(names.index(node.id) + 1) % len(names)])


def missing_await(source: SourceText, function: Function) -> Iterator[Edit]:
    """A coroutine that is never awaited."""
    for node in _inside(function):
        if isinstance(node, ast.Await):
            yield source.replace(node, source.segment(node.value))


def swapped_branches(source: SourceText, function: Function) -> Iterator[Edit]:
    """The two values of a conditional expression in each other's place."""
    for node in _inside(function):
        if isinstance(node, ast.IfExp):
            first, second = source.segment(node.body), source.segment(node.orelse)
            if first != second:
                text = f"{_grouped(node.orelse, second)} if {source.segment(node.test)} else {first}"
                yield source.replace(node, text)


def _inside(function: Function) -> Iterator[ast.AST]:
    """Every node of the body but the docstring's, in the order of the text where that can be told."""
    return (node for statement in function.code for node in ast.walk(statement))


def _comparisons(
    source: SourceText, function: Function, signs: "MappingProxyType[type[ast.cmpop], str]"
) -> Iterator[Edit]:
    for node in _inside(function):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for operator, (left, right) in zip(node.ops, pairwise(operands), strict=True):
                start, end = source.span(left)[1], source.span(right)[0]
                old = _closing(source.text[start:end]) if type(operator) in signs else None
                if old is not None:
                    yield Edit(start=start + old[0], end=start + old[1], text=signs[type(operator)])


def _closing(between: str) -> tuple[int, int] | None:
    """The position of the sign between two operands: parentheses and blanks around it do not belong to it."""
    sign = between.strip("() \t\r\n\\")
    if not sign or "#" in between:
        return None
    start = between.index(sign)
    return start, start + len(sign)


def _between(source: SourceText, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Edit]:
    start, end = source.span(left)[1], source.span(right)[0]
    matches = _closing(source.text[start:end])
    if matches is not None and source.text[start + matches[0] : start + matches[1]] == old:
        yield Edit(start=start + matches[0], end=start + matches[1], text=new)


def _is_all(node: ast.expr) -> bool:
    """Return true if it is the slice of everything."""
    return isinstance(node, ast.Slice) and (node.lower, node.upper, node.step) == (None, None, None)


def _keys(node: ast.AST) -> Iterator[ast.Constant]:
    """The constant keys by which a node reads or writes a mapping."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        yield node.slice
    elif isinstance(node, ast.Call) and node.args and _called(node) in ("get", "pop", "setdefault", "getattr"):
        key = node.args[1] if _called(node) == "getattr" and len(node.args) > 1 else node.args[0]
        if isinstance(key, ast.Constant):
            yield key


def _called(node: ast.Call) -> str:
    """The last part of the name that is called, or nothing."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_number(node: ast.expr) -> bool:
    """Return true if it may well be a number: a constant of one, a name, a sum, a length."""
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_number(node.operand)
    return isinstance(node, ast.BinOp) or (isinstance(node, ast.Call) and _called(node) == "len")


def _next_to(source: SourceText, place: ast.expr) -> tuple[str, str]:
    """One more and one less, as a person would write it."""
    try:
        value = ast.literal_eval(place)
        return str(value + 1), str(value - 1)
    except (ValueError, TypeError):
        text = source.segment(place)
        return f"{text} + 1", f"{text} - 1"


def _is_text(node: ast.expr) -> bool:
    """Return true if ``%`` after it formats rather than divides."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _grouped(node: ast.expr, text: str) -> str:
    """The text of an expression as it can stand beside others."""
    return text if isinstance(node, ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript) else f"({text})"

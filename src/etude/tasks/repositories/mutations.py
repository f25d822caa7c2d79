"""The catalogue of planted bugs: small mistakes like those of people, one at a time.

    function ──operators──▶ edits ──compile, compare──▶ mutants

An operator yields one edit for each place in a function where its bug could be. Owns the catalogue and the definition
of a mutant: it compiles, and its syntax tree differs from the right one. Only tests can show that the two behave
differently. Operators are those of mutation testing (DeMillo, Lipton, Sayward 1978), and others from bugs in Python
projects (Widyasari et al., BugsInPy, 2020).
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from etude.tasks.repositories.spans import Edit, Function, SourceText, apply, last_line

Node = TypeVar("Node", bound=ast.AST)
Operator: TypeAlias = Callable[[SourceText, Function], Iterator[Edit]]
"""Finds every place in a function where one kind of bug could be."""

NEIGHBOURS = MappingProxyType({ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"})
OPPOSITES = MappingProxyType(
    {ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
)
SWAPPABLE = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift)
"""Operators that are never commutative."""
OTHER_SIGNS: Mapping[type[ast.operator], tuple[str, str]] = MappingProxyType(
    {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "//"), ast.FloorDiv: ("//", "/")}
    | {ast.Mod: ("%", "//"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>")}
    | {ast.RShift: (">>", "<<")}
)
"""Operator → its sign, and a sign that is easily confused with it."""
_ALIKE = (
    *(("append", "extend"), ("lower", "upper"), ("lstrip", "rstrip"), ("startswith", "endswith"), ("find", "rfind")),
    *(("split", "rsplit"), ("partition", "rpartition"), ("keys", "values"), ("min", "max"), ("any", "all")),
    *(("floor", "ceil"), ("union", "intersection")),
)
TWINS: Mapping[str, str] = MappingProxyType(
    {"index": "rindex", "popleft": "pop", "issubclass": "isinstance", "update": "setdefault"}
    | {"appendleft": "append", "ljust": "rjust"}
    | dict(_ALIKE)
    | {second: first for first, second in _ALIKE}
)
"""Functions and methods that are easily confused."""
COPIES = frozenset({"list", "dict", "set", "tuple", "copy", "deepcopy", "bytearray"})
CLEANERS = frozenset({"strip", "lstrip", "rstrip", "lower", "upper", "casefold", "sorted", "reversed", "abs", "str"})
"""Calls that normalise a value and are easily forgotten."""
BLOCKS = ("body", "orelse", "finalbody")
"""Fields of a node that contain statements."""
OTHER_ERRORS: Mapping[str, str] = MappingProxyType(
    {"TypeError": "ValueError", "IndexError": "KeyError", "StopIteration": "IndexError", "ValueError": "TypeError"}
    | dict.fromkeys(("AttributeError", "UnicodeDecodeError", "ImportError"), "KeyError")
    | dict.fromkeys(
        ("RuntimeError", "ZeroDivisionError", "OverflowError", "NotImplementedError", "OSError"), "ValueError"
    )
    | {"KeyError": "IndexError"}
)
SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Delete)
"""Statements that may be reordered."""


def boundary(source: SourceText, function: Function) -> Iterator[Edit]:
    """``<`` for ``<=``, ``>`` for ``>=``, and vice versa."""
    yield from _comparisons(source, function, NEIGHBOURS)


def inverted_comparison(source: SourceText, function: Function) -> Iterator[Edit]:
    """``==`` for ``!=``, ``is`` for ``is not``, ``in`` for ``not in``, and vice versa."""
    yield from _comparisons(source, function, OPPOSITES)


def inverted_condition(source: SourceText, function: Function) -> Iterator[Edit]:
    """A condition with an extra ``not``, or a missing one."""
    for node in _nodes(function, ast.AST):
        if not isinstance(node, ast.If | ast.While | ast.IfExp):
            continue
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            yield source.replace(node.test, source.segment(node.test.operand))
        elif not isinstance(node.test, ast.Compare | ast.Constant):
            yield source.replace(node.test, f"not ({source.segment(node.test)})")


def swapped_operands(source: SourceText, function: Function) -> Iterator[Edit]:
    """``b - a`` for ``a - b``."""
    for node in _nodes(function, ast.BinOp):
        if isinstance(node.op, SWAPPABLE) and not _is_text(node.left):
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
    for node in _nodes(function, ast.BinOp):
        if type(node.op) in OTHER_SIGNS:
            yield from _between(source, node.left, node.right, *OTHER_SIGNS[type(node.op)])


def and_for_or(source: SourceText, function: Function) -> Iterator[Edit]:
    """``and`` for ``or``, and vice versa."""
    for node in _nodes(function, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        if len(node.values) == 2:  # with more operands, one changed sign would regroup them
            yield from _between(source, node.values[0], node.values[1], old, new)


def off_by_one(source: SourceText, function: Function) -> Iterator[Edit]:
    """One more or less in an index, or in a bound of a slice or range."""
    for node in _nodes(function, ast.AST):
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
    """Another number or truth value."""
    for node in _nodes(function, ast.Constant):
        if isinstance(node.value, bool):
            yield source.replace(node, str(not node.value))
        elif isinstance(node.value, int):
            yield source.replace(node, str(node.value + 1))
            if node.value:
                yield source.replace(node, "0")
        elif isinstance(node.value, float):
            yield source.replace(node, repr(node.value * 2 + 1))


def wrong_text(source: SourceText, function: Function) -> Iterator[Edit]:
    """A string constant without its last character."""
    fragments = {id(part) for node in _nodes(function, ast.JoinedStr) for part in ast.walk(node)}
    for node in _nodes(function, ast.Constant):
        if isinstance(node.value, str) and node.value and id(node) not in fragments:
            yield source.replace(node, repr(node.value[:-1]))


def wrong_key(source: SourceText, function: Function) -> Iterator[Edit]:
    """One key of a mapping instead of another that the function uses."""
    keys = [node for node in _nodes(function, ast.AST) for node in _keys(node)]
    texts = sorted({key.value for key in keys if isinstance(key.value, str)})
    for key in keys:
        others = [text for text in texts if text != key.value]
        if isinstance(key.value, str):
            yield source.replace(key, repr(others[0] if others else key.value + "_"))


def wrong_default(source: SourceText, function: Function) -> Iterator[Edit]:
    """Another default of a parameter."""
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
    """The object itself instead of a copy."""
    for node in _nodes(function, ast.AST):
        if isinstance(node, ast.Call) and not node.keywords:
            if len(node.args) == 1 and _called(node) in COPIES and not isinstance(node.args[0], ast.GeneratorExp):
                yield source.replace(node, _grouped(node.args[0], source.segment(node.args[0])))
            elif not node.args and isinstance(node.func, ast.Attribute) and node.func.attr == "copy":
                yield source.replace(node, source.segment(node.func.value))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_all(node.slice):
            yield source.replace(node, source.segment(node.value))


def lost_cleaning(source: SourceText, function: Function) -> Iterator[Edit]:
    """A value that is not stripped, case-folded, sorted or reversed."""
    for node in _nodes(function, ast.Call):
        if _called(node) not in CLEANERS:
            continue
        if isinstance(node.func, ast.Attribute):
            yield source.replace(node, source.segment(node.func.value))
        elif len(node.args) == 1 and not isinstance(node.args[0], ast.GeneratorExp | ast.Starred):
            yield source.replace(node, _grouped(node.args[0], source.segment(node.args[0])))


def swapped_arguments(source: SourceText, function: Function) -> Iterator[Edit]:
    """Two neighbouring arguments of a call, swapped."""
    for node in _nodes(function, ast.Call):
        for first, second in pairwise(node.args):
            is_starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if not is_starred and source.segment(first) != source.segment(second):
                yield _swapped(source, first, second)


def lost_keyword(source: SourceText, function: Function) -> Iterator[Edit]:
    """A call without its last keyword argument."""
    for node in _nodes(function, ast.Call):
        if node.keywords:
            before = [*node.args, *(keyword.value for keyword in node.keywords[:-1])]
            last = node.keywords[-1]
            if last.arg is not None and before and last.lineno >= (before[-1].end_lineno or 0):
                yield Edit(start=source.span(before[-1])[1], end=source.span(last)[1], text="")


def wrong_twin(source: SourceText, function: Function) -> Iterator[Edit]:
    """``max`` for ``min``, ``rstrip`` for ``lstrip``, ``any`` for ``all``, and the like."""
    for node in _nodes(function, ast.Call):
        if (twin := TWINS.get(_called(node))) is not None:
            end = source.span(node.func)[1]
            yield Edit(start=end - len(_called(node)), end=end, text=twin)


def wrong_name(source: SourceText, function: Function) -> Iterator[Edit]:
    """One parameter instead of another."""
    arguments = function.node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names = [name for name in names if name not in ("self", "cls")]
    for node in _nodes(function, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
            yield source.replace(node, names[(names.index(node.id) + 1) % len(names)])


def missing_await(source: SourceText, function: Function) -> Iterator[Edit]:
    """A coroutine that is never awaited."""
    for node in _nodes(function, ast.Await):
        yield source.replace(node, source.segment(node.value))


def swapped_branches(source: SourceText, function: Function) -> Iterator[Edit]:
    """The two values of a conditional expression, swapped."""
    for node in _nodes(function, ast.IfExp):
        first, second = source.segment(node.body), source.segment(node.orelse)
        if first != second:
            text = f"{_grouped(node.orelse, second)} if {source.segment(node.test)} else {first}"
            yield source.replace(node, text)


def dropped_branch(source: SourceText, function: Function) -> Iterator[Edit]:
    """An ``if`` without ``else`` that is missing, or one whose ``else`` is missing."""
    for block in _blocks(function):
        for node in block:
            if not isinstance(node, ast.If) or not _alone(source, node):
                continue
            if node.orelse and not _is_chain(source, node):
                yield _without_else(source, node)
            elif not node.orelse:
                yield _drop(source, node, block)


def dropped_statement(source: SourceText, function: Function) -> Iterator[Edit]:
    """A missing call that is used for its effect, or a missing update of a variable."""
    for block in _blocks(function):
        for node in block:
            is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
            if (is_call or isinstance(node, ast.AugAssign)) and _alone(source, node):
                yield _drop(source, node, block)


def reordered_statements(source: SourceText, function: Function) -> Iterator[Edit]:
    """Two neighbouring statements that depend on each other, in the wrong order."""
    for block in _blocks(function):
        for first, second in pairwise(block):
            if isinstance(first, SIMPLE) and isinstance(second, SIMPLE) and _depends(second, first):
                yield _swapped(source, first, second)


def missing_return(source: SourceText, function: Function) -> Iterator[Edit]:
    """A value that is computed but not returned."""
    for node in _nodes(function, ast.Return):
        if node.value is not None:
            start, _ = source.span(node)
            inner, _ = source.span(node.value)
            if source.text[start:inner].strip() == "return":
                yield Edit(start=start, end=inner, text="")


def wrong_exception(source: SourceText, function: Function) -> Iterator[Edit]:
    """Another exception type, raised or caught."""
    for node in _nodes(function, ast.stmt):
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
    """``break`` for ``continue``, and vice versa."""
    for node in _nodes(function, ast.stmt):
        if isinstance(node, ast.Break | ast.Continue):
            yield source.replace(node, "continue" if isinstance(node, ast.Break) else "break")


def lost_accumulation(source: SourceText, function: Function) -> Iterator[Edit]:
    """``=`` instead of ``+=``: only the last value counts."""
    for node in _nodes(function, ast.AugAssign):
        target, value = source.span(node.target), source.span(node.value)
        if "(" not in source.text[target[1] : value[0]]:
            yield Edit(start=target[1], end=value[0], text=" = ")


def early_return(source: SourceText, function: Function) -> Iterator[Edit]:
    """A ``return`` inside the loop that it should follow."""
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


OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        operator.__name__: operator
        for operator in (
            *(boundary, inverted_comparison, inverted_condition, swapped_operands, wrong_sign, and_for_or, off_by_one),
            *(mutated_constant, wrong_text, wrong_key, wrong_default, lost_copy, lost_cleaning, swapped_arguments),
            *(lost_keyword, wrong_twin, wrong_name, missing_await, swapped_branches, dropped_branch),
            *(dropped_statement, reordered_statements, missing_return, wrong_exception, break_for_continue),
            *(lost_accumulation, early_return),
        )
    }
)
"""The operators of the catalogue, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A file with one bug in it."""

    operator: str
    line: int
    """Line of the bug in the right text."""
    edit: Edit
    """Edit of the right text of the file."""


def mutants(source: SourceText, function: Function) -> Iterator[Mutant]:
    """Every possible bug of the catalogue in ``function``, in the order of the catalogue, without duplicates."""
    first, last = source.line_start(function.line), source.line_start(last_line(function.node) + 1)
    right = _tree(source.text[first:last])
    seen = {right, None}
    for mutant in unproved_mutants(source, function):
        edit = mutant.edit
        edit_there = Edit(start=edit.start - first, end=edit.end - first, text=edit.text)
        wrong = _tree(apply(source.text[first:last], [edit_there]))
        if wrong not in seen:
            yield mutant
            seen.add(wrong)


def unproved_mutants(source: SourceText, function: Function) -> Iterator[Mutant]:
    """Every edit of the catalogue in ``function``, in the order of the catalogue. A few are duplicates, do not compile
    or change nothing; to find them takes ten times as long.
    """
    first = source.line_start(function.line)
    for name, operator in OPERATORS.items():
        for edit in operator(source, function):
            line = source.text.count("\n", first, edit.start) + function.line
            yield Mutant(operator=name, line=line, edit=edit)


def _tree(function: str) -> str | None:
    """The syntax tree of a function's text, whatever its indent, as text; ``None`` if it does not compile."""
    text = f"if 1:\n{function}" if function[:1] in " \t" else function
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
        return ast.dump(ast.parse(text))
    except (SyntaxError, ValueError):
        return None


def _nodes(function: Function, kind: type[Node]) -> Iterator[Node]:
    """Every node of a kind in the body, without the docstring, statement by statement."""
    return (node for node in _all_nodes(function) if isinstance(node, kind))


@lru_cache(maxsize=1)
def _all_nodes(function: Function) -> Sequence[ast.AST]:
    """The nodes of the body, walked once for all operators."""
    return [node for statement in function.code for node in ast.walk(statement)]


def _comparisons(
    source: SourceText, function: Function, signs: "MappingProxyType[type[ast.cmpop], str]"
) -> Iterator[Edit]:
    for node in _nodes(function, ast.Compare):
        operands = [node.left, *node.comparators]
        for operator, (left, right) in zip(node.ops, pairwise(operands), strict=True):
            start, end = source.span(left)[1], source.span(right)[0]
            old = _closing(source.text[start:end]) if type(operator) in signs else None
            if old is not None:
                yield Edit(start=start + old[0], end=start + old[1], text=signs[type(operator)])


def _closing(between: str) -> tuple[int, int] | None:
    """The position of the sign between two operands, without surrounding parentheses and blanks."""
    sign = between.strip("() \t\r\n\\")
    if not sign or "#" in between:
        return None
    start = between.index(sign)
    return start, start + len(sign)


def _between(source: SourceText, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Edit]:
    start, end = source.span(left)[1], source.span(right)[0]
    span = _closing(source.text[start:end])
    if span is not None and source.text[start + span[0] : start + span[1]] == old:
        yield Edit(start=start + span[0], end=start + span[1], text=new)


def _swapped(source: SourceText, first: ast.expr | ast.stmt, second: ast.expr | ast.stmt) -> Edit:
    """The edit that swaps two parts of the text."""
    (start, first_end), (second_start, end) = source.span(first), source.span(second)
    text = source.segment(second) + source.text[first_end:second_start] + source.segment(first)
    return Edit(start=start, end=end, text=text)


def _is_all(node: ast.expr) -> bool:
    """True for the full slice ``[:]``."""
    return isinstance(node, ast.Slice) and (node.lower, node.upper, node.step) == (None, None, None)


def _keys(node: ast.AST) -> Iterator[ast.Constant]:
    """The constant keys with which a node reads or writes a mapping."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        yield node.slice
    elif isinstance(node, ast.Call) and node.args and _called(node) in ("get", "pop", "setdefault", "getattr"):
        key = node.args[1] if _called(node) == "getattr" and len(node.args) > 1 else node.args[0]
        if isinstance(key, ast.Constant):
            yield key


def _called(node: ast.Call) -> str:
    """The last part of the called name; empty if it has none."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_number(node: ast.expr) -> bool:
    """True for a likely integer: an integer constant, possibly negated, a binary operation, or a call of ``len``."""
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_number(node.operand)
    return isinstance(node, ast.BinOp) or (isinstance(node, ast.Call) and _called(node) == "len")


def _next_to(source: SourceText, place: ast.expr) -> tuple[str, str]:
    """The text of one more and of one less, as a person would write it."""
    try:
        value = ast.literal_eval(place)
        return str(value + 1), str(value - 1)
    except (ValueError, TypeError):
        text = source.segment(place)
        return f"{text} + 1", f"{text} - 1"


def _is_text(node: ast.expr) -> bool:
    """True for a string, after which ``%`` formats instead of dividing."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _grouped(node: ast.expr, text: str) -> str:
    """The text of an expression, in parentheses if it may need them as an operand."""
    return text if isinstance(node, ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript) else f"({text})"


def _blocks(function: Function) -> Iterator[Sequence[ast.stmt]]:
    """Every list of statements in the function; its body is without the docstring."""
    yield function.code
    for node in _nodes(function, ast.stmt):
        for name in BLOCKS:
            block = getattr(node, name, None)
            if block:
                yield block
        for handler in getattr(node, "handlers", ()):
            yield handler.body


def _alone(source: SourceText, node: ast.stmt) -> bool:
    """True if a statement shares its lines with nothing but a comment."""
    start, end = source.span(node)
    before = source.text[source.line_start(node.lineno) : start]
    after = source.text[end : source.line_start(last_line(node) + 1)].strip()
    return not before.strip() and (not after or after.startswith("#"))


def _drop(source: SourceText, node: ast.stmt, block: Sequence[ast.stmt]) -> Edit:
    if len(block) == 1:
        return source.replace(node, "pass")
    return source.remove_lines(node.lineno, last_line(node))


def _is_chain(source: SourceText, node: ast.If) -> bool:
    """True if the ``if`` continues with ``elif``."""
    inner = node.orelse[0]
    return isinstance(inner, ast.If) and source.segment(inner).startswith("elif")


def _without_else(source: SourceText, node: ast.If) -> Edit:
    """The edit that removes the ``else`` branch, from the end of the statement before it."""
    return Edit(start=source.span(node.body[-1])[1], end=source.span(node.orelse[-1])[1], text="")


def _depends(second: ast.stmt, first: ast.stmt) -> bool:
    """True if one statement reads a name that the other one writes, or both write the same name."""

    def names(node: ast.stmt, context: type[ast.expr_context]) -> set[str]:
        return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, context)}

    shared = names(first, ast.Store) & (names(second, ast.Load) | names(second, ast.Store))
    return bool(shared or names(second, ast.Store) & names(first, ast.Load))

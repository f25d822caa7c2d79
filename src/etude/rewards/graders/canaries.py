"""Canaries: twins of tests that must fail, made by changing one thing in a test's source. Pure.

    source ──definitions_of──▶ definition ──▶ sites ──one, at random──▶ Alteration ──altered──▶ source of the twin

Code under test that makes tests pass, whatever they assert, passes the twin, too: by patching the runner, with objects
that equal everything, by reading what is expected from the test itself. Right code cannot: at a site only what is run
for sure, and was seen to hold, is turned into what cannot hold then. A twin has its test's name and its place, and
where there is a literal to change it looks no less true; which of the two a process runs is not to be seen from inside.

Owns the surgery. Which test is a canary when is :mod:`etude.rewards.graders.test_plans`'s.
"""

import ast
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

from etude.rewards.graders.canary_literals import changed_literal, is_literal
from etude.rewards.graders.canary_syntax import (
    FunctionNode,
    Lines,
    Rows,
    assigned_once,
    called,
    classes_in,
    functions_in,
    last_name,
    rows_by_parameter,
)

Write: TypeAlias = Callable[[random.Random], str | None]


class SiteKind(StrEnum):
    """What is changed."""

    VALUE = "value"
    """A literal that something is compared with is another one."""
    ROWS = "rows"
    """The same in every row of a test with parameters, whose node ids may change with it."""
    WRAPPED = "wrapped"
    """What something is compared with is put into a list or a tuple."""
    RAISES = "raises"
    """Another exception is expected."""
    FLIPPED = "flipped"
    """The assertion holds where it did not."""
    PLANTED = "planted"
    """A comparison of two different numbers comes first: where nothing else can be changed."""


WEIGHTS = MappingProxyType(
    {SiteKind.VALUE: 12, SiteKind.ROWS: 12, SiteKind.WRAPPED: 4, SiteKind.RAISES: 3, SiteKind.FLIPPED: 1}
)
"""How likely a site is chosen beside others. Objects that lie pass an ``==`` with another value, not its opposite; and
another value is what looks most like the real one.
"""

FLIPPED_OPERATORS: Mapping[type[ast.cmpop], str] = MappingProxyType(
    {ast.NotEq: "==", ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Is: "is not", ast.IsNot: "is"}
    | {ast.NotIn: "in"}
)
"""The opposite of each comparison but ``==`` and ``in``, whose right sides are changed instead."""
EQUALITIES = frozenset(
    f"assert{kind}" for kind in ("Equal", "ListEqual", "TupleEqual", "DictEqual", "SetEqual", "MultiLineEqual")
)
_OPPOSITES = (
    *(("assertTrue", "assertFalse"), ("assertIn", "assertNotIn"), ("assertIs", "assertIsNot")),
    *(("assertIsNone", "assertIsNotNone"), ("assertIsInstance", "assertNotIsInstance")),
    *(("assertGreater", "assertLessEqual"), ("assertLess", "assertGreaterEqual"), ("assertRegex", "assertNotRegex")),
)
FLIPPED_METHODS = MappingProxyType(
    {"assertNotEqual": "assertEqual"} | dict(_OPPOSITES) | {second: first for first, second in _OPPOSITES}
)
"""The opposites among unittest's assertions."""
RAISING = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
"""Context managers that expect an exception, which is their first argument."""
SWALLOWING = ("raises", "assert", "suppress", "expect", "ignore", "fail", "xfail", "subtest", "warns", "catch")
"""How the names of context managers begin that may end an assertion's failure, or expect it; those without a name of
their own, such as a parameter of the test, may do so, too.
"""
UNRELATED = (
    *("BufferError", "FloatingPointError", "ZeroDivisionError", "UnboundLocalError", "BlockingIOError"),
    *("ChildProcessError", "RecursionError"),
)  # fmt: skip
"""Exceptions that hardly any other one is derived from."""
BASES = frozenset({"BaseException", "Exception", "ArithmeticError", "NameError", "OSError", "RuntimeError", *UNRELATED})
"""Those of which one of ``UNRELATED`` is a kind, so that it may well be raised where they are expected."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place of a test where it can be made to fail."""

    kind: SiteKind
    start: int
    """First byte of what is replaced, in UTF-8."""
    end: int
    """Byte behind it."""
    write: Write
    """What stands there instead, drawn anew each time; ``None`` where nothing was found."""
    leaves_work: bool = False
    """True if more than assertions comes after it, which a test that fails here leaves undone."""


@dataclass(frozen=True, slots=True)
class Alteration:
    """One change of a source."""

    kind: SiteKind
    start: int
    end: int
    text: str


class TestSource:
    """A test module's source, and what of it can be changed."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    def __init__(self, text: str) -> None:
        """Raises ``ValueError`` for what is no Python."""
        self.text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        try:
            tree = ast.parse(self.text)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"hidden tests are no Python: {error}") from error
        self._lines = Lines(self.text)
        self._functions = dict(functions_in(tree.body))
        self._bases = dict(classes_in(tree.body))

    def definition_of(self, name: str) -> str | None:
        """The qualified name of the function behind ``name`` (``TestA::test_b``), which a class may have inherited.

        ``None`` where it is not in this module.
        """
        if name in self._functions:
            return name
        owner, _, leaf = name.rpartition("::")
        for base in self._bases.get(owner, ()):
            found = self.definition_of(f"{base}::{leaf}") if base != owner else None
            if found:
                return found
        return None

    @property
    def definitions(self) -> Iterable[str]:
        """The qualified names of all functions."""
        return self._functions

    def text_of(self, definition: str) -> str:
        """The source of a function, its decorators included."""
        function = self._functions[definition]
        above = [self._lines.text(one) for one in function.decorator_list]
        return "\n".join([*above, self._lines.text(function)])

    def line_of(self, definition: str) -> int:
        """Where the test is, counted from 1."""
        return self._functions[definition].lineno

    def sites(self, definition: str) -> tuple[Site, ...]:
        """Where the test can be made to fail; there is always some place."""
        function = self._functions[definition]
        found = tuple(_Surgeon(self._lines, function).sites())
        return found or (_planted(self._lines, function),)

    def alteration(self, definition: str, rng: random.Random) -> Alteration:
        """One change, at random, that makes the test fail; with nothing left undone, if there is such a place."""
        every = self.sites(definition)
        sites = [site for site in every if not site.leaves_work] or list(every)
        while sites:
            site = rng.choices(sites, [WEIGHTS.get(site.kind, 1) for site in sites])[0]
            text = site.write(rng)
            if text is not None:
                return Alteration(site.kind, site.start, site.end, text)
            sites.remove(site)
        planted = _planted(self._lines, self._functions[definition])
        return Alteration(planted.kind, planted.start, planted.end, planted.write(rng) or "")

    def altered(self, alterations: Iterable[Alteration]) -> str:
        """The source with changes, which must not overlap."""
        data = self.text.encode()
        for change in sorted(alterations, key=lambda change: change.start, reverse=True):
            data = data[: change.start] + change.text.encode() + data[change.end :]
        return data.decode()


class _Surgeon:
    """Finds the sites of one test: assertions that are reached whenever those before them hold."""

    def __init__(self, lines: Lines, function: FunctionNode) -> None:
        self._lines = lines
        self._function = function
        self._assigned = assigned_once(function)
        self._rows = rows_by_parameter(function)

    def sites(self) -> Iterator[Site]:
        """From top to bottom."""
        if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(self._function)):
            return  # what a generator does is up to whoever runs it
        yield from self._of(self._function.body)

    def _of(self, body: Sequence[ast.stmt]) -> Iterator[Site]:
        for number, statement in enumerate(body, start=1):
            leaves_work = not all(map(_is_assertion, body[number:]))
            for site in self._of_statement(statement):
                yield replace(site, leaves_work=site.leaves_work or leaves_work)
            if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
                return  # what comes after may not be reached

    def _of_statement(self, statement: ast.stmt) -> Iterator[Site]:
        if isinstance(statement, ast.Assert):
            yield from self._of_assertion(statement.test)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield from self._of_method(statement.value)
        elif isinstance(statement, ast.With | ast.AsyncWith):
            yield from self._of_with(statement)

    def _of_with(self, statement: ast.With | ast.AsyncWith) -> Iterator[Site]:
        calls = [item.context_expr for item in statement.items]
        names = [called(call) for call in calls]
        if len(calls) == 1 and names[0] in RAISING:
            yield from self._of_raises(calls[0])
        if all(name and not name.lower().startswith(SWALLOWING) for name in names):
            yield from self._of(statement.body)

    def _of_raises(self, call: ast.expr) -> Iterator[Site]:
        assert isinstance(call, ast.Call)
        expected = call.args[0] if call.args else None
        if isinstance(expected, ast.Name | ast.Attribute) and last_name(expected) not in BASES:
            yield self._site(SiteKind.RAISES, expected, lambda rng: rng.choice(UNRELATED))

    def _of_assertion(self, test: ast.expr) -> Iterator[Site]:
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            yield from self._of_comparison(test)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield self._fixed(SiteKind.FLIPPED, test, f"({self._lines.text(test.operand)})")
        else:
            text = self._lines.text(test)
            is_simple = isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
            yield self._fixed(SiteKind.FLIPPED, test, f"not {text}" if is_simple else f"not ({text})")

    def _of_comparison(self, test: ast.Compare) -> Iterator[Site]:
        left, right, operator = test.left, test.comparators[0], test.ops[0]
        if isinstance(operator, ast.Eq):
            yield from self._of_equality(left, right)
        elif isinstance(operator, ast.In):
            yield self._wrapped(right)
        else:
            text = f"{self._operand(left)} {FLIPPED_OPERATORS[type(operator)]} {self._operand(right)}"
            yield self._fixed(SiteKind.FLIPPED, test, text)

    def _of_equality(self, left: ast.expr, right: ast.expr) -> Iterator[Site]:
        literal = next((found for side in (right, left) if (found := self._literal(side))), None)
        rows = self._rows.get(last_name(right)) or self._rows.get(last_name(left))
        if literal is not None and not (is_literal(left) and is_literal(right)):
            yield self._site(SiteKind.VALUE, literal, lambda rng: changed_literal(self._lines.text(literal), rng))
        elif rows is not None:
            yield self._site(SiteKind.ROWS, rows.table, lambda rng: self._changed_rows(rows, rng))
        else:
            yield self._wrapped(right)

    def _changed_rows(self, rows: Rows, rng: random.Random) -> str | None:
        """The source of the table, one cell of each row changed; ``None`` where one cannot be."""
        start, end = self._lines.span(rows.table)
        data, end_of_last = b"", start
        for cell in rows.cells:
            changed = changed_literal(self._lines.text(cell), rng)
            if changed is None:
                return None
            first, behind = self._lines.span(cell)
            data += self._lines.data[end_of_last:first] + changed.encode()
            end_of_last = behind
        return (data + self._lines.data[end_of_last:end]).decode()

    def _literal(self, node: ast.expr) -> ast.expr | None:
        """The literal that ``node`` is, or is given by: in a tolerance, or in a variable that is used once."""
        if isinstance(node, ast.Call) and called(node) == "approx" and len(node.args) == 1 and not node.keywords:
            node = node.args[0]
        if isinstance(node, ast.Name):
            return self._assigned.get(node.id)
        return node if is_literal(node) else None

    def _of_method(self, call: ast.Call) -> Iterator[Site]:
        method = call.func
        if not isinstance(method, ast.Attribute) or not isinstance(method.value, ast.Name):
            return
        if method.value.id != "self" or any(isinstance(argument, ast.Starred) for argument in call.args):
            return
        if method.attr in EQUALITIES and len(call.args) >= 2:
            yield from self._of_equality(call.args[0], call.args[1])
        elif method.attr in FLIPPED_METHODS:
            _, end = self._lines.span(method)
            start = end - len(method.attr.encode())
            opposite = FLIPPED_METHODS[method.attr]
            yield Site(SiteKind.FLIPPED, start, end, lambda rng: opposite)

    def _wrapped(self, node: ast.expr) -> Site:
        text = self._lines.text(node)
        return self._site(SiteKind.WRAPPED, node, lambda rng: rng.choice((f"[{text}]", f"({text},)")))

    def _operand(self, node: ast.expr) -> str:
        text = self._lines.text(node)
        is_simple = isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Constant)
        return text if is_simple else f"({text})"

    def _fixed(self, kind: SiteKind, node: ast.expr, text: str) -> Site:
        return self._site(kind, node, lambda rng: text)

    def _site(self, kind: SiteKind, node: ast.expr, write: Write) -> Site:
        start, end = self._lines.span(node)
        return Site(kind, start, end, write)


def _is_assertion(statement: ast.stmt) -> bool:
    """True if a statement does nothing but look."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Assert | ast.Pass) or (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr.startswith("assert")
    )


def _planted(lines: Lines, function: FunctionNode) -> Site:
    """A false comparison before the first statement."""
    first = function.body[0]
    decorators = first.decorator_list if isinstance(first, FunctionNode | ast.ClassDef) else []
    line, column = min([(first.lineno, first.col_offset), *((one.lineno, one.col_offset - 1) for one in decorators)])
    start = lines.place(line, column)
    indent = lines.indent(line)
    joint = f"\n{indent}" if len(indent.encode()) == column else "; "

    def write(rng: random.Random) -> str:
        first, second = rng.sample(range(2, 100), 2)
        return f"assert {first} == {second}{joint}"

    return Site(SiteKind.PLANTED, start, start, write)

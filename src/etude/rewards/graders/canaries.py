"""Canaries: copies of tests that must fail, made by one change to a test's source. Pure.

    source ──definitions_of──▶ definition ──▶ sites ──one, at random──▶ Alteration ──altered──▶ source of the twin

Code under test that makes any test pass also passes the twin (the changed copy): for example by patching the runner,
with objects that equal everything, or by reading the expected value from the test itself. Correct code fails the twin:
only an assertion that is certain to run, and that holds for correct code, is changed, so that it cannot hold. A twin
has the name and place of its test, and a changed literal looks as plausible as the original: the process cannot tell
from inside which of the two it runs.

A changed literal keeps the type and the shape of the original (a digit stays a digit, a list keeps its length), since
the code under test could recognise one that looks out of place. Every part of it is changed, because a comparison may
legitimately ignore one part (versions that differ only in their build name are equal).

Owns the changes to a source. :mod:`etude.rewards.graders.test_runs` selects the canaries of each run.
"""

import ast
import math
import random
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

Constant: TypeAlias = bool | int | float | str | bytes | None

WORD = re.compile(r"[A-Za-z0-9]+")
"""Words of a text; one character of each is changed."""


def is_literal(node: ast.expr) -> bool:
    """True for an expression that consists only of constants, of types that a canary can change."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool | int | float | str | bytes | None)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub | ast.UAdd) and is_number(node.operand)
    if isinstance(node, ast.Dict):
        return all(key is not None and is_literal(key) for key in node.keys) and all(map(is_literal, node.values))
    return isinstance(node, ast.List | ast.Tuple | ast.Set) and all(map(is_literal, node.elts))


def is_number(node: ast.expr) -> bool:
    """True for an int or float literal."""
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def changed_literal(text: str, rng: random.Random) -> str | None:
    """The source of a different literal, or ``None`` if the random change made an equal one (possible for ``{1, 2}``).

    ``text`` is the source of an expression for which :func:`is_literal` is true.
    """
    tree = ast.parse(f"({text}\n)", mode="eval")
    value = ast.literal_eval(tree)
    changed = ast.unparse(_Changing(rng).visit(tree))
    return None if ast.literal_eval(changed) == value else changed


def changed_constant(value: Constant, rng: random.Random) -> Constant:
    """Another value of the same type; a number changes by more than any usual tolerance."""
    if value is None:
        return 0
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1)) * rng.randint(abs(value) // 10 + 1, abs(value) // 3 + 9)
    if isinstance(value, float):
        return _changed_float(value, rng)
    if isinstance(value, bytes):
        return _changed_text(value.decode("latin-1"), rng).encode("latin-1")
    return _changed_text(value, rng)


def _changed_float(value: float, rng: random.Random) -> float:
    if not math.isfinite(value):
        return float(rng.randint(1, 99))
    size = abs(value) or 1.0
    changed = float(f"{value + rng.choice((-1, 1)) * rng.uniform(0.3, 0.9) * size:.4g}")
    return changed if math.isfinite(changed) and changed != value else value / 2 or 1.0


def _changed_text(text: str, rng: random.Random) -> str:
    """Replace one letter or digit of each word, by more than a change of case."""
    changed = WORD.sub(lambda word: _changed_word(word[0], rng), text)
    return changed if changed != text else text + rng.choice(string.ascii_lowercase)


def _changed_word(word: str, rng: random.Random) -> str:
    place = rng.randrange(len(word))
    kinds = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
    others = next(kind for kind in kinds if word[place] in kind).replace(word[place], "")
    return word[:place] + rng.choice(others) + word[place + 1 :]


class _Changing(ast.NodeTransformer):
    """Changes every constant except dictionary keys, and puts a 0 into empty containers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def visit(self, node: ast.AST) -> ast.AST:
        """Replace the literal ``node`` by another one."""
        if isinstance(node, ast.Constant | ast.UnaryOp):
            value: Constant = ast.literal_eval(node)
            return ast.parse(repr(changed_constant(value, self._rng)), mode="eval").body
        if isinstance(node, ast.Dict):
            values = [changed for old in node.values if isinstance(changed := self.visit(old), ast.expr)]
            return ast.Dict(node.keys or [ast.Constant(0)], values or [ast.Constant(0)])
        if isinstance(node, ast.List | ast.Tuple) and not node.elts:
            node.elts = [ast.Constant(0)]
            return node
        return self.generic_visit(node)


FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Lines:
    """Byte offsets in a source, by ``ast``'s lines and columns."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self._starts = [0]
        for line in self.data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def place(self, line: int, column: int) -> int:
        """Byte offset of a line and column."""
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Byte range of a node: its first byte and the byte after it."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Source of an expression."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def indent(self, line: int) -> str:
        """Indentation of a line."""
        whole = self.data[self._starts[line - 1] : self._starts[line]]
        return whole[: len(whole) - len(whole.lstrip(b" \t"))].decode()


def functions_in(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, FunctionNode]]:
    """Functions by qualified name; the last one if names repeat."""
    for node in body:
        if isinstance(node, FunctionNode):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions_in(node.body, f"{prefix}{node.name}::")


def classes_in(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Base classes by the qualified name of the class."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, tuple(base.id for base in node.bases if isinstance(base, ast.Name))
            yield from classes_in(node.body, f"{prefix}{node.name}::")


def assigned_once(function: FunctionNode) -> Mapping[str, ast.expr]:
    """Literals by variable, for variables that are assigned once, at the top level of the test, and read once."""
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
    """The literals of one ``parametrize`` parameter, in order."""

    table: ast.expr
    """The expression of all rows."""
    cells: tuple[ast.expr, ...]
    """The parameter's literal in each row."""


def rows_by_parameter(function: FunctionNode) -> Mapping[str, Rows]:
    """Literals of ``parametrize`` by the parameter that receives them, for parameters that the test reads once."""
    by_parameter: dict[str, Rows] = {}
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
                by_parameter[name] = Rows(call.args[1], tuple(whole))
    return by_parameter


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
    """The last name of a called expression; empty for anything else."""
    return last_name(node.func) if isinstance(node, ast.Call) else ""


def last_name(node: ast.expr) -> str:
    """The name of a variable or an attribute; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


Write: TypeAlias = Callable[[random.Random], str | None]


class SiteKind(StrEnum):
    """Kind of change that makes a canary of a test."""

    VALUE = "value"
    """The literal in a comparison is changed."""
    ROWS = "rows"
    """A literal is changed in every row of a parametrised test; its node ids may change, too."""
    WRAPPED = "wrapped"
    """The expected value is put into a list or a tuple."""
    RAISES = "raises"
    """Another exception is expected."""
    FLIPPED = "flipped"
    """The assertion is negated."""
    PLANTED = "planted"
    """A false comparison of two numbers is inserted first; used where nothing else can be changed."""


WEIGHTS = MappingProxyType(
    {SiteKind.VALUE: 12, SiteKind.ROWS: 12, SiteKind.WRAPPED: 4, SiteKind.RAISES: 3, SiteKind.FLIPPED: 1}
)
"""Weight of each kind of site in the random choice. An object that equals everything passes an ``==`` with another
value, but not the negated comparison; and a changed value looks most like the original test.
"""

FLIPPED_OPERATORS: Mapping[type[ast.cmpop], str] = MappingProxyType(
    {ast.NotEq: "==", ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Is: "is not", ast.IsNot: "is"}
    | {ast.NotIn: "in"}
)
"""The opposite of each comparison except ``==`` and ``in``, whose right sides are changed instead."""
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
"""Context managers that expect the exception in their first argument."""
SWALLOWING = ("raises", "assert", "suppress", "expect", "ignore", "fail", "xfail", "subtest", "warns", "catch")
"""Prefixes of context managers that may suppress or expect the failure of an assertion. Those without a name in the
source, such as a parameter of the test, may do so, too.
"""
UNRELATED = (
    *("BufferError", "FloatingPointError", "ZeroDivisionError", "UnboundLocalError", "BlockingIOError"),
    *("ChildProcessError", "RecursionError"),
)  # fmt: skip
"""Exceptions that have hardly any subclasses."""
BASES = frozenset({"BaseException", "Exception", "ArithmeticError", "NameError", "OSError", "RuntimeError", *UNRELATED})
"""Base classes of the exceptions in ``UNRELATED``: an expected base would accept one of these."""


@dataclass(frozen=True, slots=True)
class CanarySite:
    """A place of a test where it can be made to fail."""

    kind: SiteKind
    start: int
    """First byte of the replaced source, in UTF-8."""
    end: int
    """Byte after it."""
    write: Write
    """Makes a new random replacement on each call; ``None`` if there is none."""
    leaves_work: bool = False
    """True if statements other than assertions follow, which a test that fails here does not run."""


@dataclass(frozen=True, slots=True)
class Alteration:
    """One change of a test's source."""

    kind: SiteKind
    start: int
    end: int
    text: str


class TestSource:
    """A test module's source and its possible canary changes."""

    __test__ = False  # not a test class, despite its name

    def __init__(self, text: str) -> None:
        """Raises ``ValueError`` if the text is not valid Python."""
        self.text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        try:
            tree = ast.parse(self.text)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"hidden tests are not Python: {error}") from error
        self._lines = Lines(self.text)
        self._functions = dict(functions_in(tree.body))
        self._bases = dict(classes_in(tree.body))

    def definition_of(self, name: str) -> str | None:
        """The qualified name of the function that defines ``name`` (``TestA::test_b``), which a class may inherit;
        ``None`` if it is not in this module.
        """
        if name in self._functions:
            return name
        owner, _, leaf = name.rpartition("::")
        for base in self._bases.get(owner, ()):
            definition = self.definition_of(f"{base}::{leaf}") if base != owner else None
            if definition:
                return definition
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
        """Line of the test, counted from 1."""
        return self._functions[definition].lineno

    def sites(self, definition: str) -> tuple[CanarySite, ...]:
        """Sites at which the test can be made to fail; there is always one."""
        function = self._functions[definition]
        sites = tuple(_Surgeon(self._lines, function).sites())
        return sites or (_planted(self._lines, function),)

    def alteration(self, definition: str, rng: random.Random) -> Alteration:
        """A random change that makes the test fail; if possible at a site after which only assertions follow."""
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

    def sites(self) -> Iterator[CanarySite]:
        """From top to bottom."""
        if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(self._function)):
            return  # the caller decides how far a generator runs
        yield from self._of(self._function.body)

    def _of(self, body: Sequence[ast.stmt]) -> Iterator[CanarySite]:
        for number, statement in enumerate(body, start=1):
            leaves_work = not all(map(_is_assertion, body[number:]))
            for site in self._of_statement(statement):
                yield replace(site, leaves_work=site.leaves_work or leaves_work)
            if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
                return  # statements after it may not be reached

    def _of_statement(self, statement: ast.stmt) -> Iterator[CanarySite]:
        if isinstance(statement, ast.Assert):
            yield from self._of_assertion(statement.test)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield from self._of_method(statement.value)
        elif isinstance(statement, ast.With | ast.AsyncWith):
            yield from self._of_with(statement)

    def _of_with(self, statement: ast.With | ast.AsyncWith) -> Iterator[CanarySite]:
        calls = [item.context_expr for item in statement.items]
        names = [called(call) for call in calls]
        if len(calls) == 1 and names[0] in RAISING:
            yield from self._of_raises(calls[0])
        if all(name and not name.lower().startswith(SWALLOWING) for name in names):
            yield from self._of(statement.body)

    def _of_raises(self, call: ast.expr) -> Iterator[CanarySite]:
        assert isinstance(call, ast.Call)
        expected = call.args[0] if call.args else None
        if isinstance(expected, ast.Name | ast.Attribute) and last_name(expected) not in BASES:
            yield self._site(SiteKind.RAISES, expected, lambda rng: rng.choice(UNRELATED))

    def _of_assertion(self, test: ast.expr) -> Iterator[CanarySite]:
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            yield from self._of_comparison(test)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield self._fixed(SiteKind.FLIPPED, test, f"({self._lines.text(test.operand)})")
        else:
            text = self._lines.text(test)
            is_simple = isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
            yield self._fixed(SiteKind.FLIPPED, test, f"not {text}" if is_simple else f"not ({text})")

    def _of_comparison(self, test: ast.Compare) -> Iterator[CanarySite]:
        left, right, operator = test.left, test.comparators[0], test.ops[0]
        if isinstance(operator, ast.Eq):
            yield from self._of_equality(left, right)
        elif isinstance(operator, ast.In):
            yield self._wrapped(right)
        else:
            text = f"{self._operand(left)} {FLIPPED_OPERATORS[type(operator)]} {self._operand(right)}"
            yield self._fixed(SiteKind.FLIPPED, test, text)

    def _of_equality(self, left: ast.expr, right: ast.expr) -> Iterator[CanarySite]:
        literal = next((node for side in (right, left) if (node := self._literal(side))), None)
        rows = self._rows.get(last_name(right)) or self._rows.get(last_name(left))
        if literal is not None and not (is_literal(left) and is_literal(right)):
            yield self._site(SiteKind.VALUE, literal, lambda rng: changed_literal(self._lines.text(literal), rng))
        elif rows is not None:
            yield self._site(SiteKind.ROWS, rows.table, lambda rng: self._changed_rows(rows, rng))
        else:
            yield self._wrapped(right)

    def _changed_rows(self, rows: Rows, rng: random.Random) -> str | None:
        """The source of the table with one cell of each row changed; ``None`` if one of them cannot be changed."""
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
        """The literal that ``node`` is or refers to: inside a tolerance, or in a variable that is used once."""
        if isinstance(node, ast.Call) and called(node) == "approx" and len(node.args) == 1 and not node.keywords:
            node = node.args[0]
        if isinstance(node, ast.Name):
            return self._assigned.get(node.id)
        return node if is_literal(node) else None

    def _of_method(self, call: ast.Call) -> Iterator[CanarySite]:
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
            yield CanarySite(SiteKind.FLIPPED, start, end, lambda rng: opposite)

    def _wrapped(self, node: ast.expr) -> CanarySite:
        text = self._lines.text(node)
        return self._site(SiteKind.WRAPPED, node, lambda rng: rng.choice((f"[{text}]", f"({text},)")))

    def _operand(self, node: ast.expr) -> str:
        text = self._lines.text(node)
        is_simple = isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Constant)
        return text if is_simple else f"({text})"

    def _fixed(self, kind: SiteKind, node: ast.expr, text: str) -> CanarySite:
        return self._site(kind, node, lambda rng: text)

    def _site(self, kind: SiteKind, node: ast.expr, write: Write) -> CanarySite:
        start, end = self._lines.span(node)
        return CanarySite(kind, start, end, write)


def _is_assertion(statement: ast.stmt) -> bool:
    """True if a statement only asserts."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Assert | ast.Pass) or (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr.startswith("assert")
    )


def _planted(lines: Lines, function: FunctionNode) -> CanarySite:
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

    return CanarySite(SiteKind.PLANTED, start, start, write)

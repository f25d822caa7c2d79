"""The statements at the top of a module, the names that they bind and use, and the move of some of them into an
earlier text of that module.

    module before ─┐
    module after ──┴─ statements to carry ──▶ the module before, with these alone as they are after

Pure. Which statements a task needs is decided in :mod:`.slices`.
"""

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from etude.tasks.repositories.spans import Edit, SourceText, apply, last_line

EXPORTS = "__all__"
"""The list of names that a module exports."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
MODULES = 256
"""Modules whose statements are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement at the top of a module."""

    node: ast.stmt = field(repr=False)
    text: str
    """Whole lines, decorators included."""
    names: frozenset[str]
    """Names that it binds in the module."""
    uses: frozenset[str]
    """Names that it reads."""
    attributes: frozenset[tuple[str, str]]
    """Names that it reads as attributes of a name: ``module.name``."""
    code: str
    """Its tree without docstrings and annotations of functions: the same where the same is done."""

    @property
    def is_import(self) -> bool:
        """True for an import."""
        return isinstance(self.node, IMPORTS)


class ModuleStatements:
    """The statements of one module, by the names that they bind."""

    def __init__(self, text: str) -> None:
        """Raises ``SyntaxError`` or ``ValueError`` for what is no Python."""
        self.source = SourceText("", text)
        bare = ast.parse(text)  # a second tree, which loses what says nothing of what is done
        codes = [_code_of(node) for node in bare.body]
        pairs = zip(self.source.tree.body, codes, strict=True)
        self.statements = tuple(_statement(self.source, node, code) for node, code in pairs)
        self.by_name: dict[str, list[Statement]] = {}
        for statement in self.statements:
            for name in statement.names:
                self.by_name.setdefault(name, []).append(statement)

    def code_of(self, name: str) -> list[str]:
        """The code that binds a name, import by import and definition by definition."""
        return [
            _import_of(statement.node, name) if isinstance(statement.node, IMPORTS) else statement.code
            for statement in self.by_name.get(name, ())
        ]

    def definition(self, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
        """The function or class of a name; of several the last."""
        nodes = [statement.node for statement in self.by_name.get(name, ())]
        return next((node for node in reversed(nodes) if isinstance(node, DEFINITIONS)), None)

    @property
    def public(self) -> list[str]:
        """Names of public functions and classes, sorted."""
        return sorted(name for name in self.by_name if not name.startswith("_") and self.definition(name) is not None)

    @property
    def futures(self) -> list[str]:
        """Names that are imported from ``__future__``: they change how all of it is read."""
        nodes = [statement.node for statement in self.statements]
        futures = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        return [alias.name for node in futures for alias in node.names]

    @property
    def exports(self) -> ast.List | ast.Tuple | None:
        """The list ``__all__``, where it is written as one."""
        for statement in self.by_name.get(EXPORTS, ()):
            value = getattr(statement.node, "value", None)
            if isinstance(statement.node, ast.Assign) and isinstance(value, ast.List | ast.Tuple):
                return value
        return None

    def exported(self, name: str) -> bool:
        """True if a name is in ``__all__``."""
        elements = self.exports.elts if self.exports is not None else []
        return any(isinstance(element, ast.Constant) and element.value == name for element in elements)


@lru_cache(maxsize=MODULES)
def statements_of(text: str) -> ModuleStatements | None:
    """The statements of a module; ``None`` for what is no Python."""
    try:
        return ModuleStatements(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def carry(
    before: ModuleStatements,
    after: ModuleStatements,
    names: Collection[str],
    *,
    exports: Collection[str] = (),
    imports: Sequence[str] = (),
) -> str:
    """The text of a module before a change with some names bound as after it.

    ``exports`` are names for ``__all__``, ``imports`` further statements of import. Raises ``ValueError`` for
    statements that cannot be put together.
    """
    carried = [statement for statement in after.statements if statement.names & set(names) and not statement.is_import]
    lines = [*_new_imports(before, after, names), *imports]
    edits = [_insertion(before.source, _head(before), "".join(f"{line}\n" for line in lines))] if lines else []
    replaced: dict[int, list[str]] = {}
    inserted: dict[int, list[str]] = {}
    dropped: set[int] = set()
    for statement in carried:
        same = [
            index for index, old in enumerate(before.statements) if old.names & statement.names and not old.is_import
        ]
        if same:
            replaced.setdefault(same[0], []).append(statement.text)
            dropped |= set(same[1:])
        else:
            inserted.setdefault(_place(before, after, statement), []).append(statement.text)
    for index in sorted(replaced.keys() | dropped):
        node = before.statements[index].node
        start = before.source.line_start(_first_line(node))
        end = before.source.line_start(last_line(node) + 1)
        edits.append(Edit(start=start, end=end, text="\n\n".join(replaced.get(index, ()))))
    for line, texts in inserted.items():
        edits.append(_insertion(before.source, line, "".join(f"\n\n{text}" for text in texts)))
    new = [name for name in exports if before.exports is not None and not before.exported(name)]
    if new and before.exports is not None:
        edits.append(_more_exports(before.source, before.exports, new))
    return apply(before.source.text, edits)


def _statement(source: SourceText, node: ast.stmt, code: str) -> Statement:
    start, end = source.line_start(_first_line(node)), source.line_start(last_line(node) + 1)
    text = source.text[start:end]
    nodes = list(ast.walk(node))
    return Statement(
        node=node,
        text=text if text.endswith("\n") else f"{text}\n",
        names=frozenset(_bound(node)),
        uses=frozenset(inner.id for inner in nodes if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)),
        attributes=frozenset(
            (inner.value.id, inner.attr)
            for inner in nodes
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name)
        ),
        code=code,
    )


def _code_of(node: ast.stmt) -> str:
    """The tree of a statement as text, after docstrings and annotations of functions were taken out of it."""
    for inner in ast.walk(node):
        if isinstance(inner, DEFINITIONS) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.returns = None
        if isinstance(inner, ast.arg):
            inner.annotation = None
    return ast.dump(node)


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement binds in the module, those in branches included."""
    if isinstance(node, DEFINITIONS):
        yield node.name
        return
    if isinstance(node, IMPORTS):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names if alias.name != "*")
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _bound(child)
        else:
            names = (part for part in ast.walk(child) if isinstance(part, ast.Name))
            yield from (name.id for name in names if isinstance(name.ctx, ast.Store))
    for handler in getattr(node, "handlers", ()):
        for inner in handler.body:
            yield from _bound(inner)


def _import_of(node: ast.stmt, name: str) -> str:
    """The part of an import that binds one name, as a statement."""
    assert isinstance(node, IMPORTS)
    alias = next(alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) == name)
    if isinstance(node, ast.Import):
        return ast.unparse(ast.Import(names=[alias]))
    return ast.unparse(ast.ImportFrom(module=node.module, names=[alias], level=node.level))


def _new_imports(before: ModuleStatements, after: ModuleStatements, names: Collection[str]) -> list[str]:
    """Imports of some names that are there only after a change, one a line; those of ``__future__`` first."""
    lines: list[str] = []
    for name in sorted(names):
        for statement in after.by_name.get(name, ()):
            if statement.is_import:
                line = _import_of(statement.node, name)
                if line not in before.code_of(name):
                    lines.append(line)
    unique = dict.fromkeys(lines)
    return sorted(unique, key=lambda line: not line.startswith("from __future__"))


def _head(module: ModuleStatements) -> int:
    """The line after a module's docstring and imports from ``__future__``."""
    line = 0
    for index, statement in enumerate(module.statements):
        node = statement.node
        is_document = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_document and getattr(node, "module", None) != "__future__":
            break
        line = last_line(node)
    return line + 1


def _place(before: ModuleStatements, after: ModuleStatements, statement: Statement) -> int:
    """The line of the module before at which a new statement belongs: behind what it follows after the change."""
    position = after.statements.index(statement)
    for earlier in reversed(after.statements[:position]):
        matches = [old for old in before.statements if old.names & earlier.names]
        if matches:
            return max(_head(before), last_line(matches[-1].node) + 1)
    return _head(before)


def _insertion(source: SourceText, line: int, text: str) -> Edit:
    start = source.line_start(line)
    is_broken = start == len(source.text) and bool(source.text) and not source.text.endswith("\n")
    return Edit(start=start, end=start, text=f"\n{text}" if is_broken else text)


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, DEFINITIONS) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _more_exports(source: SourceText, exports: ast.List | ast.Tuple, names: Sequence[str]) -> Edit:
    """The edit that puts names at the end of a list."""
    added = ", ".join(repr(name) for name in names)
    if exports.elts:
        _, end = source.span(exports.elts[-1])
        return Edit(start=end, end=end, text=f", {added}")
    return source.replace(exports, f"[{added}]")


def names_in(texts: Mapping[str, str]) -> frozenset[str]:
    """All names that are bound at the top of some modules."""
    modules = (statements_of(text) for path, text in texts.items() if path.endswith(".py"))
    return frozenset(name for module in modules if module is not None for name in module.by_name)

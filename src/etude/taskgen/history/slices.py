"""Slices of a change: one function or class of it with all that it needs, and the tests that can be run with it alone.

    release ──▶ name ──▶ what it uses that the release changed, too ──▶ answer: the tree before, with these alone
                                                                    ──▶ hidden tests, without imports of other news

A release changes many things at once, and a task asks for one of them: so its tests must pass when only that one was
made. That they do is found out by running them (:mod:`.validator`). Pure, and the same each time, so that a record
need not hold a line of code.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from etude.taskgen.deletions import without_alias
from etude.taskgen.history.changed_files import ChangedFiles, changed_lines
from etude.taskgen.history.definitions import DEFINITIONS, ModuleStatements, Statement, carry, names_in, statements_of
from etude.taskgen.projects import Project
from etude.tasks.repositories.spans import SourceText, apply


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A part of a change that can be asked for by itself."""

    answer: Mapping[str, str | None]
    """Path → text of what it changes, without tests; ``None`` for a file that it removes."""
    hidden: Mapping[str, str]
    """Texts of tests after the change that go with it."""
    changed: frozenset[str]
    """Names that are bound otherwise with it; empty for a whole change."""
    lines: int
    """Lines of the project's modules that it adds or takes away."""


class Slicer:
    """Cuts one change into slices."""

    def __init__(self, files: ChangedFiles, project: Project) -> None:
        self._files = files
        self._project = project
        self._hidden = files.hidden(project)
        self._after = {
            path: text for path, text in files.after.items() if path.endswith(".py") and project.is_source(path)
        }
        self._before = {path: files.before.get(path, "") for path in self._after}
        self._paths = {project.module(path): path for path in self._after}
        self._new = names_in(self._after) - names_in(self._before)

    def whole(self) -> Slice:
        """All of the change."""
        changed = (path for path in self._files.changed if not self._project.is_test(path))
        return Slice(
            answer={path: self._files.after.get(path) for path in changed},
            hidden=self._hidden,
            changed=frozenset(),
            lines=self._files.lines(self._project),
        )

    def nothing(self) -> dict[str, str]:
        """The hidden tests, without imports of anything that is new."""
        return self._without(self._new)

    def names(self) -> Iterator[tuple[str, str]]:
        """Path and name of each public function and class that the change made or changed, itself or below it."""
        for path in self._files.sources(self._project):
            module = statements_of(self._after.get(path, ""))
            for name in module.public if module is not None else ():
                needs = self._needs(path, name)
                if any(self._counts(where, what, (path, name)) for where, what in needs):
                    yield path, name

    def cut(self, path: str, name: str) -> Slice | None:
        """The slice of one name; ``None`` where its statements cannot be put into the modules before."""
        by_path: dict[str, set[str]] = {}
        for where, what in self._needs(path, name) | self._exporting(path, name):
            by_path.setdefault(where, set()).add(what)
        stars = self._stars(path) if not self._before[path] else {}
        answer: dict[str, str | None] = {}
        for where in by_path.keys() | stars.keys():
            before, after = statements_of(self._before[where]), statements_of(self._after[where])
            if before is None or after is None:
                return None
            exports = [name] if after.exported(name) else []
            imports = [stars[where]] if where in stars else []
            try:
                text = carry(before, after, by_path.get(where, ()), exports=exports, imports=imports)
                ast.parse(text)
            except (ValueError, SyntaxError):
                return None
            if text != self._before[where]:
                answer[where] = text
        changed = frozenset(what for names in by_path.values() for what in names)
        return Slice(
            answer=answer,
            hidden=self._without(self._new - changed),
            changed=changed,
            lines=sum(changed_lines(self._before[where], text or "") for where, text in answer.items()),
        )

    def _needs(self, path: str, name: str) -> frozenset[tuple[str, str]]:
        """A name and what it uses, directly or not, of all that is bound otherwise after the change."""
        needs: set[tuple[str, str]] = set()
        seen: set[tuple[str, str]] = set()
        waiting = [(path, name)]
        while waiting:
            place = where, what = waiting.pop()
            after = statements_of(self._after.get(where, ""))
            if place in seen or after is None or what not in after.by_name:
                continue
            seen.add(place)
            before = statements_of(self._before[where])
            if before is None or before.code_of(what) != after.code_of(what):
                needs.add(place)
                for statement in after.by_name[what]:
                    waiting += self._used(where, after, statement)
                waiting += [(where, future) for future in after.futures]
            waiting += self._imported(where, after, what)
        return frozenset(needs)

    def _used(self, where: str, module: ModuleStatements, statement: Statement) -> Iterator[tuple[str, str]]:
        """The names that a statement of a module uses, and the attributes of the project's modules."""
        if not statement.is_import:
            yield from ((where, name) for name in statement.uses)
        for owner, attribute in statement.attributes:
            for path in self._modules(where, module, owner):
                yield path, attribute

    def _counts(self, where: str, what: str, own: tuple[str, str]) -> bool:
        """True if a changed name makes a change of ``own``: itself, or what is nobody's own name."""
        module = statements_of(self._after[where])
        is_definition = module is not None and module.definition(what) is not None
        is_imported = module is not None and all(each.is_import for each in module.by_name[what])
        return (where, what) == own or (not is_imported and (what.startswith("_") or not is_definition))

    def _exporting(self, path: str, name: str) -> frozenset[tuple[str, str]]:
        """Other modules that import the name only after the change, as packages do for their users."""
        exports: set[tuple[str, str]] = set()
        for where, text in self._after.items():
            after, before = statements_of(text), statements_of(self._before[where])
            if where != path and after is not None and before is not None and before.statements:
                is_new = name in after.by_name and name not in before.by_name
                if is_new and (path, name) in set(self._imported(where, after, name)):
                    exports.add((where, name))
        return frozenset(exports)

    def _stars(self, path: str) -> dict[str, str]:
        """Imports of all names of a new module: path → statement."""
        stars: dict[str, str] = {}
        for where, text in self._after.items():
            module = statements_of(text)
            for node in module.source.tree.body if module is not None and self._before[where] else ():
                is_star = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
                if is_star and isinstance(node, ast.ImportFrom) and self._path_of(where, node) == path:
                    stars[where] = ast.unparse(node)
        return stars

    def _imported(self, where: str, module: ModuleStatements, name: str) -> Iterator[tuple[str, str]]:
        """The place of the project that a name is imported from, if it is."""
        for statement in module.by_name.get(name, ()):
            if isinstance(statement.node, DEFINITIONS):
                continue
            for node in ast.walk(statement.node):
                if isinstance(node, ast.ImportFrom):
                    path = self._path_of(where, node)
                    names = [each.name for each in node.names if (each.asname or each.name) == name]
                    yield from ((path, each) for each in names if path is not None)

    def _modules(self, where: str, module: ModuleStatements, name: str) -> Iterator[str]:
        """The modules of the project that a name stands for."""
        for statement in module.by_name.get(name, ()):
            node = statement.node
            if isinstance(node, ast.Import):
                dotted = [each.name for each in node.names if (each.asname or each.name) == name]
                yield from (self._paths[each] for each in dotted if each in self._paths)
            elif isinstance(node, ast.ImportFrom):
                parent = self._dotted(where, node)
                inner = [f"{parent}.{each.name}" for each in node.names if (each.asname or each.name) == name]
                yield from (self._paths[each] for each in inner if each in self._paths)

    def _path_of(self, where: str, node: ast.ImportFrom) -> str | None:
        return self._paths.get(self._dotted(where, node))

    def _dotted(self, where: str, node: ast.ImportFrom) -> str:
        """The dotted name of the module that an import names."""
        if not node.level:
            return node.module or ""
        package = self._project.module(where).split(".")
        is_package = PurePosixPath(where).name == "__init__.py"
        up = node.level - 1 if is_package else node.level
        return ".".join([*package[: len(package) - up], *([node.module] if node.module else [])])

    def _without(self, names: frozenset[str]) -> dict[str, str]:
        """The hidden tests without imports of some names of the project."""
        return {
            path: _without_imports(text, names, self._project) if path.endswith(".py") else text
            for path, text in self._hidden.items()
        }


def top_imports(text: str) -> list[str]:
    """The imports that run when a module is imported, in a fixed order: those outside of functions."""
    try:
        waiting: list[ast.AST] = [ast.parse(text)]
    except (SyntaxError, ValueError):
        return [text]
    imports = list[str]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(ast.unparse(node))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting.extend(ast.iter_child_nodes(node))
    return imports


def _without_imports(text: str, names: frozenset[str], project: Project) -> str:
    """A test module without imports of some names of its project; what uses them fails when it runs."""
    try:
        source = SourceText("", text)
    except (SyntaxError, ValueError):
        return text
    edits = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and _is_of_project(node, project):
            absent = sorted({alias.name for alias in node.names} & names)
            if absent:
                edits.append(without_alias(source, node, *absent))
    return apply(text, edits)


def _is_of_project(node: ast.ImportFrom, project: Project) -> bool:
    return node.level > 0 or (node.module or "").partition(".")[0] in project.modules

"""Selection of the tests that an agent sees: those that would give a task away are cut out of its copy of the test
files.

For a deletion, every test that fails without the feature is hidden. For a planted bug a part of the failing tests stays
visible, as in a repository where the build is red; the others are hidden, so that mending just what is seen is not
enough. Tests are hidden by the function: of one with parameters, all cases. Pure.
"""

import ast
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from etude.taskgen.deletions import without_alias
from etude.tasks.repositories.spans import Edit, SourceText, apply, last_line

VISIBLE_SHARE = 0.5
"""Most failing tests of a planted bug that stay visible…"""
MAX_VISIBLE = 3
"""…and no more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestView:
    """The test files of a package, split into visible and hidden ones."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    changed: Mapping[str, str | None]
    """Files that are others in the agent's copy: path → text, or ``None`` for one that is left out."""
    hidden: frozenset[str]
    """Failing tests that the agent does not see."""
    visible: frozenset[str]
    """Failing tests that it does."""


def place_of(test: str) -> tuple[str, str]:
    """File and dotted name of the test function of a node id."""
    path, _, inner = test.partition("::")
    return path, inner.partition("[")[0].replace("::", ".")


def view_tests(
    files: Mapping[str, str], fails: Collection[str], *, show: bool, gone: str = "", salt: str = ""
) -> TestView:
    """Cut the failing tests out of ``files`` (path → text of every test file), but for a few if ``show``.

    ``gone`` is a name that must not be mentioned any more either. ``salt`` decides, with the names, which ones stay.
    """
    functions = sorted({place_of(test) for test in fails}, key=lambda place: _order(salt, *place))
    count = min(MAX_VISIBLE, int(len(functions) * VISIBLE_SHARE)) if show else 0
    shown = set(functions[:count])
    cut: dict[str, set[str]] = {}
    for path, name in functions[count:]:
        cut.setdefault(path, set()).add(name)
    changed: dict[str, str | None] = {path: _without(path, files.get(path), names, gone) for path, names in cut.items()}
    if gone:
        word = re.compile(rf"\b{re.escape(gone)}\b")
        others = {path: text for path, text in files.items() if path not in cut and word.search(text)}
        changed |= {path: _without(path, text, (), gone) for path, text in others.items()}
    left_out = {path for path, text in changed.items() if text is None}
    visible = frozenset(test for test in fails if place_of(test) in shown and place_of(test)[0] not in left_out)
    return TestView(changed=changed, hidden=frozenset(fails) - visible, visible=visible)


def _order(salt: str, path: str, name: str) -> str:
    return hashlib.sha256(f"{salt}|{path}|{name}".encode()).hexdigest()


def _without(path: str, text: str | None, names: Iterable[str], gone: str) -> str | None:
    """A test file without some functions and without a name; ``None`` when it is better left out altogether."""
    if text is None:
        return None
    try:
        source = SourceText(path, text)
    except (SyntaxError, ValueError):
        return None
    required = set(names)
    edits: list[Edit] = []
    hidden: set[str] = set()
    for name, node, block in _definitions(source):
        mentions = bool(gone) and _mentions(source, node, gone)
        if name in required or (mentions and not isinstance(node, ast.ClassDef)):
            hidden.add(name)
            edits.append(_cut(source, node, block))
    if required - hidden:
        return None  # it comes from a class elsewhere, or is made by a loop
    if gone:
        imports = [node for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom)]
        edits += [without_alias(source, node, gone) for node in imports if any(a.name == gone for a in node.names)]
    try:
        result = _passes(apply(text, edits))
    except ValueError:  # a class and its method both had to go
        return None
    if gone and re.search(rf"\b{re.escape(gone)}\b", result):
        return None
    return result if any(_is_test(name) for name, *_ in _definitions(SourceText(path, result))) else None


def _definitions(source: SourceText) -> list[tuple[str, ast.stmt, list[ast.stmt]]]:
    """Functions and classes at the top and methods of these classes, each with the block it is in."""
    definitions: list[tuple[str, ast.stmt, list[ast.stmt]]] = []
    waiting: list[tuple[str, list[ast.stmt]]] = [("", source.tree.body)]
    while waiting:
        prefix, block = waiting.pop()
        for node in block:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                definitions.append((prefix + node.name, node, block))
            elif isinstance(node, ast.ClassDef):
                waiting.append((f"{prefix}{node.name}.", node.body))
            elif isinstance(node, ast.If | ast.With):
                waiting.append((prefix, node.body))
    return definitions


def _is_test(name: str) -> bool:
    return name.rpartition(".")[2].startswith("test")


def _mentions(source: SourceText, node: ast.stmt, gone: str) -> bool:
    return re.search(rf"\b{re.escape(gone)}\b", source.segment(node)) is not None


def _cut(source: SourceText, node: ast.stmt, block: list[ast.stmt]) -> Edit:
    """Remove a definition with its decorators and the blank lines after it; a block that loses all keeps a ``pass``."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    last = last_line(node)
    while last < source.lines and not source.line(last + 1).strip():
        last += 1
    edit = source.remove_lines(first, last)
    if node is block[0]:  # the mark of a block that may now be empty; see _passes
        return Edit(start=edit.start, end=edit.end, text=f"{source.indent(first)}pass  # {MARK}\n")
    return edit


MARK = "etude: nothing here"


def _passes(text: str) -> str:
    """The text without the marks of blocks that hold something else."""
    lines = text.splitlines(keepends=True)
    for index in [number for number, line in enumerate(lines) if MARK in line]:
        trial = [*lines[:index], "", *lines[index + 1 :]]
        try:
            ast.parse("".join(trial))
            lines = trial
        except SyntaxError:
            lines[index] = lines[index].replace(f"  # {MARK}", "")
    return "".join(lines)

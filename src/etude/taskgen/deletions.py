"""Deletions: features removed from a package, which an agent must restore.

There are three kinds: the body of a function, the bodies of a class's methods, or a whole function with every mention
of its name in the package's exports and documents. The first two keep signatures and docstrings, because these specify
the code to write. Owns the resulting files and the name that must not remain; :mod:`~etude.taskgen.leaks` checks that
it does not.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from etude.tasks.repositories.spans import FUNCTION_NODES, Edit, Function, SourceText, apply, last_line

MIN_LINES = 3
"""Minimum lines of code in a body that is worth rewriting."""
MAX_LINES = 80
"""Maximum lines; more is a project, not a feature."""
MIN_CLASS_METHODS = 2
MIN_DOCUMENT = 10
"""Minimum characters of a docstring that describes the function."""
MIN_NAME = 5
"""Minimum characters of a name that can be searched for as a separate word."""
STUB = "raise NotImplementedError"


class DeletionKind(StrEnum):
    """Unit of code that is removed."""

    BODY = "delete_body"
    CLASS = "delete_class"
    WHOLE = "delete_whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A package with one feature removed."""

    kind: DeletionKind
    path: str
    target: str
    """Dotted name, within its module, of the removed code."""
    lines: tuple[int, ...]
    """First lines of the changed functions, as in their code objects."""
    changed: Mapping[str, str]
    """Every changed file: path → its text without the feature."""
    bodies: tuple[str, ...]
    """The removed source, one text per location."""
    gone: str = ""
    """Name that no file of the package mentions after the deletion."""


def body_deletions(source: SourceText) -> Iterator[Deletion]:
    """A deletion for each function and method whose body is long enough."""
    for function in source.functions():
        if is_worth(function) and is_described(function):
            edit = _stub(source, function)
            yield Deletion(
                kind=DeletionKind.BODY,
                path=source.path,
                target=function.qualname,
                lines=(function.line,),
                changed={source.path: apply(source.text, [edit])},
                bodies=(source.text[edit.start : edit.end],),
            )


def class_deletions(source: SourceText) -> Iterator[Deletion]:
    """A deletion for each top-level class that has several methods worth rewriting."""
    functions = tuple(source.functions())
    for node in source.classes():
        methods = [function for function in functions if node in function.parents and _has_code(function)]
        worth = [function for function in methods if is_worth(function)]
        described = sum(map(is_described, worth))
        if len(worth) < MIN_CLASS_METHODS or 2 * described < len(worth) or sum(map(_size, methods)) > MAX_LINES:
            continue
        edits = [_stub(source, function) for function in methods]
        yield Deletion(
            kind=DeletionKind.CLASS,
            path=source.path,
            target=node.name,
            lines=tuple(function.line for function in methods),
            changed={source.path: apply(source.text, edits)},
            bodies=tuple(source.text[edit.start : edit.end] for edit in edits),
        )


def whole_deletions(
    source: SourceText, package: Mapping[str, SourceText], documents: Mapping[str, str], built: Sequence[str] = ()
) -> Iterator[Deletion]:
    """A deletion for each top-level function that the rest of the package exports at most, but does not use.

    ``package`` maps paths to all source files, including stubs. ``documents`` are the other texts: each line that
    mentions the name is removed. ``built`` are texts that cannot be changed: a function named in one is not deleted.
    """
    for function in source.functions():
        name = function.node.name
        if (
            function.parents
            or not is_worth(function)
            or not is_described(function)
            or len(name) < MIN_NAME
            or function.node not in source.tree.body
        ):
            continue
        word = re.compile(rf"\b{re.escape(name)}\b")
        if any(word.search(text) for text in built):
            continue
        changed = _without(source, function, package, documents, word)
        if changed is not None:
            yield Deletion(
                kind=DeletionKind.WHOLE,
                path=source.path,
                target=name,
                lines=(function.line,),
                changed=changed,
                bodies=(function_text(source, function),),
                gone=name,
            )


def is_worth(function: Function) -> bool:
    """Return true if a function's body is worth rewriting."""
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.node.decorator_list}
    return MIN_LINES <= _size(function) <= MAX_LINES and not decorators & {"overload", "abstractmethod"}


def is_described(function: Function) -> bool:
    """Return true if a function has a long enough docstring or a special name such as ``__len__``."""
    name = function.node.name
    has_document = len(ast.get_docstring(function.node) or "") >= MIN_DOCUMENT
    return has_document or (name.startswith("__") and name.endswith("__"))


def function_text(source: SourceText, function: Function) -> str:
    """The full lines of a function and its decorators."""
    return source.text[source.line_start(function.line) : source.line_start(last_line(function.node) + 1)]


def signature(source: SourceText, function: Function) -> str:
    """The decorators and the ``def`` header as written, without indentation."""
    _, end = _header(source, function)
    indent = source.indent(function.line)
    lines = source.text[source.line_start(function.line) : end].rstrip().splitlines()
    return "\n".join(line.removeprefix(indent) for line in lines)


def _has_code(function: Function) -> bool:
    return any(not _is_nothing(statement) for statement in function.code)


def _is_nothing(statement: ast.stmt) -> bool:
    is_dots = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_dots or isinstance(statement, ast.Pass)


def _size(function: Function) -> int:
    """The number of lines from the first statement to the last; 0 if they share the line of ``def``."""
    code = function.code
    if not code or code[0].lineno == function.node.lineno:
        return 0
    return last_line(code[-1]) - code[0].lineno + 1


def _header(source: SourceText, function: Function) -> tuple[int, int]:
    """The position of ``def`` and the position after its colon: the first colon after the arguments and annotation."""
    node = function.node
    arguments = node.args
    parts = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    inner = [part for part in (*parts, *arguments.defaults, *arguments.kw_defaults, node.returns) if part is not None]
    start = source.offset(node.lineno, node.col_offset)
    after = max([start, *(source.span(part)[1] for part in inner)])
    body, _ = source.span(node.body[0])
    colon = source.text.find(":", after, body)
    return start, colon + 1


def _stub(source: SourceText, function: Function) -> Edit:
    """The edit that replaces a body, trailing comments included, by a stub; signature and docstring stay."""
    _, start = _header(source, function)
    node = function.node
    if len(function.code) < len(node.body):
        _, start = source.span(node.body[0])
    indent = source.indent(node.body[0].lineno) if node.body[0].lineno > node.lineno else " "
    last = last_line(node)
    while last < source.lines and _is_comment_at(source, last + 1, indent):
        last += 1
    end = source.line_start(last + 1)
    ending = "\r\n" if source.line(node.lineno).endswith("\r\n") else "\n"
    return Edit(start=start, end=end, text=f"{ending}{indent}{STUB}{ending}")


def _is_comment_at(source: SourceText, number: int, indent: str) -> bool:
    """Return true if a line is a comment in the block with this indentation."""
    line = source.line(number)
    return line.startswith(indent) and line.strip().startswith("#")


def _without(
    source: SourceText,
    function: Function,
    package: Mapping[str, SourceText],
    documents: Mapping[str, str],
    word: re.Pattern[str],
) -> Mapping[str, str] | None:
    """Every file that mentions the name, with the name removed; ``None`` if some code uses it."""
    changed: dict[str, str] = {}
    for path, file in package.items():
        if path != source.path and not word.search(file.text):
            continue
        edits = _export_edits(file, function.node.name, function.node)
        if edits is None:
            return None
        if path == source.path:
            last = last_line(function.node)
            while last < file.lines and not file.line(last + 1).strip():
                last += 1
            edits = [edit for edit in edits if not _is_within(edit, file, function)]
            edits.append(file.remove_lines(function.line, last))
        text = apply(file.text, edits)
        if word.search(text):
            return None
        changed[path] = text
    for path, text in documents.items():
        if word.search(text):
            changed[path] = "".join(line for line in text.splitlines(keepends=True) if not word.search(line))
    return changed


def _is_within(edit: Edit, file: SourceText, function: Function) -> bool:
    return file.line_start(function.line) <= edit.start < file.line_start(last_line(function.node) + 1)


def _export_edits(file: SourceText, name: str, own: ast.AST) -> list[Edit] | None:
    """The edits that remove a name from imports, export lists and stubs; ``None`` if it is used otherwise."""
    edits: list[Edit] = []
    inside = {id(node) for node in ast.walk(own)}
    for node in ast.walk(file.tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            edits.append(without_alias(file, node, name))
        elif isinstance(node, ast.List | ast.Tuple):
            edits += _element_edits(file, node, name)
        elif isinstance(node, FUNCTION_NODES) and node.name == name and file.path.endswith(".pyi"):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            edits.append(file.remove_lines(first, last_line(node)))
        elif isinstance(node, ast.Name | ast.Attribute) and name in (
            getattr(node, "id", ""),
            getattr(node, "attr", ""),
        ):
            return None
    return edits


def without_alias(file: SourceText, node: ast.ImportFrom, *gone: str) -> Edit:
    """The edit that removes names from an import; without other names, ``pass`` replaces the statement."""
    names = [alias for alias in node.names if alias.name not in gone]
    if not names:
        return file.replace(node, "pass")
    first = file.span(node)[0]
    inner = file.span(node.names[0])[0]
    head = file.text[first:inner]
    aliases = [alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in names]
    indent = "\n" + file.indent(node.lineno)
    if "(" in head:
        body = "".join(f"{indent}    {alias}," for alias in aliases)
        return file.replace(node, f"{head[: head.index('(')]}({body}{indent})")
    return file.replace(node, head + ", ".join(aliases))


def _element_edits(file: SourceText, node: ast.List | ast.Tuple, name: str) -> Iterator[Edit]:
    """The edits that remove a string from a list, with the comma after or before it."""
    for index, element in enumerate(node.elts):
        if isinstance(element, ast.Constant) and element.value == name:
            start, end = file.span(element)
            if index + 1 < len(node.elts):
                end = file.span(node.elts[index + 1])[0]
            elif index:
                start = file.span(node.elts[index - 1])[1]
            yield Edit(start=start, end=end, text="")

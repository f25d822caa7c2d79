"""The house rules that ruff, mypy and import-linter do not know: how large things get, and what is never written.

    python tools/shape.py [FILE OR FOLDER ...]

Reads source with ``ast`` and ``tokenize`` and imports nothing of étude. Prints one line per fault, with the measured
value and the limit, and exits with 1 if there is any; warnings do not fail. Style, types and layers belong to the
other gates of ``make check``.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeAlias

ROOTS = ("src/etude", "bench", "tests", "tools", "examples", "recipes")
"""Files that are inspected if no path is given; a root that does not exist yet is skipped."""

FILE_LINES_TYPICAL = 600
"""Beyond this a file is warned about."""
FILE_LINES = 900
"""Beyond this it fails."""
FUNCTION_LINES = 100
"""From ``def`` to the last line, docstring included, decorators not."""
CLASS_LINES = 400
"""From ``class`` to the last line."""
CLASS_METHODS = 20
"""Dunder methods are not counted: Python chooses them, not we."""
PARAMETERS = 6
"""``self`` and ``cls`` are not counted. Fields of a dataclass and options of a command are no parameters: they are
always named. A kernel in Triton's language takes an argument per array and stride: it has nothing else.
"""
NESTING = 4
"""Blocks inside blocks, the way a reader sees indentation; ``elif`` is no deeper than its ``if``."""

BROAD_EXCEPT_ALLOWED: dict[str, str] = {
    "src/etude/gateway/http/app.py": "the last resort of a server: the caller gets an answer, the log gets the place",
    "src/etude/aio.py": "a background task that fails is named and started again, a bounded number of times",
    "src/etude/tokens/chat.py": "tokenizers raises bare Exception for a damaged file, or panics: it is a DamagedError",
    "src/etude/config/plugins.py": "somebody's own module may raise anything: it is named, as an error of the recipe",
    "src/etude/run/scoring.py": "somebody's own reward function may raise anything: its value is missing, logged",
    "src/etude/run/lending.py": "somebody's own production may raise anything: its machines are its own then",
    "src/etude/run/fleet_state.py": "without this thread no change reaches a fleet: it reports and tries again",
    "src/etude/feedback/store.py": "of works that share a transaction one may raise anything: its owner gets it, alone",
    "src/etude/feedback/writer.py": "whatever opening the store raises is raised where the thread was started",
    "src/etude/cli/fork_server.py": "a forked process exits by itself: its traceback is printed, as Python does",
    "tests/fuzz/fuzzing.py": "an error that a reader does not name is what is looked for",
    "src/etude/telemetry/tail.py": "somebody's own sink may raise anything: the event is lost, counted, and said",
}
"""Files that may catch everything, and why. Cleaning up and raising again is allowed anywhere: it swallows nothing."""

VAGUE_NAMES = {"base", "common", "core", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}
"""Uninformative names of files and folders."""
MUTABLE_TYPES = {"bytearray", "count", "Counter", "defaultdict", "deque", "dict", "list", "OrderedDict", "set"}
"""Calls that make something mutable."""
MUTATING_METHODS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"),
    *("reverse", "setdefault", "sort", "update"),
}  # fmt: skip
"""Method calls that change a container in place."""

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Block: TypeAlias = (
    ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.TryStar | ast.Match
)


class Fault(NamedTuple):
    """A fault in one line."""

    line: int
    message: str


class Finding(NamedTuple):
    """A fault, where it is and the rule it breaks."""

    path: str
    rule: str
    fault: Fault

    @property
    def is_warning(self) -> bool:
        """True if the gate stays open."""
        return self.rule in WARNINGS

    def __str__(self) -> str:
        label = "warning: " if self.is_warning else ""
        return f"{self.path}:{self.fault.line}: {label}{self.rule}: {self.fault.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One parsed file."""

    path: PurePosixPath
    """Relative to the repository: the first part determines the rules."""
    text: str
    tree: ast.Module

    @property
    def is_product(self) -> bool:
        """True for a file of the package, which has stricter rules than the others."""
        return self.path.parts[0] == "src"

    @property
    def is_test(self) -> bool:
        """True for a test, whose functions are described by their names."""
        return self.path.parts[0] == "tests"


Rule: TypeAlias = Callable[[Source], Iterator[Fault]]


def main(arguments: Sequence[str]) -> int:
    """Inspect files and folders (default: ``ROOTS``), print the findings, return the exit code."""
    repository = Path(__file__).resolve().parent.parent
    roots = [Path(argument).resolve() for argument in arguments]
    roots = roots or [repository / root for root in ROOTS if (repository / root).is_dir()]
    files = sorted({file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root])})
    findings: list[Finding] = []
    for file in files:
        path = file.relative_to(repository) if file.is_relative_to(repository) else file
        findings += inspect(path.as_posix(), file.read_text(encoding="utf-8"))
    for finding in findings:
        print(finding)
    warnings = sum(finding.is_warning for finding in findings)
    faults = len(findings) - warnings
    print(f"{len(files)} files, {faults} faults, {warnings} warnings")
    return 1 if faults else 0


def inspect(path: str, text: str) -> list[Finding]:
    """All findings in one file, by line. ``path`` is relative to the repository, with forward slashes."""
    try:
        source = Source(path=PurePosixPath(path), text=text, tree=ast.parse(text))
    except SyntaxError as error:
        return [Finding(path, "syntax", Fault(error.lineno or 1, error.msg))]
    findings = [Finding(path, name, fault) for name, rule in RULES.items() for fault in rule(source)]
    return sorted(findings, key=lambda finding: finding.fault.line)


# --- Size ---------------------------------------------------------------------------------------------------------


def long_file(source: Source) -> Iterator[Fault]:
    """Warn about a file that is getting long."""
    lines = len(source.text.splitlines())
    if FILE_LINES_TYPICAL < lines <= FILE_LINES:
        yield Fault(1, f"{lines} lines, typically at most {FILE_LINES_TYPICAL}")


def file_lines(source: Source) -> Iterator[Fault]:
    """Refuse a file that is too long."""
    lines = len(source.text.splitlines())
    if lines > FILE_LINES:
        yield Fault(1, f"{lines} lines, at most {FILE_LINES}")


def function_lines(source: Source) -> Iterator[Fault]:
    """Refuse a function that is too long."""
    for function in functions_in(source.tree):
        if (lines := lines_of(function)) > FUNCTION_LINES:
            yield Fault(function.lineno, f"{function.name}() has {lines} lines, at most {FUNCTION_LINES}")


def class_lines(source: Source) -> Iterator[Fault]:
    """Refuse a class that is too long."""
    for node in classes_in(source.tree):
        if (lines := lines_of(node)) > CLASS_LINES:
            yield Fault(node.lineno, f"{node.name} has {lines} lines, at most {CLASS_LINES}")


def class_methods(source: Source) -> Iterator[Fault]:
    """Refuse a class with too many methods."""
    for node in classes_in(source.tree):
        methods = sum(isinstance(child, FunctionNode) and not is_dunder(child.name) for child in node.body)
        if methods > CLASS_METHODS:
            yield Fault(node.lineno, f"{node.name} has {methods} methods, at most {CLASS_METHODS}")


def parameters(source: Source) -> Iterator[Fault]:
    """Refuse a function of the package with too many parameters."""
    for function in functions_in(source.tree) if source.is_product else ():
        marks = [ast.unparse(mark.func if isinstance(mark, ast.Call) else mark) for mark in function.decorator_list]
        if not {"app.command", "triton.jit"}.isdisjoint(marks):
            continue
        signature = function.args
        named = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs, signature.vararg, signature.kwarg]
        count = sum(parameter is not None and parameter.arg not in ("self", "cls") for parameter in named)
        if count > PARAMETERS:
            yield Fault(function.lineno, f"{function.name}() has {count} parameters, at most {PARAMETERS}")


def nesting(source: Source) -> Iterator[Fault]:
    """Refuse blocks nested too deep."""
    return too_deep(source.tree, depth=0, in_function=False)


# --- Docstrings ---------------------------------------------------------------------------------------------------


def module_docstring(source: Source) -> Iterator[Fault]:
    """Refuse a module that does not say what it owns."""
    if not source.is_test and source.tree.body and ast.get_docstring(source.tree) is None:
        yield Fault(1, "no docstring: say what the module owns and what it does not")


def public_docstring(source: Source) -> Iterator[Fault]:
    """Refuse a public class, function or method without a docstring, except in examples of 30 lines, which their
    module's docstring explains.
    """
    if not source.is_test and not source.path.is_relative_to("examples/extend"):
        yield from undocumented(source.tree)


# --- What is never written ----------------------------------------------------------------------------------------


def vague_name(source: Source) -> Iterator[Fault]:
    """Refuse uninformative names of files and folders."""
    for part in (*source.path.parts[:-1], source.path.stem):
        if part in VAGUE_NAMES:
            yield Fault(1, f"{part!r} says nothing of what is inside: name it after the noun it owns")


def init_content(source: Source) -> Iterator[Fault]:
    """Refuse anything in an ``__init__.py`` but the package's own."""
    if source.path.name == "__init__.py" and source.path != PurePosixPath("src/etude/__init__.py") and source.text:
        yield Fault(1, f"{len(source.text.splitlines())} lines, at most 0: import from the module that owns the name")


def no_hasattr(source: Source) -> Iterator[Fault]:
    """Refuse checks of an object's type: use a protocol."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and name_of(node.func) == "hasattr":
            yield Fault(node.lineno, "hasattr() asks an object what it is: put the question in a protocol")


def global_statement(source: Source) -> Iterator[Fault]:
    """Refuse functions that rebind names of their module."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield Fault(node.lineno, f"global {', '.join(node.names)}: pass the value or give it an owner")


def mutable_global(source: Source) -> Iterator[Fault]:
    """Refuse module state: a container at module level is a constant, in capitals, filled where it is born."""
    changed = set(changed_names(source.tree))
    for statement in source.tree.body:
        for name in mutable_names(statement):
            if name != name.upper():
                yield Fault(statement.lineno, f"{name} is mutable module state: write it in capitals or freeze it")
            elif name in changed:
                yield Fault(statement.lineno, f"{name} is written like a constant but changed in this module")


def broad_except(source: Source) -> Iterator[Fault]:
    """Refuse to swallow every error outside ``BROAD_EXCEPT_ALLOWED``."""
    if str(source.path) in BROAD_EXCEPT_ALLOWED:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and names_everything(node.type) and not raises_again(node):
            yield Fault(node.lineno, "catches every error: name those that are expected")
        if isinstance(node, ast.Call) and name_of(node.func) == "suppress" and any(map(names_everything, node.args)):
            yield Fault(node.lineno, "suppresses every error: name those that are expected")


def suppressed_cancellation(source: Source) -> Iterator[Fault]:
    """Refuse to suppress cancellations: code that awaits a cancelled task in this way also suppresses its own."""
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        if name_of(call.func) == "suppress" and "CancelledError" in map(name_of, call.args):
            yield Fault(call.lineno, "suppresses its own cancellation: asyncio.gather(…, return_exceptions=True)")


def unfinished(source: Source) -> Iterator[Fault]:
    """Refuse comments that say the work is not done."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and (word := re.search(r"\b(TODO|FIXME|XXX)\b", token.string)):
            yield Fault(token.start[0], f"{word[0]}: finish it or leave it out")


# --- Reading the tree ---------------------------------------------------------------------------------------------


def functions_in(tree: ast.AST) -> Iterator[FunctionNode]:
    """Every function and method, nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, FunctionNode))


def classes_in(tree: ast.AST) -> Iterator[ast.ClassDef]:
    """Every class, nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def lines_of(node: FunctionNode | ast.ClassDef) -> int:
    """Lines from the ``def`` or ``class`` to the end."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def is_dunder(name: str) -> bool:
    """True if Python chose the name."""
    return name.startswith("__") and name.endswith("__")


def name_of(node: ast.expr) -> str:
    """The last name of a dotted one, or ''."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def too_deep(node: ast.AST, *, depth: int, in_function: bool) -> Iterator[Fault]:
    """The outermost blocks below ``node`` that are nested too deep; a function inside a function is one deeper."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, FunctionNode)
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        level = depth + ((isinstance(child, Block) and not is_elif) or (is_function and in_function))
        if level > NESTING:
            assert isinstance(child, ast.stmt)
            yield Fault(child.lineno, f"{level} blocks deep, at most {NESTING}")
        else:
            yield from too_deep(child, depth=level, in_function=in_function or is_function)


def undocumented(parent: ast.Module | ast.ClassDef) -> Iterator[Fault]:
    """Public classes, functions and methods below ``parent`` that have no docstring."""
    for node in parent.body:
        if not isinstance(node, FunctionNode | ast.ClassDef) or node.name.startswith("_"):
            continue
        inherits = any(name_of(mark) in ("overload", "override", "setter") for mark in node.decorator_list)
        if ast.get_docstring(node) is None and not inherits:
            yield Fault(node.lineno, f"{node.name} has no docstring: first line a full sentence")
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node)


def mutable_names(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement binds to a new container; Python's own, such as ``__all__``, are left alone."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return
    value = statement.value
    literals = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    if isinstance(value, literals) or (isinstance(value, ast.Call) and name_of(value.func) in MUTABLE_TYPES):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (name for target in targets if (name := name_of(target)) and not is_dunder(name))


def changed_names(tree: ast.Module) -> Iterator[str]:
    """Names of containers that are changed in place somewhere in the module."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield name
            case ast.AugAssign(target=ast.Name(id=name)):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in MUTATING_METHODS:
                yield name


def names_everything(kind: ast.expr | None) -> bool:
    """True if an exception, a tuple of them or none at all covers all errors."""
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(one is None or name_of(one) in ("Exception", "BaseException") for one in kinds)


def raises_again(handler: ast.ExceptHandler) -> bool:
    """True if a handler ends in a bare ``raise``."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


RULES: dict[str, Rule] = {
    "long-file": long_file,
    "file-lines": file_lines,
    "function-lines": function_lines,
    "class-lines": class_lines,
    "class-methods": class_methods,
    "parameters": parameters,
    "nesting": nesting,
    "module-docstring": module_docstring,
    "public-docstring": public_docstring,
    "vague-name": vague_name,
    "init-content": init_content,
    "hasattr": no_hasattr,
    "global": global_statement,
    "mutable-global": mutable_global,
    "broad-except": broad_except,
    "suppressed-cancellation": suppressed_cancellation,
    "unfinished": unfinished,
}
"""Rule name in the output → the function that finds its faults."""
WARNINGS = {"long-file"}
"""Rules that do not fail the gate."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

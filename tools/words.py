"""The words of the house: what ``make check`` refuses as a name, and advice for a better one.

    python tools/words.py [FILE OR FOLDER ...]

Reads source with ``ast`` and imports nothing of étude. The list is ``words.txt`` beside this file, and so says for
everyone what docs/glossary.md explains. Three rules:

    word       a retired word in an identifier or a file name, as a whole or between underscores and capitals
    opening    a docstring that opens with a word such as *What* instead of naming the thing
    class      one class name that stands for two things: two modules of the package define it
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOTS = ("src/etude", "bench", "tests", "tools", "examples", "recipes")
PRODUCT = "src/etude/"
"""Docstrings and class names are checked only here; the names of tests describe what they test."""
LIST = Path(__file__).with_name("words.txt")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""One word of ``snake_case``, ``CamelCase`` or ``UPPER_CASE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """One line of the list."""

    kind: str
    """``word``: a part of an identifier or file name; ``name``: a whole identifier; ``opening``: of a docstring."""
    text: str
    advice: str
    """Things for which the word has stood, to choose from; of an opening, what to write instead."""
    where: tuple[str, ...]
    """Patterns of paths in which it is refused; with ``!`` in front, of paths in which it is a common word."""

    def applies(self, path: str) -> bool:
        """Return true if the rule applies to a file."""
        allowed = [pattern[1:] for pattern in self.where if pattern.startswith("!")]
        refused = [pattern for pattern in self.where if not pattern.startswith("!")]
        if any(fnmatch(path, pattern) for pattern in allowed):
            return False
        return not refused or any(fnmatch(path, pattern) for pattern in refused)


def main(arguments: Sequence[str]) -> int:
    """Inspect files and folders (default: ``ROOTS``), print a line for each fault, return the exit code."""
    repository = Path(__file__).resolve().parent.parent
    roots = [Path(argument).resolve() for argument in arguments] or [repository / root for root in ROOTS]
    files = sorted({file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root])})
    sources = {file.relative_to(repository).as_posix(): file.read_text(encoding="utf-8") for file in files}
    faults = inspect(sources, read_list(LIST.read_text(encoding="utf-8")))
    for fault in faults:
        print(fault)
    print(f"{len(sources)} files, {len(faults)} faults")
    return 1 if faults else 0


def read_list(table: str) -> tuple[Retired, ...]:
    """Parse ``words.txt``: ``kind text[, text …] => advice [@ pattern …]``; ``#`` begins a comment.

    Raises ``ValueError`` with the number of an invalid line.
    """
    rules = []
    for number, line in enumerate(table.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(word|name|opening)\s+(.+?)\s*=>\s*(.+?)\s*(?:@\s*(.+))?", line)
        if match is None:
            raise ValueError(
                f"words.txt:{number}: expected 'word|name|opening TEXT, … => ADVICE [@ PATTERN …]', got {line!r}"
            )
        kind, texts, advice, where = match.groups()
        patterns = tuple((where or "").split())
        rules += [Retired(kind=kind, text=text, advice=advice, where=patterns) for text in re.split(r"\s*,\s*", texts)]
    return tuple(rules)


def inspect(sources: dict[str, str], rules: Sequence[Retired]) -> list[str]:
    """Every fault of sources by path, in the order of paths and lines."""
    words: dict[tuple[str, str], list[Retired]] = defaultdict(list)
    for rule in rules:
        words[rule.kind, rule.text].append(rule)
    openings = {rule.text: rule for rule in rules if rule.kind == "opening"}
    faults = []
    classes: dict[str, list[str]] = defaultdict(list)
    for path, text in sources.items():
        tree = ast.parse(text)
        names = {(1, part) for part in Path(path).with_suffix("").parts} | set(_identifiers(tree))
        for line, name in sorted(names):
            faults += [
                f"{path}:{line}: {name!r}: {rule.text!r} is retired; name the thing itself, which may be: {rule.advice}"
                for rule in _hits(name, words)
                if rule.applies(path)
            ]
        if path.startswith(PRODUCT):
            faults += [f"{path}:{line}: {problem}" for line, problem in _openings(tree, openings)]
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    classes[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    for name, places in sorted(classes.items()):
        if len(places) > 1:
            faults.append(f"{places[0]}: class {name!r} means {len(places)} things: {', '.join(places)}")
    return faults


def _hits(name: str, words: Mapping[tuple[str, str], Sequence[Retired]]) -> Iterator[Retired]:
    """Rules by kind and text → those that a name breaks."""
    yield from words.get(("name", name.strip("_").lower()), ())
    for part in sorted({part.lower() for part in PART.findall(name)}):
        yield from words.get(("word", part), ())


def _identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names where they are given, not where they are used."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str(name)):
                yield node.lineno, name


def _openings(tree: ast.Module, openings: dict[str, Retired]) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions, and of the fields and constants above them."""
    for node in ast.walk(tree):
        for child in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                first = re.match(r"\W*(\w+)", child.value.value)
                if first and first[1] in openings:
                    yield child.lineno, f"a docstring opens with {first[1]!r}: {openings[first[1]].advice}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

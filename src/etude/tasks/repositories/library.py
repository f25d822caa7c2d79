"""Functions of the Python standard library, as other code in which demonstrations plant and repair bugs.

A small model that practises in one package remembers its few functions. In thousands of functions that it meets once,
only reading helps: find the strange line, and write it again with one change.

Owns the choice of functions: short ones, which make short documents. A function is shown as the end of its file.
"""

import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from etude.tasks.repositories.spans import Function, SourceText, last_line

LEFT_OUT = frozenset({"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"})
"""Folders without functions of the library proper."""
SHORTEST_LINES, LONGEST_LINES = 2, 16
"""Lines of a function's code, without its head and docstring."""
MOST_LINES = 999
"""Last line of a file at which a function may end: line numbers of more digits are rare in tasks."""


@cache
def library_functions() -> Sequence[tuple[SourceText, Function]]:
    """Every short function of the standard library with its file, in the order of the files' names: several thousand,
    which take some seconds to parse.
    """
    return tuple((source, function) for source in _sources() for function in source.functions() if _is_short(function))


def _sources() -> Iterator[SourceText]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if LEFT_OUT.isdisjoint(path.parts):
            try:
                yield SourceText(path.as_posix(), file.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):  # a file in another encoding, or a template of code
                continue


def _is_short(function: Function) -> bool:
    if not function.code or last_line(function.node) > MOST_LINES:
        return False
    return SHORTEST_LINES <= last_line(function.node) - function.code[0].lineno + 1 <= LONGEST_LINES

"""Functions of the Python standard library, as other code in which demonstrations plant and repair bugs.

A small model that practises in one package remembers its few functions. In thousands of functions that it meets once or
twice, only reading helps: find the strange line, and write it again with one change.

Owns the choice of functions: short ones, which make short documents. A function is shown as the end of its file.
"""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from random import Random

from etude.tasks.repositories.spans import Function, SourceText, last_line

LEFT_OUT = frozenset({"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"})
"""Folders without functions of the library proper."""
SHORTEST_LINES, LONGEST_LINES = 2, 10
"""Lines of a function's code, without its head and docstring."""
MOST_LINES = 999
"""Last line of a file at which a function may end: line numbers of more digits are rare in tasks."""


class LibraryFunctions:
    """The short functions of the standard library: several thousand. A file is parsed when it is first drawn."""

    def __init__(self) -> None:
        self._root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(self._root.rglob("*.py"))
        self._files = [file for file in files if LEFT_OUT.isdisjoint(file.relative_to(self._root).parts)]
        self._sizes = [file.stat().st_size for file in self._files]
        self._functions: dict[Path, Sequence[tuple[SourceText, Function]]] = {}

    def draw(self, rng: Random) -> tuple[SourceText, Function]:
        """A random function and its file; long files are drawn more often."""
        while True:
            [file] = rng.choices(self._files, self._sizes)
            if file not in self._functions:
                self._functions[file] = self._read(file)
            if self._functions[file]:
                return rng.choice(self._functions[file])

    def _read(self, file: Path) -> Sequence[tuple[SourceText, Function]]:
        try:
            source = SourceText(file.relative_to(self._root).as_posix(), file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):  # a file in another encoding, or a template of code
            return []
        return [(source, function) for function in source.functions() if _is_short(function)]


def _is_short(function: Function) -> bool:
    if not function.code or last_line(function.node) > MOST_LINES:
        return False
    return SHORTEST_LINES <= last_line(function.node) - function.code[0].lineno + 1 <= LONGEST_LINES

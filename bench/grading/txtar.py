"""Several files as one text: Go's txtar format (https://pkg.go.dev/golang.org/x/tools/txtar).

A comment, then each file: a line ``-- PATH --`` and its text up to the next such line.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE = re.compile(r"^-- (.+) --\n", re.MULTILINE)


class Archive(NamedTuple):
    """The parts of a text."""

    comment: str
    files: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "Archive":
        """Read one from a file."""
        comment, *parts = FILE.split(path.read_text(encoding="utf-8"))
        return cls(comment, dict(zip(parts[::2], parts[1::2], strict=True)))

    def fields(self) -> Iterator[tuple[str, str]]:
        """The lines ``NAME: VALUE`` of the comment."""
        for line in self.comment.splitlines():
            name, _, value = line.partition(": ")
            yield name, value

    def folder(self, name: str) -> dict[str, str]:
        """The files below a folder, by their paths in it."""
        return {path.removeprefix(f"{name}/"): text for path, text in self.files.items() if path.startswith(f"{name}/")}

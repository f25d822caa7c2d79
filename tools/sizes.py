"""Lines of code by room: no blank lines, no comments, no docstrings. A compass, no gate: it never fails.

python tools/sizes.py
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path("src/etude")
BESIDE = ("bench", "tests", "tools", "examples", "recipes")
"""Folders that are not installed."""
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
"""Tokens that make no line one of code."""
COLUMNS = 3


class Size(NamedTuple):
    """Size of a room."""

    room: str
    files: int
    """Files with code in them."""
    lines: int

    def __str__(self) -> str:
        return f"{self.room:<12}{self.lines:>7,} in {self.files:>3}"


def code_lines(text: str) -> int:
    """Lines of a module that have code in them."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for token in tokens if token.type not in SILENT for line in range(token.start[0], token.end[0] + 1)}
    return len(code.difference(docstring_lines(ast.parse(text))))


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Lines of strings that stand as statements: docstrings, and those beneath constants and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def size_of(room: str, files: Sequence[Path]) -> Size:
    """Count a room."""
    counts = [code_lines(file.read_text(encoding="utf-8")) for file in files]
    return Size(room, sum(map(bool, counts)), sum(counts))


def rooms_of(package: Path) -> list[Size]:
    """The folders of a package, largest first, and last the files directly in it."""
    folders = [folder for folder in package.iterdir() if folder.is_dir() and folder.name != "__pycache__"]
    sizes = [size_of(folder.name, sorted(folder.rglob("*.py"))) for folder in folders]
    return [*sorted(sizes, key=lambda size: -size.lines), size_of("no folder", sorted(package.glob("*.py")))]


def main() -> int:
    """Print the rooms of the package, what lies beside it, and the package's sum."""
    repository = Path(__file__).resolve().parent.parent
    rooms = rooms_of(repository / PACKAGE)
    beside = [size_of(folder, sorted((repository / folder).rglob("*.py"))) for folder in BESIDE]
    for sizes in (rooms, beside):
        for first in range(0, len(sizes), COLUMNS):
            print("   ".join(map(str, sizes[first : first + COLUMNS])))
    print(
        f"{sum(room.lines for room in rooms):,} lines of code in {sum(room.files for room in rooms)} files of {PACKAGE}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

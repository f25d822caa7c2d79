"""Draw public names of the package at random, with the first lines of their docstrings.

python tools/names.py [COUNT] [SEED]

A reader who knows the field must be able to explain each of them; otherwise the name or the line is wrong.
"""

import ast
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "etude"


def main(arguments: Sequence[str]) -> int:
    """Print ``module.name: first docstring line`` for a number of public classes and functions."""
    count, seed = (int(text) for text in (*arguments, *("60", "0")[len(arguments) :]))
    names = sorted(public_names())
    for name, line in sorted(random.Random(seed).sample(names, count)):
        print(f"{name}: {line}")
    return 0


def public_names() -> Iterator[tuple[str, str]]:
    """Every public class and function at the top of a module, and the first line of its docstring."""
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                yield f"{module}.{node.name}", (ast.get_docstring(node) or "").split("\n")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

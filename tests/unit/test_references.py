"""What documents and docstrings refer to exists: papers' functions, files, and the names of Sphinx roles."""

import ast
import re
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src"
DOCUMENTS = (
    *REPOSITORY.glob("*.md"),
    *REPOSITORY.glob("docs/*.md"),
    *REPOSITORY.glob("recipes/*/README.md"),
    *REPOSITORY.glob("bench/**/*.md"),
)
CODE_NAME = re.compile(r"`(src/\S+\.py):(\w+)`")
PYTHON_FILE = re.compile(r"`((?:[\w-]+/)*\w+\.py)(?::\w+)?`")
ROLE = re.compile(r":(?:mod|class|func|meth|data|attr|exc):`~?(etude\.[\w.]+)`")
ELSEWHERE = {"core_algos.py", "words.py"}
"""Files of other projects, and of a sandbox."""


@cache
def names_of(file: Path) -> frozenset[str]:
    """Everything that a module defines, at whatever depth."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign():
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return frozenset(names)


def is_defined(reference: str) -> bool:
    """True if a dotted name is a module, or names in one."""
    parts = reference.split(".")
    for length in range(len(parts), 0, -1):
        place = SOURCE.joinpath(*parts[:length])
        file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        if file.is_file():
            return set(parts[length:]) <= names_of(file)
    return False


def test_the_functions_of_papers_exist() -> None:
    named = CODE_NAME.findall((REPOSITORY / "papers.md").read_text(encoding="utf-8"))
    assert named
    assert not [(path, name) for path, name in named if name not in names_of(REPOSITORY / path)]


def test_the_files_that_documents_name_exist() -> None:
    files = {file.relative_to(REPOSITORY) for top in ("src", "bench", "tests", "tools", "examples", "recipes")
             for file in (REPOSITORY / top).rglob("*.py")}  # fmt: skip
    endings = {"/".join(file.parts[first:]) for file in files for first in range(len(file.parts))}
    missing = {
        (document.name, file)
        for document in DOCUMENTS
        for file in PYTHON_FILE.findall(document.read_text(encoding="utf-8"))
        if file not in endings | ELSEWHERE and not file.endswith("NAME.py")
    }
    assert not missing


def test_the_names_that_docstrings_refer_to_exist() -> None:
    missing = {
        (file.name, reference)
        for top in ("src", "bench", "tests", "tools")
        for file in (REPOSITORY / top).rglob("*.py")
        for reference in ROLE.findall(file.read_text(encoding="utf-8"))
        if not is_defined(reference)
    }
    assert not missing

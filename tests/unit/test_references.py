"""References in documents, workflows and docstrings lead to something that exists.

They are pages and headings, targets of make, commands, papers' functions, files, and the names of Sphinx roles.
"""

import ast
import re
from functools import cache
from pathlib import Path

from typer.core import TyperGroup

from etude.cli.main import COMMANDS, load

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
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")
COMMAND = re.compile(r"^make ([a-z][a-z-]*)", re.MULTILINE)
INLINE_COMMAND = re.compile(r"(?:`|run: )make ([a-z][a-z-]*)")
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
ETUDE_COMMAND = re.compile(r"`etude ([a-z][a-z-]*)(?: ([a-z][a-z|-]*))?")
"""A command and, where it is a group, the command in it, or several with bars between them."""
ELSEWHERE = {"core_algos.py", "words.py"}
"""Files of other projects, and of a sandbox."""


@cache
def names_of(file: Path) -> frozenset[str]:
    """All names that a module defines, at any depth."""
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


def anchors_of(page: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and site generators make them."""
    headings = HEADING.findall(CODE_BLOCK.sub("", page))
    return {NOT_IN_ANCHORS.sub("", heading.lower()).replace(" ", "-") for heading in headings}


def targets_in(page: str) -> list[str]:
    """The targets of `make` that a page names, in blocks of code and between the words."""
    blocks = "\n".join(CODE_BLOCK.findall(page))
    return COMMAND.findall(blocks) + INLINE_COMMAND.findall(page)


def commands_of(name: str) -> set[str]:
    """The commands in a group; none for any other command."""
    command = load(name)
    return set(command.commands) if isinstance(command, TyperGroup) else set()


def test_commands_in_documents_and_messages_exist() -> None:
    groups = {name: commands_of(name) for name in COMMANDS}
    unknown = [
        (file.name, f"etude {name} {inner}")
        for file in (*DOCUMENTS, *REPOSITORY.glob("docs/tutorials/*.md"), *SOURCE.rglob("*.py"))
        for name, inner in ETUDE_COMMAND.findall(file.read_text(encoding="utf-8"))
        if name not in groups or (inner and groups[name] and not set(inner.split("|")) <= groups[name])
    ]
    assert not unknown


def test_links_between_documents_lead_somewhere() -> None:
    broken = list[tuple[str, str]]()
    for document in DOCUMENTS:
        page = CODE_BLOCK.sub("", document.read_text(encoding="utf-8"))
        for path, anchor in LINK.findall(page):
            target = document.parent / path if path else document
            if not target.exists() or (anchor and anchor not in anchors_of(target.read_text(encoding="utf-8"))):
                broken.append((document.name, f"{path}#{anchor}"))
    assert not broken


def test_the_targets_of_make_that_are_named_exist() -> None:
    targets = set(TARGET.findall((REPOSITORY / "Makefile").read_text(encoding="utf-8")))
    pages = (*DOCUMENTS, *REPOSITORY.glob(".github/**/*.yml"), *REPOSITORY.glob(".github/*.md"))
    named = {(page.name, target) for page in pages for target in targets_in(page.read_text(encoding="utf-8"))}
    assert named
    assert not {(page, target) for page, target in named if target not in targets}


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

"""Tasks that a change could be: what is asked for, in a line, and the tests that would tell.

    commit ───▶ its subject, without what only its repository understands ──▶ one proposal
    release ──▶ each public function or class that is new in it ────────────▶ a proposal each

Prompts are short and leave much open, as users write them. Pure: texts in, proposals out. Whether its tests really fail
before and pass after is found out by running them (:mod:`.validator`).
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from etude.taskgen.history.sources import Change
from etude.taskgen.projects import Project, is_test_file
from etude.taskgen.verdicts import Rejection

MIN_WORDS = 3
"""A subject with fewer words asks for nothing."""
MAX_LINES = 600
"""Lines that a commit may add or take away in its sources."""
EASY_LINES, MEDIUM_LINES = 12, 60
"""Most lines of an easy task, and of one that is not hard."""
NOISE = re.compile(
    r"^(merge|bump|release|version|prepare|revert|update (changelog|docs|readme|dependenc)|typo|wip|lint|format|"
    r"\[?pre-commit|ci\b|docs?\b|chore|style|test\b|tests\b|v?[0-9]+\.[0-9]+)",
    re.IGNORECASE,
)
"""Subjects of changes that nobody would ask an agent for."""
PREFIX = re.compile(r"^(feat|fix|perf|refactor|add|bug)(\([^)]*\))?!?:\s*", re.IGNORECASE)
"""Kind and scope of a conventional commit."""
TRAILER = re.compile(
    r"\s*(\((#|gh-|bpo-)[0-9]+\)|\[[#A-Z]+-?[0-9]+\]|(closes|fixes|refs?)\s+#[0-9]+)\.?", re.IGNORECASE
)
"""Numbers of issues and requests, which say nothing to an agent."""
DOCSTRING_CHARACTERS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFiles:
    """The texts of a project before and after a change."""

    before: Mapping[str, str]
    after: Mapping[str, str]

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths whose texts differ, sorted."""
        paths = self.before.keys() | self.after.keys()
        return tuple(sorted(path for path in paths if self.before.get(path) != self.after.get(path)))

    def sources(self, project: Project) -> tuple[str, ...]:
        """Changed modules of the project."""
        return tuple(path for path in self.changed if path.endswith(".py") and project.is_source(path))

    def tests(self, project: Project) -> tuple[str, ...]:
        """Test modules that are new or other ones after it."""
        return tuple(path for path in self.changed if path in self.after and is_test_file(path))

    def lines(self, project: Project) -> int:
        """Lines that it adds to the project's modules, or takes out of them."""
        return sum(_lines(self.before.get(path, ""), self.after.get(path, "")) for path in self.sources(project))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One task that a change could be."""

    prompt: str
    template: str
    """The behaviour that it is about."""
    mention: str = ""
    """A name that tests of the task mention; empty: all tests that the change made pass are its."""
    lines: int

    @property
    def difficulty(self) -> str:
        """By the size of the change: ``easy``, ``medium`` or ``hard``."""
        return "easy" if self.lines <= EASY_LINES else "medium" if self.lines <= MEDIUM_LINES else "hard"


def propose(change: Change, files: ChangedFiles, project: Project) -> list[Proposal] | Rejection:
    """The tasks that a change could be, or the reason why it could be none."""
    sources = files.sources(project)
    if not sources or not files.tests(project):
        return Rejection.UNTESTED
    if not change.subject:
        return list(_new_names(files, project)) or Rejection.VAGUE
    prompt = prompt_of(change.subject)
    if not prompt:
        return Rejection.VAGUE
    lines = files.lines(project)
    if lines > MAX_LINES:
        return Rejection.TOO_WIDE
    main = max(sources, key=lambda path: _lines(files.before.get(path, ""), files.after.get(path, "")))
    return [Proposal(prompt=prompt, template=f"{project.name}:{project.module(main)}", lines=lines)]


def prompt_of(subject: str) -> str:
    """A commit's subject as a user would have asked for it; empty where that would ask for nothing."""
    text = TRAILER.sub("", PREFIX.sub("", subject.strip())).strip().rstrip(".")
    is_noise = NOISE.search(subject.strip()) or NOISE.search(text)
    return "" if is_noise or len(text.split()) < MIN_WORDS else text[0].lower() + text[1:]


def _new_names(files: ChangedFiles, project: Project) -> Iterator[Proposal]:
    """A proposal for each public name at the top of a module that is there only after the change."""
    for path in files.sources(project):
        old, new = _definitions(files.before.get(path, "")), _definitions(files.after.get(path, ""))
        for name in sorted(new.keys() - old.keys()):
            node, module = new[name], project.module(path)
            if any(name in _definitions(text) for other, text in files.before.items() if other.endswith(".py")):
                continue  # it only moved here
            yield Proposal(
                prompt=f"add {_signature(node)} to {module}{_purpose(node)}",
                template=f"{project.name}:{module}:{name}",
                mention=name,
                lines=(node.end_lineno or node.lineno) - node.lineno + 1,
            )


def _definitions(text: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """The public functions and classes at the top of a module; none of one that cannot be parsed."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return {}
    nodes = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: node for node in nodes if not node.name.startswith("_")}


def _signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"a class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"


def _purpose(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The first sentence of a docstring, behind a colon."""
    document = ast.get_docstring(node) or ""
    first = " ".join(document.split("\n\n")[0].split()).replace("``", "`")
    sentence = re.split(r"(?<=[a-z)`])\.(\s|$)", first)[0][:DOCSTRING_CHARACTERS]
    return f": {sentence[0].lower()}{sentence[1:]}" if sentence else ""


def _lines(before: str, after: str) -> int:
    """Lines that are in one of two texts and not in the other, counted once for each time."""
    old, new = Counter(before.splitlines()), Counter(after.splitlines())
    return ((old - new) + (new - old)).total()

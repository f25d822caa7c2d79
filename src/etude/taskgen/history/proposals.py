"""Tasks that a change could be: what is asked for, in a line, and the tests that would tell.

    commit ───▶ its subject, without what only its repository understands ──▶ one proposal
    release ──▶ each public function or class that is new or changed in it ─▶ a proposal each

Prompts are short and leave much open, as users write them. Pure: texts in, proposals out. Whether its tests really fail
before and pass after is found out by running them (:mod:`.validator`).
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from etude.taskgen.hiding import place_of
from etude.taskgen.history.changed_files import ChangedFiles, changed_lines
from etude.taskgen.history.definitions import names_in, statements_of
from etude.taskgen.history.slices import Slicer
from etude.taskgen.history.sources import Change
from etude.taskgen.projects import Project
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
NOTE_CHARACTERS = 300
CASES = 3
"""Tests that a prompt names where nothing else says what is wanted."""
NOTES = re.compile(r"(^|/)(change|history|news|release|version|whats)", re.IGNORECASE)
"""Names of files that say what is new."""
DOCUMENTS = (".rst", ".md", ".txt", "CHANGES", "HISTORY", "NEWS")
MARKUP = re.compile(r":[a-z:]+:`~?\.?([^`<]*?)( ?<[^>]*>)?`|\[([^]]*)\]\([^)]*\)")
Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One task that a change could be."""

    prompt: str
    template: str
    """The behaviour that it is about."""
    path: str = ""
    name: str = ""
    """Module and name of what is asked for, of which its tests speak; empty: all of the change."""
    lines: int

    @property
    def difficulty(self) -> str:
        """By the size of the change: ``easy``, ``medium`` or ``hard``."""
        if self.lines <= EASY_LINES:
            return "easy"
        return "medium" if self.lines <= MEDIUM_LINES else "hard"


def propose(change: Change, files: ChangedFiles, project: Project) -> list[Proposal] | Rejection:
    """The tasks that a change could be, or the reason why it could be none."""
    sources = files.sources(project)
    if not sources or not files.tests(project):
        return Rejection.UNTESTED
    if not change.subject:
        return list(_proposals_of_names(files, project)) or Rejection.VAGUE
    prompt = prompt_of(change.subject)
    if not prompt:
        return Rejection.VAGUE
    lines = files.lines(project)
    if lines > MAX_LINES:
        return Rejection.TOO_WIDE
    main = max(sources, key=lambda path: changed_lines(files.before.get(path, ""), files.after.get(path, "")))
    return [Proposal(prompt=prompt, template=f"{project.name}:{project.module(main)}", lines=lines)]


def prompt_of(subject: str) -> str:
    """A commit's subject as a user would have asked for it; empty where that would ask for nothing."""
    text = TRAILER.sub("", PREFIX.sub("", subject.strip())).strip().rstrip(".")
    is_noise = NOISE.search(subject.strip()) or NOISE.search(text)
    return "" if is_noise or len(text.split()) < MIN_WORDS else text[0].lower() + text[1:]


def _proposals_of_names(files: ChangedFiles, project: Project) -> Iterator[Proposal]:
    """A proposal for each public name at the top of a module that is new or another one after the change."""
    notes = release_notes(files)
    names_before = names_in({path: text for path, text in files.before.items() if path.endswith(".py")})
    for path, name in Slicer(files, project).names():
        module, after = project.module(path), statements_of(files.after[path])
        old = statements_of(files.before.get(path, ""))
        node = None if after is None else after.definition(name)
        was = None if old is None else old.definition(name)
        if node is None or (was is None and name in names_before):
            continue  # it only moved here
        if was is None:
            prompt = f"add {_signature(node)} to {module}{_purpose(node)}"
        else:
            words = note_on(notes, name) or _new_sentence(was, node)
            prompt = f"{name} in {module}: {words}" if words else ""
        yield Proposal(prompt=prompt, template=f"{project.name}:{module}:{name}", path=path, name=name, lines=0)


def asked_by_tests(proposal: Proposal, tests: Sequence[str]) -> str:
    """The prompt of a proposal; where nothing says what the change is for, the names of its first tests do."""
    if proposal.prompt:
        return proposal.prompt
    names = dict.fromkeys(place_of(test)[1].replace(".", " ").replace("_", " ") for test in tests)
    cases_of = [re.sub(r"\b[Tt]ests?\b ?", "", re.sub(r"\b[Tt]est(?=[A-Z])", "", name)).strip() for name in names]
    cases = ", ".join([each for each in cases_of if each][:CASES])
    _, module, name = proposal.template.split(":")
    return f"{name} in {module} does not do what it should: {cases or name}"


def release_notes(files: ChangedFiles) -> list[str]:
    """The notes that documents of a project have only after a change, paragraph by paragraph and item by item."""
    notes: list[str] = []
    for path in files.changed:
        if NOTES.search(path) and path.endswith(DOCUMENTS):
            old = set(files.before.get(path, "").splitlines())
            is_new = True
            for line in files.after.get(path, "").splitlines():
                begins = not line.strip() or re.match(r"\s*([-*+]|[0-9]+\.) ", line) is not None
                if line in old or not line.strip():
                    is_new = True
                elif begins or is_new or not notes:
                    notes.append(line.strip(" -*+"))
                    is_new = False
                else:
                    notes[-1] += " " + line.strip()
    return notes


def note_on(notes: Sequence[str], name: str) -> str:
    """The first note that mentions a name, without markup and numbers of issues; empty where there is none."""
    for note in notes:
        text = " ".join(MARKUP.sub(r"\1\3", TRAILER.sub("", note)).replace("`", "").split())
        if re.search(rf"\b{re.escape(name)}\b", text) and len(text.split()) >= MIN_WORDS:
            return text[:NOTE_CHARACTERS].rstrip(".")
    return ""


def _new_sentence(before: Definition, after: Definition) -> str:
    """The first sentence of a docstring that was not in it before."""
    old = " ".join((ast.get_docstring(before) or "").split())
    for sentence in re.split(r"(?<=[a-z)`])\.\s", " ".join((ast.get_docstring(after) or "").split())):
        if len(sentence.split()) >= MIN_WORDS and sentence.rstrip(".") not in old and ">>>" not in sentence:
            return sentence[:DOCSTRING_CHARACTERS].replace("``", "`").rstrip(".")
    return ""


def _signature(node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        return f"a class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"


def _purpose(node: Definition) -> str:
    """The first sentence of a docstring, behind a colon."""
    document = ast.get_docstring(node) or ""
    first = " ".join(document.split("\n\n")[0].split()).replace("``", "`")
    sentence = re.split(r"(?<=[a-z)`])\.(\s|$)", first)[0][:DOCSTRING_CHARACTERS]
    return f": {sentence[0].lower()}{sentence[1:]}" if sentence else ""

"""Candidates for tasks: every deletion and planted bug in functions that tests reach, in an order set by the seed.

Pure and deterministic: the same package, survey and seed give the same candidates with the same ids, so that an
interrupted build can resume.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from etude.taskgen.deletions import (
    Deletion,
    body_deletions,
    class_deletions,
    function_text,
    signature,
    whole_deletions,
)
from etude.taskgen.projects import Project
from etude.taskgen.survey import Survey
from etude.tasks.repositories.mutations import mutants
from etude.tasks.repositories.spans import Function, SourceText, apply

BUGS_PER_FUNCTION = 3
"""Limit on planted bugs per function, each of a different operator."""
DOCUMENTS = (".rst", ".md", ".txt")
BUG = "bug"
DELETION = "deletion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One deletion or planted bug of a package, from which a task may be made."""

    candidate_id: str
    kind: str
    """``bug`` or ``deletion``."""
    operator: str
    path: str
    target: str
    """Dotted name, within its module, of the changed function or class."""
    functions: tuple[str, ...]
    """``path:line`` of each changed function."""
    before: Mapping[str, str] = field(repr=False)
    """Every changed file: path → text before the change."""
    after: Mapping[str, str] = field(repr=False)
    """The same files after the change."""
    gone: str = ""
    """Name that no file mentions after the change."""
    required: str = field(default="", repr=False)
    """For a deletion: signatures and docstrings of the code to restore."""

    @property
    def top(self) -> str:
        """Top-level name in the module that contains the target."""
        return self.target.partition(".")[0]


def sources_of(project: Project, texts: Mapping[str, str]) -> Mapping[str, SourceText]:
    """The Python files of the packages, including stubs."""
    sources: dict[str, SourceText] = {}
    for path, text in texts.items():
        if path.endswith((".py", ".pyi")) and project.is_source(path):
            try:
                sources[path] = SourceText(path, text)
            except (SyntaxError, ValueError):
                continue  # a template, or another version of Python
    return sources


def propose(project: Project, texts: Mapping[str, str], survey: Survey, *, seed: int) -> list[Candidate]:
    """All candidates of a package, deletions and bugs mixed, in the order that ``seed`` sets."""
    package = sources_of(project, texts)
    documents = {path: text for path, text in texts.items() if path.endswith(DOCUMENTS)}
    built = [
        text
        for path, text in texts.items()
        if path not in package and path not in documents and not project.is_test(path) and path != "PKG-INFO"
    ]
    candidates: dict[str, Candidate] = {}
    for path, source in package.items():
        if path.endswith(".py"):
            for deletion in (
                *body_deletions(source),
                *class_deletions(source),
                *whole_deletions(source, package, documents, built),
            ):
                candidate = _deletion(source, deletion, texts)
                if survey.affected(candidate.functions):
                    candidates[candidate.candidate_id] = candidate
            for candidate in _bugs(source, survey, seed):
                candidates[candidate.candidate_id] = candidate
    return sorted(candidates.values(), key=lambda candidate: _digest(seed, candidate.candidate_id))


def _bugs(source: SourceText, survey: Survey, seed: int) -> Iterator[Candidate]:
    """A few bugs for each function, with different operators, chosen by the seed."""
    for function in source.functions():
        key = f"{source.path}:{function.line}"
        if not survey.affected([key]) or _is_trivial(source, function):
            continue
        drawn = sorted(mutants(source, function), key=lambda mutant: _digest(seed, mutant.operator, mutant.edit))
        taken: set[str] = set()
        for mutant in drawn:
            if mutant.operator not in taken and len(taken) < BUGS_PER_FUNCTION:
                taken.add(mutant.operator)
                after = {source.path: apply(source.text, [mutant.edit])}
                yield Candidate(
                    candidate_id=_digest(source.path, mutant.operator, after),
                    kind=BUG,
                    operator=mutant.operator,
                    path=source.path,
                    target=function.qualname,
                    functions=(key,),
                    before={source.path: source.text},
                    after=after,
                )


def _deletion(source: SourceText, deletion: Deletion, texts: Mapping[str, str]) -> Candidate:
    return Candidate(
        candidate_id=_digest(deletion.path, deletion.kind, deletion.changed),
        kind=DELETION,
        operator=deletion.kind,
        path=deletion.path,
        target=deletion.target,
        functions=tuple(f"{deletion.path}:{line}" for line in deletion.lines),
        before={path: texts[path] for path in deletion.changed},
        after=deletion.changed,
        gone=deletion.gone,
        required=_required_names(source, deletion),
    )


def _required_names(source: SourceText, deletion: Deletion) -> str:
    """The signatures of a deletion's functions; docstrings too if the deletion removes them."""
    parts = []
    for function in source.functions():
        if function.line in deletion.lines:
            document = ""
            if deletion.gone and len(function.code) < len(function.node.body):
                document = "\n    " + source.segment(function.node.body[0])
            parts.append(signature(source, function) + document)
    return "\n\n".join(parts)


def _is_trivial(source: SourceText, function: Function) -> bool:
    return not function.code or len(function_text(source, function)) > 20_000


def _digest(*parts: object) -> str:
    text = json.dumps(parts, default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

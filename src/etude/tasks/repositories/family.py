"""Repository tasks for a small model: one wrong line in a named function, with a one-line prompt.

    fix clamp in src/humanize/number.py 523        its code begins at line 523, after the docstring

Also the demonstrations for such a model (:class:`RepairDemonstrations`): right functions, and sessions of an agent that
repairs new bugs in them, often badly. Whole functions are held out with all their tasks: no document contains their
code, neither as its subject nor around another function. Owns the prompts; the tasks and their grading stay unchanged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from etude.config.tasks import RepositoryOptions
from etude.errors import ConfigError
from etude.harnesses import tools
from etude.protocols import FamilyContext, TaskFamily
from etude.sandboxes.images.store import ImageStore
from etude.tasks.corpora.transcripts import Message
from etude.tasks.heldout import in_turns
from etude.tasks.repositories.folder import RepositoryTasks
from etude.tasks.repositories.library import LibraryFunctions
from etude.tasks.repositories.mutations import Mutant, mutants, unproved_mutants
from etude.tasks.repositories.spans import Function, SourceText, apply, last_line
from etude.types import Split, Task

MIN_MISTAKES = 2
"""Minimum number of wrong versions of a line: one is the bug, another the imperfect agent's wrong edit."""
PLACES_PER_FUNCTION = 64
"""Maximum number of mutants of one function that are tried."""
ALL = "all"
"""Last word of an exercise's prompt."""
MOST_BUGS = 6
"""Maximum number of bugs of an exercise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A correct line of a function, and plausible wrong versions of it."""

    path: str
    function: str
    first: int
    """Line at which the function's code begins, after its docstring."""
    line: int
    lines: tuple[str, ...]
    """The whole right file."""
    mistakes: tuple[str, ...]

    @property
    def right(self) -> str:
        """The right line."""
        return self.lines[self.line - 1]

    def shown(self, line: str) -> str:
        """The output of ``read PATH FIRST`` if the file had ``line`` at this position."""
        return _shown(self, {self.line: line})

    def edit(self, line: str) -> Message:
        """The agent's message that writes ``line`` at this position."""
        return _edit(self.path, self.line, line)


def open_repositories(options: RepositoryOptions, context: FamilyContext) -> TaskFamily:
    """The family of a recipe.

    Raises :class:`~etude.errors.ConfigError` for tasks without probes, unless the recipe allows them.
    """
    repository = RepositoryTasks(context.folder)
    if (unprobed := repository.unprobed) and not options.unprobed:
        raise ConfigError(
            f"tasks.folder = {str(context.folder)!r}: {len(unprobed)} tasks have no probe, so that code which forges "
            f"the results of its tests meets canaries alone: delete them ({', '.join(unprobed[:3])} …, each "
            f"*/tasks/ID.json), or set tasks.options.unprobed = true"
        )
    return BriefTasks(repository, ImageStore(repository.images)) if options.brief else repository


class BriefTasks:
    """One-line repository tasks with a short prompt; implements :class:`~etude.protocols.TaskFamily`."""

    def __init__(self, family: RepositoryTasks, images: ImageStore) -> None:
        """Raises :class:`~etude.errors.ConfigError` if a side of the hold-out has no such task."""
        self._tasks = {split: [*_brief(family, images, split)] for split in Split}
        self._tasks[Split.HELDOUT] = in_turns(self._tasks[Split.HELDOUT], lambda task: task.template)
        self.family = family
        for split, tasks in self._tasks.items():
            if not tasks:
                raise ConfigError(
                    f"{family.folder} has no {split} task of one wrong line: build more, or leave out "
                    f"tasks.options.brief"
                )

    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of one side, in order."""
        return self._tasks[split]

    def size(self, split: Split) -> int | None:
        """Number of tasks of a split."""
        return len(self._tasks[split])

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split."""
        return self._tasks[split][index]


class RepairDemonstrations:
    """Mid-training documents for a small model; implements :class:`~etude.tasks.corpora.corpus.Demonstrations`."""

    def __init__(self, tasks: BriefTasks, options: RepositoryOptions, split: Split = Split.TRAIN) -> None:
        self._tasks = tasks
        self._options = options
        self._split = split
        self._by_function: dict[tuple[str, int], Sequence[Repair]] = {}
        """Repairs in functions of the standard library that were drawn before, by file and line."""

    def code(self, rng: Random) -> str | list[Message]:
        """A right function as the agent sees it; elsewhere, an exercise."""
        if self._is_elsewhere(rng):
            return self._exercise(rng)
        repair = rng.choice(self._repairs)
        return repair.shown(repair.right)

    def session(self, rng: Random) -> list[Message]:
        """A session on a new bug: the agent may read the function first, edits the line, and submits."""
        repair = rng.choice(self._elsewhere(rng) if self._is_elsewhere(rng) else self._repairs)
        bug = rng.choice(repair.mistakes)
        messages = [Message("user", ask(repair.function, repair.path, repair.first))]
        if rng.random() < self._options.read_first:
            messages += _reading(repair, repair.shown(bug))
        is_right = rng.random() < self._options.right_edit
        line = repair.right if is_right else rng.choice([mistake for mistake in repair.mistakes if mistake != bug])
        return [*messages, repair.edit(line), Message("user", tools.OK), Message("assistant", tools.SUBMIT)]

    def _exercise(self, rng: Random) -> list[Message]:
        """A function with several bugs, of which every line is written again, right, in any order: much copying for one
        reading. The prompt differs from a task's, so that a session still ends after one edit.
        """
        repairs = self._elsewhere(rng)
        one = repairs[0]
        bugs = rng.sample(repairs, min(len(repairs), rng.randint(1, MOST_BUGS)))
        numbers = [number for number in range(one.first, len(one.lines) + 1) if one.lines[number - 1].strip()]
        messages = [Message("user", f"{ask(one.function, one.path, one.first)} {ALL}")]
        messages += _reading(one, _shown(one, {bug.line: rng.choice(bug.mistakes) for bug in bugs}))
        for number in rng.sample(numbers, len(numbers)):
            messages += [_edit(one.path, number, one.lines[number - 1]), Message("user", tools.OK)]
        return [*messages, Message("assistant", tools.SUBMIT)]

    def _is_elsewhere(self, rng: Random) -> bool:
        """True if a document is about the standard library. Held-out documents are about the tasks' code alone. A share
        of 0 draws no random number, so that documents without one stay the same.
        """
        share = self._options.elsewhere if self._split is Split.TRAIN else 0.0
        return share > 0 and rng.random() < share

    def _elsewhere(self, rng: Random) -> Sequence[Repair]:
        """The repairs of a function of the standard library that has any."""
        while True:
            source, function = self._library.draw(rng)
            key = source.path, function.line
            if key not in self._by_function:
                bugs = _mistakes(source, function, unproved_mutants(source, function))
                repairs = _repairs_of(source, function, bugs, self._fewest, last_line(function.node))
                self._by_function[key] = [*repairs]
            if self._by_function[key]:
                return self._by_function[key]

    @cached_property
    def _library(self) -> LibraryFunctions:
        return LibraryFunctions()

    @property
    def _fewest(self) -> int:
        """The number of wrong versions that a line needs: an agent without wrong edits needs only the bug."""
        return MIN_MISTAKES if self._options.right_edit < 1 else 1

    @cached_property
    def _repairs(self) -> Sequence[Repair]:
        """Every function line on this side of the hold-out that has several plausible wrong versions."""
        sources: dict[str, tuple[SourceText, set[str]]] = {}
        family = self._tasks.family
        heldout = {task.template for task in family.tasks(Split.HELDOUT)}
        for task in family.tasks(self._split):
            for path, text in family.answer(task).items():
                prefix, _, _ = task.template.rpartition(":")
                kept_out = {name.rpartition(":")[2] for name in heldout if name.startswith(prefix + ":")}
                sources.setdefault(path, (SourceText(path, text), kept_out))
        shown = _repairs if self._split is Split.TRAIN else _heldout_repairs
        repairs = [repair for source, kept_out in sources.values() for repair in shown(source, kept_out, self._fewest)]
        if not repairs:
            raise ConfigError(f"{family.folder} has no {self._split} function with a line that could be got wrong")
        return repairs


def ask(function: str, path: str, line: int) -> str:
    """The prompt of a brief task."""
    return f"fix {function} in {path} {line}"


def _edit(path: str, number: int, line: str) -> Message:
    return Message("assistant", f"{tools.EDIT} {path} {number}\n{line}")


def _reading(repair: Repair, shown: str) -> list[Message]:
    """The agent reads the function, and what it sees."""
    return [Message("assistant", f"{tools.READ} {repair.path} {repair.first}"), Message("user", shown)]


def _shown(repair: Repair, wrong: Mapping[int, str]) -> str:
    """The output of ``read PATH FIRST`` with other lines at some positions."""
    lines = [wrong.get(number, line) for number, line in enumerate(repair.lines, start=1)]
    return tools.number_lines("\n".join(lines), repair.first)


def _brief(family: RepositoryTasks, images: ImageStore, split: Split) -> Iterator[Task]:
    for task in family.tasks(split):
        answer = family.answer(task)
        if len(answer) != 1 or task.environment is None:
            continue
        [(path, right)] = answer.items()
        broken = _text(images, task.environment.image, f"{task.environment.workdir}/{path}")
        line = _only_difference(broken, right)
        function = line and _function_at(SourceText(path, right), line)
        if function:
            yield replace(task, prompt=ask(function.qualname, path, _first(function)))


def _repairs(source: SourceText, heldout: set[str], fewest: int) -> Iterator[Repair]:
    """Repairs in functions for training: not held out, and not shown together with a held-out function."""
    functions = list(source.functions())
    hidden = [
        line for other in functions if other.top in heldout for line in range(other.line, last_line(other.node) + 1)
    ]
    for function in functions:
        if function.top not in heldout and not any(line in _view(function) for line in hidden):
            bugs = _mistakes(source, function, mutants(source, function))
            yield from _repairs_of(source, function, bugs, fewest)


def _heldout_repairs(source: SourceText, heldout: set[str], fewest: int) -> Iterator[Repair]:
    """Repairs in held-out functions."""
    for function in source.functions():
        if function.top in heldout:
            bugs = _mistakes(source, function, mutants(source, function))
            yield from _repairs_of(source, function, bugs, fewest)


def _repairs_of(
    source: SourceText, function: Function, bugs: Mapping[int, list[str]], fewest: int, end: int | None = None
) -> Iterator[Repair]:
    """Repairs in a function, of lines with at least ``fewest`` bugs, in a file that has no line after ``end``."""
    lines = tuple(source.text.split("\n")[:end])
    for line, mistakes in bugs.items():
        if line in _view(function) and len(mistakes) >= fewest:
            yield Repair(
                path=source.path,
                function=function.qualname,
                first=_first(function),
                line=line,
                lines=lines,
                mistakes=tuple(mistakes),
            )


def _view(function: Function) -> range:
    """The lines that reading a function shows."""
    return range(_first(function), _first(function) + tools.WINDOW_LINES)


def _mistakes(source: SourceText, function: Function, bugs: Iterator[Mutant]) -> Mapping[int, list[str]]:
    """Line number in the function → wrong versions of that line."""
    mistakes: dict[int, list[str]] = {}
    for mutant, _ in zip(bugs, range(PLACES_PER_FUNCTION), strict=False):
        edit = mutant.edit
        if "\n" not in source.text[edit.start : edit.end] + edit.text:
            start = source.line_start(mutant.line)
            right = source.line(mutant.line).rstrip("\r\n")
            here = replace(edit, start=edit.start - start, end=edit.end - start)
            wrong = apply(right, [here])
            if wrong != right:
                mistakes.setdefault(mutant.line, []).append(wrong)
    return mistakes


def _only_difference(one: str, other: str) -> int | None:
    """The number of the only line in which two texts differ; ``None`` if there is not exactly one."""
    ours, theirs = one.split("\n"), other.split("\n")
    different = [number for number, pair in enumerate(zip(ours, theirs, strict=False), start=1) if pair[0] != pair[1]]
    return different[0] if len(ours) == len(theirs) and len(different) == 1 else None


def _function_at(source: SourceText, line: int) -> Function | None:
    """The function whose code contains a line, if one view shows both the beginning of the code and the line."""
    for function in source.functions():
        if _first(function) <= line <= last_line(function.node) and line < _first(function) + tools.WINDOW_LINES:
            return function
    return None


def _first(function: Function) -> int:
    """The line at which a function's code begins."""
    return function.code[0].lineno if function.code else function.line


def _text(images: ImageStore, image: str, path: str) -> str:
    """The text of a file in the topmost layer of an image that contains it."""
    for layer in reversed(images.open(image).layers):
        file = layer / path.lstrip("/")
        if file.is_file():
            return file.read_text(encoding="utf-8")
    raise ConfigError(f"image {image} has no {path}: its tasks and images do not belong together; build them again")

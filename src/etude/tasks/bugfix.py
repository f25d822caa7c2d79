"""The planted-bug family: short Python files with one wrong line, hidden tests, and a held-out split.

About one in n templates of a kind is held out. The choice is by hash, so it is the same for every seed, and templates
that compute the same (``(a + b) - c`` and ``(a - c) + b``) are always on the same side. The answer line of a held-out
template, under any naming, is *forbidden* on the training side: as an answer, as a planted bug and as a mistake in a
transcript. Training shows each part of such an answer, but never the combination or an equivalent of it.

Two options require exploration. With ``hidden_label`` the right line also returns a word that is neither in the prompt
nor in the file: only the output of the failing test shows it. With several ``files`` the prompt does not say which file
contains the function.

Owns the split and the instances. Does not grade (:mod:`etude.rewards`) and does not write transcripts
(:mod:`etude.tasks.corpora.transcripts`).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from random import Random
from types import CodeType

import orjson

from etude.config.tasks import BugfixOptions
from etude.protocols import FamilyContext
from etude.tasks.heldout import HeldoutTasks
from etude.tasks.programs import (
    FILE_NAMES,
    FUNCTION_NAMES,
    KINDS,
    LABELS,
    PATHS,
    Lines,
    Naming,
    Parts,
    ProgramKind,
    with_label,
)
from etude.types import Case, FunctionChecks, Json, Split, Task

PROBES = 40
"""Random calls that distinguish two behaviours; if two look equal, only more templates are held out."""
HIDDEN_CASES = 10
"""Cases that grade a rollout; the agent never sees them."""
VISIBLE_CASES = 2
"""Cases that the agent's ``test`` command runs; at least one of them fails at the start."""
MIN_MISTAKES = 3
"""Minimum number of different wrong lines of a problem: one session may try this many."""
TELLING_CASES = 3
"""Minimum number of cases that the planted bug must change; otherwise the instance is drawn again."""
CODES = 64
"""Size of the cache of compiled programs: enough for one problem and the last few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One planted-bug problem: the right program, its broken line, and other plausible mistakes."""

    kind: ProgramKind
    template: Parts
    naming: Naming
    function: str
    path: str
    right: Lines
    bug: str
    """The wrong answer line that was planted."""
    mistakes: tuple[str, ...]
    """Wrong answer lines, without a label, that may be shown on this side of the hold-out."""
    label: str = ""
    """Word that the right line returns in addition to its value; empty for none."""
    other_files: Mapping[str, Lines] = field(default_factory=dict)
    """Path → program of another function."""
    is_named: bool = True
    """True if the prompt names the file that contains the function."""

    @property
    def prompt(self) -> str:
        """The request to the agent."""
        return f"fix {self.function} in {self.path}" if self.is_named else f"fix {self.function}"

    @property
    def plain_answer(self) -> str:
        """The right answer line, without a label."""
        return self.kind.answer_line(self.template, self.naming)

    def files(self, lines: Lines) -> dict[str, str]:
        """Path → text of all files, with ``lines`` as the program at ``path``."""
        texts = {self.path: lines, **self.other_files}
        return {path: "\n".join(texts[path]) for path in sorted(texts)}

    @property
    def broken(self) -> Lines:
        """The program with the bug in it."""
        return self.with_answer(self.bug)

    def with_answer(self, line: str) -> Lines:
        """The program with another answer line."""
        return (*self.right[: self.kind.answer], line, *self.right[self.kind.answer + 1 :])


class BugfixFamily:
    """An endless stream of planted-bug tasks; implements :class:`~etude.protocols.TaskFamily`."""

    @classmethod
    def open(cls, options: BugfixOptions, context: FamilyContext) -> "BugfixFamily":
        """The family of a recipe."""
        return cls(options, seed=context.seed, heldout_every=context.heldout_every)

    def __init__(self, options: BugfixOptions, *, seed: int, heldout_every: int = 6) -> None:
        self._seed = seed
        self._options = options
        self.kinds: tuple[ProgramKind, ...] = tuple(KINDS[name] for name in options.kinds)
        self._trained = tuple(kind for kind in self.kinds if kind.name not in options.untrained)
        self._heldout = choose_heldout(self.kinds, heldout_every)
        self._choices = {(kind.name, split): self.templates(kind, split) for kind in self.kinds for split in Split}
        chosen = [(kind, parts) for kind in self.kinds for parts in self.templates(kind, Split.HELDOUT)]
        self._heldout_tasks = HeldoutTasks([each for each in chosen if self._can_be_broken(*each)], self._heldout_task)

    @cached_property
    def forbidden(self) -> frozenset[str]:
        """Every answer line of every held-out template under every naming, stripped."""
        return frozenset(
            kind.answer_line(template, naming).strip()
            for kind in self.kinds
            for template in self.templates(kind, Split.HELDOUT)
            for naming in kind.namings
        )

    def templates(self, kind: ProgramKind, split: Split) -> Sequence[Parts]:
        """The templates of one kind on one side of the hold-out."""
        return [parts for parts in kind.templates if ((kind.name, parts) in self._heldout) == (split is Split.HELDOUT)]

    def size(self, split: Split) -> int | None:
        """None: the supply of tasks is unlimited."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split; deterministic in the seed (training) or fixed (held out)."""
        if split is Split.HELDOUT:
            return self._heldout_tasks.task(index)
        rng = Random(f"task|{self._seed}|{split}|{index}")
        return _task(*self.graded_problem(split, rng, kinds=self._trained), split)

    def graded_problem(
        self,
        split: Split,
        rng: Random,
        of: tuple[ProgramKind, Parts] | None = None,
        kinds: Sequence[ProgramKind] | None = None,
    ) -> tuple[Problem, FunctionChecks]:
        """Draw a problem together with cases on which its bug shows; ``of`` and ``kinds`` as in :meth:`problem`."""
        while True:
            problem = self.problem(split, rng, of, kinds)
            checks = self._checks(problem, rng)
            if checks is not None:
                return problem, checks

    def problem(
        self,
        split: Split,
        rng: Random,
        of: tuple[ProgramKind, Parts] | None = None,
        kinds: Sequence[ProgramKind] | None = None,
    ) -> Problem:
        """Draw a program and break it; on the training side nothing forbidden is used. ``of`` sets kind and template;
        without it they are drawn, from ``kinds`` if given, else from all kinds.
        """
        while True:
            kind = of[0] if of else rng.choice(kinds or self.kinds)
            template = of[1] if of else rng.choice(self._choices[kind.name, split])
            naming = rng.choice(kind.namings)
            function = rng.choice(FUNCTION_NAMES)
            mistakes = self._mistakes(kind, template, naming)
            if len(mistakes) >= MIN_MISTAKES:
                problem = Problem(
                    kind=kind,
                    template=template,
                    naming=naming,
                    function=function,
                    path=rng.choice(FILE_NAMES),
                    right=kind.program(template, naming, function),
                    bug=rng.choice(mistakes),
                    mistakes=mistakes,
                )
                problem = _labelled(problem, rng) if self._options.hidden_label else problem
                return self._among_others(problem, split, rng) if self._options.files > 1 else problem

    def _among_others(self, problem: Problem, split: Split, rng: Random) -> Problem:
        """The problem in one of several files; the functions in the other files have other names."""
        path, *other_paths = rng.sample(PATHS, self._options.files)
        names = rng.sample([name for name in FUNCTION_NAMES if name != problem.function], len(other_paths))
        others = {other: self._other_program(split, name, rng) for other, name in zip(other_paths, names, strict=True)}
        return replace(problem, path=path, other_files=others, is_named=False)

    def _other_program(self, split: Split, function: str, rng: Random) -> Lines:
        """A right program under another function name."""
        kind = rng.choice(self.kinds)
        return kind.program(rng.choice(self._choices[kind.name, split]), rng.choice(kind.namings), function)

    def _mistakes(self, kind: ProgramKind, template: Parts, naming: Naming) -> tuple[str, ...]:
        """Wrong answer lines that are not forbidden."""
        return tuple(mistake for mistake in kind.mistakes(template, naming) if mistake.strip() not in self.forbidden)

    def _can_be_broken(self, kind: ProgramKind, template: Parts) -> bool:
        return any(len(self._mistakes(kind, template, naming)) >= MIN_MISTAKES for naming in kind.namings)

    def _heldout_task(self, of: tuple[ProgramKind, Parts], rng: Random) -> Task:
        return _task(*self.graded_problem(Split.HELDOUT, rng, of), Split.HELDOUT)

    def _checks(self, problem: Problem, rng: Random) -> FunctionChecks | None:
        """Draw cases; ``None`` if the bug changes the result of too few."""
        calls = [problem.kind.arguments(rng) for _ in range(HIDDEN_CASES + VISIBLE_CASES)]
        right = [run_program(problem.right, problem.function, arguments) for arguments in calls]
        wrong = [run_program(problem.broken, problem.function, arguments) for arguments in calls]
        telling = [i for i, (good, bad) in enumerate(zip(right, wrong, strict=True)) if good != bad]
        if len(telling) < TELLING_CASES:
            return None
        shown = rng.choice(telling)
        quiet = rng.choice([i for i in range(len(calls)) if i != shown])
        cases = [Case(arguments=arguments, expected=value) for arguments, value in zip(calls, right, strict=True)]
        return FunctionChecks(
            path=problem.path,
            function=problem.function,
            visible=(cases[shown], cases[quiet]),
            hidden=tuple(case for i, case in enumerate(cases) if i not in (shown, quiet)),
        )


def _labelled(problem: Problem, rng: Random) -> Problem:
    """The problem with a label in its right line and another label in the wrong one."""
    label, wrong = rng.sample(LABELS, 2)
    right = problem.with_answer(with_label(problem.plain_answer, label))
    return replace(problem, right=right, bug=with_label(problem.bug, wrong), label=label)


def run_program(lines: Lines, function: str, arguments: Sequence[Json]) -> Json:
    """Call a function of our own templates in this process; an exception counts as the value ``!Name``.

    Accepts only text from :mod:`etude.tasks.programs`; code that a model wrote runs in a sandbox.
    """
    names: dict[str, object] = {}
    try:
        exec(_code(lines), names)
        value: Json = names[function](*orjson.loads(orjson.dumps(list(arguments))))  # type: ignore[operator]  # a function
    except (ArithmeticError, TypeError, ValueError, NameError, IndexError) as error:
        return f"!{type(error).__name__}"
    return value


@lru_cache(maxsize=CODES)
def _code(lines: Lines) -> CodeType:
    """Compile a program, cached: it is called many times, and compiling takes twenty times as long as a call."""
    return compile("\n".join(lines), "<template>", "exec")


def choose_heldout(kinds: Sequence[ProgramKind], one_in: int) -> frozenset[tuple[str, Parts]]:
    """Hold out whole classes of equal behaviour, in the order of their hashes, until each kind has its share."""
    classes: dict[str, list[tuple[str, Parts]]] = {}
    for kind in kinds:
        for parts in kind.templates:
            classes.setdefault(behaviour(kind, parts), []).append((kind.name, parts))
    required = {kind.name: max(1, len(kind.templates) // one_in) for kind in kinds}
    heldout: set[tuple[str, Parts]] = set()
    for _, members in sorted(classes.items()):
        if any(required[name] > 0 for name, _ in members) and len(members) <= max(
            required[name] for name, _ in members
        ):
            heldout.update(members)
            for name, _ in members:
                required[name] -= 1
    return frozenset(heldout)


def behaviour(kind: ProgramKind, parts: Parts) -> str:
    """Digest of the results of a template's right program on fixed random calls: equal for equal behaviour."""
    lines = kind.program(parts, kind.namings[0], "probe")
    results = [run_program(lines, "probe", arguments) for arguments in _probes(kind.arguments)]
    return hashlib.sha256(orjson.dumps([kind.arguments.__name__, results])).hexdigest()


@cache
def _probes(draw: Callable[[Random], tuple[Json, ...]]) -> Sequence[tuple[Json, ...]]:
    """The arguments of these calls: the same for all programs with the same argument types."""
    rng = Random(f"probe|{draw.__name__}")
    return [draw(rng) for _ in range(PROBES)]


def _task(problem: Problem, checks: FunctionChecks, split: Split) -> Task:
    files = problem.files(problem.broken)
    identity = orjson.dumps([problem.path, files[problem.path], problem.right, *sorted(problem.other_files.items())])
    return Task(
        task_id=hashlib.sha256(identity).hexdigest()[:16],
        family="bugfix",
        template=problem.kind.title(problem.template),
        split=split,
        prompt=problem.prompt,
        files=files,
        checks=checks,
    )

"""Changes in, tasks out: run the tests of each before and after it, and keep what always tells the two apart.

    change ──▶ proposals ──▶ image of the tree before ──▶ all tests, without and with the change: which tell?
                                                            └─▶ leaks? ──▶ the tests of each proposal, without and with
                     its part, twice each ──▶ proof ──▶ canaries possible? ──▶ graded as right? ──▶ task, record

Consumes changes; produces a verdict for each proposal and tasks for some. Waits for sandboxes and runs of tests, each
with a deadline. On shutdown sandboxes are closed; what has a verdict is on disk. Which tests count is decided in
:mod:`etude.taskgen.verdicts`, what is asked in :mod:`.proposals`.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from etude.errors import AgentFault, DamagedError, SandboxError
from etude.protocols import SandboxProvider
from etude.sandbox_spec import EnvironmentSpec, Image, SandboxSpec
from etude.sandboxes.images.store import ImageStore
from etude.taskgen.failures import RepositoryError
from etude.taskgen.hiding import place_of
from etude.taskgen.history.changed_files import ChangedFiles
from etude.taskgen.history.mentions import functions_naming, is_named
from etude.taskgen.history.proposals import MAX_LINES, Proposal, asked_by_tests, propose
from etude.taskgen.history.records import HistoryRecord, digest_of_texts, id_of
from etude.taskgen.history.slices import Slice, Slicer, top_imports
from etude.taskgen.history.sources import Change, History
from etude.taskgen.installs import environment
from etude.taskgen.leaks import RemovedIdentifiers, removed_identifiers, search, without_repeated
from etude.taskgen.projects import Project, bare_name, is_test_file, read_project
from etude.taskgen.scrubbing import commit_all, copy_clean
from etude.taskgen.sources import read_texts
from etude.taskgen.survey import is_fit
from etude.taskgen.testruns import RunObservation, TestRun, observe
from etude.taskgen.validator import ACCEPTED, FLOOR_S, SLACK, artefacts_of
from etude.taskgen.verdicts import MAX_ABOUT, MAX_HIDDEN_BYTES, OTHERS, Proof, Rejection, prove
from etude.tasks.repositories.folder import FAMILY, CandidateVerdict, PackageFolder
from etude.types import Split, Task, TestChecks

RUN_TIMEOUT_S = 180.0
"""For one run of a change's tests."""
LEAST_TIMEOUT_S = 30.0
"""For one run of a part's tests…"""
PART_SLACK = 10.0
"""…and so many times as long as those of the whole change took: what takes longer does not end."""
ATTEMPTS = 2
"""Sandboxes in which a change is tried: tests come in another order and with another hash seed in each."""
SANDBOX_TTL_S = 1800.0
REPEATED = 0.5
"""Share of a change's lines that may stand elsewhere in its project before it, as idioms do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """Verdicts of a grader on tasks. Both raise :class:`~etude.errors.SandboxError`."""

    guarded: Callable[[Task], Awaitable[Collection[str]]]
    """The tests of a task that it can guard with canaries, by node id."""
    is_right: Callable[[Task, Mapping[str, str]], Awaitable[bool]]
    """True if a task is done once some files are written, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """All that a project needs, installed."""

    layer: str
    """Digest of the layer."""
    base: str
    """Name of the stored base system that it was installed over; empty: the provider's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeTrees:
    """A change with both of its trees."""

    change: Change
    files: ChangedFiles
    project: Project
    """The project after it."""
    before: Path
    """The tree that an agent is given."""

    @property
    def slicer(self) -> Slicer:
        """Its slicer."""
        return Slicer(self.files, self.project)

    def slice(self, path: str, name: str) -> Slice | None:
        """All of the change, or the part of it that makes a name; ``None`` where that cannot be cut out."""
        return self.slicer.cut(path, name) if name else self.slicer.whole()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePart:
    """A proposal, the part of the change that it asks for, and the runs that prove it."""

    proposal: Proposal
    slice: Slice
    broken: list[RunObservation] = field(default_factory=list)
    right: list[RunObservation] = field(default_factory=list)
    """Runs without and with it."""

    def proof(self, trees: ChangeTrees) -> Proof:
        """The tests that always fail before and pass after, of those that mention a name; and some that always pass."""
        every = sorted({test for run in self.right for test in run.tests if is_fit(test)})
        named = [test for test in every if is_named(trees.files.after, test, self.proposal.name)]
        proof = prove(named, every, self.broken, self.right)
        if proof.rejection in {Rejection.FLAKY, Rejection.UNSOLVED} and not any(run.ended for run in self.right):
            return replace(proof, rejection=self._why_none_tells(named, proof.rejection))
        others = proof.others[:OTHERS]
        has_sound = self._can_import_some(trees, others)
        return replace(proof, about=proof.about[:MAX_ABOUT], others=others if has_sound else ())

    def _can_import_some(self, trees: ChangeTrees, tests: Sequence[str]) -> bool:
        """True if the module of some test can be imported without the part: it imports nothing new at its top."""
        if not tests:
            return False
        without, complete = trees.slicer.nothing(), self.slice.hidden
        paths = {place_of(test)[0] for test in tests}
        return any(top_imports(without.get(path, "")) == top_imports(complete.get(path, "")) for path in paths)

    def _why_none_tells(self, named: Sequence[str], otherwise: Rejection) -> Rejection:
        """The reason why no test of some tells the part: the change does without it, or it needs more of the change;
        ``otherwise`` where some test passes one time and fails another.
        """
        if named and all(run.passed(test) for run in self.broken for test in named):
            return Rejection.SURVIVED
        is_mixed = (len({run.passed(test) for run in runs}) > 1 for runs in (self.broken, self.right) for test in named)
        return otherwise if any(is_mixed) else Rejection.INCOMPLETE

    @property
    def seconds(self) -> float:
        """Longest run with the change."""
        return max(run.seconds for run in self.right)


@final
class ChangeValidator:
    """Validates changes of one project, one after another."""

    def __init__(
        self,
        history: History,
        provider: SandboxProvider,
        store: ImageStore,
        folder: PackageFolder,
        *,
        needs: Dependencies,
        grading: Grading,
    ) -> None:
        """``grading`` is that by which its tasks will be graded."""
        self._history = history
        self._provider = provider
        self._store = store
        self._folder = folder
        self._needs = needs
        self._grading = grading

    async def validate(self, change: Change) -> tuple[list[CandidateVerdict], list[HistoryRecord]]:
        """Try all that a change could be: a verdict for each, or one for the whole, and the records of what was kept.

        Trouble with sandboxes is a verdict, too: :attr:`~etude.taskgen.verdicts.Rejection.FAILED`.
        """
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="etude-change-", ignore_cleanup_errors=True) as scratch:
            try:
                # On this thread, as all that parses: two threads that do it at once crash CPython 3.11 (gh-106905).
                trees = read_change(self._history, change, Path(scratch))
                proposals = propose(change, trees.files, trees.project)
                if isinstance(proposals, Rejection):
                    return [_verdict(change, proposals, began_s)], []
                return await self._validate(trees, proposals)
            except RepositoryError as error:
                return [_verdict(change, Rejection.UNTESTED, began_s, detail=str(error))], []
            except (SandboxError, AgentFault) as error:
                return [_verdict(change, Rejection.FAILED, began_s, detail=str(error)[:1000])], []

    async def _validate(
        self, trees: ChangeTrees, proposals: Sequence[Proposal]
    ) -> tuple[list[CandidateVerdict], list[HistoryRecord]]:
        began_s = time.monotonic()
        if sum(map(len, trees.files.hidden(trees.project).values())) > MAX_HIDDEN_BYTES:
            return [_verdict(trees.change, Rejection.TOO_LARGE, began_s)], []
        spoken_of = [proposal for proposal in proposals if _has_tests(trees, proposal.name)]
        verdicts = [
            _verdict(trees.change, Rejection.SURVIVED, began_s, detail="no test names it", target=proposal.template)
            for proposal in proposals
            if proposal not in spoken_of
        ]
        if not spoken_of:
            return verdicts, []
        image = await asyncio.to_thread(add_image, trees, self._store, self._needs)
        names = frozenset(proposal.name for proposal in spoken_of)
        both = (trees.slicer.nothing(), None), _files(trees.slicer.whole())
        first = await self._observe(trees, image, both, names=names, timeout_s=RUN_TIMEOUT_S)
        if first[-1].ended == "timeout":  # of a busy machine, perhaps: nothing tells yet what the change does
            raise SandboxError(f"the tests of {trees.change.candidate_id} did not end within {RUN_TIMEOUT_S:g} s")
        if first[0].ended == "timeout":  # nor would they in the sandbox of an agent that does nothing
            detail = "without the change its tests do not end"
            hanging = [
                _verdict(trees.change, Rejection.HANGS, began_s, detail=detail, target=proposal.template)
                for proposal in spoken_of
            ]
            return [*verdicts, *hanging], []
        made: list[tuple[HistoryRecord, Task, Slice]] = []
        parts: list[ChangePart] = []
        for proposal in spoken_of:
            part, rejection, detail = self._cut(trees, proposal, image, first)
            if part is not None:
                parts.append(part)
            else:
                verdicts.append(_verdict(trees.change, rejection, began_s, detail=detail, target=proposal.template))
        await self._run(trees, parts, image, first)
        for part in parts:
            verdict, record, task = await self._conclude(trees, part, image, [each for each, *_ in made])
            verdicts.append(replace(verdict, seconds=round(time.monotonic() - began_s, 3)))
            made += [(record, task, part.slice)] if task is not None else []
        for _, task, part_of_it in made:  # without a pause, as the caller's records: no task is left without one
            self._folder.add(task, texts_of(part_of_it))
        return verdicts, [record for record, *_ in made]

    def _cut(
        self, trees: ChangeTrees, proposal: Proposal, image: Image, first: Sequence[RunObservation]
    ) -> tuple[ChangePart | None, str, str]:
        """The part of a proposal, or the reason why none is made, and a detail of it."""
        without, complete = first
        telling = [test for test in complete.tests if complete.passed(test) and not without.passed(test)]
        if not any(is_named(trees.files.after, test, proposal.name) for test in telling):
            return None, Rejection.UNSOLVED if complete.ended else Rejection.SURVIVED, ""
        part = trees.slice(proposal.path, proposal.name)
        if part is None:
            return None, Rejection.UNSOLVED, "its statements cannot be put into the tree before it"
        if part.lines > MAX_LINES:
            return None, Rejection.TOO_WIDE, ""
        leak = self._leak(trees, part, image)
        if leak:
            return None, Rejection.LEAKS, leak
        return ChangePart(proposal=replace(proposal, lines=part.lines), slice=part), "", ""

    async def _run(
        self, trees: ChangeTrees, parts: Sequence[ChangePart], image: Image, first: Sequence[RunObservation]
    ) -> None:
        """Run the tests of each part, without and with it, in as many sandboxes as there are attempts."""
        without, complete = first
        steady = [test for test in complete.tests if complete.passed(test) and without.passed(test)]
        telling = [test for test in complete.tests if complete.passed(test) and not without.passed(test)]
        broken = trees.slicer.nothing()
        for attempt in range(ATTEMPTS) if parts else ():
            ids = {part.proposal.name: _about(trees, part, telling) + steady[:OTHERS] for part in parts}
            every = sorted({test for tests in ids.values() for test in tests})
            pairs: list[tuple[Mapping[str, str | None], Sequence[str]]] = [(broken, every)]
            pairs += [({**part.slice.hidden, **part.slice.answer}, ids[part.proposal.name]) for part in parts]
            order = pairs if attempt % 2 == 0 else pairs[::-1]
            runs = await self._observe(trees, image, order, attempt=attempt, timeout_s=part_timeout_s(complete.seconds))
            before, *after = runs if attempt % 2 == 0 else runs[::-1]
            for part, run in zip(parts, after, strict=True):
                part.broken.append(before)
                part.right.append(run)

    async def _conclude(
        self, trees: ChangeTrees, part: ChangePart, image: Image, records: Sequence[HistoryRecord]
    ) -> tuple[CandidateVerdict, HistoryRecord, Task | None]:
        """The verdict on a part that was run, its record, and, where it is kept, its task."""
        proof = part.proof(trees)
        record = record_of(self._history, trees, part, proof)
        rejection = proof.rejection
        if rejection is None and record.task_id in {each.task_id for each in records}:
            rejection = Rejection.TWIN
        task = None if rejection else task_of(record, trees, part.slice, image)
        detail = ""
        try:
            if task is not None and not await self._grading.guarded(task):
                rejection = Rejection.UNGUARDED
            elif task is not None and not await self._grading.is_right(task, texts_of(part.slice)):
                rejection, detail = Rejection.UNSOLVED, "the grader does not take the true change for right"
        except SandboxError as error:  # about these tests, as others of the change ran: it keeps its other tasks
            rejection, detail = Rejection.UNGUARDED, str(error)[:1000]
        target = part.proposal.template
        if rejection is not None or task is None:
            verdict = _verdict(trees.change, str(rejection), 0.0, detail=detail, target=target, tests=proof.about)
            return verdict, record, None
        accepted = _verdict(trees.change, ACCEPTED, 0.0, target=target, tests=proof.about)
        return replace(accepted, task_id=task.task_id), record, task

    async def _observe(
        self,
        trees: ChangeTrees,
        image: Image,
        runs: Sequence[tuple[Mapping[str, str | None], Sequence[str] | None]],
        *,
        timeout_s: float,
        attempt: int = 0,
        names: frozenset[str] = frozenset(),
    ) -> list[RunObservation]:
        """Run the changed tests over some files each, in one sandbox: those of some ids; or all of them, or those that
        speak of some names. ``timeout_s`` is for each run. Of ids only their modules are imported, as when a task is
        graded: another one could fail and leave behind what these need.
        """
        texts, modules = trees.files.after, trees.files.tests(trees.project)
        named = {path: functions_naming(texts[path], names) for path in modules} if names - {""} else None
        steps = [
            TestRun(
                targets=modules if not ids else tuple(dict.fromkeys(place_of(test)[0] for test in ids)),
                ids=None if ids is None else tuple(ids),
                named=named,
                others=2 * OTHERS,
                seed=attempt,
                files=files,
                timeout_s=timeout_s,
            )
            for files, ids in runs
        ]
        sandbox = await self._provider.create({}, SandboxSpec(image=image, ttl_s=SANDBOX_TTL_S))
        try:
            return await observe(sandbox, steps, options=trees.project.options, hash_seed=attempt)
        finally:
            await sandbox.close()

    def _leak(self, trees: ChangeTrees, part: Slice, image: Image) -> str:
        """The place where a part of the change can be found by an agent; empty where it cannot."""
        project = trees.project
        after = {
            path: text for path, text in texts_of(part).items() if path.endswith(".py") and project.is_source(path)
        }
        try:
            removed = removed_identifiers(after, {path: trees.files.before.get(path) for path in after}, ())
        except SyntaxError as error:
            return f"a module that cannot be parsed: {error}"
        new = without_repeated(removed, trees.files.before.values())
        if len(new.windows) < (1 - REPEATED) * len(removed.windows):
            return "most of its lines stand in the project before it"
        lines = RemovedIdentifiers(windows=new.windows, digests=new.digests)
        *_, tree = image.layers  # dependencies have no copy of the project: see installs.without_copies
        return next((str(leak) for leak in search(tree, lines, prefix="/")), "")


def part_timeout_s(whole_s: float) -> float:
    """The time for the tests of a part, by what those of the whole change took."""
    return min(RUN_TIMEOUT_S, max(LEAST_TIMEOUT_S, PART_SLACK * whole_s))


def read_change(history: History, change: Change, scratch: Path) -> ChangeTrees:
    """Both trees of a change, in the empty folder ``scratch``.

    Raises :class:`~etude.taskgen.failures.RepositoryError`.
    """
    before, after = (history.tree(name, scratch / side) for name, side in ((change.before, "a"), (change.after, "b")))
    files = ChangedFiles(before=read_texts(before), after=read_texts(after))
    project = read_project(files.after)
    named = replace(project, name=bare_name(project.name))  # which releases of one project spell differently
    return ChangeTrees(change=change, files=files, project=named, before=before)


def add_image(trees: ChangeTrees, store: ImageStore, needs: Dependencies) -> Image:
    """Store the image of a task: what the project needs, and its tree before the change as the only commit."""
    with tempfile.TemporaryDirectory(prefix="etude-task-") as scratch:
        work = Path(scratch) / "layer" / "work"
        copy_clean(trees.before, work, {})
        commit_all(work)
        layer = store.add_layer(Path(scratch) / "layer")
    return store.add([needs.layer, layer], base=needs.base, environment=dict(environment(trees.project)))


def texts_of(part: Slice) -> dict[str, str]:
    """The files that a part of a change makes or changes."""
    return {path: text for path, text in part.answer.items() if text is not None}


def record_of(history: History, trees: ChangeTrees, part: ChangePart, proof: Proof) -> HistoryRecord:
    """The record of a part of a change, by what was proved of it."""
    change, package, proposal = trees.change, trees.project.name, part.proposal
    return HistoryRecord(
        task_id=id_of(package, change.before, change.after, proof.about),
        source=history.reference,
        package=package,
        before=change.before,
        after=change.after,
        day=change.day,
        prompt=asked_by_tests(proposal, proof.about),
        template=proposal.template,
        path=proposal.path,
        name=proposal.name,
        lines=proposal.lines,
        difficulty=proposal.difficulty,
        about=proof.about,
        others=proof.others,
        timeout_s=round(2 * FLOOR_S + SLACK * part.seconds, 1),
        digest=digest_of_texts(trees.files.before, part.slice.hidden),
        licence=trees.project.licence,
    )


def task_of(record: HistoryRecord, trees: ChangeTrees, part: Slice, image: Image) -> Task:
    """The task of a record. Raises :class:`~etude.errors.DamagedError` for trees that it was not validated with."""
    if digest_of_texts(trees.files.before, part.hidden) != record.digest:
        raise DamagedError(
            f"task {record.task_id}: {record.source} {record.before}..{record.after} has other files than when the "
            f"task was validated: take it out of the suite, or build it again"
        )
    return Task(
        task_id=record.task_id,
        family=FAMILY,
        template=record.template,
        split=Split.HELDOUT,
        prompt=record.prompt,
        files={},
        checks=TestChecks(
            files=_needed(part.hidden, (*record.about, *record.others)),
            must_pass=(*record.about, *record.others),
            about=len(record.about),
            artefacts=artefacts_of(trees.project, (*trees.files.before, *part.answer)),
            command=("python3", "-m", "pytest", *trees.project.options),
            timeout_s=record.timeout_s,
        ),
        environment=EnvironmentSpec(image=image.digest),
    )


def _needed(hidden: Mapping[str, str], tests: Sequence[str]) -> dict[str, str]:
    """The hidden files that some tests need: their modules, and all that is no test module itself."""
    modules = {place_of(test)[0] for test in tests}
    return {path: text for path, text in hidden.items() if path in modules or not is_test_file(path)}


def _files(part: Slice) -> tuple[dict[str, str | None], None]:
    """The files of a run of all tests with a part of the change."""
    return {**part.hidden, **part.answer}, None


def _has_tests(trees: ChangeTrees, name: str) -> bool:
    """True if a changed test speaks of a name; any does, where there is none."""
    texts, modules = trees.files.after, trees.files.tests(trees.project)
    return not name or any(functions_naming(texts[path], [name]) for path in modules)


def _about(trees: ChangeTrees, part: ChangePart, tests: Sequence[str]) -> list[str]:
    """The tests that can tell a part of the change, as many as a task may name."""
    texts, name = trees.files.after, part.proposal.name
    return [test for test in tests if is_fit(test) and is_named(texts, test, name)][:MAX_ABOUT]


def _verdict(
    change: Change, outcome: str, began_s: float, *, detail: str = "", target: str = "", tests: Sequence[str] = ()
) -> CandidateVerdict:
    return CandidateVerdict(
        candidate_id=change.candidate_id,
        operator="commit" if change.subject else "release",
        path=change.subject,
        target=target,
        outcome=str(outcome),
        seconds=round(time.monotonic() - began_s, 3),
        detail=detail,
        tests=tuple(tests[:40]),
    )

"""Changes in, tasks out: run the tests of each before and after it, and keep what always tells the two apart.

    change ──▶ proposals ──▶ image of the tree before ──▶ its tests, without and with the change, twice each
                                                            └─▶ proof ──▶ leaks? ──▶ canaries possible? ──▶ task, record

Consumes changes; produces a verdict for each proposal and tasks for some. Waits for sandboxes and runs of tests, each
with a deadline. On shutdown sandboxes are closed; what has a verdict is on disk. Which tests count is decided in
:mod:`etude.taskgen.verdicts`, what is asked in :mod:`.proposals`.
"""

import ast
import asyncio
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from etude.errors import AgentFault, DamagedError, SandboxError
from etude.protocols import SandboxProvider
from etude.sandbox_spec import EnvironmentSpec, Image, SandboxSpec
from etude.sandboxes.images.store import ImageStore
from etude.taskgen.failures import RepositoryError
from etude.taskgen.hiding import place_of
from etude.taskgen.history.proposals import ChangedFiles, Proposal, propose
from etude.taskgen.history.records import HistoryRecord, digest_of_texts, id_of
from etude.taskgen.history.sources import Change, History
from etude.taskgen.installs import environment
from etude.taskgen.leaks import RemovedIdentifiers, removed_identifiers, search, without_repeated
from etude.taskgen.projects import Project, is_test_file, read_project
from etude.taskgen.scrubbing import commit_all, copy_clean
from etude.taskgen.sources import read_texts
from etude.taskgen.survey import is_fit
from etude.taskgen.testruns import RunObservation, TestRun, observe
from etude.taskgen.validator import ACCEPTED, FLOOR_S, SLACK, artefacts_of
from etude.taskgen.verdicts import MAX_ABOUT, MAX_HIDDEN_BYTES, OTHERS, Proof, Rejection, prove
from etude.tasks.repositories.folder import FAMILY, CandidateVerdict, PackageFolder
from etude.types import Split, Task, TestChecks

RUN_TIMEOUT_S = 90.0
"""For one run of a change's tests."""
ATTEMPTS = 2
"""Sandboxes in which a change is tried: tests come in another order and with another hash seed in each."""
SANDBOX_TTL_S = 1800.0
REPEATED = 0.5
"""Share of a change's lines that may stand elsewhere in its project before it, as idioms do."""
Guarded = Callable[[Task], Awaitable[Collection[str]]]
"""The tests of a task that a grader can guard with canaries, by node id."""


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
    def hidden(self) -> dict[str, str]:
        """Texts of tests as they are after the change: those that it changed, and what all tests read."""
        after = self.files.after
        return {
            path: after[path]
            for path in after
            if self.project.is_test(path)
            and (path in self.files.changed or path.endswith("conftest.py"))
            and not self.project.is_source(path)
        }

    @property
    def answer(self) -> dict[str, str | None]:
        """The change itself, without its tests: path → text, or ``None`` for a file that it removes."""
        changed = (path for path in self.files.changed if not self.project.is_test(path))
        return {path: self.files.after.get(path) for path in changed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Runs of a change's tests without and with it."""

    broken: Sequence[RunObservation]
    right: Sequence[RunObservation]

    def proof(self, mention: str, trees: ChangeTrees) -> Proof:
        """The tests that always fail before and pass after, of those that mention a name; and some that always pass."""
        every = sorted({test for run in self.right for test in run.tests if is_fit(test)})
        named = [test for test in every if not mention or _mentions(trees.files.after, test, mention)]
        proof = prove(named, every, self.broken, self.right)
        if proof.rejection is Rejection.FLAKY and all(run.passed(test) for run in self.broken for test in named):
            return replace(proof, rejection=Rejection.SURVIVED)
        return replace(proof, about=proof.about[:MAX_ABOUT], others=proof.others[:OTHERS])

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
        site: str,
        guarded: Guarded,
    ) -> None:
        """``site`` is the digest of the layer with what the project needs; ``guarded`` asks what a grader can guard."""
        self._history = history
        self._provider = provider
        self._store = store
        self._folder = folder
        self._site = site
        self._guarded = guarded

    async def validate(self, change: Change) -> tuple[list[CandidateVerdict], list[HistoryRecord]]:
        """Try all that a change could be: a verdict for each, or one for the whole, and the records of what was kept.

        Trouble with sandboxes is a verdict, too: :attr:`~etude.taskgen.verdicts.Rejection.FAILED`.
        """
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="etude-change-", ignore_cleanup_errors=True) as scratch:
            try:
                trees = await asyncio.to_thread(read_change, self._history, change, Path(scratch))
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
        if sum(map(len, trees.hidden.values())) > MAX_HIDDEN_BYTES:
            return [_verdict(trees.change, Rejection.TOO_LARGE, began_s)], []
        image = await asyncio.to_thread(add_image, trees, self._store, self._site)
        leak = await asyncio.to_thread(self._leak, trees, image)
        if leak:
            return [_verdict(trees.change, Rejection.LEAKS, began_s, detail=leak)], []
        evidence = await self._observe(trees, image)
        verdicts: list[CandidateVerdict] = []
        records: list[HistoryRecord] = []
        for proposal in proposals:
            proof = evidence.proof(proposal.mention, trees)
            record = record_of(self._history, trees, proposal, proof, evidence.seconds)
            rejection = proof.rejection
            if rejection is None and record.task_id in {each.task_id for each in records}:
                rejection = Rejection.TWIN
            task = None if rejection else task_of(record, trees, image)
            if task is not None and not await self._guarded(task):
                rejection = Rejection.UNGUARDED
            verdict = _verdict(
                trees.change, rejection or ACCEPTED, began_s, target=proposal.template, tests=proof.about
            )
            if rejection is None and task is not None:
                answer = {path: text for path, text in trees.answer.items() if text is not None}
                await asyncio.to_thread(self._folder.add, task, answer)
                records.append(record)
                verdict = replace(verdict, task_id=task.task_id)
            verdicts.append(verdict)
        return verdicts, records

    async def _observe(self, trees: ChangeTrees, image: Image) -> Evidence:
        """Run the tests without and with the change, in either order."""
        targets = trees.files.tests(trees.project)
        given: Mapping[bool, dict[str, str | None]] = {False: {**trees.hidden}, True: {**trees.hidden, **trees.answer}}
        seen: dict[bool, list[RunObservation]] = {False: [], True: []}
        for attempt, order in enumerate(((False, True), (True, False))[:ATTEMPTS]):
            sandbox = await self._provider.create({}, SandboxSpec(image=image, ttl_s=SANDBOX_TTL_S))
            try:
                steps = [
                    TestRun(targets=targets, seed=attempt, files=given[solved], timeout_s=RUN_TIMEOUT_S)
                    for solved in order
                ]
                runs = await observe(sandbox, steps, options=trees.project.options, hash_seed=attempt)
            finally:
                await sandbox.close()
            for solved, run in zip(order, runs, strict=True):
                seen[solved].append(run)
        return Evidence(broken=seen[False], right=seen[True])

    def _leak(self, trees: ChangeTrees, image: Image) -> str:
        """The place where the change can be found by an agent; empty where it cannot."""
        sources = [path for path in trees.files.sources(trees.project) if path in trees.files.after]
        after = {path: trees.files.after[path] for path in sources}
        try:
            removed = removed_identifiers(after, {path: trees.files.before.get(path) for path in sources}, ())
        except SyntaxError as error:
            return f"a module that cannot be parsed: {error}"
        new = without_repeated(removed, trees.files.before.values())
        if len(new.windows) < (1 - REPEATED) * len(removed.windows):
            return "most of its lines stand in the project before it"
        lines = RemovedIdentifiers(windows=new.windows, digests=new.digests)
        *_, tree = image.layers  # dependencies have no copy of the project: see installs.without_copies
        return next((str(leak) for leak in search(tree, lines, prefix="/")), "")


def read_change(history: History, change: Change, scratch: Path) -> ChangeTrees:
    """Both trees of a change, in the empty folder ``scratch``.

    Raises :class:`~etude.taskgen.failures.RepositoryError`.
    """
    before, after = (history.tree(name, scratch / side) for name, side in ((change.before, "a"), (change.after, "b")))
    files = ChangedFiles(before=read_texts(before), after=read_texts(after))
    return ChangeTrees(change=change, files=files, project=read_project(files.after), before=before)


def add_image(trees: ChangeTrees, store: ImageStore, site: str) -> Image:
    """Store the image of a task: what the project needs, and its tree before the change as the only commit."""
    with tempfile.TemporaryDirectory(prefix="etude-task-") as scratch:
        work = Path(scratch) / "layer" / "work"
        copy_clean(trees.before, work, {})
        commit_all(work)
        layer = store.add_layer(Path(scratch) / "layer")
    return store.add([site, layer], base="", environment=dict(environment(trees.project)))


def record_of(history: History, trees: ChangeTrees, proposal: Proposal, proof: Proof, seconds: float) -> HistoryRecord:
    """The record of a proposal, by what was proved of it."""
    change, package = trees.change, trees.project.name
    return HistoryRecord(
        task_id=id_of(package, change.before, change.after, proof.about),
        source=history.reference,
        package=package,
        before=change.before,
        after=change.after,
        day=change.day,
        prompt=proposal.prompt,
        template=proposal.template,
        mention=proposal.mention,
        lines=proposal.lines,
        difficulty=proposal.difficulty,
        about=proof.about,
        others=proof.others,
        timeout_s=round(2 * FLOOR_S + SLACK * seconds, 1),
        digest=digest_of_texts(trees.files.before, trees.hidden),
    )


def task_of(record: HistoryRecord, trees: ChangeTrees, image: Image) -> Task:
    """The task of a record. Raises :class:`~etude.errors.DamagedError` for trees that it was not validated with."""
    if digest_of_texts(trees.files.before, trees.hidden) != record.digest:
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
            files=_needed(trees.hidden, (*record.about, *record.others)),
            must_pass=(*record.about, *record.others),
            about=len(record.about),
            artefacts=artefacts_of(trees.project, tuple(trees.files.before)),
            command=("python3", "-m", "pytest", *trees.project.options),
            timeout_s=record.timeout_s,
        ),
        environment=EnvironmentSpec(image=image.digest),
    )


def _needed(hidden: Mapping[str, str], tests: Sequence[str]) -> dict[str, str]:
    """The hidden files that some tests need: their modules, and all that is no test module itself."""
    modules = {place_of(test)[0] for test in tests}
    return {path: text for path, text in hidden.items() if path in modules or not is_test_file(path)}


def _mentions(texts: Mapping[str, str], test: str, name: str) -> bool:
    """True if the function of a test mentions a name."""
    path, function = place_of(test)
    word = re.compile(rf"\b{re.escape(name)}\b")
    try:
        tree = ast.parse(texts.get(path, ""))
    except (SyntaxError, ValueError):
        return False
    name_of_test = function.split(".")[-1]
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name_of_test)
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in function.split("."))
    inner = [ast.get_source_segment(texts[path], node) or "" for node in functions]
    return any(word.search(text) for text in inner) or any(word.search(node.name) for node in classes)


def _verdict(
    change: Change, outcome: str, began_s: float, *, detail: str = "", target: str = "", tests: Sequence[str] = ()
) -> CandidateVerdict:
    return CandidateVerdict(
        candidate_id=f"{change.before}..{change.after}",
        operator="commit" if change.subject else "release",
        path=change.subject,
        target=target,
        outcome=str(outcome),
        seconds=round(time.monotonic() - began_s, 3),
        detail=detail,
        tests=tuple(tests[:40]),
    )

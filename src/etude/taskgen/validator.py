"""Validation of candidates: sandbox runs in, verdicts and tasks out.

    candidates ──batches──▶ quick runs in a live sandbox ──▶ the survivors, one by one: build the image, search it,
                                                              prove it in a fresh sandbox ──▶ task, verdict

Consumes candidates; produces a verdict for each and tasks for some. Waits for sandboxes and for runs of tests, each
with a deadline. On shutdown the sandboxes are closed; accepted tasks are on disk. :mod:`~etude.taskgen.verdicts`
decides which candidates become tasks.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from etude.errors import AgentFault, SandboxError
from etude.protocols import Sandbox, SandboxProvider
from etude.sandbox_spec import EnvironmentSpec, Image, SandboxSpec
from etude.sandboxes.images.store import ImageStore
from etude.taskgen.candidates import BUG, Candidate
from etude.taskgen.hiding import TestView, place_of, view_tests
from etude.taskgen.instructions import EXAMPLES, instruct
from etude.taskgen.leaks import Leak, RemovedIdentifiers, removed_identifiers, search
from etude.taskgen.projects import Project
from etude.taskgen.scrubbing import commit_all, copy_clean
from etude.taskgen.survey import Survey
from etude.taskgen.testruns import Calls, RunObservation, TestRun, observe
from etude.taskgen.verdicts import (
    MAX_HIDDEN_BYTES,
    Proof,
    Rejection,
    choose_tests,
    judge_quick,
    probe_cases,
    prove,
    refuse_unrun,
)
from etude.tasks.repositories.folder import FAMILY, CandidateVerdict, PackageFolder, split_of
from etude.types import Case, Json, Probe, Task, TestChecks

ACCEPTED = "kept"
DELETE = "delete_"
"""Prefix of the operators of deletions; no operator of a planted bug has it."""
SLACK = 5.0
"""Factor by which a run may be slower than in the survey, because the machine is busy."""
FLOOR_S = 15.0
"""Fixed part of a run's timeout."""
SANDBOX_TTL_S = 3600.0

Guarded: TypeAlias = Callable[[Task], Awaitable[Collection[str]]]
"""The tests of a task that a grader can guard with canaries, by node id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRepository:
    """A prepared package: the inputs for the validation of its candidates."""

    project: Project
    texts: Mapping[str, str]
    """Its original files."""
    tree: Path
    """Folder of the original files."""
    survey: Survey
    site: str
    """Digest of the layer with its requirements."""
    pristine: Image
    """Image with the unchanged package, for quick runs; no agent receives it."""
    base: str
    environment: Mapping[str, str]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate that passed its quick run."""

    candidate: Candidate
    affected: frozenset[str]
    fails: frozenset[str]
    messages: Mapping[str, str]
    seconds: float


class CandidateValidator:
    """Validation of one package's candidates, some of them concurrently."""

    def __init__(
        self,
        bench: PreparedRepository,
        provider: SandboxProvider,
        store: ImageStore,
        folder: PackageFolder,
        guarded: Guarded | None = None,
    ) -> None:
        """``guarded`` gives the tests that a grader can guard; with it, a candidate without a probe may be a task."""
        self._guarded = guarded
        self._bench = bench
        self._provider = provider
        self._store = store
        self._folder = folder
        self._tests = {
            path: text for path, text in bench.texts.items() if path.endswith(".py") and bench.project.is_test(path)
        }
        self._taken = {
            (verdict.operator.startswith(DELETE), verdict.target, verdict.tests)
            for verdict in folder.verdicts()
            if verdict.outcome == ACCEPTED
        }

    async def quick(
        self, candidates: Sequence[Candidate], sandbox: Sandbox
    ) -> tuple[list[Trial], list[CandidateVerdict]]:
        """Run each candidate's tests on the unchanged package plus its change, all in forks of one process.

        Raises :class:`~etude.errors.SandboxError`.
        """
        survey = self._bench.survey
        verdicts: list[CandidateVerdict] = []
        worth: list[tuple[Candidate, frozenset[str]]] = []
        for candidate in candidates:
            affected = survey.affected(candidate.functions)
            rejection = refuse_unrun(survey, affected)
            if rejection is None and self._guarded is None and self._calls(candidate) is None:
                rejection = Rejection.UNPROBED
            if rejection is None:
                worth.append((candidate, affected))
            else:
                verdicts.append(_verdict(candidate, rejection, 0.0))
        steps = [
            self._run(affected, dict(candidate.after), number + 1) for number, (candidate, affected) in enumerate(worth)
        ]
        seen = await observe(sandbox, steps, options=self._bench.project.options, hash_seed=1) if steps else []
        trials: list[Trial] = []
        for (candidate, affected), observation in zip(worth, seen, strict=True):
            fails, rejection = judge_quick(survey, affected, observation)
            if rejection is None and _key(candidate, fails) in self._taken:
                rejection = Rejection.TWIN
            if rejection is not None:
                verdicts.append(_verdict(candidate, rejection, observation.seconds, tests=_names(fails)))
                continue
            messages = {test: observation.tests[test].message for test in fails if test in observation.tests}
            trials.append(
                Trial(
                    candidate=candidate, affected=affected, fails=fails, messages=messages, seconds=observation.seconds
                )
            )
        return trials, verdicts

    async def finish(self, trial: Trial) -> CandidateVerdict:
        """Build the image of a candidate, search it for leaks, prove it, and write the task if it is accepted.

        Raises :class:`~etude.errors.SandboxError`.
        """
        started = time.monotonic()
        candidate = trial.candidate
        key = _key(candidate, trial.fails)
        if key in self._taken:
            return _verdict(candidate, Rejection.TWIN, trial.seconds, tests=key[2])
        view = view_tests(
            self._tests, trial.fails, show=candidate.kind == BUG, gone=candidate.gone, salt=candidate.candidate_id
        )
        about, others = choose_tests(
            self._bench.survey, trial.affected, trial.fails, view.hidden, candidate.candidate_id
        )
        hidden = self._hidden_files(view, (*about, *others))
        if sum(map(len, hidden.values())) > MAX_HIDDEN_BYTES:
            return _verdict(candidate, Rejection.TOO_LARGE, trial.seconds, tests=key[2])
        image, leaks = await asyncio.to_thread(self._build, candidate, view)
        if leaks or image is None:
            return _verdict(candidate, Rejection.LEAKS, trial.seconds, detail=str(leaks[0]), tests=key[2])
        calls = self._calls(candidate)
        proof, cases = await self._prove(candidate, image, (about, others), hidden, calls)
        seconds = trial.seconds + time.monotonic() - started
        if proof.rejection is not None:
            return _verdict(candidate, proof.rejection, seconds, tests=key[2])
        task = self._task(trial, view, image, proof, cases, hidden)
        rejection = None if cases else await self._refuse_unprobed(task)
        if rejection is None and key in self._taken:  # a concurrent candidate was faster
            rejection = Rejection.TWIN
        if rejection is not None:
            return _verdict(candidate, rejection, seconds, tests=key[2])
        self._taken.add(key)
        await asyncio.to_thread(self._folder.add, task, candidate.before)
        counts = {
            "about": len(proof.about),
            "others": len(proof.others),
            "visible": len(view.visible),
            "probe_cases": len(cases),
        }
        return replace(_verdict(candidate, ACCEPTED, seconds, tests=key[2]), task_id=task.task_id, counts=counts)

    async def _refuse_unprobed(self, task: Task) -> Rejection | None:
        """The reason to reject a task without a probe."""
        if self._guarded is None:
            return Rejection.UNPROBED
        return None if await self._guarded(task) else Rejection.UNGUARDED

    @asynccontextmanager
    async def live(self) -> AsyncIterator[Sandbox]:
        """A sandbox with the unchanged package, for quick runs."""
        spec = SandboxSpec(image=self._bench.pristine, environment=self._bench.environment, ttl_s=SANDBOX_TTL_S)
        sandbox = await self._provider.create({}, spec)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def _run(self, tests: frozenset[str] | Sequence[str], files: Mapping[str, str | None], seed: int) -> TestRun:
        ids = tuple(sorted(tests))
        seconds = self._bench.survey.seconds(ids)
        return TestRun(
            targets=tuple(sorted({place_of(test)[0] for test in ids})),
            ids=ids,
            seed=seed,
            files=files,
            timeout_s=FLOOR_S + SLACK * seconds,
        )

    def _hidden_files(self, view: TestView, named: Sequence[str]) -> dict[str, str]:
        """The original text of every conftest, every file of a named test, and every file that the agent has changed
        or lacks.
        """
        paths = {place_of(test)[0] for test in named} | {path for path in view.changed if path in self._tests}
        paths |= {path for path in self._tests if path.endswith("conftest.py")}
        return {path: self._tests[path] for path in sorted(paths) if path in self._tests}

    def _build(self, candidate: Candidate, view: TestView) -> tuple[Image | None, list[Leak]]:
        """The image of a task and no leak, or no image and the first leak."""
        bench = self._bench
        changed: dict[str, str | None] = {**candidate.after, **view.changed}
        with tempfile.TemporaryDirectory(prefix="etude-task-") as scratch:
            tree = Path(scratch) / "layer"
            work = tree / "work"
            copy_clean(bench.tree, work, changed)
            commit_all(work)
            rest = [text for path, text in bench.texts.items() if path not in changed]
            rest += [text for path, text in changed.items() if text is not None and path not in candidate.before]
            removed_names = removed_identifiers(candidate.before, candidate.after, rest, gone=candidate.gone)
            leaks = list(search(tree, removed_names, prefix="/"))[:1]
            elsewhere = RemovedIdentifiers(
                windows=removed_names.windows, digests=removed_names.digests, modules=frozenset()
            )
            leaks = leaks or list(search(self._store.layer(bench.site), elsewhere, prefix="/"))[:1]
            if leaks:
                return None, leaks
            layer = self._store.add_layer(tree)
        image = self._store.add([bench.site, layer], base=bench.base, environment=dict(bench.environment))
        return image, []

    def _calls(self, candidate: Candidate) -> Calls | None:
        """The recorded calls of the changed function, if it is a single top-level one."""
        if len(candidate.functions) != 1 or "." in candidate.target:
            return None
        recorded = self._bench.survey.calls.get(candidate.functions[0], ())
        if not recorded:
            return None
        calls: list[tuple[Json, ...]] = [tuple(json.loads(text)) for text in recorded]
        module = self._bench.project.module(candidate.path)
        return Calls(module=module, function=candidate.target, calls=tuple(calls))

    async def _prove(
        self,
        candidate: Candidate,
        image: Image,
        tests: tuple[tuple[str, ...], tuple[str, ...]],
        hidden: Mapping[str, str],
        calls: Calls | None,
    ) -> tuple[Proof, tuple[Case, ...]]:
        """Run the tests and calls with and without the answer, in two fresh sandboxes with both orders and two hash
        seeds.
        """
        answer: dict[str, str | None] = {**hidden, **candidate.before}
        broken: list[RunObservation] = []
        right: list[RunObservation] = []
        called: dict[bool, list[RunObservation]] = {True: [], False: []}
        named = (*tests[0], *tests[1])
        for attempt, order in enumerate(((False, True), (True, False))):
            spec = SandboxSpec(image=image, ttl_s=SANDBOX_TTL_S)
            sandbox = await self._provider.create({}, spec)
            try:
                steps: list[TestRun | Calls] = [
                    self._run(named, answer if solved else dict(hidden), 10 + attempt) for solved in order
                ]
                if calls is not None:
                    steps += [
                        Calls(
                            module=calls.module,
                            function=calls.function,
                            calls=calls.calls,
                            files=dict(candidate.before) if solved else {},
                        )
                        for solved in order
                    ]
                seen = await observe(sandbox, steps, options=self._bench.project.options, hash_seed=100 + attempt)
            finally:
                await sandbox.close()
            for solved, run in zip(order, seen[:2], strict=True):
                (right if solved else broken).append(run)
            for solved, run in zip(order, seen[2:], strict=False):
                called[solved].append(run)
        cases = probe_cases(calls.calls, called[True], called[False]) if calls is not None else ()
        return prove(tests[0], tests[1], broken, right), cases

    def _task(
        self,
        trial: Trial,
        view: TestView,
        image: Image,
        proof: Proof,
        cases: tuple[Case, ...],
        hidden: Mapping[str, str],
    ) -> Task:
        candidate, project = trial.candidate, self._bench.project
        module = project.module(candidate.path)
        template = f"{project.name}:{module}:{candidate.top}"
        named = {place_of(test)[0] for test in (*proof.about, *proof.others)} | set(view.changed)
        examples = cases[-EXAMPLES:] if candidate.kind != BUG and len(cases) > 2 * EXAMPLES else ()
        probe = Probe(module=module, function=candidate.target, cases=cases[: len(cases) - len(examples)])
        return Task(
            task_id=candidate.candidate_id,
            family=FAMILY,
            template=template,
            split=split_of(template),
            prompt=instruct(project, candidate, view, trial.messages, examples),
            files={},
            checks=TestChecks(
                files={path: text for path, text in hidden.items() if path in named or path.endswith("conftest.py")},
                must_pass=(*proof.about, *proof.others),
                about=len(proof.about),
                artefacts=artefacts_of(project, tuple(self._bench.texts)),
                command=("python3", "-m", "pytest", *project.options),
                probes=(probe,) if cases else (),
                visible=_visible(trial, view),
                timeout_s=FLOOR_S * 2 + SLACK * self._bench.survey.seconds((*proof.about, *proof.others)),
            ),
            environment=EnvironmentSpec(image=image.digest),
        )


def artefacts_of(project: Project, paths: Sequence[str]) -> tuple[str, ...]:
    """The paths to copy from an agent's sandbox: the packages; of a package with tests, its entries without them."""
    matches: set[str] = set()
    for root in project.sources:
        inside = [path for path in paths if path.startswith(f"{root}/")]
        if not any(project.is_test(path) for path in inside):
            matches.add(root)
            continue
        for path in inside:
            if not project.is_test(path):
                matches.add("/".join(path.split("/")[: root.count("/") + 2]))
    return tuple(sorted(matches))


def _visible(trial: Trial, view: TestView) -> tuple[str, ...]:
    """The test files in the agent's copy with tests that reach the change; empty means all test files."""
    paths = {place_of(test)[0] for test in trial.affected}
    return tuple(sorted(path for path in paths if view.changed.get(path, "") is not None))


def _key(candidate: Candidate, fails: frozenset[str]) -> tuple[bool, str, tuple[str, ...]]:
    """The key of a task, unique within a package."""
    return candidate.operator.startswith(DELETE), candidate.target, _names(fails)


def _names(tests: frozenset[str]) -> tuple[str, ...]:
    """Sorted names of failing tests for a verdict, at most 40."""
    return tuple(sorted(tests)[:40])


def _verdict(
    candidate: Candidate,
    outcome: str,
    seconds: float,
    *,
    detail: str = "",
    tests: tuple[str, ...] = (),
) -> CandidateVerdict:
    return CandidateVerdict(
        candidate_id=candidate.candidate_id,
        operator=candidate.operator,
        path=candidate.path,
        target=candidate.target,
        outcome=str(outcome),
        seconds=round(seconds, 3),
        detail=detail,
        tests=tests,
    )


def failed(candidate: Candidate, error: SandboxError | AgentFault) -> CandidateVerdict:
    """The verdict on a candidate whose sandbox failed."""
    return _verdict(candidate, Rejection.FAILED, 0.0, detail=str(error)[:1000])

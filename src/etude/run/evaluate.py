"""`etude eval`: try a published weight version on the held-out tasks, repeatedly, and store every attempt.

    version ──▶ evaluations/vNNNNNN-DIGEST.db: a ledger ──▶ what is missing? ──▶ engine, gateway, rollouts ──▶ tries
                                                                └─ nothing ────────────────────────────────────▲

The version is served from a scratch run folder. The tries are stored in a separate ledger next to the run's, which is
only read; if the run has a URL, they are stored there too, so that any machine can continue. Each pass over the tasks
is a purpose in that ledger, so a finished try is never repeated: an interrupted evaluation continues, and more passes
or tasks only cost the additional tries. A try that fails because of infrastructure is repeated as in a run; one that
fails every time is missing, and gets one more round in the next evaluation.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from etude.aio import background_task, gather_or_cancel
from etude.config.recipe import RunConfig
from etude.config.release import SuiteConfig
from etude.dashboard.evaluation import Evaluation, SamplingMode, Try
from etude.errors import ConfigError, InfrastructureError, RunFolderError
from etude.ledger.archive import Archive, RolloutOutcome, Search
from etude.ledger.ledger import Ledger
from etude.rewards.score import GRADER, grade_of
from etude.rewards.transcript import continued
from etude.run.data_copies import bring_data
from etude.run.folder import RunFolder, try_lock
from etude.run.kept_files import KeptFiles
from etude.run.rollouts import TEMPERATURES, RolloutParts, heldout_tasks, open_parts
from etude.run.serve_version import ServedRun, serving_version
from etude.run.suite_trials import trial_config, trial_name
from etude.run.task_families import open_family
from etude.run.weight_log import open_log
from etude.telemetry.events import EngineStats
from etude.telemetry.log import EventReader
from etude.types import Disposition, Group, Rollout, Task, TurnKind

POLL_S = 0.2
"""Interval at which engine and gateway are checked."""
PASSES_AT_ONCE = 2
"""Passes in progress at a time: a run also tries its two sampling modes together."""
EVALUATIONS = "evaluations"
"""Folder with the ledgers of tries, in the run folder."""
LOCK = ".evaluations.lock"
"""File of the run folder with the lock that evaluations in progress share."""
VERSION_DIGITS = 6
"""Digits of the version in the name of a ledger."""
ENGINE_S = "engine-s"
"""The ledger fact with the engine's busy time."""

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of finished tries and the planned number."""
TryAll = Callable[[str, Sequence[Task]], Awaitable[object]]
"""Tries each task once under a label, and returns when all have ended (``Dispatcher.evaluate``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """Request for an evaluation."""

    version: int | None = None
    """``None``: the newest."""
    tasks: int | None = None
    """``None``: the recipe's number."""
    passes: int = 1
    """Number of sampled tries per task."""
    greedy: bool = True
    """True if each task is also tried once greedily, which gives nearly the same result every time."""
    suite: SuiteConfig | None = None
    """A suite of other tasks, with its own scoring and its own ledger; ``None``: the run's tasks."""
    concurrency: int | None = None
    """Tries at a time, pass by pass; ``None``: in each of two passes the recipe's number, which fits its own tasks."""

    def __post_init__(self) -> None:
        for option, number in (("--passes", self.passes), ("--tasks", self.tasks)):
            if number is not None and number < 1:
                raise ConfigError(f"{option} {number}: expected 1 or more")

    def labels(self) -> dict[SamplingMode, list[str]]:
        """Purposes of the passes by sampling mode."""
        sampled = [f"sampled-{number}" for number in range(self.passes)]
        return {"sampled": sampled, "greedy": ["greedy"]} if self.greedy else {"sampled": sampled}


def evaluate(folder: RunFolder, request: EvalRequest, progress: Progress = lambda ended, planned: None) -> Evaluation:
    """Make the missing attempts of an evaluation, and return all of its attempts.

    Raises :class:`~etude.errors.UserError` for a version that does not exist, or if no attempt succeeds.
    """
    copies = KeptFiles(folder, EVALUATIONS)
    version, digest = resolve_version(folder, request.version)
    (folder.path / EVALUATIONS).mkdir(exist_ok=True)
    with evaluating(folder, copies):
        config, ledger, number = _trial(folder, request, version, digest)
        bring_data(folder, "tasks")
        labels = [label for labels in request.labels().values() for label in labels]
        if not _is_done(ledger, labels, number):
            number = len(heldout_tasks(open_family(config), number))  # the family may have fewer
        if not _is_done(ledger, labels, number):
            try:
                with serving_version(folder, version, ledger=ledger, recipe=config) as served:
                    counter = TryCount(ledger, labels, number, progress)
                    asyncio.run(_evaluate(served, request, number, counter))
            finally:
                _keep(copies, ledger)
        return read_evaluation(folder, request, version, digest)


@contextlib.contextmanager
def evaluating(folder: RunFolder, copies: KeptFiles) -> Iterator[None]:
    """Count as an evaluation in progress while the context is open, and first bring the ledgers of tries, unless
    another evaluation is in progress on this machine: it has them open.
    """
    descriptor = os.open(folder.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if try_lock(descriptor):
            copies.bring()
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def read_evaluation(folder: RunFolder, request: EvalRequest, version: int, digest: str) -> Evaluation:
    """The tries of an evaluation so far, without new ones. Raises as :meth:`Archive.open` does."""
    config, ledger, number = _trial(folder, request, version, digest)
    parts, labels = config.reward.parts, request.labels()
    with Archive.open(ledger) as archive:
        facts = archive.fact(ENGINE_S)
        number = min(number, max(archive.admitted(label) for names in labels.values() for label in names))
        return Evaluation(
            run=str(folder.path),
            version=version,
            digest=digest,
            tries={
                mode: tuple(tuple(tries(archive, label, number)) for label in names) for mode, names in labels.items()
            },
            engine_s=float(facts or 0.0),
            parts=(GRADER, *(part.name for part in parts)) if parts else (),
        )


def ledger_of_tries(folder: RunFolder, version: int, digest: str, suite: str = "") -> Path:
    """The ledger of the evaluations of a version: of the run's own tasks, or those of a suite by the name of its
    tries (:func:`~etude.run.suite_trials.trial_name`).

    Versions with equal weights share the ledger of the first one tried.
    """
    folder_of_tries = folder.path / EVALUATIONS
    ending = f"-{digest[:12]}" + (f"-{suite}" if suite else "") + ".db"
    tried = sorted(folder_of_tries.glob(f"v{'[0-9]' * VERSION_DIGITS}{ending}"))
    return tried[0] if tried else folder_of_tries / f"v{version:0{VERSION_DIGITS}}{ending}"


def evaluation_ledger(folder: RunFolder, request: EvalRequest, version: int, digest: str) -> Path:
    """The ledger of an evaluation. Raises :class:`~etude.errors.ConfigError`."""
    _, ledger, _ = _trial(folder, request, version, digest)
    return ledger


def _trial(folder: RunFolder, request: EvalRequest, version: int, digest: str) -> tuple[RunConfig, Path, int]:
    """The recipe of an evaluation, its ledger, and its number of tasks. Raises :class:`~etude.errors.ConfigError`."""
    run, suite = folder.config(), request.suite
    if suite is None:
        return run, ledger_of_tries(folder, version, digest), request.tasks or run.eval.tasks
    config = trial_config(run, suite)
    ledger = ledger_of_tries(folder, version, digest, trial_name(config, suite))
    return config, ledger, request.tasks or suite.count


def _keep(copies: KeptFiles, ledger: Path) -> None:
    """Upload a ledger of tries to the URL of its run; if that is unavailable, print that the tries are only local."""
    try:
        copies.keep(f"{EVALUATIONS}/{ledger.name}")
    except InfrastructureError as error:
        logger.warning("the tries are in %s only: %s", ledger, error)


def resolve_version(folder: RunFolder, version: int | None) -> tuple[int, str]:
    """The number of a version (``None``: the newest) and the digest of its weights."""
    log = open_log(folder)
    version = log.latest() if version is None else version
    record = None if version is None else log.read(version)
    if version is None or record is None:
        versions = log.versions()
        if not versions:
            raise RunFolderError(f"{folder.path} has no weights yet")
        raise RunFolderError(f"{folder.path} has no weight version {version}: it has {versions[0]} to {versions[-1]}")
    return version, record.digest


def _is_done(ledger: Path, labels: Sequence[str], tasks: int) -> bool:
    """True if every task of every pass has a successful try."""
    if not ledger.exists():
        return False
    Ledger.open(ledger).close()  # migrates the schema of an older étude
    with Archive.open(ledger) as archive:
        return not any(missing(archive, label, tasks) for label in labels)


async def _evaluate(served: ServedRun, request: EvalRequest, tasks: int, counter: "TryCount") -> None:
    """Evaluate while supervising engine and gateway; raises if one of them cannot be kept alive."""
    async with background_task(_measure(served, request, tasks)) as tried:
        while not tried.done():
            served.supervisor.check()
            counter.report()
            await asyncio.wait({tried}, timeout=POLL_S)
        tried.result()


async def _measure(served: ServedRun, request: EvalRequest, tasks: int) -> None:
    async with open_parts(served.folder, in_one_file=True) as parts:
        await parts.served.reach(served.version)
        heldout = heldout_tasks(parts.family, tasks)
        attempt = partial(parts.dispatcher.evaluate, concurrency=request.concurrency)
        slots = asyncio.Semaphore(PASSES_AT_ONCE if request.concurrency is None else 1)
        passes: list[Coroutine[None, None, None]] = []
        for mode, labels in request.labels().items():
            try_all = partial(attempt, temperature=TEMPERATURES[mode])
            passes += [_limited(slots, one_pass(parts.ledger, try_all, label, heldout)) for label in labels]
        try:
            await gather_or_cancel(passes)
        finally:
            _note_engine_time(parts, served)


async def _limited(slots: asyncio.Semaphore, work: Coroutine[None, None, None]) -> None:
    try:
        async with slots:
            await work
    finally:
        work.close()  # in case it was never awaited


async def one_pass(ledger: Ledger, try_all: TryAll, label: str, tasks: Sequence[Task]) -> None:
    """Try each task once; tasks that failed in every earlier round get one new round.

    Raises :class:`~etude.errors.RunFolderError` if other tasks were tried under that label.
    """
    due, is_new = list(range(len(tasks))), False
    for name in rounds(label):
        if not due or is_new:
            return
        is_new = not ledger.progress(name).admitted
        await try_all(name, [tasks[index] for index in due])
        groups = zip(due, ledger.groups(name), strict=False)
        due = [index for index, group in groups if not _same(group, tasks[index]).rollouts]


def rounds(label: str) -> Iterator[str]:
    """The purposes (labels) of a pass's rounds: all tasks, then those missing from the round before.

    Missing tasks are in ascending order, so added tasks come last and the positions in every round stay the same.
    """
    yield label
    yield from (f"{label}.again-{number}" for number in count(1))


def _same(group: Group, task: Task) -> Group:
    """Return the group if it belongs to ``task``. Raises :class:`~etude.errors.RunFolderError`."""
    if group.task.task_id != task.task_id:
        raise RunFolderError(
            f"a held-out task was {group.task.task_id} when it was tried and is {task.task_id} now: the tasks have "
            f"changed since; remove the run's evaluations/ to measure anew"
        )
    return group


def _note_engine_time(parts: RolloutParts, served: ServedRun) -> None:
    """Add the engine's busy time to the ledger fact."""
    events = (logged.event for logged in EventReader(served.folder.events).new())
    busy_s = sum(event.busy_s for event in events if isinstance(event, EngineStats))
    known_s = float(parts.ledger.facts.get(ENGINE_S) or 0.0)
    parts.ledger.facts.set(ENGINE_S, str(known_s + busy_s))


@dataclass(frozen=True, slots=True)
class TryCount:
    """Reports the progress of an evaluation to the caller."""

    ledger: Path
    labels: Sequence[str]
    tasks: int
    progress: Progress

    def report(self) -> None:
        """Count the finished tries."""
        if self.ledger.exists():
            with Archive.open(self.ledger) as archive:
                passes = [census for census in archive.census() if census.purpose.partition(".")[0] in self.labels]
            ended = sum(census.outcomes[RolloutOutcome.GRADED] for census in passes)
            self.progress(ended, self.tasks * len(self.labels))


def missing(archive: Archive, label: str, tasks: int) -> list[int]:
    """Tasks without an attempt in any round of a pass."""
    return [index for index, attempt in enumerate(tries(archive, label, tasks)) if attempt is None]


def last_failure(ledger: Path, labels: Sequence[str]) -> str:
    """Reason of the last try in some passes that failed because of infrastructure; empty if there is none."""
    with Archive.open(ledger) as archive:
        for census in reversed(archive.census()):
            if census.purpose.partition(".")[0] in labels:
                failed = archive.find(Search(purpose=census.purpose, outcome=RolloutOutcome.FAILED, limit=1))
                if failed:
                    return failed[0].reason
    return ""


def tries(archive: Archive, label: str, tasks: int) -> list[Try | None]:
    """One attempt per task of a pass, from whichever round has it."""
    graded = graded_groups(archive, label, tasks)
    return [None if group is None else _try(group.task, group.rollouts[0]) for group in graded]


def graded_groups(archive: Archive, label: str, tasks: int) -> list[Group | None]:
    """The group of each task of a pass in which it has an attempt, from whichever round has it."""
    graded: list[Group | None] = [None] * tasks
    for name in rounds(label):
        due = [index for index, group in enumerate(graded) if group is None]
        admitted = archive.admitted(name)
        if not due or not admitted:
            return graded
        for position, index in enumerate(due[:admitted]):
            group = archive.group(name, position)
            if group.rollouts:
                graded[index] = group
    raise AssertionError("rounds never end")


def _try(task: Task, rollout: Rollout) -> Try:
    turns = rollout.turns
    shared = (0 if before is None else turns[before].length for before in continued(turns))
    prompt_tokens = sum(len(turn.prompt_ids) for turn in turns)
    return Try(
        task_id=task.task_id,
        template=task.template,
        reward=rollout.reward or 0.0,
        graded=grade_of(rollout),
        parts=rollout.reward_parts,
        prompt_tokens=prompt_tokens,
        new_tokens=prompt_tokens - sum(shared),
        sampled_tokens=sum(len(turn.completion_ids) for turn in turns),
        turns=len(turns),
        summaries=sum(turn.kind is TurnKind.SUMMARY for turn in turns),
        seconds=rollout.seconds,
        is_cheat=rollout.verdict is not None and rollout.verdict.disposition is not Disposition.KEEP,
    )

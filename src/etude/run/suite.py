"""`etude suite run`: run any model behind a URL on the tasks of a suite, and store every try.

    suite ──▶ its tasks ──▶ OUT/tries.db: what is missing? ──▶ sandboxes, harness ──▶ passthrough ──▶ the model's API
                                  ▲                                                       │ tokens, seconds
                                  └──────────── graded tries, with what they cost ◀───────┘   ──▶ OUT/results.json

Tries are slots of a ledger as in `etude eval`: each pass is a purpose in it, so a finished try is never repeated, and a
failure of a machine or an API is retried and never a reward of zero. Weights of a run are evaluated as in `etude eval`
(:func:`try_version`). This module owns the wiring and the contents of the results.
"""

import asyncio
import contextlib
import datetime
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import final

import aiohttp

from etude.aio import background_task
from etude.clock import SystemClock
from etude.config.judge import JudgeConfig
from etude.config.loading import apply_override, is_recipe, load_recipe, parse_config
from etude.config.recipe import LedgerConfig, RunConfig, is_pass
from etude.config.release import SuiteConfig
from etude.config.reward import RewardConfig
from etude.config.suite import SUITE_FILE
from etude.config.tasks import SandboxConfig, TaskConfig
from etude.dashboard.evaluation import TokenPrices
from etude.dashboard.suite_results import SuiteResults, SuiteTry, suite_try, write_results
from etude.errors import AgentFault, ConfigError, OutOfTime, UserError
from etude.gateway.upstream.calls import Upstream
from etude.gateway.upstream.passthrough import Passthrough
from etude.ledger.archive import Archive
from etude.ledger.heartbeat import leased
from etude.ledger.ledger import Ledger, TaskDraw
from etude.protocols import Harness, HarnessResult, Sandbox, Session, TaskFamily
from etude.rewards.score import grade_of
from etude.rollouts.dispatcher import Dispatcher
from etude.rollouts.sandbox import RolloutLimits
from etude.rollouts.worker import GradeScorer, RolloutContext, Scorer
from etude.run.evaluate import (
    EvalRequest,
    Progress,
    TryAll,
    TryCount,
    evaluate,
    evaluation_ledger,
    graded_groups,
    last_failure,
    one_pass,
)
from etude.run.folder import RunFolder, exclusive
from etude.run.judging import JudgeState, OpenJudge, check_judge, open_judge, reward_digest
from etude.run.model_calls import serving_passthrough
from etude.run.rollouts import heldout_tasks, open_stage
from etude.run.scoring import reward_scorer
from etude.run.suite_trials import trial_config
from etude.run.task_families import open_family
from etude.run.task_sandboxes import image_store
from etude.sockets import alert_connector
from etude.tasks.harbor.family import read_tasks
from etude.tasks.harbor.images import build_images
from etude.tasks.suites import FAMILY, HARBOR, digest_of_tasks, is_suite, suite_of, task_config
from etude.telemetry.log import EventLog
from etude.types import Rollout, Split, Task

TRIES_FILE = "tries.db"
"""File of a folder of results: the ledger of tries."""
IDENTITY = "suite-identity"
"""The fact of that ledger that identifies what was tried, and how."""
POLL_S = 0.3
"""Interval at which progress, and whether the API refuses all calls, are checked."""
ENDLESS_TASKS = 256
"""Default number of tasks of an infinite family."""
COMMANDS_S = 600.0
"""Default time for all commands of an agent together; ``--set rollouts.timeout_s`` changes it."""
OUTAGE_S = 900.0
"""Time without a successful try after which the suite stops."""
ETUDE_API = "etude"
"""API of weights of a run, in results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A suite to be tried."""

    place: Path
    """Path of its folder, or of a recipe."""
    name: str
    version: str
    tasks: TaskConfig
    sandboxes: SandboxConfig
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TryLimits:
    """The number of tries of a suite, and the rules for counting them."""

    passes: int = 1
    tasks: int | None = None
    """``None``: all."""
    temperature: float = 1.0
    concurrency: int = 4
    """Tries at a time."""
    pass_at: float = 1.0
    prices: TokenPrices | None = None

    def __post_init__(self) -> None:
        numbers = {"--passes": self.passes, "--tasks": self.tasks, "--concurrency": self.concurrency}
        for option, number in numbers.items():
            if number is not None and number < 1:
                raise ConfigError(f"{option} {number}: expected 1 or more")

    def labels(self) -> list[str]:
        """Purposes of the passes in the ledger of tries."""
        return [f"sampled-{number}" for number in range(self.passes)]


def open_suite(place: Path) -> Suite:
    """A suite's folder, a bare folder of Harbor's tasks, or the held-out tasks of a recipe.

    Raises :class:`~etude.errors.ConfigError`.
    """
    if is_suite(place):
        file, (tasks, sandboxes) = suite_of(place), task_config(place)
        return Suite(
            place=place,
            name=file.name,
            version=file.version,
            tasks=tasks,
            sandboxes=sandboxes,
            reward=file.reward,
            judge=file.judge,
        )
    if is_recipe(place):
        recipe = load_recipe(place)
        tasks, sandboxes = recipe.tasks, recipe.sandboxes
        return Suite(place=place, name=recipe.name, version="1", tasks=tasks, sandboxes=sandboxes, seed=recipe.seed)
    raise ConfigError(
        f"{str(place)!r} is no suite: expected a folder with {SUITE_FILE}, one of tasks in Harbor's format, or a recipe"
    )


def try_config(suite: Suite, harness: dict[str, object], limits: TryLimits, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe for running a suite; ``harness`` is its ``[harness]``, ``overrides`` those of ``--set``.

    Raises :class:`~etude.errors.ConfigError`.
    """
    tree: dict[str, object] = {
        "name": suite.name,
        "seed": suite.seed,
        "tasks": suite.tasks.model_dump(mode="json", exclude_defaults=True),
        "sandboxes": suite.sandboxes.model_dump(mode="json", exclude_defaults=True),
        "reward": suite.reward.model_dump(mode="json", exclude_defaults=True),
        "judge": suite.judge.model_dump(mode="json", exclude_defaults=True),
        "harness": harness,
        "rollouts": {"timeout_s": COMMANDS_S, "max_outage_s": OUTAGE_S},
    }
    for override in overrides:
        apply_override(tree, override)
    config = parse_config(tree, source=" --set ".join(["etude suite run", *overrides]))
    return config.model_copy(
        update={"rollouts": config.rollouts.model_copy(update={"concurrency": limits.concurrency})}
    )


def try_model(
    suite: Suite,
    config: RunConfig,
    upstream: Upstream,
    limits: TryLimits,
    out: Path,
    progress: Progress = lambda ended, planned: None,
) -> SuiteResults:
    """Run a model behind a URL on a suite, and write ``results.json`` into the folder ``out``; tries already stored
    there are not repeated.

    Raises :class:`~etude.errors.UserError` for a suite that cannot be run, for a folder with tries of something else or
    in which another process makes some, and if the API refuses every call.
    """
    out.mkdir(parents=True, exist_ok=True)
    if suite.tasks.family == FAMILY and suite_of(Path(suite.tasks.folder)).tasks.family == HARBOR:
        asyncio.run(_build_images(Path(suite_of(Path(suite.tasks.folder)).tasks.folder), config))
    tasks = tasks_of(open_family(config), limits.tasks)
    check_judge(config)
    results = SuiteResults(
        suite=suite.name,
        version=suite.version,
        digest=digest_of_tasks(tasks),
        model=upstream.model,
        url=upstream.url,
        api=upstream.api,
        harness=config.harness.kind,
        date=_today(),
        etude=version_of("etude"),
        temperature=limits.temperature,
        passes=limits.passes,
        pass_at=limits.pass_at,
        tasks={task.task_id: task.template for task in tasks},
        tries=(),
        parts=tuple(part.name for part in config.reward.parts),
        reward=reward_digest(config),
        prices=limits.prices,
    )
    with (
        exclusive(RunFolder(out), "suite"),  # so a previous holder of the lease is dead
        leased(out / TRIES_FILE, LedgerConfig(), name="suite", holder="etude suite run") as ledger,
    ):
        date = _check_identity(ledger, config, upstream, results, out)
        try:
            tries = _Tries(ledger=ledger, config=config, upstream=upstream, limits=limits, tasks=tasks, out=out)
            asyncio.run(_try_all(tries, progress))
        finally:
            results = replace(results, date=date, tries=tuple(_read_tries(out / TRIES_FILE, limits, results)))
            write_results(results, out)
    if not results.tries:
        raise _none_succeeded(out / TRIES_FILE, limits)
    return results


def try_version(
    suite: Suite,
    folder: RunFolder,
    version: int | None,
    limits: TryLimits,
    out: Path,
    progress: Progress = lambda ended, planned: None,
) -> SuiteResults:
    """Run a weight version of a run on a suite with the run's own harness, as its release gate does, and write
    ``results.json`` into the folder ``out``.

    Raises :class:`~etude.errors.UserError` for a suite that cannot be run, and if no try succeeds.
    """
    run, name = folder.config(), re.sub(r"[^a-z0-9]+", "-", f"{suite.name}-{suite.version}".lower())
    named = SuiteConfig(name=name, recipe=str(suite.place))
    config = trial_config(run, named)
    check_judge(config)
    tasks = tasks_of(open_family(config), limits.tasks)
    request = EvalRequest(
        version=version,
        tasks=len(tasks),
        passes=limits.passes,
        greedy=False,
        suite=named,
        concurrency=limits.concurrency,
    )
    evaluation = evaluate(folder, request, progress)
    out.mkdir(parents=True, exist_ok=True)
    results = SuiteResults(
        suite=suite.name,
        version=suite.version,
        digest=digest_of_tasks(tasks),
        model=f"{run.name} v{evaluation.version}",
        url=str(folder.path),
        api=ETUDE_API,
        harness=run.harness.kind,
        date=_today(),
        etude=version_of("etude"),
        temperature=1.0,
        passes=limits.passes,
        pass_at=limits.pass_at,
        tasks={task.task_id: task.template for task in tasks},
        tries=(),
        parts=tuple(part.name for part in suite.reward.parts),
        reward=reward_digest(config) if suite.reward.parts else "",
        prices=limits.prices,
    )
    tries = [
        suite_try(attempt, number, results)
        for number, attempts in enumerate(evaluation.tries["sampled"])
        for attempt in attempts
        if attempt is not None
    ]
    results = replace(results, tries=tuple(tries))
    write_results(results, out)
    if not tries:
        raise _none_succeeded(evaluation_ledger(folder, request, evaluation.version, evaluation.digest), limits)
    return results


def tasks_of(family: TaskFamily, number: int | None) -> list[Task]:
    """The first ``number`` tasks that a suite's family holds out, by default all of them."""
    size = family.size(Split.HELDOUT)
    return heldout_tasks(family, number or size or ENDLESS_TASKS)


@final
class MeteredHarness:
    """A harness whose results include the texts and the cost of its calls; implements
    :class:`~etude.protocols.Harness`.
    """

    def __init__(self, harness: Harness, passthrough: Passthrough) -> None:
        self._harness = harness
        self._passthrough = passthrough

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Run the harness; the result includes the measures and the texts of its session."""
        try:
            result = await self._harness.run(task, session, sandbox, temperature=temperature)
        except (OutOfTime, AgentFault) as over:
            result = HarnessResult(reason=over.REASON, counts={})
        calls = self._passthrough.session(session.session_id)
        measures = {**result.measures, **calls.measures()}
        return replace(result, measures=measures, spoken=tuple(calls.transcript.calls))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tries:
    """The tries of a model on some tasks."""

    ledger: Ledger
    config: RunConfig
    upstream: Upstream
    limits: TryLimits
    tasks: Sequence[Task]
    out: Path


async def _try_all(tries: _Tries, progress: Progress) -> None:
    """Make the missing tries, pass by pass."""
    ledger, config, limits, tasks, out = tries.ledger, tries.config, tries.limits, tries.tasks, tries.out
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=alert_connector()))
        passthrough = await stack.enter_async_context(serving_passthrough(tries.upstream, http))
        sandboxes, grader, harness = await open_stage(stack, config, http, folder=out, gateway_urls=[passthrough.url])
        events = stack.enter_context(EventLog(out / "events", "suite"))
        judging = open_judge(config, http, state=JudgeState(out), alarm=events.write)
        judge = await stack.enter_async_context(judging)
        dispatcher = Dispatcher(
            config.rollouts,
            ledger=ledger,
            draw=_no_training,
            context=RolloutContext(
                sessions=passthrough,
                sandboxes=sandboxes,
                harness=MeteredHarness(harness, passthrough),
                grader=grader,
                clock=SystemClock(),
                limits=RolloutLimits.of(config.rollouts, config.harness),
                scorer=_open_scorer(config, judge),
                pass_at=limits.pass_at,
            ),
            events=events,
            serving_version=lambda: 0,
        )
        count = TryCount(out / TRIES_FILE, limits.labels(), len(tasks), progress)
        attempt = partial(dispatcher.evaluate, temperature=limits.temperature)
        async with background_task(_pass_by_pass(ledger, attempt, limits.labels(), tasks)) as trying:
            while not trying.done():
                if passthrough.fault is not None:
                    raise passthrough.fault
                count.report()
                await asyncio.wait({trying}, timeout=POLL_S)
            trying.result()


def _open_scorer(config: RunConfig, judge: OpenJudge | None) -> Scorer:
    """The scorer of a suite's ``[reward]``, which reads the texts of calls, as their tokens are unknown."""
    return reward_scorer(config, judge, read=lambda turns: ()) if config.reward.parts else GradeScorer()


async def _pass_by_pass(ledger: Ledger, attempt: TryAll, labels: Sequence[str], tasks: Sequence[Task]) -> None:
    for label in labels:
        await one_pass(ledger, attempt, label, tasks)


def _no_training(position: int) -> TaskDraw:
    raise AssertionError("nothing is trained on a suite")


async def _build_images(folder: Path, config: RunConfig) -> None:
    """Build the missing images of Harbor's tasks; a task whose image fails is excluded, and its family reports it."""
    await build_images(read_tasks(folder).tasks, image_store(config.sandboxes, config.tasks))


def _check_identity(ledger: Ledger, config: RunConfig, upstream: Upstream, results: SuiteResults, out: Path) -> str:
    """The date of the first try. Raises :class:`~etude.errors.ConfigError` if the folder has tries of
    something else.
    """
    now = {
        "suite": f"{results.suite} {results.version}",
        "model": upstream.model,
        "url": upstream.url,
        "api": upstream.api,
        "extra": dict(upstream.extra),
        "temperature": results.temperature,
        "harness": config.harness.model_dump(mode="json"),
        "reward": results.reward,
    }
    fact = ledger.facts.get(IDENTITY)
    if fact is None:
        ledger.facts.set(IDENTITY, json.dumps({"date": results.date, **now}))
        return results.date
    before = json.loads(fact)
    for name, value in now.items():
        if before.get(name, "") != value:
            raise ConfigError(
                f"--out {str(out)!r} has tries of {name} = {before.get(name, '')!r}, and this is {value!r}: "
                f"name another folder"
            )
    return str(before["date"])


def _read_tries(place: Path, limits: TryLimits, results: SuiteResults) -> Iterator[SuiteTry]:
    """All tries in a ledger, pass by pass."""
    with Archive.open(place) as archive:
        for number, label in enumerate(limits.labels()):
            for group in graded_groups(archive, label, len(results.tasks)):
                if group is not None:
                    yield _suite_try(group.task, group.rollouts[0], number, results)


def _suite_try(task: Task, rollout: Rollout, number: int, results: SuiteResults) -> SuiteTry:
    graded = rollout.reward or 0.0 if results.parts else grade_of(rollout)
    return SuiteTry(
        task_id=task.task_id,
        template=task.template,
        number=number,
        reward=rollout.reward or 0.0,
        graded=graded,
        passed=is_pass(graded, results.pass_at),
        reason=rollout.reason,
        seconds=rollout.seconds,
        measures=dict(rollout.reward_parts),
    )


def _none_succeeded(ledger: Path, limits: TryLimits) -> UserError:
    """The error if infrastructure prevented all tries, with the last failure."""
    reason = last_failure(ledger, limits.labels()) or "none was made"
    return UserError(f"no try succeeded: {reason}; repair that and run it again")


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()

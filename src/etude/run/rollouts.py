"""The rollouts process: evaluates before RL, fills the trainer's batches, evaluates after RL.

    eval before ──▶ rollouts for every step, an eval of a few tasks now and then ──▶ trainer has finished ──▶ eval after

Each part records its progress in the ledger, so a restarted process continues where its predecessor died.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

import aiohttp

from etude.aio import background_task, gather_or_cancel
from etude.clock import SystemClock
from etude.config.recipe import EvalConfig, RunConfig, is_pass
from etude.config.rollouts import HARNESSES, CommandOptions
from etude.config.tasks import LocalOptions
from etude.dashboard.calls import turn_shares
from etude.dashboard.statistics import Estimate, mean_of
from etude.errors import ConfigError, EngineUnavailable, EtudeError, UserError
from etude.fsync import write_whole
from etude.harnesses.command import CommandHarness
from etude.harnesses.completions import HarnessContext
from etude.harnesses.shell import ShellHarness
from etude.harnesses.single_turn import SingleTurnHarness
from etude.ledger.archive import RolloutOutcome, Search
from etude.ledger.heartbeat import leased
from etude.ledger.ledger import Ledger, TaskDraw
from etude.protocols import Grader, GraderContext, Harness, SandboxProvider, TaskFamily
from etude.rewards.graders.answers import AnswerGrader
from etude.rewards.graders.functions import GraderByKind, HiddenTests
from etude.rewards.graders.named import NamedGrader
from etude.rewards.score import grade_of
from etude.rewards.shaping.parts import mean_parts, reward_spec
from etude.rollouts.branching import Branching
from etude.rollouts.dispatcher import Dispatcher
from etude.rollouts.gateway_table import GatewayTable
from etude.rollouts.sandbox import RolloutLimits
from etude.rollouts.sessions import GatewaySessions
from etude.rollouts.task_history import SelectedTasks
from etude.rollouts.task_order import TaskOrder
from etude.rollouts.task_selection import TaskSelection
from etude.rollouts.worker import RolloutContext, SessionOpener, TaskSandboxes
from etude.run.detokenize import ToolReader, tool_reader
from etude.run.events import open_events
from etude.run.folder import RunFolder, holder
from etude.run.followed_regions import ServedRegions, open_regions
from etude.run.judging import JudgeState, judge_fingerprints, open_judge, synced_judge_state
from etude.run.keys import KeyRole
from etude.run.placement import fleet_of
from etude.run.process_name import GATEWAY, ROLLOUTS, ProcessName
from etude.run.resuming import measured_fact
from etude.run.sandbox_hosts import fleet_hosts
from etude.run.scoring import freeze_reward, open_monitor, open_scorer
from etude.run.serving import run_until_signal
from etude.run.stores import leased_ledger, open_archive
from etude.run.task_families import NOTHING_HELD_OUT, open_family
from etude.run.task_sandboxes import (
    EnvironmentTaskSandboxes,
    PlainTaskSandboxes,
    base_store,
    image_store,
    open_provider,
)
from etude.sandbox_spec import Capability
from etude.sandboxes.images.machine_base import environment_mounts
from etude.sandboxes.local.provider import LocalSandboxes
from etude.sandboxes.remote.hosts import FindHosts, SandboxLoad
from etude.sockets import alert_connector
from etude.telemetry.events import EvalDone, EvalFailed, PhaseStarted
from etude.telemetry.log import EventLog
from etude.tokens.jinja import load_format
from etude.types import AnswerChecks, FunctionChecks, Group, NamedChecks, Split, Task

POLL_S = 0.05
"""Interval at which gateways are polled for the served weight version."""
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
"""Timeout of one such request."""
CONFINEMENT = (Capability.CONFINED, Capability.NETWORK_OFF)
"""Capabilities without which the model's programs could read the run folder and reach the gateway."""
OUR_HARNESS = ".venv-harness"
"""Virtual environment of mini-swe-agent, created by the repository's Makefile."""
HARNESS_FOLDER = "/harness"
"""Folder of a harness's own files inside a sandbox."""
TASKS_ON_THE_WAY = 64
"""Number of held-out tasks of an evaluation during RL: it competes with training rollouts, which continue."""
DRAWS = 2
"""Held-out tasks drawn per task needed: draws can repeat, and a small family has few tasks."""
TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}
"""The two sampling modes of every evaluation."""

logger = logging.getLogger(__name__)


class ServedVersion:
    """The lowest weight version that any engine serves, according to all gateways that answer; −1 before the first
    answer.

    Updates ``table`` with the gateways that answer.
    """

    def __init__(self, table: GatewayTable, http: aiohttp.ClientSession, *, outage_s: float) -> None:
        """``outage_s`` is the longest time that all gateways may be silent while a caller waits."""
        self._table = table
        self._http = http
        self._outage_s = outage_s
        self._heard_s = time.monotonic()
        self._changed = asyncio.Event()
        self._following = asyncio.create_task(self._follow())

    def __call__(self) -> int:
        """The latest version reported: never ahead of the engines, whose versions only increase."""
        if self._following.done():
            self._following.result()
        return self._table.version

    async def changed(self, version: int) -> None:
        """Wait until a version other than ``version`` is served."""
        while self._table.version == version:
            await self._changed.wait()

    async def reach(self, version: int) -> None:
        """Wait until ``version`` is served. Raises :class:`~etude.errors.EngineUnavailable` if no gateway answers."""
        while self() < version:
            if time.monotonic() - self._heard_s > self._outage_s:
                urls = ", ".join(f"{url}/healthz" for url in self._table.urls)
                raise EngineUnavailable(f"{urls}: no weight version was named for {self._outage_s:g} s")
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Stop polling."""
        self._following.cancel()

    async def _follow(self) -> None:
        """Poll every gateway, forever; while all are down, the last answer stays valid."""
        async with asyncio.TaskGroup() as group:
            for url in self._table.urls:
                group.create_task(self._follow_one(url))

    async def _follow_one(self, url: str) -> None:
        while True:
            version, before = await self._fetch_version(url), self._table.version
            if version is None:
                self._table.record_silence(url)
            else:
                self._table.record_answer(url, version)
                self._heard_s = time.monotonic()
            if self._table.version != before:
                self._changed.set()
                self._changed = asyncio.Event()
            await asyncio.sleep(POLL_S)

    async def _fetch_version(self, url: str) -> int | None:
        """The lowest version that a gateway's engines serve; ``None`` if it does not answer or has no engine."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._http.get(f"{url}/healthz", timeout=HEALTH_TIMEOUT) as answer:
                if answer.status == 200:
                    return int((await answer.json())["engine"]["version"])
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """The resources of the rollouts process, opened from a run folder."""

    folder: RunFolder
    config: RunConfig
    ledger: Ledger
    events: EventLog
    family: TaskFamily
    dispatcher: Dispatcher
    served: ServedVersion | ServedRegions
    read_tools: ToolReader

    async def evaluate(self, label: str, tasks: Sequence[Task], *, version: int, purpose: str = "") -> EvalDone:
        """Try every task once sampled and once greedily; resumable under the same ``purpose``, by default the label.

        Raises :class:`~etude.errors.UserError` if one sampling mode has no reward at all: its slots are lost, and a
        retry would not recover them. While machines are down, the circuit breaker stops the evaluation earlier, with
        slots left.
        """
        purpose = purpose or label
        ways = [self.dispatcher.evaluate(f"{purpose}-{way}", tasks, temperature=t) for way, t in TEMPERATURES.items()]
        sampled, greedy = await gather_or_cancel(ways)
        if not sampled or not greedy:
            lost = next(way for way, rewards in zip(TEMPERATURES, (sampled, greedy), strict=True) if not rewards)
            raise lost_all(self.folder, f"{purpose}-{lost}")
        groups = {way: list(self.ledger.groups(f"{purpose}-{way}")) for way in TEMPERATURES}
        done = evaluation_done(label, version, groups, self.read_tools, pass_at=self.config.eval.pass_at)
        self.events.write(done)
        return done


def evaluation_done(
    label: str, version: int, groups: Mapping[str, Sequence[Group]], read_tools: ToolReader, *, pass_at: float
) -> EvalDone:
    """The result of an evaluation from its groups by sampling mode: one group per task, without a rollout if all its
    attempts failed.
    """
    clusters = [group.task.template or group.task.task_id for group in groups["sampled"]]
    tries = {way: [group.rollouts[0] if group.rollouts else None for group in groups[way]] for way in TEMPERATURES}
    rewards = {way: [each.reward if each else None for each in tries[way]] for way in TEMPERATURES}
    passed = {way: [is_pass(grade_of(each), pass_at) if each else None for each in tries[way]] for way in TEMPERATURES}
    calls = {way: turn_shares([read_tools(each.turns) for each in tries[way] if each]) for way in TEMPERATURES}
    sampled, greedy = (_pass_rate(passed[way], clusters) for way in TEMPERATURES)
    return EvalDone(
        label=label,
        version=version,
        tasks=min(sum(reward is not None for reward in rewards[way]) for way in TEMPERATURES),
        sampled_pass=sampled.value,
        sampled_stderr=sampled.stderr,
        greedy_pass=greedy.value,
        greedy_stderr=greedy.stderr,
        sampled_parts=mean_parts(groups["sampled"]),
        greedy_parts=mean_parts(groups["greedy"]),
        clusters=clusters,
        sampled_rewards=rewards["sampled"],
        sampled_passed=passed["sampled"],
        greedy_rewards=rewards["greedy"],
        greedy_passed=passed["greedy"],
        sampled_calls=calls["sampled"],
        greedy_calls=calls["greedy"],
    )


def _pass_rate(passed: Sequence[bool | None], clusters: Sequence[str]) -> Estimate:
    tried = [(float(each), cluster) for each, cluster in zip(passed, clusters, strict=True) if each is not None]
    return mean_of([each for each, _ in tried], [cluster for _, cluster in tried])


def lost_all(folder: RunFolder, purpose: str) -> UserError:
    """The error of an evaluation in which every rollout used up its attempts, with the last failure."""
    with open_archive(folder) as archive:
        failed = archive.find(Search(purpose=purpose, outcome=RolloutOutcome.FAILED, limit=1))
    reason = failed[0].reason if failed else "its attempts were used up"
    return UserError(
        f"evaluation {purpose!r}: every rollout used up its attempts (rollouts.max_attempts), the last failed because "
        f"of {reason}; fix that and start another run: this one does not retry lost rollouts, but `etude eval` "
        f"can evaluate its weights"
    )


@contextlib.asynccontextmanager
async def open_parts(
    folder: RunFolder, name: ProcessName = ROLLOUTS, *, in_one_file: bool = False
) -> AsyncIterator[RolloutParts]:
    """Connect to a run's gateways and ledger and start its sandboxes, while the context is open.

    ``name`` is also the name of the lease under which this process fills slots. Turns are stored as payloads of the
    run, or inside the ledger with ``in_one_file``.
    """
    config = folder.config()
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=alert_connector()))
        events = stack.enter_context(open_events(folder, name))
        if in_one_file:
            lease = leased(folder.ledger, config.ledger, name=str(name), holder=holder(folder, name))
        else:
            lease = leased_ledger(folder, config, name, events)
        ledger = stack.enter_context(lease)
        freeze_reward(ledger.facts, reward_spec(config.reward, judge_fingerprints(config)))
        sessions = await stack.enter_async_context(_open_sessions(folder, config, http, events))
        served = sessions.served
        context = await stack.enter_async_context(_rollout_context(folder, config, http, events, sessions, name))
        family = open_family(config)
        dispatcher = Dispatcher(
            config.rollouts,
            ledger=ledger,
            draw=open_draws(config, family, ledger),
            context=context,
            events=events,
            serving_version=served,
        )
        yield RolloutParts(
            folder=folder,
            config=config,
            ledger=ledger,
            events=events,
            family=family,
            dispatcher=dispatcher,
            served=served,
            read_tools=tool_reader(
                load_format(folder.model, config.gateway.chat_template_kwargs),
                bare_shell=config.harness.kind == "command",
            ),
        )


def open_draws(config: RunConfig, family: TaskFamily, ledger: Ledger) -> Callable[[int], TaskDraw]:
    """The training task at each position of a recipe's training data."""
    selection, size = config.tasks.selection, family.size(Split.TRAIN)
    if selection.kind == "in_order":
        return TaskOrder(family, seed=config.seed).draw
    assert size is not None, "a plan of the tasks refuses a selection of endless ones"
    return SelectedTasks(family, TaskSelection(selection, size=size, seed=config.seed), ledger).draw


def heldout_tasks(family: TaskFamily, count: int) -> list[Task]:
    """The evaluation set, the same for every run of a recipe: the first ``count`` held-out tasks of a family, or all if
    there are fewer, without duplicates.

    Raises :class:`~etude.errors.ConfigError` if the family holds out no tasks.
    """
    size = family.size(Split.HELDOUT)
    if size == 0:
        raise ConfigError(NOTHING_HELD_OUT)
    drawn = (family.task(Split.HELDOUT, index) for index in range(min(DRAWS * count, size or DRAWS * count)))
    return list(islice({task.task_id: task for task in drawn}.values(), count))


def run_rollouts(folder: RunFolder, name: ProcessName = ROLLOUTS) -> None:
    """Run the schedule, or what remains of it; processes other than the first only make training rollouts."""
    run_until_signal(_run(folder) if name == ROLLOUTS else _help(folder, name))


async def _help(folder: RunFolder, name: ProcessName) -> None:
    """Fill groups alongside the first process, as long as any are needed."""
    async with open_parts(folder, name) as parts:
        await parts.served.reach(0)
        await parts.dispatcher.train(parts.config.trainer.steps, parts.config.live)


async def _run(folder: RunFolder) -> None:
    """Run the schedule of the first process, from weight version 0 to the last."""
    async with open_parts(folder) as parts:
        steps, ledger = parts.config.trainer.steps, parts.ledger
        await parts.served.reach(0)
        await _evaluate_alone(parts, "before", version=0)
        if ledger.progress().steps_done < steps:
            parts.events.write(PhaseStarted(phase="rl"))
            await train_and_evaluate(parts)
        await parts.served.reach(steps)
        await _evaluate_alone(parts, "after", version=steps)
        parts.events.write(PhaseStarted(phase="done"))


async def train_and_evaluate(parts: RolloutParts) -> None:
    """Fill the remaining batches and evaluate on the way; what either raises ends both at once."""
    await gather_or_cancel([_train(parts), evaluate_on_the_way(parts)])


async def _train(parts: RolloutParts) -> None:
    """Fill the remaining batches, and wait until the last version is served."""
    steps = parts.config.trainer.steps
    await parts.dispatcher.train(steps, parts.config.live)
    while parts.ledger.progress().steps_done < steps:
        await asyncio.sleep(POLL_S)
    await parts.served.reach(steps)


async def _evaluate_alone(parts: RolloutParts, label: str, *, version: int) -> None:
    """Evaluate while nothing else runs, unless the recipe disables it or a previous process did it.

    A run whose number of steps was raised after its end is evaluated again, with new attempts.
    """
    facts, fact, first = parts.ledger.facts, measured_fact(label), f"{measured_fact(label)}-first"
    if not parts.config.eval.enabled or facts.get(fact) == str(version):
        return
    if facts.get(first) is None:
        facts.set(first, str(version))
    purpose = label if facts.get(first) == str(version) else f"{label}-{version}"
    parts.events.write(PhaseStarted(phase=f"eval-{label}"))
    tasks = heldout_tasks(parts.family, parts.config.eval.tasks)
    await parts.evaluate(label, tasks, version=version, purpose=purpose)
    facts.set(fact, str(version))


async def evaluate_on_the_way(parts: RolloutParts) -> None:
    """Evaluate at intervals of versions during training, with a few tasks each time.

    Nothing waits for an evaluation. A late one is dropped for the next, so at most one runs at a time. One that fails
    is reported, and the next is made; an unexpected exception is raised.
    """
    steps, config = parts.config.trainer.steps, parts.config.eval
    for due in evaluations_due(steps, config):
        while (version := parts.served()) < due:  # training decides how long an outage may last
            await parts.served.changed(version)
        label = f"step-{due}"
        if version < min(due + config.every_steps, steps) and parts.ledger.facts.get(f"eval-{label}") is None:
            try:
                await parts.evaluate(label, heldout_tasks(parts.family, TASKS_ON_THE_WAY), version=version)
            except EtudeError as error:
                logger.warning("evaluation %s failed, training continues: %s", label, error)
                parts.events.write(EvalFailed(label=label, reason=f"{type(error).__name__}: {error}"))
            else:
                parts.ledger.facts.set(f"eval-{label}", "done")


def evaluations_due(steps: int, config: EvalConfig) -> range:
    """The weight versions at which RL is evaluated, apart from the first and the last one."""
    is_enabled = config.enabled and config.every_steps
    return range(config.every_steps, steps, config.every_steps) if is_enabled else range(0)


async def check_sandboxes(sandboxes: SandboxProvider, config: RunConfig) -> None:
    """Raise :class:`~etude.errors.ConfigError` unless sandboxes have the capabilities that the recipe needs."""
    granted = await sandboxes.capabilities()
    missing = [capability.replace("_", " ") for capability in CONFINEMENT if capability not in granted]
    options = config.sandboxes.options
    if missing and not (isinstance(options, LocalOptions) and options.allow_unconfined):
        raise ConfigError(
            f"this machine does not keep sandboxes {' and '.join(missing)} (user namespaces are switched off): "
            f"programs the model writes could read your files. Enable them, or set "
            f"sandboxes.options.allow_unconfined = true"
        )
    if isinstance(config.harness.options, CommandOptions) and Capability.ALLOW_LIST not in granted:
        raise ConfigError(
            f"harness.kind = {config.harness.kind!r} calls the model from inside of its sandbox, and sandboxes.kind = "
            f"{config.sandboxes.kind!r} cannot restrict it to the gateway: choose another kind"
        )
    if config.credit.branches > 1 and not granted & {Capability.FORK, Capability.LIVE_FORK}:
        raise ConfigError(
            f"credit.options.branches = {config.credit.branches} forks sandboxes, which sandboxes.kind = "
            f"{config.sandboxes.kind!r} cannot do: choose another kind, or another credit.kind"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sessions:
    """Connections to the gateways of a run, on one machine or in all regions of its fleet."""

    opener: SessionOpener
    served: ServedVersion | ServedRegions
    urls: Sequence[str]
    """URLs of the gateways; empty on a fleet, where gateways start and stop."""


@contextlib.asynccontextmanager
async def _open_sessions(
    folder: RunFolder, config: RunConfig, http: aiohttp.ClientSession, events: EventLog
) -> AsyncIterator[_Sessions]:
    """Follow the gateways of a run, while the context is open."""
    if fleet_of(folder) is not None:
        async with open_regions(folder, config, http, events) as (opener, regions):
            yield _Sessions(opener=opener, served=regions, urls=())
        return
    gateways = GatewayTable([*folder.endpoints.urls(GATEWAY.command).values()])
    served = ServedVersion(gateways, http, outage_s=config.rollouts.outage_s)
    try:
        sessions = GatewaySessions(gateways, folder.key(KeyRole.ADMIN), http)
        async with background_task(sessions.keep_alive()):
            yield _Sessions(opener=sessions, served=served, urls=gateways.urls)
    finally:
        served.close()


@contextlib.asynccontextmanager
async def _rollout_context(
    folder: RunFolder,
    config: RunConfig,
    http: aiohttp.ClientSession,
    events: EventLog,
    sessions: _Sessions,
    name: ProcessName,
) -> AsyncIterator[RolloutContext]:
    """The dependencies of rollouts."""
    async with contextlib.AsyncExitStack() as stack:
        sandboxes, grader, harness = await open_stage(
            stack,
            config,
            http,
            folder=folder.path,
            gateway_urls=sessions.urls,
            find_hosts=fleet_hosts(folder, config.sandboxes),
        )
        judge_state = JudgeState(folder.path, name.replica)
        if config.judge.kind != "none":
            stack.enter_context(synced_judge_state(folder, judge_state))
        judge = await stack.enter_async_context(open_judge(config, http, state=judge_state, alarm=events.write))
        chat = load_format(folder.model, config.gateway.chat_template_kwargs)
        hosted = sandboxes if isinstance(sandboxes, EnvironmentTaskSandboxes) else None
        yield RolloutContext(
            sessions=sessions.opener,
            sandboxes=sandboxes,
            harness=harness,
            grader=grader,
            clock=SystemClock(),
            limits=RolloutLimits.of(config.rollouts, config.harness),
            monitor=open_monitor(config, chat),
            scorer=open_scorer(config, chat, judge),
            branching=Branching.of(config.credit, config.seed),
            announce=None if hosted is None else hosted.announce,
            sandbox_load=SandboxLoad if hosted is None else hosted.load,
            version_changed=sessions.served.changed,
            pass_at=config.eval.pass_at,
        )


async def open_stage(
    stack: contextlib.AsyncExitStack,
    config: RunConfig,
    http: aiohttp.ClientSession,
    *,
    folder: Path,
    gateway_urls: Sequence[str],
    find_hosts: Sequence[FindHosts] = (),
) -> tuple[TaskSandboxes, Grader, Harness]:
    """Open the task sandboxes, grader and harness of a recipe; ``stack`` closes them. The files of an external harness
    are written into ``folder``, and each of its sandboxes may reach only the gateway of its session. ``gateway_urls``
    are the gateways known so far; the function tests that a sandbox can reach one. ``find_hosts`` read the sandbox
    hosts of a fleet.

    Raises :class:`~etude.errors.ConfigError` for what this machine does not have.
    """
    context = HarnessContext(http=http, tasks=config.tasks, on_close=stack.push_async_callback)
    options, harness, answers = config.sandboxes.options, make_harness(config, context), AnswerGrader()
    stack.push_async_callback(answers.close)
    if isinstance(options, LocalOptions) and not isinstance(harness, CommandHarness | ShellHarness):
        local = LocalSandboxes(workers=options.workers)
        stack.push_async_callback(local.close)
        if not isinstance(harness, SingleTurnHarness):  # a single turn runs no commands
            await check_sandboxes(local, config)
        # No process outlives its command there, so the agent's processes end with its last command.
        plain = PlainTaskSandboxes(local)
        named = NamedGrader(config.tasks.graders, GraderContext(open_sandbox=plain.open))
        graders = GraderByKind({FunctionChecks: HiddenTests(), AnswerChecks: answers, NamedChecks: named})
        return plain, graders, harness
    sandboxes = config.sandboxes
    if sandboxes.kind == "local":
        sandboxes = sandboxes.model_copy(update={"kind": "ns"})  # a shell or an external program needs isolation
    external = config.harness.options
    beside = mounts_beside(folder, external) if isinstance(external, CommandOptions) else {}
    provider, images = open_provider(sandboxes, base_store(sandboxes), find_hosts), image_store(sandboxes, config.tasks)
    task_sandboxes = EnvironmentTaskSandboxes(provider, images, beside=beside, reaches=bool(beside))
    stack.push_async_callback(task_sandboxes.close)
    await check_sandboxes(task_sandboxes.sandboxes, config)
    if isinstance(harness, CommandHarness):
        probe = await task_sandboxes.open_empty(next(iter(gateway_urls), ""))
        await harness.check(probe)
        await probe.close()
    grader = task_sandboxes.grader(config.rollouts.grading_timeout_s, answers, config.tasks.graders)
    return task_sandboxes, grader, harness


def make_harness(config: RunConfig, context: HarnessContext) -> Harness:
    """The harness of a recipe. Raises :class:`~etude.errors.ConfigError` for what this machine does not have."""
    return cast("Harness", HARNESSES.make(config.harness.kind, config.harness.options, context))


def mounts_beside(folder: Path, harness: CommandOptions) -> dict[str, Path]:
    """Mounts of an external harness, whose files are written into ``folder``."""
    return harness_mounts(harness.mounts) | {HARNESS_FOLDER: write_harness(folder, harness.files)}


def write_harness(folder: Path, files: Mapping[str, str]) -> Path:
    """Write the harness's own files; returns their folder. Agents can read it, so nothing else may be in it."""
    place = folder / "harness"
    place.mkdir(exist_ok=True)
    place.chmod(0o755)
    for name, text in files.items():
        write_whole(place / name, text.encode(), mode=0o644)  # agents of another process may be reading it
    return place


def harness_mounts(folders: Sequence[str]) -> dict[str, Path]:
    """The mounts with a recipe's harness files. Raises :class:`~etude.errors.ConfigError` for a missing folder."""
    mounts: dict[str, Path] = {}
    for folder in folders:
        if not Path(folder).is_dir():
            fix = "`make harness` makes it" if Path(folder).name == OUR_HARNESS else "correct the path"
            raise ConfigError(f"harness.options.mounts: there is no folder {folder!r} in {Path.cwd()}: {fix}")
        mounts |= environment_mounts(Path(folder))
    return mounts

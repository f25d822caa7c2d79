"""One rollout, from an open slot to its record.

    slot ─▶ start ─────▶ play ───────▶ grade ───────────────▶ turns ───────▶ score ──▶ Rollout: graded
            session      the harness   agent's processes      captured by    grade, findings, parts
            sandbox      in the        killed, cheat monitor  the gateway
            monitor      sandbox       looks, grader runs
            └ or a fork of a parent rollout

Any step may fail because of infrastructure: then the Rollout has no reward, and its slot is retried. Work that used up
its own time, or broke its own sandbox, is graded as it is.

This module owns the order of these steps and attributes each failure: only here do errors become rollouts. If an agent
could turn a bad outcome into an infrastructure failure, it would be retried until a better outcome: a policy that
passes with probability p would be measured as one that passes with 1 − (1 − p)^attempts. So the cause is determined
where a command fails, not guessed here: :class:`~etude.errors.AgentFault` has reward zero, every other failure is
infrastructure's. Time limits are in :mod:`etude.rollouts.sandbox`, retries of slots and the use of the record in
:mod:`etude.rollouts.runner`.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, Protocol, Self, TypeVar

import aiohttp

from etude.errors import AgentFault, EngineUnavailable, InfrastructureError, OutOfTime
from etude.harnesses.actions import Finding
from etude.ledger.ledger import OpenSlot
from etude.protocols import Clock, Grade, Grader, Harness, HarnessResult, Sandbox, Score, Session
from etude.rollouts.branching import Branching, ForkPoint
from etude.rollouts.sandbox import COPIES_S, AgentTime, BoundedSandbox, RolloutLimits, SandboxCall, within
from etude.sandboxes.remote.hosts import SandboxLoad
from etude.types import Branch, Hint, Rollout, RolloutStage, RolloutStatus, Task, Turn

T = TypeVar("T")

INFRASTRUCTURE = (InfrastructureError, aiohttp.ClientError, OSError)
"""Errors that are a machine's fault. ``TimeoutError`` is an ``OSError``, so a missed deadline is one of them. Any other
exception is a bug and propagates.
"""


class SessionOpener(Protocol):
    """Opens gateway sessions, and returns their sampled turns."""

    async def open(self, *, min_version: int | None = None) -> Session:
        """Start a session whose calls are not answered by weights older than ``min_version``.

        Raises :class:`~etude.errors.EngineUnavailable` when no gateway can be reached.
        """
        ...

    async def fork(self, session_id: str) -> tuple[Session, int]:
        """Start a session that copies another one; returns it with the number of copied turns. Its first calls must be
        the same as the original's.

        Raises like :meth:`close`.
        """
        ...

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session and return its turns in order.

        Raises :class:`~etude.errors.SessionLost` if it is unknown, perhaps no longer known, else
        :class:`~etude.errors.EngineUnavailable` when the gateway cannot be reached.
        """
        ...

    async def discard(self, session_id: str) -> None:
        """End a session without its turns. Raises like :meth:`close`, but without retries."""
        ...

    async def lost(self, session_id: str) -> NoReturn:
        """Wait, possibly forever, until a session is unreachable and no longer worth waiting for; then raise
        :class:`~etude.errors.SessionLost`.
        """
        ...


class TaskSandboxes(Protocol):
    """Opens the sandboxes that tasks specify."""

    async def open(self, task: Task, *, gateway: str) -> Sandbox:
        """A fresh sandbox with the task's files. ``gateway`` is the URL of the rollout's session: the only place that
        an agent in the sandbox may need to reach. Raises :class:`~etude.errors.SandboxError`.
        """
        ...


class MonitoredRollout(Protocol):
    """One rollout under the cheat monitor."""

    async def look(self) -> None:
        """Inspect the sandbox after the agent has ended and before grading. Raises
        :class:`~etude.errors.SandboxError`.
        """
        ...

    def findings(self, turns: Sequence[Turn]) -> Sequence[Finding]:
        """All findings in the sandbox and in ``turns``."""
        ...

    def fork(self, sandbox: Sandbox) -> "MonitoredRollout":
        """The monitor of a fork of this rollout, which continues in a copy of its sandbox."""
        ...


class CheatMonitor(Protocol):
    """Looks for cheating in every rollout."""

    async def begin(self, task: Task, sandbox: Sandbox) -> MonitoredRollout:
        """Prepare a fresh sandbox. Raises :class:`~etude.errors.SandboxError`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedRollout:
    """A finished rollout with all inputs of its score."""

    task: Task
    result: HarnessResult
    grade: Grade
    turns: tuple[Turn, ...]
    findings: Sequence[Finding] | None = None
    """``None`` if rollouts are not monitored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """The score of a rollout and the training signals of single turns."""

    score: Score
    turn_rewards: tuple[float, ...] = ()
    """One for each turn, or empty."""
    hints: tuple[Hint, ...] = ()


class Scorer(Protocol):
    """Scores a graded rollout (:mod:`etude.rewards.score`)."""

    async def score(self, rollout: GradedRollout) -> ScoredRollout:
        """The score, within its own deadlines. Raises on an infrastructure failure: then the rollout is retried and
        never gets reward zero for it.
        """
        ...


class GradeScorer:
    """Takes the grade as the score; implements :class:`Scorer`."""

    async def score(self, rollout: GradedRollout) -> ScoredRollout:
        """The grade alone: no parts, no cheat policy."""
        return ScoredRollout(score=Score(value=rollout.grade.value, parts=rollout.grade.parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """The dependencies of every rollout."""

    sessions: SessionOpener
    sandboxes: TaskSandboxes
    harness: Harness
    grader: Grader
    clock: Clock
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    monitor: CheatMonitor | None = None
    """``None``: rollouts are not monitored for cheating."""
    scorer: Scorer = field(default_factory=GradeScorer)
    branching: Branching | None = None
    """``None``: no rollouts fork."""
    announce: Callable[[Task, int], None] | None = None
    """Called with a task and the number of sandboxes that will be requested; ``None``: no preparation."""
    sandbox_load: Callable[[], SandboxLoad] = SandboxLoad
    """Present demand for sandboxes on several hosts, and their capacity; none by default."""
    version_changed: Callable[[int], Awaitable[None]] | None = None
    """Waits until the served weight version differs from the argument; ``None``: the served version is polled."""
    pass_at: float = 1.0
    """Grade from which a rollout counts as passed; only used for reports."""
    is_eval: bool = False
    """True for evaluations, in which a rollout without a reward is useless: a masked rollout counts as failed and is
    retried, instead of being recorded and not trained on.
    """

    def for_eval(self) -> Self:
        """The same dependencies for evaluation rollouts."""
        return replace(self, branching=None, is_eval=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStart:
    """The session and the sandbox in which a rollout starts, and the prefix that it shares with its parent."""

    session: Session
    sandbox: Sandbox
    """The sandbox, with time limits."""
    monitored: MonitoredRollout | None = None
    recorded: tuple[SandboxCall, ...] = ()
    """The parent's calls to its sandbox before the fork."""
    branch: Branch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSpec:
    """The fork point of a parent rollout, and the receiver of its forks."""

    rollout_id: str
    """Id of the parent."""
    point: ForkPoint
    count: int
    """Number of forks."""
    start_forks: Callable[[Sequence[RolloutStart]], None]
    """Takes ownership of the starts; called at most once."""


class StageTimes:
    """Seconds of one rollout by stage."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds = defaultdict[RolloutStage, float](float)

    @contextmanager
    def of(self, stage: RolloutStage) -> Iterator[None]:
        """Count the time of the context for a stage, however it ends."""
        began_s = self._clock.now()
        try:
            yield
        finally:
            self.move(stage, self._clock.now() - began_s)

    def move(self, stage: RolloutStage, seconds: float, *, out_of: RolloutStage | None = None) -> None:
        """Count seconds for a stage, and subtract them from ``out_of``."""
        self._seconds[stage] += seconds
        if out_of is not None:
            self._seconds[out_of] = max(0.0, self._seconds[out_of] - seconds)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Stage → seconds, in the order of stages."""
        return {str(stage): round(self._seconds[stage], 4) for stage in RolloutStage if stage in self._seconds}


async def run_rollout(
    slot: OpenSlot,
    context: RolloutContext,
    *,
    rollout_id: str,
    temperature: float,
    start: RolloutStart | None = None,
    fork: ForkSpec | None = None,
) -> Rollout:
    """Attempt one slot in bounded time; returns a graded rollout or an infrastructure failure.

        slot, context ─▶ start ─▶ result ─▶ grade ─▶ turns ─▶ scored ─▶ Rollout

    Bad or malformed work of the model is graded, as is work that used up its own time. Cancellation and bugs are
    raised. Sandbox and session are always closed, including those of ``start``, but not those passed on by ``fork``.
    """
    task, started_s, stages = slot.task, context.clock.now(), StageTimes(context.clock)
    record = partial(Rollout, rollout_id=rollout_id, group_index=slot.group_index, slot=slot.slot, attempt=slot.attempt)
    try:
        start = start or await _start(slot, context, stages)
        async with _closing(start, context):
            playing = _play(start, fork, context, stages, task=task, temperature=temperature)
            result = await _unless_lost(start.session, context, playing)
            with stages.of(RolloutStage.GRADING):
                grade = await grade_work(task, start.sandbox, result, context.grader, context.limits, start.monitored)
        with stages.of(RolloutStage.SCORING):
            fetching = _fetch_turns(start.session, slot.admitted_version, result, context)
            turns = await _unless_lost(start.session, context, fetching)
            findings = None if start.monitored is None else start.monitored.findings(turns)
            scored = await context.scorer.score(
                GradedRollout(task=task, result=result, grade=grade, turns=turns, findings=findings)
            )
        if scored.score.masked and context.is_eval:
            raise InfrastructureError(scored.score.masked)
    except (*INFRASTRUCTURE, AgentFault) as error:  # an agent that has not started is not at fault
        return record(
            status=RolloutStatus.FAILED_INFRA,
            reward=None,
            reason=f"{type(error).__name__}: {error}",
            seconds=context.clock.now() - started_s,
            session_id="" if start is None else start.session.session_id,
            stage_s=stages.seconds,
        )
    shared = 0 if start.branch is None else start.branch.turns
    return record(
        status=RolloutStatus.GRADED,
        reward=scored.score.value,
        reward_parts={**result.measures, **scored.score.parts},
        reason=result.reason,
        counts=result.counts,
        turns=turns,
        seconds=context.clock.now() - started_s,
        session_id=start.session.session_id,
        stage_s=stages.seconds,
        verdict=scored.score.verdict,
        turn_rewards=scored.turn_rewards,
        hints=tuple(hint for hint in scored.hints if hint.turn >= shared),
        branch=start.branch,
    )


async def close_start(start: RolloutStart, context: RolloutContext) -> None:
    """Close a rollout start that no rollout will use."""
    await _quietly(start.sandbox.close(), context)
    await _quietly(context.sessions.discard(start.session.session_id), context)


async def grade_work(
    task: Task,
    sandbox: Sandbox,
    result: HarnessResult,
    grader: Grader,
    limits: RolloutLimits,
    monitored: MonitoredRollout | None = None,
) -> Grade:
    """Grade an agent's files; 0 with the part ``agent_fault`` if the agent made grading impossible.

    The agent's processes have ended before grading. Every run of the checks has its full time: otherwise work that
    hangs its verifier, or needs one run more because it is right, would count as an infrastructure failure without a
    reward. Grading that fails because of infrastructure is retried. Raises ``INFRASTRUCTURE``.
    """
    deadline_s = limits.grading_s + task.grading_s
    try:
        await sandbox.kill_processes()
        if monitored is not None:
            await monitored.look()
        for _ in range(limits.gradings - 1):
            with suppress(*INFRASTRUCTURE):
                return await within(deadline_s, "grading", grader.grade(task, sandbox, result))
        return await within(deadline_s, "grading", grader.grade(task, sandbox, result))
    except AgentFault:
        return Grade(value=0.0, parts={AgentFault.REASON: 1.0})


async def _start(slot: OpenSlot, context: RolloutContext, stages: StageTimes) -> RolloutStart:
    start_s, task = context.limits.start_s, slot.task
    with stages.of(RolloutStage.SESSION):
        opening = context.sessions.open(min_version=slot.admitted_version)
        session = await within(start_s, "opening a session", opening)
    try:
        with stages.of(RolloutStage.SANDBOX):
            starting = context.sandboxes.open(task, gateway=session.base_url)
            sandbox = BoundedSandbox(await within(start_s, "starting a sandbox", starting))
            try:
                monitored = None if context.monitor is None else await context.monitor.begin(task, sandbox)
            except BaseException:
                await _quietly(sandbox.close(), context)
                raise
    except BaseException:
        await _quietly(context.sessions.discard(session.session_id), context)
        raise
    return RolloutStart(session=session, sandbox=sandbox, monitored=monitored)


@asynccontextmanager
async def _closing(start: RolloutStart, context: RolloutContext) -> AsyncIterator[None]:
    """The context in which a rollout uses its sandbox, which is closed at the end; the session is closed only if the
    rollout failed.
    """
    try:
        try:
            yield
        finally:
            await _quietly(start.sandbox.close(), context)
    except BaseException:
        await _quietly(context.sessions.discard(start.session.session_id), context)
        raise


async def _unless_lost(session: Session, context: RolloutContext, work: Coroutine[None, None, T]) -> T:
    """The result of ``work``, which is cancelled if its session is lost. Raises :class:`~etude.errors.SessionLost`."""
    working = asyncio.ensure_future(work)
    losing = asyncio.ensure_future(context.sessions.lost(session.session_id))
    try:
        await asyncio.wait((working, losing), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else losing.result()
    finally:
        for task in (working, losing):
            task.cancel()
        await asyncio.gather(working, losing, return_exceptions=True)


async def _play(
    start: RolloutStart,
    fork: ForkSpec | None,
    context: RolloutContext,
    stages: StageTimes,
    *,
    task: Task,
    temperature: float,
) -> HarnessResult:
    """Run the harness; its sandbox limits, charges and records its calls."""
    agent = AgentTime(context.limits)
    on_call = None if fork is None else _Forking(start, fork, agent, context).after_call
    sandbox = BoundedSandbox(start.sandbox, agent, start.recorded, on_call)
    try:
        with stages.of(RolloutStage.MODEL):
            return await agent.wait(context.harness.run(task, start.session, sandbox, temperature=temperature))
    except (OutOfTime, AgentFault) as over:
        return HarnessResult(reason=over.REASON, counts={})  # for a harness without its own handling
    finally:
        stages.move(RolloutStage.TOOLS, agent.calls_s, out_of=RolloutStage.MODEL)


async def _fetch_turns(
    session: Session, admitted_version: int, result: HarnessResult, context: RolloutContext
) -> tuple[Turn, ...]:
    """The turns of a session: at least one, and no token older than what every engine served when its group was
    admitted. The staleness bound depends on this check: an engine that was unreachable, and so not counted, may have
    returned with old weights.
    """
    turns = await within(context.limits.start_s, "fetching the turns", context.sessions.close(session.session_id))
    if not turns:
        printed = f"; it printed: {result.printed}" if result.printed else ""
        raise InfrastructureError(
            f"the session has no turn: the harness never reached the gateway ({result.reason}){printed}"
        )
    oldest = min((int(turn.versions.min()) for turn in turns if len(turn.versions)), default=admitted_version)
    if oldest < admitted_version:
        raise EngineUnavailable(
            f"an engine sampled with weight version {oldest}; every engine had served {admitted_version} or a later "
            f"one when this group was admitted"
        )
    return turns


class _Forking:
    """Follows a parent's calls to its sandbox, and forks it once."""

    def __init__(self, start: RolloutStart, fork: ForkSpec, agent: AgentTime, context: RolloutContext) -> None:
        self._start = start
        self._fork = fork
        self._agent = agent
        self._context = context
        self._calls: list[SandboxCall] = list(start.recorded)
        self._is_over = False

    async def after_call(self, call: SandboxCall) -> None:
        """Process one more call. Raises like a fork: then no forks are started, and the parent has failed."""
        if self._is_over:
            return
        self._calls.append(call)
        if self._fork.point.is_due(len(self._calls), failed=call.is_failure):
            self._is_over = True
            self._agent.sign_of_life(COPIES_S + self._fork.count * self._context.limits.start_s)
            self._fork.start_forks(await self._starts())
            self._agent.sign_of_life()

    async def _starts(self) -> list[RolloutStart]:
        copies = await self._start.sandbox.fork(self._fork.count)
        starts: list[RolloutStart] = []
        try:
            for copy in copies:
                starts.append(await self._start_in(copy))  # noqa: PERF401  # what there is must be closed on failure
        except BaseException:
            for copy in copies[len(starts) :]:
                await _quietly(copy.close(), self._context)
            for start in starts:
                await close_start(start, self._context)
            raise
        return starts

    async def _start_in(self, sandbox: Sandbox) -> RolloutStart:
        forking = self._context.sessions.fork(self._start.session.session_id)
        session, turns = await within(self._context.limits.start_s, "forking a session", forking)
        monitored = self._start.monitored
        return RolloutStart(
            session=session,
            sandbox=sandbox,
            monitored=None if monitored is None else monitored.fork(sandbox),
            recorded=tuple(self._calls),
            branch=Branch(rollout_id=self._fork.rollout_id, turns=turns) if turns else None,
        )


async def _quietly(closing: Awaitable[object], context: RolloutContext) -> None:
    """Close in bounded time; errors are suppressed so that they do not hide an earlier one."""
    with suppress(*INFRASTRUCTURE):
        await within(context.limits.closing_s, "closing", closing)

"""One rollout, from an open session to a graded or failed record.

    open a session ──▶ make a sandbox ──▶ the agent ──▶ kill, look, grade ──▶ fetch the turns ──▶ appraise
                    └── or branch off another rollout    └─ out of its own time, in its own way: graded as it stands

Owns the order of events in a rollout and the one decision whose fault a failure is: only here do errors become
rollouts. Does not own how long each part may take (:mod:`etude.rollouts.bounds`), retries, or what the record is for
(:mod:`etude.rollouts.runner`).
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self

from etude.errors import AgentFault, EngineUnavailable, InfrastructureError, OutOfTime
from etude.ledger.ledger import OpenSlot
from etude.protocols import Appraisal, Appraiser, Clock, Grade, Grader, Harness, HarnessResult, Sandbox, Session
from etude.rollouts.bounds import COPIES_S, AgentTime, BoundedSandbox, Limits, within
from etude.rollouts.branching import Branching, ForkPoint
from etude.rollouts.grading import INFRASTRUCTURE, grade_leftovers
from etude.rollouts.replays import Note, NotedSandbox
from etude.types import Branch, Disposition, Rollout, RolloutStatus, Task, Turn, Verdict

UNWATCHED = Verdict(disposition=Disposition.KEEP, reward=0.0, reason="", flags=(), hacked=False, graded=0.0)
"""Of a rollout that nobody looked at."""


class Sessions(Protocol):
    """The gateway as rollouts see it: it lends a way to the model and says afterwards what was sampled there."""

    async def open(self) -> Session:
        """Start a session. Raises :class:`~etude.errors.EngineUnavailable` when the gateway cannot be reached."""
        ...

    async def fork(self, session_id: str) -> tuple[Session, int]:
        """Start a session that begins as another one, and with how many turns. Its first calls must be that one's.

        Raises like :meth:`close`.
        """
        ...

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session and hand over its turns in order.

        Raises :class:`~etude.errors.SessionLost` when it is not known (any more), else
        :class:`~etude.errors.EngineUnavailable` when the gateway cannot be reached.
        """
        ...

    async def discard(self, session_id: str) -> None:
        """End a session whose turns nobody wants. Raises like :meth:`close`, but at once."""
        ...


class TaskSandboxes(Protocol):
    """Where tasks are worked on."""

    async def open(self, task: Task) -> Sandbox:
        """A fresh sandbox as the task says, with its files. Raises :class:`~etude.errors.SandboxError`."""
        ...


class MonitoredRollout(Protocol):
    """A look at one rollout for cheating."""

    async def look(self) -> None:
        """The agent is gone, and nothing was graded yet. Raises :class:`~etude.errors.SandboxError`."""
        ...

    def judge(self, reward: Grade, turns: Sequence[Turn]) -> Verdict:
        """What becomes of it."""
        ...

    def beside(self, sandbox: Sandbox) -> "MonitoredRollout":
        """The same look at another rollout, which branches off this one and goes on in a copy of its sandbox."""
        ...


class CheatMonitor(Protocol):
    """Looks for cheating in every rollout."""

    async def begin(self, task: Task, sandbox: Sandbox) -> MonitoredRollout:
        """Get ready in a fresh sandbox. Raises :class:`~etude.errors.SandboxError`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """The parts that every rollout is run with."""

    sessions: Sessions
    sandboxes: TaskSandboxes
    harness: Harness
    grader: Grader
    clock: Clock
    watch: CheatMonitor | None = None
    """``None``: nobody looks for cheating."""
    appraiser: Appraiser | None = None
    """``None``: the grader's word is all."""
    branching: Branching | None = None
    """How training rollouts branch; ``None``: each begins by itself."""
    pass_at: float = 1.0
    """Grade that is a pass; it decides what is told of a rollout, and nothing else."""
    measures: bool = False
    """Whether rollouts are for a measurement, to which one without a reward says nothing: what the appraiser masks has
    failed then, and is tried again, instead of being kept and not trained on.
    """

    def for_measuring(self) -> Self:
        """The same parts for rollouts that are not trained on."""
        return replace(self, branching=None, measures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStart:
    """Where a rollout works, how it asks the model, and what it shares with another one."""

    session: Session
    sandbox: Sandbox
    """Bounded."""
    watching: MonitoredRollout | None = None
    seen: tuple[Note, ...] = ()
    """The calls to the sandbox that the other one made before."""
    branch: Branch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSpec:
    """What a rollout has to do that others branch off."""

    rollout_id: str
    """Its own."""
    point: ForkPoint
    branches: int
    """How many rollouts branch off it, itself not counted."""
    hand_over: Callable[[Sequence[RolloutStart]], None]
    """Takes them over; called once at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """How a rollout is bound up with others of its group."""

    beginning: RolloutStart | None = None
    """Where it branches off; it is closed with the rollout. ``None``: it begins anew."""
    trunk: ForkSpec | None = None


ALONE = Ties()
"""Of a rollout that shares nothing."""


async def run_rollout(
    slot: OpenSlot, context: RolloutContext, limits: Limits, *, rollout_id: str, temperature: float, ties: Ties = ALONE
) -> Rollout:
    """Attempt a slot once; the result is graded or failed by infrastructure, in bounded time.

    Bad or malformed work of the model is graded, and so is work that used up its own time. Cancellation and bugs are
    raised. Whatever happens, sandbox and session are closed; those of branches once they were handed over are not.
    """
    ended = partial(Rollout, rollout_id=rollout_id, group_index=slot.group_index, slot=slot.slot, attempt=slot.attempt)
    started_s = context.clock.now()
    try:
        played = await _play(slot, context, limits, temperature, ties)
    except (*INFRASTRUCTURE, AgentFault) as error:  # the fault of an agent that has not begun is none
        return ended(
            status=RolloutStatus.FAILED_INFRA,
            reward=None,
            reason=f"{type(error).__name__}: {error}",
            seconds=context.clock.now() - started_s,
        )
    verdict, appraisal = played.verdict, played.appraisal
    branch = None if ties.beginning is None else ties.beginning.branch
    return ended(
        status=RolloutStatus.GRADED,
        reward=appraisal.reward.value if verdict is None else verdict.reward,
        reward_parts={**played.result.measures, **appraisal.reward.parts},
        reason=played.result.reason,
        counts=played.result.counts,
        turns=played.turns,
        seconds=context.clock.now() - started_s,
        verdict=verdict,
        turn_rewards=appraisal.turn_rewards,
        hints=tuple(hint for hint in appraisal.hints if branch is None or hint.turn >= branch.turns),
        branch=branch,
    )


async def give_back(beginning: RolloutStart, context: RolloutContext, limits: Limits) -> None:
    """Close what nobody is going to work in."""
    await _quietly(limits, beginning.sandbox.close())
    await _quietly(limits, context.sessions.discard(beginning.session.session_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """How a session went, what it is worth, and what was sampled in it."""

    result: HarnessResult
    appraisal: Appraisal
    turns: tuple[Turn, ...]
    verdict: Verdict | None


async def _play(slot: OpenSlot, context: RolloutContext, limits: Limits, temperature: float, ties: Ties) -> _Played:
    task = slot.task
    begun = ties.beginning or await _begin(task, context, limits)
    session, watching = begun.session, begun.watching
    try:
        try:
            agent = AgentTime(limits)
            hands = _hands(begun, ties, agent, context, limits)
            try:
                result = await agent.wait(context.harness.run(task, session, hands, temperature=temperature))
            except (OutOfTime, AgentFault) as over:
                result = HarnessResult(reason=over.REASON, counts={})  # of a harness that kept none
            reward = await grade_leftovers(task, begun.sandbox, result, context.grader, limits, watching)
        finally:
            await _quietly(limits, begun.sandbox.close())
    except BaseException:
        await _quietly(limits, context.sessions.discard(session.session_id))
        raise
    turns = await within(limits.start_s, "fetching the turns", context.sessions.close(session.session_id))
    if not turns:
        printed = f"; it printed: {result.printed}" if result.printed else ""
        raise InfrastructureError(
            f"the session has no turn: the harness never reached the gateway ({result.reason}){printed}"
        )
    _check_versions(turns, slot.admitted_version)
    appraisal = Appraisal(reward=reward)
    if context.appraiser is not None:
        appraisal = await context.appraiser.appraise(task, result, reward, turns)
    if appraisal.masked and context.measures:
        raise InfrastructureError(appraisal.masked)
    verdict = None if watching is None else watching.judge(reward, turns)
    return _Played(result=result, appraisal=appraisal, turns=turns, verdict=_weigh(verdict, appraisal, reward))


async def _begin(task: Task, context: RolloutContext, limits: Limits) -> RolloutStart:
    session = await within(limits.start_s, "opening a session", context.sessions.open())
    try:
        sandbox = BoundedSandbox(await within(limits.start_s, "making a sandbox", context.sandboxes.open(task)))
        try:
            watching = None if context.watch is None else await context.watch.begin(task, sandbox)
        except BaseException:
            await _quietly(limits, sandbox.close())
            raise
    except BaseException:
        await _quietly(limits, context.sessions.discard(session.session_id))
        raise
    return RolloutStart(session=session, sandbox=sandbox, watching=watching)


def _hands(begun: RolloutStart, ties: Ties, agent: AgentTime, context: RolloutContext, limits: Limits) -> Sandbox:
    """The sandbox as the agent has it: its time is spent there, and what is shared with others noted or answered."""
    hands = BoundedSandbox(begun.sandbox, agent)
    if ties.trunk is not None:
        return NotedSandbox(hands, agent, begun.seen, _Fork(begun, ties.trunk, agent, context, limits).note)
    return NotedSandbox(hands, agent, begun.seen) if begun.seen else hands


class _Fork:
    """Watches what a trunk does in its sandbox, and forks it once."""

    def __init__(
        self, begun: RolloutStart, trunk: ForkSpec, agent: AgentTime, context: RolloutContext, limits: Limits
    ) -> None:
        self._begun = begun
        self._trunk = trunk
        self._agent = agent
        self._context = context
        self._limits = limits
        self._notes: list[Note] = list(begun.seen)
        self._is_over = False

    async def note(self, note: Note) -> None:
        """One more call was made. Raises like what is forked: then nothing is handed over, and the trunk has failed."""
        if self._is_over:
            return
        self._notes.append(note)
        if self._trunk.point.is_due(len(self._notes), failed=note.is_failure):
            self._is_over = True
            self._agent.sign_of_life(COPIES_S + self._trunk.branches * self._limits.start_s)
            self._trunk.hand_over(await self._branches())
            self._agent.sign_of_life()

    async def _branches(self) -> list[RolloutStart]:
        copies = await self._begun.sandbox.fork(self._trunk.branches)
        branches: list[RolloutStart] = []
        try:
            for copy in copies:
                branches.append(await self._branch(copy))  # noqa: PERF401  # what there is must be closed on failure
        except BaseException:
            for copy in copies[len(branches) :]:
                await _quietly(self._limits, copy.close())
            for branch in branches:
                await give_back(branch, self._context, self._limits)
            raise
        return branches

    async def _branch(self, sandbox: Sandbox) -> RolloutStart:
        forking = self._context.sessions.fork(self._begun.session.session_id)
        session, turns = await within(self._limits.start_s, "forking a session", forking)
        watching = self._begun.watching
        return RolloutStart(
            session=session,
            sandbox=sandbox,
            watching=None if watching is None else watching.beside(sandbox),
            seen=tuple(self._notes),
            branch=Branch(rollout_id=self._trunk.rollout_id, turns=turns) if turns else None,
        )


def _weigh(verdict: Verdict | None, appraisal: Appraisal, graded: Grade) -> Verdict | None:
    """The verdict on the rollout as a whole; ``None`` where nobody watched and nothing is masked.

    One that keeps it takes the appraised reward, or becomes a quarantine where the appraiser masks; any other stands.
    """
    if verdict is None and not appraisal.masked:
        return None
    kept = verdict or replace(UNWATCHED, graded=graded.value)
    if kept.disposition is not Disposition.KEEP:
        return kept
    if appraisal.masked:
        return replace(kept, disposition=Disposition.QUARANTINE, reward=0.0, reason=appraisal.masked)
    return replace(kept, reward=appraisal.reward.value)


def _check_versions(turns: Sequence[Turn], admitted_version: int) -> None:
    """No token is older than what every engine served when its group was admitted: the bound of staleness rests on it.

    An engine that was out of reach, and so not counted, may have come back with old weights.
    """
    oldest = min((int(turn.versions.min()) for turn in turns if len(turn.versions)), default=admitted_version)
    if oldest < admitted_version:
        raise EngineUnavailable(
            f"an engine sampled with weight version {oldest}; every engine had served {admitted_version} or a later "
            f"one when this group was admitted"
        )


async def _quietly(limits: Limits, closing: Awaitable[object]) -> None:
    """Close in bounded time; what matters is what happened before, so trouble here is not reported over it."""
    with suppress(*INFRASTRUCTURE):
        await within(limits.closing_s, "closing", closing)

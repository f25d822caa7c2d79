"""Rollouts in flight: slots become asyncio tasks, results become ledger records.

    launch(slots) ──▶ schedule ──▶ attempt ──▶ record ──▶ graded: the slot is filled
                          ▲                      ├──────▶ failed by infrastructure: back off, try again
                          └──────────────────────┘        no attempt left: the slot is lost; where half its group is,
                                                          the group is dropped and its other rollouts are cancelled

If rollouts branch, a bundle of slots starts with one of them, the parent: the others wait until it forks and continue
from there, or copy its record if it ended before. A parent that fails before its fork is retried, and the others wait
for it; a failed fork is retried as a separate rollout.

- consumes: slots to fill
- produces: ended rollouts and lost slots in the ledger, one ``RolloutClosed`` event per attempt
- waits for: attempts, each bounded (:mod:`etude.rollouts.sandbox`); the storage of their turns; pauses, which
  the schedule knows the ends of
- woken by: the end of an attempt, the end of a pause; :meth:`RolloutRunner.wake`
- on shutdown: cancels all attempts and waits for them to clean up, at most ``CLEANUP_S``

:mod:`etude.rollouts.schedule` and :mod:`etude.rollouts.branching` make all decisions. :mod:`etude.rollouts.dispatcher`
chooses the slots to launch, :mod:`etude.rollouts.worker` defines failures.
"""

import asyncio
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self
from uuid import uuid4

from etude.config.recipe import is_pass
from etude.config.rollouts import RolloutConfig
from etude.errors import UserError
from etude.ledger.ledger import TRAIN, Ledger, OpenSlot
from etude.ledger.states import GroupState
from etude.rollouts.branching import Bundles
from etude.rollouts.schedule import Place, Schedule, SlotPhase, place_of
from etude.rollouts.worker import ForkSpec, RolloutContext, RolloutStart, close_start, run_rollout
from etude.telemetry.events import OUTAGE_TOLD_S, Outage, RolloutClosed
from etude.telemetry.log import EventLog
from etude.types import Branch, Disposition, PayloadRef, Rollout, RolloutStatus, Task, Verdict

CLEANUP_S = 60.0
"""Time for cancelled attempts to close their sessions and sandboxes, each of which has its own, lower limit."""
WRITERS = 16
"""Number of rollouts whose turns are stored concurrently."""


class RolloutRunner:
    """Runs slots of one purpose, at most ``concurrency`` at a time; leaving it cancels what still runs."""

    def __init__(
        self,
        purpose: str,
        config: RolloutConfig,
        *,
        temperature: float,
        ledger: Ledger,
        context: RolloutContext,
        events: EventLog,
    ) -> None:
        self._purpose = purpose
        self._temperature = temperature
        self._max_resamples = config.max_resamples
        self._ledger = ledger
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="turns")
        self._context = context if purpose == TRAIN else context.for_eval()
        self._events = events
        self._schedule = Schedule(
            concurrency=config.concurrency,
            max_attempts=config.max_attempts,
            outage_s=config.max_outage_s,
            worked=any(ledger.progress(each).complete for each in {purpose, TRAIN}),
        )
        self._reported_s = -math.inf
        self._branching = self._context.branching
        self._bundles = Bundles(1 if self._branching is None else self._branching.size)
        self._starts = _RolloutStarts(self._context)
        self._attempts: dict[Place, asyncio.Task[None]] = {}
        self._closing = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        running = list(self._attempts.values())
        for attempt in running:
            if not attempt.cancelling():  # a second cancel would interrupt its cleanup
                attempt.cancel()
        running += self._starts.close_waiting()
        if running:
            await asyncio.wait(running, timeout=CLEANUP_S)
        self._writers.shutdown(wait=False)

    def __len__(self) -> int:
        """Number of slots that run or wait for their next attempt or for their parent to fork."""
        return len(self._schedule) + len(self._bundles)

    def __contains__(self, slot: OpenSlot) -> bool:
        """True for a slot that was launched and has not ended."""
        return slot in self._schedule or slot in self._bundles

    def launch(self, slots: Iterable[OpenSlot]) -> None:
        """Add slots; those whose attempts were used up by a previous process are lost, possibly with their group."""
        self._start(self._bundles.admit(slots))

    def wake(self) -> None:
        """End the current or the next turn, because something else has changed."""
        self._changed.set()

    async def turn(self, timeout_s: float) -> None:
        """Start what is due, then wait until something ends or :meth:`wake` is called, at most ``timeout_s``.

        Raises a rollout's error: a bug, or :class:`~etude.errors.UserError` when nothing has succeeded for too long.
        """
        now = self._context.clock.now()
        for slot in self._schedule.due(now):
            attempt = self._attempts[place_of(slot)] = asyncio.create_task(self._attempt(slot))
            attempt.add_done_callback(partial(self._completed, slot))
        next_s = self._schedule.next_time()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s if next_s is None else min(timeout_s, max(0.0, next_s - now))):
                await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        self._changed.clear()

    def _start(self, slots: Iterable[OpenSlot]) -> None:
        dropped: set[int] = set()
        for slot in slots:
            if slot.group_index in dropped or self._schedule.add(slot) is not SlotPhase.LOST:
                continue
            if self._lose(slot, "its attempts were used up before a restart") is GroupState.DROPPED:
                dropped.add(slot.group_index)

    async def _attempt(self, slot: OpenSlot) -> None:
        rollout_id, start = uuid4().hex, self._starts.take(slot)
        try:
            rollout = await run_rollout(
                slot,
                self._context,
                rollout_id=rollout_id,
                temperature=self._temperature,
                start=start,
                fork=self._fork_spec(slot, rollout_id),
            )
            turns = await self._store_turns(rollout)
        except asyncio.CancelledError:
            if self._closing or slot in self._schedule:  # by this runner, at the end, or from outside
                raise
            rollout, turns = _dropped(slot, rollout_id), None
        copied = self._bundles.release(slot) if rollout.status is RolloutStatus.GRADED else []
        due = None
        for ended in (rollout, *(_copied(rollout, other) for other in copied)):
            due = self._ledger.record(ended, self._purpose, turns, max_resamples=self._max_resamples)
            self._events.write(_closed(ended, slot.task, self._purpose, self._context.pass_at))
        if slot in self._schedule:
            self._after_attempt(slot, rollout, due)

    async def _store_turns(self, rollout: Rollout) -> PayloadRef | None:
        """Store the turns of an ended rollout before a row refers to them, without blocking the event loop."""
        if not (self._ledger.turns.payloads and rollout.turns):
            return None
        return await asyncio.get_running_loop().run_in_executor(self._writers, self._ledger.turns.store, rollout)

    def _fork_spec(self, slot: OpenSlot, rollout_id: str) -> ForkSpec | None:
        """The fork that a slot's rollout must make for waiting slots; ``None`` if none wait."""
        count = self._bundles.waiting_for(slot)
        if self._branching is None or not count:
            return None
        point, start_forks = self._branching.fork_point(slot), partial(self._start_forks, slot)
        return ForkSpec(rollout_id=rollout_id, point=point, count=count, start_forks=start_forks)

    def _start_forks(self, parent: OpenSlot, starts: Sequence[RolloutStart]) -> None:
        """Start the slots that waited for a parent from its fork point."""
        slots = self._bundles.release(parent)
        self._start(slots)
        self._starts.put([slot for slot in slots if slot in self._schedule], starts)
        self._changed.set()

    def _after_attempt(self, slot: OpenSlot, rollout: Rollout, due: int | None) -> None:
        """Record the end of an attempt in the schedule; ``due`` is the next one, if the slot needs it."""
        if rollout.status is RolloutStatus.GRADED:
            self._schedule.graded(slot)
        elif due is None:
            self._abandon(slot.group_index)
        elif self._schedule.failed(slot, due=due, now=self._context.clock.now()) is SlotPhase.LOST:
            self._lose(slot, rollout.reason)
        self._report_outage(rollout)
        if self._schedule.breaker.gave_up:
            raise UserError(
                f"no rollout has succeeded for a long time (rollouts.max_outage_s), the last failed because of "
                f"{rollout.reason}; repair that and resume the run, nothing graded is lost"
            )

    def _report_outage(self, rollout: Rollout) -> None:
        """Report at intervals the cause and start of an outage, and its end."""
        now_s, since_s = self._context.clock.now(), self._schedule.breaker.since_s
        if since_s is None and self._reported_s > -math.inf:
            self._reported_s = -math.inf
            self._events.write(Outage(what="rollouts", seconds=0.0, reason=""))
        elif since_s is not None and now_s - self._reported_s >= OUTAGE_TOLD_S:
            self._reported_s = now_s
            self._events.write(Outage(what="rollouts", seconds=now_s - since_s, reason=rollout.reason))

    def _lose(self, slot: OpenSlot, reason: str) -> GroupState:
        state = self._ledger.lose_slot(
            self._purpose,
            slot.group_index,
            slot.slot,
            f"infra: slot {slot.slot}: {reason}",
            max_resamples=self._max_resamples,
        )
        if state is GroupState.DROPPED:
            self._abandon(slot.group_index)
        else:
            self._start(self._bundles.release(slot))
        return state

    def _abandon(self, group_index: int) -> None:
        self._bundles.abandon(group_index)
        for place in self._schedule.abandon(group_index):
            attempt = self._attempts[place]
            if attempt is not asyncio.current_task():
                attempt.cancel()
        self._starts.close_waiting(group_index)

    def _completed(self, slot: OpenSlot, attempt: asyncio.Task[None]) -> None:
        if self._attempts.get(place_of(slot)) is attempt:
            del self._attempts[place_of(slot)]
        error: BaseException | None = None
        if not attempt.cancelled():
            error = attempt.exception()
        elif not self._closing and slot in self._schedule:  # it would stay open and block forever
            error = RuntimeError(
                f"a rollout of group {slot.group_index} was cancelled, and not by us: run again to fill its slot"
            )
        self._failure = self._failure or error
        self._changed.set()


class _RolloutStarts:
    """Starts of forks that do not run yet; unused ones are closed."""

    def __init__(self, context: RolloutContext) -> None:
        self._context = context
        self._waiting: dict[Place, RolloutStart] = {}
        self._closings: set[asyncio.Task[None]] = set()  # the loop itself has no strong reference to them

    def put(self, slots: Sequence[OpenSlot], starts: Sequence[RolloutStart]) -> None:
        """Assign one start to each slot; the remaining ones are closed."""
        self._waiting |= {place_of(slot): start for slot, start in zip(slots, starts, strict=False)}
        for start in starts[len(slots) :]:
            self._close(start)

    def take(self, slot: OpenSlot) -> RolloutStart | None:
        """The start of a slot that runs now; the rollout closes it."""
        return self._waiting.pop(place_of(slot), None)

    def close_waiting(self, group_index: int | None = None) -> list[asyncio.Task[None]]:
        """Close the starts of one group, or of all, whose slots will not run any more; returns all closings in
        progress.
        """
        for place in [place for place in self._waiting if group_index in (None, place[0])]:
            self._close(self._waiting.pop(place))
        return list(self._closings)

    def _close(self, start: RolloutStart) -> None:
        closing = asyncio.create_task(close_start(start, self._context))
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)


def _dropped(slot: OpenSlot, rollout_id: str) -> Rollout:
    """The record of an attempt whose group was dropped."""
    return Rollout(
        rollout_id=rollout_id,
        group_index=slot.group_index,
        slot=slot.slot,
        attempt=slot.attempt,
        status=RolloutStatus.DROPPED,
        reward=None,
        reason="its group was dropped",
    )


def _copied(rollout: Rollout, slot: OpenSlot) -> Rollout:
    """The record of a waiting slot, copied from a parent that ended before its fork."""
    return replace(
        rollout,
        rollout_id=uuid4().hex,
        slot=slot.slot,
        attempt=slot.attempt,
        seconds=0.0,
        stage_s={},
        hints=(),
        branch=Branch(rollout_id=rollout.rollout_id, turns=len(rollout.turns)),
    )


def _closed(rollout: Rollout, task: Task, purpose: str, pass_at: float) -> RolloutClosed:
    verdict = rollout.verdict or Verdict(disposition=Disposition.KEEP, graded=rollout.reward or 0.0)
    shared = 0 if rollout.branch is None else rollout.branch.turns
    return RolloutClosed(
        rollout_id=rollout.rollout_id,
        purpose=purpose,
        group_index=rollout.group_index,
        status=rollout.status,
        reason=rollout.reason,
        reward=rollout.reward,
        turns=len(rollout.turns),
        sampled_tokens=sum(len(turn.completion_ids) for turn in rollout.turns[shared:]),
        seconds=rollout.seconds,
        template=task.template,
        version=max((int(turn.versions.max()) for turn in rollout.turns if len(turn.versions)), default=-1),
        disposition=verdict.disposition,
        flags=list(verdict.flags),
        hacked=verdict.hacked,
        cheat_reason=verdict.reason,
        impossible=verdict.impossible,
        passed=is_pass(verdict.graded, pass_at),
        session=rollout.session_id,
        stage_s=dict(rollout.stage_s),
    )

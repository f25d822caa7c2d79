"""Rollouts in flight: slots become asyncio tasks, ends become ledger records.

    launch(slot) ──▶ attempt ──▶ record ──▶ graded: the slot is filled
                        ▲          ├──────▶ failed by infrastructure: back off, try again
                        └──────────┘        no attempt left: drop the group, cancel its other rollouts

Owns retries and the end of a group. Does not own which slots to launch (:mod:`etude.rollouts.dispatcher`) or what
counts as a failure (:mod:`etude.rollouts.worker`).
"""

import asyncio
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self
from uuid import uuid4

from etude.config import RolloutConfig
from etude.errors import InfrastructureError
from etude.ledger.ledger import Ledger, OpenSlot
from etude.rollouts.worker import Rig, run_rollout
from etude.telemetry.events import RolloutClosed
from etude.telemetry.log import EventLog
from etude.types import Disposition, Rollout, RolloutStatus, Task, Verdict

FIRST_BACKOFF_S = 1.0
"""Wait before the second attempt; doubles with each, long enough in sum for a dead process to be restarted."""
MAX_BACKOFF_S = 8.0
"""Longest wait between attempts."""
UNWATCHED = Verdict(disposition=Disposition.KEEP, reward=0.0, reason="", flags=(), hacked=False, graded=0.0)
"""Of a rollout that nobody looked at."""
MAX_DROPS_IN_A_ROW = 8
"""Groups dropped without one rollout graded in between before we stop: it is not the tasks, it is the machines."""


class Flight:
    """Runs slots of one purpose, at most ``concurrency`` at a time; leaving it cancels what still runs."""

    def __init__(
        self, purpose: str, config: RolloutConfig, *, temperature: float, ledger: Ledger, rig: Rig, events: EventLog
    ) -> None:
        self._purpose = purpose
        self._config = config
        self._temperature = temperature
        self._ledger = ledger
        self._rig = rig
        self._events = events
        self._permits = asyncio.Semaphore(config.concurrency)
        self._group_of: dict[asyncio.Task[None], int] = {}
        self._dropped: set[int] = set()
        self._drops_in_a_row = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        running = list(self._group_of)
        for task in running:
            if not task.cancelling():  # a second cancel would interrupt its closing
                task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def __len__(self) -> int:
        """Slots that are running or waiting for their next attempt."""
        return len(self._group_of)

    def launch(self, slot: OpenSlot) -> None:
        """Start to fill a slot."""
        task = asyncio.create_task(self._fill(slot))
        self._group_of[task] = slot.group_index
        task.add_done_callback(self._landed)

    async def changed(self, timeout_s: float) -> None:
        """Wait until a slot is filled or given up, at most ``timeout_s``. Raises what a rollout raised.

        That is a bug, or :class:`~etude.errors.InfrastructureError` when group after group had to be dropped.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure

    async def _fill(self, slot: OpenSlot) -> None:
        reason = "its attempts were used up before a restart"
        while slot.attempt < self._config.max_attempts:
            if slot.attempt:
                await self._rig.clock.sleep(backoff_s(slot.attempt))
            rollout = await self._attempt(slot)
            due = self._ledger.record(rollout, self._purpose)
            self._events.write(_closed(rollout, slot.task, self._purpose))
            if rollout.status is RolloutStatus.GRADED:
                self._drops_in_a_row = 0
            if due is None:
                return
            reason = rollout.reason
            slot = replace(slot, attempt=due)
        self._drop(slot, reason)

    async def _attempt(self, slot: OpenSlot) -> Rollout:
        rollout_id = uuid4().hex
        async with self._permits:
            try:
                return await run_rollout(
                    slot,
                    self._rig,
                    rollout_id=rollout_id,
                    temperature=self._temperature,
                    timeout_s=self._config.timeout_s,
                )
            except asyncio.CancelledError:
                if slot.group_index not in self._dropped:
                    raise
        return Rollout(
            rollout_id=rollout_id,
            group_index=slot.group_index,
            slot=slot.slot,
            attempt=slot.attempt,
            status=RolloutStatus.DROPPED,
            reward=None,
            reason="its group was dropped",
        )

    def _drop(self, slot: OpenSlot, reason: str) -> None:
        index = slot.group_index
        self._ledger.drop_group(self._purpose, index, f"infra: slot {slot.slot}: {reason}")
        self._dropped.add(index)
        for task, group_index in self._group_of.items():
            if group_index == index and task is not asyncio.current_task():
                task.cancel()
        self._drops_in_a_row += 1
        if self._drops_in_a_row == MAX_DROPS_IN_A_ROW:
            raise InfrastructureError(
                f"{MAX_DROPS_IN_A_ROW} groups in a row were dropped after {self._config.max_attempts} attempts, the "
                f"last because of {reason}; repair that and run again, nothing graded is lost"
            )

    def _landed(self, task: asyncio.Task[None]) -> None:
        index = self._group_of.pop(task)
        error: BaseException | None = None
        if not task.cancelled():
            error = task.exception()
        elif not self._closing and index not in self._dropped:  # its slot would stay open, and be waited for, for ever
            error = RuntimeError(f"a rollout of group {index} was cancelled, and not by us: run again to fill its slot")
        self._failure = self._failure or error
        self._changed.set()


def backoff_s(attempt: int) -> float:
    """Seconds to wait before attempt 1, 2, …"""
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (attempt - 1))


def _closed(rollout: Rollout, task: Task, purpose: str) -> RolloutClosed:
    verdict = rollout.verdict or UNWATCHED
    return RolloutClosed(
        rollout_id=rollout.rollout_id,
        purpose=purpose,
        group_index=rollout.group_index,
        status=rollout.status,
        reason=rollout.reason,
        reward=rollout.reward,
        turns=len(rollout.turns),
        sampled_tokens=sum(len(turn.completion_ids) for turn in rollout.turns),
        seconds=rollout.seconds,
        template=task.template,
        version=max((int(turn.versions.max()) for turn in rollout.turns if len(turn.versions)), default=-1),
        disposition=verdict.disposition,
        flags=list(verdict.flags),
        hacked=verdict.hacked,
        cheat_reason=verdict.reason,
        impossible=verdict.impossible,
        passed=(verdict.graded if rollout.verdict else rollout.reward or 0.0) > 0,
    )

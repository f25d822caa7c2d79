"""Dispatcher that keeps rollouts running until the trainer, or an evaluation, has enough.

    tasks ──▶ admit ──▶ ledger: group ──▶ launch its slots ──▶ ledger: rollouts ──▶ ready groups ──▶ trainer
                ▲                                                                                       │
                └──────────────────── weight version served, rollouts in flight ◀───────────────────────┘

- consumes: training tasks in their order (:mod:`etude.rollouts.task_order`), or the tasks of an evaluation; the weight
  version being served
- produces: groups and ended rollouts in the ledger, one ``GroupAdmitted`` event per group, one
  ``RolloutClosed`` per attempt; one ``RolloutsStats`` every ``LOOK_S``
- waits for: room in the staleness window and in the concurrency limit; rollouts, each of which is bounded
- woken by: the end of a rollout; another weight version that is served; every ``LOOK_S``, because other
  rollouts processes may fill the same groups, or die and leave slots behind
- on shutdown: cancels all rollouts, closes their sessions and sandboxes. Nothing is recorded about them, so the next
  start finds their slots open and fills them first
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import NoReturn

from etude.aio import background_task
from etude.config.live import LiveConfig
from etude.config.rollouts import RolloutConfig
from etude.ledger.ledger import TRAIN, Ledger, TaskDraw
from etude.rollouts.admission import NOT_LIVE, Admission
from etude.rollouts.runner import RolloutRunner
from etude.rollouts.worker import RolloutContext
from etude.telemetry.events import GroupAdmitted, RolloutsStats
from etude.telemetry.log import EventLog
from etude.types import Task

POLL_S = 0.02
"""Interval at which the served weight version is polled if changes are not announced; far below the
time of a rollout.
"""
LOOK_S = 2.0
"""Longest delay until slots filled or left behind by other rollouts processes are noticed, and between reports."""
TRAIN_TEMPERATURE = 1.0
"""The policy gradient is only valid for samples of the policy itself."""


class Dispatcher:
    """Schedules the rollouts of one run.

    ``draw`` returns the training task at a position of the training data. ``serving_version`` returns the weight
    version that every engine serves at least; staleness is bounded against it, so it must never be ahead of an engine.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        ledger: Ledger,
        draw: Callable[[int], TaskDraw],
        context: RolloutContext,
        events: EventLog,
        serving_version: Callable[[], int],
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._draw = draw
        self._context = context
        self._events = events
        self._serving_version = serving_version
        self._version_changed = context.version_changed or self._poll_version

    async def train(self, steps: int, live: LiveConfig = NOT_LIVE) -> None:
        """Fill the groups of ``steps`` optimiser steps, except users' sessions; return when all are complete."""
        admission, version, loads = Admission(self._config, steps=steps, live=live), -1, 0
        async with (
            self._runner(TRAIN, self._config, TRAIN_TEMPERATURE) as runner,
            background_task(self._follow_version(runner)) as following,
        ):
            look_s, most = -math.inf, 0
            while (progress := self._ledger.progress()).complete < admission.groups_needed(loads):
                if self._context.clock.now() >= look_s:
                    look_s = self._context.clock.now() + LOOK_S
                    runner.launch(slot for slot in self._ledger.open_slots(TRAIN) if slot not in runner)
                    self._report(most)
                    most = 0
                if self._serving_version() != version:
                    version = self._serving_version()
                    loads = self._ledger.loads.count(version)
                self._admit(admission, runner, admitted=progress.usable, version=version, loads=loads)
                most = max(most, len(runner))
                await runner.turn(max(0.0, look_s - self._context.clock.now()))
                if following.done():
                    following.result()

    async def evaluate(
        self, label: str, tasks: Sequence[Task], *, temperature: float, concurrency: int | None = None
    ) -> list[float]:
        """Try each task once, ``concurrency`` at a time (default: the recipe's number), and return the rewards in order
        of tasks.

        Continues an interrupted evaluation of the same ``label``. Tasks whose every attempt failed because of
        infrastructure have no reward and are absent; the ledger counts them as dropped.
        """
        for task in tasks[self._ledger.progress(label).admitted :]:
            version = self._serving_version()
            index = self._ledger.admit_group(task, label, 1, version)
            if index is not None:
                self._events.write(GroupAdmitted(purpose=label, group_index=index, version=version))
        config = self._config
        if concurrency is not None:
            config = config.model_copy(update={"concurrency": concurrency})
        async with self._runner(label, config, temperature) as runner:
            runner.launch(self._ledger.open_slots(label))
            while len(runner):
                await runner.turn(LOOK_S)
        return self._ledger.rewards(label)

    async def _follow_version(self, runner: RolloutRunner) -> NoReturn:
        """Wake a runner whenever the served version changes."""
        while True:
            await self._version_changed(self._serving_version())
            runner.wake()

    async def _poll_version(self, version: int) -> None:
        while self._serving_version() == version:
            await asyncio.sleep(POLL_S)

    def _report(self, running: int) -> None:
        """Log the places that are in use, with the most ``running`` rollouts since the last report."""
        load = self._context.sandbox_load()
        room = max(0, load.capacity - load.demand)
        self._events.write(
            RolloutsStats(running=running, capacity=self._config.concurrency, sandboxes=load.demand, sandbox_room=room)
        )

    def _runner(self, purpose: str, config: RolloutConfig, temperature: float) -> RolloutRunner:
        return RolloutRunner(
            purpose,
            config,
            temperature=temperature,
            ledger=self._ledger,
            context=self._context,
            events=self._events,
        )

    def _admit(self, admission: Admission, runner: RolloutRunner, *, admitted: int, version: int, loads: int) -> None:
        """Admit as many groups as allowed; the ledger decides finally, as other processes may admit at the
        same time.
        """
        number = admission.groups_to_admit(version=version, admitted=admitted, in_flight=len(runner), loads=loads)
        for _ in range(number):
            slots = self._ledger.admit_next(
                self._draw,
                size=self._config.group_size,
                version=version,
                kept_below=admission.window(version, loads),
            )
            if slots is None:
                return
            self._events.write(GroupAdmitted(purpose=TRAIN, group_index=slots[0].group_index, version=version))
            if self._context.announce is not None:
                self._context.announce(slots[0].task, len(slots))
            runner.launch(slots)

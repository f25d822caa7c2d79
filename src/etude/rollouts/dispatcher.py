"""Keeps rollouts running until the trainer, or an evaluation, has all it needs.

    tasks ──▶ admit ──▶ ledger: group ──▶ launch its slots ──▶ ledger: rollouts ──▶ ready groups ──▶ trainer
                ▲                                                                                       │
                └──────────────────── weight version served, rollouts in flight ◀───────────────────────┘

- consumes: training tasks in the family's order, or the tasks of an evaluation; the weight version being served
- produces: groups and ended rollouts in the ledger, one ``RolloutClosed`` event per attempt
- waits for: a place in the staleness window and in the concurrency limit; rollouts
- woken by: the end of a rollout; every ``POLL_S``, because versions advance in another process
- on shutdown: cancels all rollouts, closes their sessions and sandboxes. Nothing is recorded about them, so the next
  start finds their slots open and fills them first
"""

from collections.abc import Callable, Sequence

from etude.config import RolloutConfig
from etude.errors import ConfigError
from etude.ledger.ledger import TRAIN, Ledger, OpenSlot
from etude.protocols import TaskFamily
from etude.rollouts.admission import Admission
from etude.rollouts.flight import Flight
from etude.rollouts.worker import Rig
from etude.telemetry.log import EventLog
from etude.types import Split, Task

POLL_S = 0.02
"""How late a new weight version may be noticed; far below the time of a rollout."""
CURSOR = "rollouts.next-task"
"""The ledger's fact that remembers how many training tasks were drawn."""
MAX_REPEATS = 10_000
"""Tasks in a row that were all trained before: the family has nothing new to offer."""
TRAIN_TEMPERATURE = 1.0
"""The policy gradient holds for samples of the policy itself."""


class Dispatcher:
    """Runs the rollouts of one run.

    ``serving_version`` says which weight version every engine serves at least, right now; staleness is bounded
    against that number, so it must never be ahead of an engine.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        ledger: Ledger,
        family: TaskFamily,
        rig: Rig,
        events: EventLog,
        serving_version: Callable[[], int],
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._family = family
        self._rig = rig
        self._events = events
        self._serving_version = serving_version

    async def train(self, steps: int) -> None:
        """Fill the groups of ``steps`` optimiser steps; return when every one of them is complete."""
        admission = Admission(self._config, steps=steps)
        async with self._flight(TRAIN, TRAIN_TEMPERATURE) as flight:
            for slot in self._ledger.open_slots(TRAIN):
                flight.launch(slot)
            while (progress := self._ledger.progress()).complete < admission.groups_needed:
                version = self._serving_version()
                for _ in range(admission.groups_to_admit(version=version, kept=progress.kept, in_flight=len(flight))):
                    for slot in self._admit_next(version):
                        flight.launch(slot)
                await flight.changed(POLL_S)

    async def evaluate(self, label: str, tasks: Sequence[Task], *, temperature: float) -> list[float]:
        """Try each task once and return the rewards in order of tasks.

        Goes on where an interrupted evaluation of the same ``label`` stopped. Tasks whose every attempt failed by
        infrastructure have no reward and are absent; they are counted as dropped in the ledger.
        """
        for task in tasks[self._ledger.progress(label).admitted :]:
            self._ledger.admit_group(task, label, 1, self._serving_version())
        async with self._flight(label, temperature) as flight:
            for slot in self._ledger.open_slots(label):
                flight.launch(slot)
            while len(flight):
                await flight.changed(POLL_S)
        return self._ledger.rewards(label)

    def _flight(self, purpose: str, temperature: float) -> Flight:
        return Flight(
            purpose,
            self._config,
            temperature=temperature,
            ledger=self._ledger,
            rig=self._rig,
            events=self._events,
        )

    def _admit_next(self, version: int) -> list[OpenSlot]:
        """Admit the next training task that is new, and return its slots.

        The cursor is written after the admission: a crash in between draws the same task again, which is then known.
        """
        first = int(self._ledger.get_fact(CURSOR) or 0)
        size = self._config.group_size
        for cursor in range(first, first + MAX_REPEATS):
            task = self._family.task(Split.TRAIN, cursor)
            index = self._ledger.admit_group(task, TRAIN, size, version)
            self._ledger.set_fact(CURSOR, str(cursor + 1))
            if index is not None:
                return [OpenSlot(task=task, group_index=index, slot=slot, attempt=0) for slot in range(size)]
        raise ConfigError(
            f"the last {MAX_REPEATS} training tasks were all trained before: the family has too few different tasks "
            f"for this run; lower trainer.steps or rollouts.groups_per_step, or widen [tasks]"
        )

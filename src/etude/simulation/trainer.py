"""A modelled trainer with the real ledger: it claims batches, waits the modelled time, publishes and commits.

    claim ──▶ busy ──▶ the previous version is committed ──▶ save ──▶ publish ┄┄ during the next step ┄┄▶ commit

The order is that of :mod:`etude.run.trainer`. It may be cancelled at any point: its successor continues from the ledger
and the store.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from etude.config.recipe import RunConfig
from etude.ledger.ledger import Ledger
from etude.simulation.calibration import TrainerTimes
from etude.simulation.processors import Processors
from etude.telemetry.events import MOST_AGES, Event, StepDone
from etude.types import Group

POLL_S = 0.02
"""Interval at which the ledger is polled for a batch."""


@dataclass(slots=True)
class ModelledStore:
    """The weight log of a run: the newest version, and the callbacks for each new one."""

    newest: int = 0
    is_away: bool = False
    """True while the store is unavailable for publishing."""
    followers: list[Callable[[int], None]] = field(default_factory=list)

    def publish(self, version: int) -> None:
        """Make a version visible; publishing the newest one again changes nothing."""
        if version > self.newest:
            self.newest = version
            for follower in self.followers:
                follower(version)


@final
class ModelledTrainer:
    """The trainer process of a simulated run."""

    def __init__(
        self,
        config: RunConfig,
        times: TrainerTimes,
        *,
        ledger: Ledger,
        store: ModelledStore,
        processors: Processors,
        write: Callable[[Event], None],
    ) -> None:
        """``write`` receives its events."""
        self._config = config
        self._times = times
        self._ledger = ledger
        self._store = store
        self._processors = processors
        self._write = write

    async def run(self, *, poll_s: float = POLL_S) -> None:
        """Train until the last step is committed."""
        done = self._ledger.progress().steps_done
        if self._store.newest > done:  # a predecessor died between publishing and committing
            done = self._store.newest
            self._ledger.commit_step(done)
        publishing: asyncio.Task[None] | None = None
        try:
            for step in range(done + 1, self._config.trainer.steps + 1):
                await self._compute(step, poll_s)
                if publishing is not None:
                    await publishing
                await asyncio.sleep(self._times.save_s)
                publishing = asyncio.create_task(self._publish(step))
            if publishing is not None:
                await publishing
        finally:
            if publishing is not None:
                publishing.cancel()

    async def _compute(self, step: int, poll_s: float) -> None:
        """Wait for a batch, and for the modelled time of a step on it."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while (groups := self._ledger.claim_batch(step, self._config.rollouts.groups_per_step)) is None:
            await asyncio.sleep(poll_s)
        wait_s, ages = loop.time() - began_s, token_ages(groups, step - 1)
        await self._processors.compute(self._times.step_s(sum(ages)))
        metrics = {
            "busy_s": loop.time() - began_s - wait_s,
            "wait_s": wait_s,
            "staleness_tokens": float(sum(ages)),
            "staleness_max": float(max((age for age, count in enumerate(ages) if count), default=0)),
        }
        self._write(StepDone(step=step, metrics=metrics, token_ages=ages, groups=[group.index for group in groups]))

    async def _publish(self, step: int) -> None:
        await asyncio.sleep(self._times.publish_s)
        while self._store.is_away:
            await asyncio.sleep(POLL_S)
        self._store.publish(step)
        self._ledger.commit_step(step)


def token_ages(groups: Sequence[Group], version: int) -> list[int]:
    """Staleness, from 0, → sampled tokens of a batch that is trained on at ``version``; a modelled turn has a number of
    tokens for each version.
    """
    ages = [0] * MOST_AGES
    for group in groups:
        for rollout in group.rollouts:
            for turn in rollout.turns:
                for sampled, tokens in zip(turn.versions.tolist(), turn.completion_ids.tolist(), strict=True):
                    ages[min(version - sampled, MOST_AGES - 1)] += tokens
    while len(ages) > 1 and not ages[-1]:
        ages.pop()
    return ages

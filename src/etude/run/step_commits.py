"""Steps from computed to committed: their checkpoints, their versions, and what is kept in case one is done again.

    begin n ──▶ save n, publish n ┄┄ beside the next step ┄┄▶ commit n ──▶ payloads up to the newest checkpoint go

Owns the order of these and the payloads of batches that were claimed. What a step computes, and what is done again
after a crash, is :mod:`etude.run.trainer`'s.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import final

from torch import Tensor

from etude.closing import Closing
from etude.config.recipe import RunConfig
from etude.errors import DamagedError, EtudeError
from etude.ledger.changes import LIVE, TRAIN
from etude.ledger.ledger import Ledger
from etude.ledger.payloads import Payloads
from etude.ledger.states import UNSETTLED
from etude.models.checkpoint import state_of
from etude.models.decoder import Decoder
from etude.run.checkpoint_copies import CheckpointCopies
from etude.run.folder import RunFolder
from etude.run.heartbeat import Heartbeat
from etude.run.numerics import published_state
from etude.run.payload_store import open_feedback, open_ledger, open_payloads
from etude.run.publishing import WeightPublishing
from etude.run.trainer_group import TrainerGroup
from etude.telemetry.events import StepSaved
from etude.telemetry.log import EventLog
from etude.trainer.mismatch import MismatchProbe
from etude.types import Group, PayloadRef
from etude.weights.digest import state_digest
from etude.weights.log import WeightLog
from etude.weights.tensors import to_stored

SWEEP_S = 3600.0
"""Interval at which payloads are removed that nothing refers to."""
LONGEST_ROLLOUT_S = 24 * 3600.0
"""Least age of those: the ledger refers to what a rollout left when it ends."""

logger = logging.getLogger(__name__)


@final
@dataclass(kw_only=True, eq=False)
class StepCommits(Closing):
    """The steps of one trainer, one under way at a time."""

    folder: RunFolder
    config: RunConfig
    ledger: Ledger
    events: EventLog
    log: WeightLog
    payloads: Payloads
    publishing: WeightPublishing
    copies: CheckpointCopies
    trainer_group: TrainerGroup
    probe: MismatchProbe | None
    unproven: int = 0
    """A step that may have been published by a process before this one."""
    _payloads_of: dict[int, tuple[PayloadRef, ...]] = field(default_factory=dict)
    """Step → the payloads of its batch, until it is committed and need not be done again."""
    _is_held: bool = False
    """True while the version under way is of a step that is committed when its checkpoint can be restored anywhere."""
    _heartbeat: Heartbeat = field(default_factory=Heartbeat)
    _sweeper: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="payload sweep")
    )
    _sweeping: Future[None] | None = None
    _swept_s: float = 0.0

    def close(self) -> None:
        """Wait for the sweep of payloads under way."""
        self._sweeper.shutdown()

    def note(self, step: int, groups: Sequence[Group]) -> None:
        """Keep the payloads of a step's batch from now on."""
        self._payloads_of[step] = payload_refs(groups)

    @property
    def can_commit(self) -> bool:
        """True if :meth:`commit_published` would not wait."""
        return self.publishing.is_visible and (self.copies.is_complete or not self._is_held)

    def begin(self, step: int, *, is_load: bool = False) -> None:
        """Begin to save and to publish a step that was computed, once the one before is committed."""
        times = [time.perf_counter()]
        self.commit_published()
        times.append(time.perf_counter())
        self._save(step, is_load=is_load)
        self._heartbeat.beat()
        times.append(time.perf_counter())
        self.publish(step)
        times.append(time.perf_counter())
        commit_s, save_s, publish_s = (after - before for before, after in pairwise(times))
        self.events.write(StepSaved(step=step, commit_s=commit_s, save_s=save_s, publish_s=publish_s))

    def _save(self, step: int, *, is_load: bool) -> None:
        """Begin to write the checkpoint of a step that has one: every so many, the last, and those that load weights,
        which the ledger cannot tell how to do again. The first kind waits for it only where every step has one.
        """
        every = self.config.trainer.checkpoint_steps
        self._is_held = every == 1 or is_load or step == self.config.trainer.steps
        if self._is_held or step % every == 0:
            self.copies.finish(self.idle)
            self.copies.start(step, self.trainer_group.save(step))

    def idle(self) -> None:
        """Do what has to be done now and then while rank 0 waits."""
        self.trainer_group.idle(time.monotonic())
        self._heartbeat.beat()

    def prove(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Compare what a step that is done again gave with what was published of it, if that is still there."""
        record = self.log.read(step)
        if record is not None and (digest := state_digest(to_stored(state))) != record.digest:
            raise DamagedError(
                f"step {step}, done again from a checkpoint, ended in the weights {digest[:12]}; {record.digest[:12]} "
                f"were published: another machine or library, or kernels that give other bits each time. Go on where "
                f"it was computed, or start a new run from version {step}, with trainer.checkpoint_steps = 1"
            )

    def publish(self, step: int) -> None:
        """Start to publish the policy as version ``step``; the next step's batch and gradients do not wait for it."""
        model = self.trainer_group.whole_model()
        state = published_state(model, self.config.numerics)
        if step == self.unproven:
            self.prove(step, state)
        # What could not be computed again to the same bits must not be seen before it can be restored.
        is_free = not self._is_held or self.config.numerics.arithmetic == "invariant"
        self.publishing.start(state, step, (lambda: None) if is_free else self.copies.wait)
        self.remember_policy(step, model)

    def commit_published(self) -> None:
        """Commit the step whose version was under way, once that is visible and what it waits for is durable."""
        version = self.publishing.land(self.idle)
        if version is None:
            return
        if self._is_held or self.copies.is_complete:
            self.copies.finish(self.idle)
        self.events.flush()
        self.ledger.commit_step(version)
        for step in [step for step in self._payloads_of if step <= min(version, self.copies.restorable)]:
            self.payloads.drop(self._payloads_of.pop(step))
        if time.monotonic() - self._swept_s > SWEEP_S:
            self.sweep()

    def sweep(self) -> None:
        """Begin to remove the payloads that nothing refers to, beside the step: a long run has many to look through."""
        if self._sweeping is None or self._sweeping.done():
            self._swept_s = time.monotonic()
            self._sweeping = self._sweeper.submit(sweep_payloads, self.folder, self.copies.restorable)

    def remember_policy(self, version: int, model: Decoder) -> None:
        """Keep the policy's weights as ``version``: each of several ranks its part, one alone those of ``model``."""
        self.remember(version, state_of(model) if self.config.parallel.ranks == 1 else None)

    def remember(self, version: int, state: Mapping[str, Tensor] | None) -> None:
        """Keep what a version sampled with, where anything is scored again."""
        if self.probe is not None:
            self.probe.remember(version, state)


def payload_refs(groups: Iterable[Group]) -> tuple[PayloadRef, ...]:
    """The payload references of some groups' turns."""
    turns = (turn for group in groups for rollout in group.rollouts for turn in rollout.turns)
    return tuple(turn.payload for turn in turns if turn.payload is not None)


def sweep_payloads(folder: RunFolder, restorable: int) -> None:
    """Remove old payloads that nothing refers to: routes and masks of evaluations, of tries that failed, of whoever
    else called; turns whose rollout was never recorded. What fails is done the next time.

    Steps behind ``restorable``, the newest that can be restored, may have to be done again.
    """
    try:
        with open_ledger(folder) as ledger:
            in_use = partial(_payloads_in_use, folder, ledger, restorable)
            open_payloads(folder).sweep(in_use, ledger.turns.named, older_than_s=LONGEST_ROLLOUT_S)
    except EtudeError as error:
        logger.warning("payloads that nothing refers to are not removed yet: %s", error)


def _payloads_in_use(folder: RunFolder, ledger: Ledger, restorable: int) -> list[PayloadRef]:
    """Routes and masks that may still be trained on."""
    refs: list[PayloadRef] = []
    if folder.config().feedback.window_s:
        with open_feedback(folder) as feedback:  # first: a session that leaves it is in the ledger by then
            refs += feedback.payloads()
    refs += payload_refs(group for each in (TRAIN, LIVE) for group in ledger.groups(each, UNSETTLED))
    for step in range(restorable + 1, ledger.progress().steps_done + 1):
        refs += payload_refs(ledger.batch(step))
    return refs

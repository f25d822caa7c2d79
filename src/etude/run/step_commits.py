"""Checkpoint, publication and commit of optimiser steps, in the order that survives a crash.

    begin n ──▶ save n, publish n ┄┄ during the next step ┄┄▶ commit n ──▶ drop payloads up to the newest checkpoint

This module owns this order and the payloads of claimed batches. :mod:`etude.run.trainer` computes steps and repeats
them after a crash.
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
from etude.errors import DamagedError, EtudeError, trace_of
from etude.ledger.changes import LIVE, TRAIN
from etude.ledger.ledger import Ledger
from etude.ledger.payloads import Payloads
from etude.ledger.states import UNSETTLED
from etude.models.checkpoint import state_of
from etude.models.hf import CausalModel
from etude.run.checkpoint_copies import CheckpointCopies
from etude.run.folder import RunFolder
from etude.run.heartbeat import Heartbeat
from etude.run.numerics import published_state
from etude.run.publishing import WeightPublishing
from etude.run.stores import open_feedback, open_ledger, open_payloads
from etude.run.trainer_group import TrainerGroup
from etude.telemetry.events import StepSaved
from etude.telemetry.log import EventLog
from etude.trainer.mismatch import MismatchProbe
from etude.types import Group, PayloadRef
from etude.weights.digest import state_digest
from etude.weights.log import WeightLog
from etude.weights.tensors import to_stored

SWEEP_S = 3600.0
"""Interval at which unreferenced payloads are removed."""
LONGEST_ROLLOUT_S = 24 * 3600.0
"""Minimum age for removal: the ledger refers to a rollout's payloads only after its end."""

logger = logging.getLogger(__name__)


@final
@dataclass(kw_only=True, eq=False)
class StepCommits(Closing):
    """The steps of one trainer; at most one is being published at a time."""

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
    """A step that an earlier process may have published already."""
    _payloads_of: dict[int, tuple[PayloadRef, ...]] = field(default_factory=dict)
    """Step → the payloads of its batch, until it is committed and will not be repeated."""
    _is_held: bool = False
    """True while the step being published must not be committed before its checkpoint can be restored anywhere."""
    _heartbeat: Heartbeat = field(default_factory=Heartbeat)
    _sweeper: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="payload sweep")
    )
    _sweeping: Future[None] | None = None
    _swept_s: float = 0.0

    def close(self) -> None:
        """Wait for a running sweep of payloads."""
        self._sweeper.shutdown()

    def note(self, step: int, groups: Sequence[Group]) -> None:
        """Record the payloads of a step's batch, so that they are not deleted."""
        self._payloads_of[step] = payload_refs(groups)

    @property
    def can_commit(self) -> bool:
        """True if :meth:`commit_published` would not wait."""
        return self.publishing.is_visible and (self.copies.is_complete or not self._is_held)

    def begin(self, step: int, *, is_load: bool = False) -> None:
        """Commit the previous step, then start to save and publish a computed step."""
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
        """Start to write a checkpoint if the step has one: every ``checkpoint_steps``, the last, and steps that load
        weights, which cannot be repeated from the ledger. The commit waits for it unless checkpoints are only written
        every few steps.
        """
        every = self.config.trainer.checkpoint_steps
        self._is_held = every == 1 or is_load or step == self.config.trainer.steps
        if self._is_held or step % every == 0:
            self.copies.finish(self.idle)
            self.copies.start(step, self.trainer_group.save(step))

    def idle(self) -> None:
        """Keep the other ranks and the heartbeat alive while rank 0 waits."""
        self.trainer_group.idle(time.monotonic())
        self._heartbeat.beat()

    def prove(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Compare the weights of a repeated step with its published weights, if these are in the log.

        Raises :class:`~etude.errors.DamagedError` if they differ.
        """
        record = self.log.read(step)
        if record is not None and (digest := state_digest(to_stored(state))) != record.digest:
            raise DamagedError(
                f"step {step}, repeated from a checkpoint, ended in the weights {digest[:12]}; {record.digest[:12]} "
                f"were published: another machine or library, or nondeterministic kernels. Continue where it was "
                f"computed, or start a new run from version {step}, with trainer.checkpoint_steps = 1"
            )

    def publish(self, step: int) -> None:
        """Start to publish the policy as version ``step``; the next step's batch and gradients do not wait for it."""
        model = self.trainer_group.whole_model()
        state = published_state(model, self.config.numerics)
        if step == self.unproven:
            self.prove(step, state)
        # Weights that could not be recomputed to the same bits must not be visible before they can be restored. With
        # users' sessions they could not: one that the baseline was computed from may be deleted meanwhile.
        is_exact = self.config.numerics.arithmetic == "invariant" and not self.config.live.groups_per_step
        is_free = not self._is_held or is_exact
        self.publishing.start(state, step, (lambda: None) if is_free else self.copies.wait)
        self.remember_policy(step, model)

    def commit_published(self) -> None:
        """Commit the step that is being published, once its version is visible and, if the commit must wait for it, its
        checkpoint is durable.
        """
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
        """Start to remove unreferenced payloads in another thread: a long run has many to look through."""
        if self._sweeping is None or self._sweeping.done():
            self._swept_s = time.monotonic()
            self._sweeping = self._sweeper.submit(sweep_payloads, self.folder, self.copies.restorable)
            self._sweeping.add_done_callback(_log_failure)

    def remember_policy(self, version: int, model: CausalModel) -> None:
        """Keep the policy's weights as ``version``: those of ``model``, or with several ranks each rank's part."""
        self.remember(version, state_of(model) if self.config.parallel.ranks == 1 else None)

    def remember(self, version: int, state: Mapping[str, Tensor] | None) -> None:
        """Keep the weights of a version if anything is scored with them again."""
        if self.probe is not None:
            self.probe.remember(version, state)


def _log_failure(sweeping: Future[None]) -> None:
    if (error := sweeping.exception()) is not None:
        logger.error("unreferenced payloads are not removed: %s", trace_of(error))


def payload_refs(groups: Iterable[Group]) -> tuple[PayloadRef, ...]:
    """The payload references of some groups' turns."""
    turns = (turn for group in groups for rollout in group.rollouts for turn in rollout.turns)
    return tuple(turn.payload for turn in turns if turn.payload is not None)


def sweep_payloads(folder: RunFolder, restorable: int) -> None:
    """Remove old unreferenced payloads: routes and masks of evaluations, failed attempts and other callers; turns whose
    rollout was never recorded. A failure is logged and retried in the next sweep.

    Steps after ``restorable``, the newest that can be restored, may have to be repeated.
    """
    try:
        with open_ledger(folder) as ledger:
            in_use = partial(_payloads_in_use, folder, ledger, restorable)
            open_payloads(folder).sweep(in_use, ledger.turns.named, older_than_s=LONGEST_ROLLOUT_S)
    except EtudeError as error:
        logger.warning("unreferenced payloads are not removed yet: %s", error)


def _payloads_in_use(folder: RunFolder, ledger: Ledger, restorable: int) -> list[PayloadRef]:
    """Routes and masks that may still be trained on."""
    refs: list[PayloadRef] = []
    if folder.config().feedback.window_s:
        with open_feedback(folder) as feedback:  # first: sessions move from here to the ledger
            refs += feedback.payloads()
    refs += payload_refs(group for each in (TRAIN, LIVE) for group in ledger.groups(each, UNSETTLED))
    for step in range(restorable + 1, ledger.progress().steps_done + 1):
        refs += payload_refs(ledger.batch(step))
    return refs

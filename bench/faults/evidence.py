"""Reading what a run under fire has in its ledger snapshot, and what it left when it is over.

Owns how the facts are found: the ledger's tables are read as they lie on disk, beside the ledger's own code, and
without disturbing it. What the facts mean is :mod:`bench.faults.audit`'s.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from bench.faults.audit import (
    Closing,
    Computed,
    Ending,
    Evidence,
    LedgerSnapshot,
    Terms,
    Weights,
)
from bench.faults.database import locked, query, split
from bench.faults.snapshot import QUESTIONS, snapshot_of
from etude.config.recipe import RunConfig
from etude.config.rollouts import CodingOptions
from etude.errors import InfrastructureError
from etude.ledger.ledger import TRAIN
from etude.models.checkpoint import load_spec
from etude.rollouts.task_order import TaskOrder
from etude.run.folder import RunFolder
from etude.run.numerics import published_state, training_model
from etude.run.stores import open_ledger
from etude.run.task_families import open_family
from etude.run.trainer_group import optimisation_of
from etude.run.weight_log import open_log
from etude.telemetry.events import Logged, RolloutClosed, StepDone
from etude.telemetry.log import EventReader
from etude.trainer.checkpoint import Checkpoints
from etude.weights.digest import state_digest
from etude.weights.repair import verify
from etude.weights.tensors import to_stored

BUSY_S = 5.0
"""Maximum time that a reader waits for a lock."""


def read_snapshot(folder: RunFolder) -> LedgerSnapshot | None:
    """The ledger's current snapshot; ``None`` while it cannot be read."""
    place = split(folder.ledger)
    answers = query(place, QUESTIONS) if place is not None else _read_file(folder.ledger)
    return None if answers is None else snapshot_of(answers)


def read_evidence(folder: RunFolder, snapshot: LedgerSnapshot) -> Evidence:
    """All evidence that a finished run left. Raises :class:`~etude.errors.DamagedError` for unreadable parts."""
    config = folder.config()
    harness = config.harness.options
    assert isinstance(harness, CodingOptions)
    events = EventReader(folder.events).new()
    return Evidence(
        terms=Terms(
            steps=config.trainer.steps,
            groups_per_step=config.rollouts.groups_per_step,
            max_turns=harness.max_turns,
            max_attempts=config.rollouts.max_attempts,
        ),
        snapshot=snapshot,
        drawn=_drawn(folder, config),
        endings=tuple(_endings(folder)),
        closings=tuple(_closings(events)),
        computed=tuple(_computed(events)),
        weights=read_weights(folder),
    )


def read_weights(folder: RunFolder) -> Weights:
    """Verified contents of the weight log, and the version that the newest checkpoint would publish."""
    log = open_log(folder)
    versions = tuple(log.versions())
    newest = log.read(versions[-1]) if versions else None
    return Weights(
        versions=versions,
        faults=tuple(f"{check.name}: {check.fault}" for check in verify(log) if check.fault is not None),
        published="" if newest is None else newest.digest,
        lineage=lineage_digest(folder),
    )


def lineage_digest(folder: RunFolder) -> str:
    """Digest of what the newest checkpoint would publish. Raises :class:`~etude.errors.DamagedError` without one."""
    config = folder.config()
    spec = load_spec(folder.model)
    model = training_model(spec, config.numerics, "cpu")
    optimisation = optimisation_of(model, config)
    checkpoints = Checkpoints(folder.checkpoints)
    optimisation.restore(checkpoints.load(max(checkpoints.steps(), default=0)))
    return state_digest(to_stored(published_state(model, config.numerics)))


@contextmanager
def locked_ledger(folder: RunFolder) -> Iterator[None]:
    """Hold the ledger's lock. Raises :class:`~etude.errors.InfrastructureError` if it cannot be had."""
    place = split(folder.ledger)
    if place is not None:
        with locked(place):
            yield
        return
    with closing(sqlite3.connect(folder.ledger, timeout=BUSY_S, isolation_level=None)) as db:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise InfrastructureError(f"the ledger {folder.ledger} cannot be locked: {error}") from error
        yield


def _read_file(file: str) -> list[list[tuple[Any, ...]]] | None:
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=BUSY_S)) as db:
            db.execute("BEGIN")  # one moment
            return [db.execute(question).fetchall() for question in QUESTIONS]
    except sqlite3.OperationalError:
        return None


def _drawn(folder: RunFolder, config: RunConfig) -> tuple[tuple[str, int], ...]:
    order = TaskOrder(open_family(config), seed=config.seed)
    with open_ledger(folder) as ledger:
        drawn = ledger.progress().drawn
    draws = (order.draw(position) for position in range(drawn))
    return tuple((draw.task.task_id, draw.epoch) for draw in draws)


def _endings(folder: RunFolder) -> Iterator[Ending]:
    with open_ledger(folder) as ledger:
        for group in ledger.groups(TRAIN):
            for rollout in group.rollouts:
                yield Ending(
                    rollout_id=rollout.rollout_id,
                    reason=rollout.reason,
                    turns=len(rollout.turns),
                    last_finish=rollout.turns[-1].finish if rollout.turns else None,
                )


def _closings(events: list[Logged]) -> Iterator[Closing]:
    for logged in events:
        if isinstance(logged.event, RolloutClosed) and logged.event.purpose == TRAIN:
            event = logged.event
            yield Closing(rollout_id=event.rollout_id, status=event.status, reward=event.reward)


def _computed(events: list[Logged]) -> Iterator[Computed]:
    for logged in events:
        if isinstance(logged.event, StepDone):
            step = logged.event
            batch = tuple(
                step.metrics[name] for name in ("reward_mean", "loss_tokens", "staleness_sum", "staleness_tokens")
            )
            yield Computed(step.step, batch)

"""Mid-training and SFT, each in one process or a group of ranks; the last phase publishes weight version 0.

    model of the previous phase ──▶ steps, checkpoints with the data's cursor ──▶ its model ──▶ next phase, or version 0

A phase can be killed and restarted at any point: it continues from its newest checkpoint with exactly the steps that it
would have taken. A finished phase is never repeated, and once version 0 is committed nothing is left to do.

Each rank reads its own part of every batch, so ranks need no commands. Only rank 0 decides whether there is a phase to
run, writes events and copies, and saves the model.
"""

import math
import os
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from etude.closing import Closing
from etude.errors import RunFolderError
from etude.models.adapters import attach, merge
from etude.models.checkpoint import load_state, state_of
from etude.models.decoder import Decoder
from etude.models.hf import CausalModel
from etude.run.checkpoint_copies import CheckpointCopies, copy_model, restore_checkpoint, restore_model
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.heartbeat import Heartbeat
from etude.run.numerics import adapter_spec
from etude.run.phase_data import batch_schedule, cursor_tensors, open_reading, read_cursors
from etude.run.phase_folders import (
    Phase,
    PhaseFolders,
    PhaseRecord,
    check_complete,
    checkpoints_place,
    model_place,
    parallel_of,
    phases_of,
    place,
    settings_of,
    write_record,
)
from etude.run.phase_models import (
    copy_tokenizer,
    digest_of,
    make_start,
    optimisation_of,
    prepare,
    publish_start,
    read_model,
    save_model,
    sharded_model,
)
from etude.run.process_name import ProcessName
from etude.run.store_outages import StoreOutages
from etude.run.weight_log import open_log
from etude.tasks.corpora.mixture import Cursor, Taken
from etude.telemetry.events import Event, HeldoutLoss, ImitationProgress, PhaseEnded
from etude.telemetry.log import EventLog
from etude.tokens.jinja import load_format
from etude.trainer.batching.packing import Cost, pack
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.imitation import ImitationTrainer, Loss
from etude.trainer.parallel import Grid, joined
from etude.trainer.whole_copy import WholeCopy
from etude.types import Document

REPORT_EVERY_STEPS, REPORT_S = 20, 5.0
"""Steps between progress events, about a second on a laptop; and the longest time between them, for slow steps."""
BEGIN, NOTHING = b"begin", b"nothing"
"""Messages of rank 0 to the others: run the phase, or nothing to do."""


def run_phase(folder: RunFolder, phase: Phase) -> None:
    """Run one phase, or this rank's part of it, unless it is done; after the last one publish version 0.

    Raises :class:`~etude.errors.RunFolderError` when the phase is not the next one, or no phase of the recipe.
    """
    config = folder.config()
    if phase not in phases_of(config):
        raise RunFolderError(f"{folder.path} has no phase {phase!r}: set sft.file in its run.toml")
    with joined(parallel_of(config, phase), config.trainer.device) as grid:
        if grid is None or grid.rank == 0:
            lead(folder, phase, grid)
        elif grid.broadcast(b"") == BEGIN:
            bring(folder, phase, grid)
            outages = StoreOutages(folder.store, config.rollouts.max_outage_s)  # only rank 0 reports them
            with PhaseProcess(folder, phase, None, outages, grid) as process:
                process.run()


def lead(folder: RunFolder, phase: Phase, grid: Grid | None) -> None:
    """Run a phase as rank 0, or alone."""
    config, lineage = folder.config(), PhaseFolders(folder)
    with (
        open_events(folder, ProcessName(command=phase)) as events,
        StoreOutages(folder.store, config.rollouts.max_outage_s, events) as outages,
    ):
        is_published = open_log(folder, outages).latest() is not None
        is_due = not is_published and is_next(folder, phase)
        if is_due and lineage.origin(phase, config) == lineage.model("start"):
            place(lineage.model("start"), lambda target: make_start(target, config))
            copy_model(folder, model_place("start"), outages)
        if grid is not None:
            grid.broadcast(BEGIN if is_due else NOTHING)
        if is_due:
            bring(folder, phase, grid)
            with PhaseProcess(folder, phase, events, outages, grid) as process:
                process.run()
            copy_model(folder, model_place(phase), outages)
        if is_published:
            check_complete(lineage, config)
        elif not lineage.pending(config):
            publish_start(folder, lineage.model(phases_of(config)[-1]), events, outages)


def is_next(folder: RunFolder, phase: Phase) -> bool:
    """True if the phase is still to be done. Raises :class:`~etude.errors.RunFolderError` if another
    phase comes first.
    """
    bring_models(folder)
    pending = PhaseFolders(folder).pending(folder.config())
    if phase in pending and pending[0] != phase:
        fix = f"run `etude {pending[0]} --run {folder.path}` first"
        raise RunFolderError(f"{phase} comes after {pending[0]}, which is not done: {fix}")
    return phase in pending


def bring(folder: RunFolder, phase: Phase, grid: Grid | None) -> None:
    """Download the initial model and checkpoint of a phase from the run's URL to each machine; the ranks continue
    together.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        bring_models(folder)
        restore_checkpoint(folder, checkpoints_place(phase))
    if grid is not None:
        grid.largest(0)  # a barrier: no rank gets a number before all have downloaded


def bring_models(folder: RunFolder) -> None:
    """Download the models of the phases done so far."""
    restore_model(folder, model_place("start"))
    for phase in phases_of(folder.config()):
        restore_model(folder, model_place(phase))


class PhaseProcess(Closing):
    """The resources of a phase, or of this rank's part of it, opened from a run folder."""

    def __init__(
        self, folder: RunFolder, phase: Phase, events: EventLog | None, outages: StoreOutages, grid: Grid | None
    ) -> None:
        """``events`` is set on rank 0 only."""
        self._phase = phase
        self._events = events
        self._grid = grid
        self._config = folder.config()
        self._settings = settings_of(self._config, phase)
        self._lineage = PhaseFolders(folder)
        torch.set_num_threads(self._settings.threads)
        self._origin = self._lineage.origin(phase, self._config)
        self._chat = load_format(self._origin, self._config.gateway.chat_template_kwargs)
        self._share, self._shares = (0, 1) if grid is None else (grid.share, grid.shares)
        self._reading = open_reading(
            self._config, phase, self._chat, folder.path, reader=self._share, readers=self._shares
        )
        self._parent, self._model = self._open_model()
        self._cost = Cost.of_model(self._model.spec)
        for later in phases_of(self._config)[phases_of(self._config).index(phase) + 1 :]:
            open_reading(self._config, later, self._chat, folder.path)  # fails now rather than hours later
        self._tokens = 0
        """Tokens that all ranks have read."""
        self._ends = list(accumulate(batch_schedule(self._settings, self._reading.tokens).budgets()))
        """Cumulative tokens read after each step."""
        self._steps = len(self._ends)
        self._optimisation = optimisation_of(self._model, self._config, self._settings, steps=self._steps, grid=grid)
        self._trainer = ImitationTrainer(self._optimisation, grid)
        self._checkpoints = Checkpoints(self._lineage.checkpoints(phase), None if grid is None else grid.everyone)
        self._copies = CheckpointCopies(folder, outages, checkpoints_place(phase))

    def close(self) -> None:
        """Wait for the checkpoint copy in progress."""
        self._copies.close()

    def run(self) -> None:
        """Take the remaining steps and save the resulting model."""
        step, cursor = self._recover()
        loss = self._measure(step)
        recent, since_s, first = Loss(), time.perf_counter(), step + 1
        while step < self._steps:
            step += 1
            documents, cursor = self._reading.stream.batch(cursor, self._ends[step - 1])
            if passes := self._passes(documents):
                learnt = self._trainer.step(step, passes)
                recent, self._tokens = recent + learnt, self._tokens + learnt.tokens
            now_s = time.perf_counter()
            if step == first or now_s - since_s > REPORT_S or self._is_due(step, REPORT_EVERY_STEPS):
                self._report(step, recent, now_s - since_s)
                recent, since_s = Loss(), now_s
            if self._is_due(step, self._settings.checkpoint_steps):
                self._save(step, cursor)
            if self._is_due(step, self._config.eval.loss_every_steps):
                loss = self._measure(step)
        self._end(loss)

    def _is_due(self, step: int, every: int) -> bool:
        """True at multiples of ``every`` and at the last step; 0 means only at the last step."""
        return step == self._steps or bool(every and step % every == 0)

    def _open_model(self) -> tuple[str, CausalModel]:
        """Load the model: (digest of the phase's initial weights, on rank 0 only; the model on its training device)."""
        if self._grid is not None:
            parent = digest_of(read_model(self._origin, self._config.model.impl)) if self._is_first else ""
            return parent, sharded_model(self._origin, self._config, self._grid)
        model = read_model(self._origin, self._config.model.impl)
        parent = digest_of(model)
        if self._reading.tokens:  # without data there is nothing to compute: the model stays on the host
            if self._config.lora.trains(self._phase):
                assert isinstance(model, Decoder), "refused with the recipe"
                attach(model, adapter_spec(self._config), base=parent, seed=self._config.seed)
            prepare(model, self._config)
        return parent, model

    @property
    def _is_first(self) -> bool:
        """True on rank 0, the only rank that writes anything other than checkpoints."""
        return self._events is not None

    def _save(self, step: int, cursor: Cursor) -> None:
        if self._is_first:
            self._copies.finish(Heartbeat().beat)
        cursors = [cursor] if self._grid is None else self._gathered(cursor, self._grid)
        self._checkpoints.save(step, self._optimisation.tensors() | cursor_tensors(cursors, self._identity))
        if self._is_first:
            self._copies.start(step)

    def _gathered(self, cursor: Cursor, grid: Grid) -> list[Cursor]:
        """The cursors of all readers."""
        names = sorted(self._reading.stream.sources)
        own = [number for name in names for number in (cursor.of(name).documents, cursor.of(name).tokens)]
        rows = grid.by_share(own)
        return [
            Cursor(taken={name: Taken(documents=row[2 * at], tokens=row[2 * at + 1]) for at, name in enumerate(names)})
            for row in rows
        ]

    @property
    def _identity(self) -> str:
        """Digest of everything that determines the batches, so that a cursor is never applied to other data."""
        return f"{self._reading.stream.identity}; {self._ends}"

    def _recover(self) -> tuple[int, Cursor]:
        """Load the newest checkpoint; returns its step and this reader's cursor at that step."""
        saved = max(self._checkpoints.steps(), default=0)
        if not saved:
            return 0, Cursor()
        tensors = self._checkpoints.load(saved, self._optimisation.like)
        cursors = read_cursors(tensors, self._identity, self._shares)
        self._optimisation.restore(tensors)
        self._tokens = sum(cursor.tokens for cursor in cursors)
        return saved, cursors[self._share]

    def _passes(self, documents: Sequence[Document]) -> list[list[Document]]:
        """Pack this rank's documents into passes; all ranks have the number of passes of the rank that needs most."""
        lengths = [len(document.token_ids) for document in documents]
        most = self._config.trainer.microbatch_tokens * self._config.parallel.cp
        (packed,) = pack(lengths, max_tokens=most, ranks=1, cost=self._cost)
        passes = [[documents[index] for index in microbatch] for microbatch in packed]
        if self._grid is not None:
            passes += [[] for _ in range(self._grid.largest(len(passes)) - len(passes))]
        return passes

    def _measure(self, step: int) -> float | None:
        """The held-out loss after a step; ``None`` if no data is held out."""
        losses = {
            name: self._trainer.measure(self._passes(documents[self._share :: self._shares]))
            for name, documents in self._reading.heldout.items()
        }
        if not losses:
            return None
        shares = {name: self._reading.stream.mixture.due(name, self._reading.tokens) for name in losses}
        mean = sum(share * losses[name].mean for name, share in shares.items()) / sum(shares.values())
        self._write(
            HeldoutLoss(
                phase=self._phase,
                step=step,
                tokens=self._tokens,
                loss=mean,
                action_loss=_finite(sum(losses.values(), Loss()).action_mean),
                sources={name: loss.mean for name, loss in losses.items()},
            )
        )
        return mean

    def _report(self, step: int, recent: Loss, seconds: float) -> None:
        self._write(
            ImitationProgress(
                phase=self._phase,
                step=step,
                steps=self._steps,
                tokens=self._tokens,
                loss=_finite(recent.mean),
                action_loss=_finite(recent.action_mean),
                tokens_per_s=recent.tokens / seconds,
            )
        )

    def _write(self, event: Event) -> None:
        """Write an event, on rank 0 only."""
        if self._events is not None:
            self._events.write(event)

    def _whole(self) -> CausalModel | None:
        """The final model of the phase, on rank 0; an adapter is merged into the original weights in float32."""
        if self._grid is not None:
            return WholeCopy(self._model, self._grid.everyone, {}).update()
        if self._model.adapters is None:
            return self._model
        whole = read_model(self._origin)
        assert isinstance(whole, Decoder), "refused with the recipe"
        attach(whole, adapter_spec(self._config), base=self._parent)
        load_state(whole, state_of(self._model))
        merge(whole)
        return whole

    def _end(self, loss: float | None) -> None:
        whole = self._whole()
        if whole is None:
            return
        record = PhaseRecord(
            phase=self._phase,
            steps=self._steps,
            tokens=self._tokens,
            loss=loss,
            digest=digest_of(whole),
            parent=self._parent,
        )

        def fill(target: Path) -> None:
            copy_tokenizer(self._origin, target)
            save_model(target, whole, load_format(target))
            write_record(target, record)

        place(self._lineage.model(self._phase), fill)
        self._write(
            PhaseEnded(
                phase=record.phase,
                steps=record.steps,
                tokens=record.tokens,
                loss=loss,
                digest=record.digest,
                parent=record.parent,
            )
        )


def _finite(value: float) -> float | None:
    """A mean; ``None`` for NaN, that of no token."""
    return None if math.isnan(value) else value

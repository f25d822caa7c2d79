"""Mid-training and SFT, each a process, and the publication of weight version 0 after the last of them.

    model of the phase before ──▶ steps, checkpoints with the data's cursor ──▶ its model ──▶ next phase, or version 0

Safe to kill and start again at any point: a phase goes on from its newest checkpoint and takes the very steps that it
would have taken, one that is done is never done again, and once version 0 is committed nothing is left to do.
"""

import hashlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from etude.closing import Closing
from etude.config.data_paths import change_source, in_run
from etude.config.imitation import FAMILY_SOURCES, ImitationConfig
from etude.config.recipe import RunConfig, has_drafts
from etude.config.training import ModelShape
from etude.errors import RunFolderError
from etude.models.adapters import attach, merge
from etude.models.checkpoint import (
    Impl,
    StoredCheckpoint,
    load_spec,
    load_state,
    save_checkpoint,
    spec_from_shape,
    state_of,
)
from etude.models.decoder import Decoder
from etude.models.fast import FastArithmetic, multiplies_bfloat16
from etude.models.hf import CausalModel, make_causal_model
from etude.models.spec import ModelSpec
from etude.run.checkpoint_copies import CheckpointCopies, copy_model, restore_checkpoint, restore_model
from etude.run.draft_head import with_draft_head
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.heartbeat import Heartbeat
from etude.run.numerics import DTYPES, adapter_spec, choose_arithmetic, frozen_base, published_state, training_model
from etude.run.phase_folders import (
    Phase,
    PhaseFolders,
    PhaseRecord,
    check_complete,
    checkpoints_place,
    model_place,
    phases_of,
    place,
    write_record,
)
from etude.run.process_name import ProcessName
from etude.run.publishing import WeightPublishing
from etude.run.resolve import resolve_device
from etude.run.store_outages import StoreOutages
from etude.run.task_families import open_demonstrations
from etude.run.weight_log import open_log
from etude.run.working_folder import MODEL, keep
from etude.tasks.corpora.conversations import Conversations
from etude.tasks.corpora.corpus import demonstration_sources, tokenizer_texts
from etude.tasks.corpora.mixture import BatchStream, Cursor, Mixture, Side, Source, Taken, heldout_documents
from etude.tasks.corpora.texts import PlainText, TextFiles
from etude.telemetry.events import HeldoutLoss, ImitationProgress, PhaseEnded
from etude.telemetry.log import EventLog
from etude.tokens.chat import ChatTemplate
from etude.tokens.jinja import load_format
from etude.tokens.messages import ChatFormat
from etude.trainer.batching.packing import Cost, pack
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.imitation import ImitationTrainer, Loss
from etude.trainer.optimisation import BatchSchedule, Optimisation, RateSchedule, build_optimiser
from etude.types import Document, Json, Split
from etude.weights.digest import state_digest
from etude.weights.tensors import to_stored

REPORT_EVERY_STEPS, REPORT_S = 20, 5.0
"""Steps between progress events, about a second on a laptop; and the longest time between them, for slow steps."""
HELDOUT_DOCUMENTS = 64
"""Held-out documents of each source on which the loss is measured: some ten thousand tokens, a second's work."""
CURSOR, IDENTITY = "cursor", "identity"
"""In a checkpoint: ``cursor/<source>`` int64 [documents, tokens]; ``identity`` uint8 [32] of the data."""
DOCUMENT_BYTES = 1_024
"""Longest part of a text file that is one document: some hundred tokens, so that it fits any context."""
BETAS, WEIGHT_DECAY, CLIP_NORM = (0.9, 0.98), 0.05, 1.0
"""AdamW's moment decay rates, the decay of matrices, and the bound on the global gradient norm. A short memory of
second moments (0.98) follows the gradients of the first steps from random weights; the others are the common choice.
"""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "generation_config.json", "additional_chat_templates"),
)
"""Files that a model folder hands down to the next, where they are there."""


def run_phases(folder: RunFolder) -> None:
    """Run every missing phase of the recipe in this process, and publish version 0."""
    for phase in phases_of(folder.config()):
        run_phase(folder, phase)


def run_phase(folder: RunFolder, phase: Phase) -> None:
    """Run one phase, unless it is done; after the last one publish version 0.

    Raises :class:`~etude.errors.RunFolderError` when the phase is not the next one, or no phase of the recipe.
    """
    config, lineage = folder.config(), PhaseFolders(folder)
    if phase not in phases_of(config):
        raise RunFolderError(f"{folder.path} has no phase {phase!r}: set sft.file in its run.toml")
    with (
        open_events(folder, ProcessName(command=phase)) as events,
        StoreOutages(folder.store, config.rollouts.max_outage_s, events) as outages,
    ):
        if open_log(folder, outages).latest() is not None:
            check_complete(lineage, config)
            return
        restore_model(folder, model_place("start"))
        for earlier in phases_of(config):
            restore_model(folder, model_place(earlier))
        pending = lineage.pending(config)
        if phase in pending:
            if pending[0] != phase:
                fix = f"run `etude {pending[0]} --run {folder.path}` first"
                raise RunFolderError(f"{phase} comes after {pending[0]}, which is not done: {fix}")
            restore_checkpoint(folder, checkpoints_place(phase))
            with PhaseProcess(folder, phase, events, outages) as process:
                process.run()
            copy_model(folder, model_place(phase), outages)
        if not lineage.pending(config):
            publish_start(folder, lineage.model(phases_of(config)[-1]), events, outages)


class PhaseProcess(Closing):
    """The resources of a phase, opened from a run folder."""

    def __init__(self, folder: RunFolder, phase: Phase, events: EventLog, outages: StoreOutages) -> None:
        self._phase = phase
        self._events = events
        self._config = folder.config()
        self._settings = settings_of(self._config, phase)
        self._lineage = PhaseFolders(folder)
        torch.set_num_threads(self._settings.threads)
        self._origin = self._lineage.origin(phase, self._config)
        if self._origin == self._lineage.model("start"):
            place(self._origin, lambda target: make_start(target, self._config))
            copy_model(folder, model_place("start"), outages)
        self._chat = load_format(self._origin, self._config.gateway.chat_template_kwargs)
        self._model = read_model(self._origin, self._config.model.impl)
        self._parent = digest_of(self._model)
        spec = self._model.spec
        self._cost = Cost.of_model(spec)
        self._reading = open_reading(self._config, phase, self._chat, folder.path)
        if self._reading.tokens:  # what reads nothing computes nothing: its model stays on the host
            if self._config.lora.trains(phase):
                assert isinstance(self._model, Decoder), "refused with the recipe"
                attach(self._model, adapter_spec(self._config), base=self._parent, seed=self._config.seed)
            prepare(self._model, self._config)
        for later in phases_of(self._config)[phases_of(self._config).index(phase) + 1 :]:
            open_reading(self._config, later, self._chat, folder.path)  # refused now, or hours later
        self._ends = list(accumulate(batch_schedule(self._settings, self._reading.tokens).budgets()))
        """Tokens that have been read once each step is taken."""
        self._steps = len(self._ends)
        self._optimisation = optimisation_of(self._model, self._config, self._settings, steps=self._steps)
        self._trainer = ImitationTrainer(self._optimisation)
        self._checkpoints = Checkpoints(self._lineage.checkpoints(phase))
        self._copies = CheckpointCopies(folder, outages, checkpoints_place(phase))

    def close(self) -> None:
        """Wait for the copy of a checkpoint under way."""
        self._copies.close()

    def run(self) -> None:
        """Take the steps that are left, and leave the model that they end with."""
        step, cursor = self._recover()
        loss = self._measure(step, cursor)
        recent, since_s, first = Loss(), time.perf_counter(), step + 1
        while step < self._steps:
            step += 1
            documents, cursor = self._reading.stream.batch(cursor, self._ends[step - 1])
            if documents:
                recent += self._trainer.step(step, self._microbatches(documents))
            now_s = time.perf_counter()
            if step == first or now_s - since_s > REPORT_S or self._is_due(step, REPORT_EVERY_STEPS):
                self._report(step, cursor, recent, now_s - since_s)
                recent, since_s = Loss(), now_s
            if self._is_due(step, self._settings.checkpoint_steps):
                self._copies.finish(Heartbeat().beat)
                self._checkpoints.save(step, self._optimisation.tensors() | cursor_tensors(cursor, self._identity))
                self._copies.start(step)
            if self._is_due(step, self._config.eval.loss_every_steps):
                loss = self._measure(step, cursor)
        self._end(cursor, loss)

    def _is_due(self, step: int, every: int) -> bool:
        """True if something that is done every so many steps, and after the last one, is to be done; 0: only then."""
        return step == self._steps or bool(every and step % every == 0)

    @property
    def _identity(self) -> str:
        """Digest of all that decides the batches, so that no cursor is read for other data."""
        return f"{self._reading.stream.identity}; {self._ends}"

    def _recover(self) -> tuple[int, Cursor]:
        """Go to the newest checkpoint; returns its step and what had been read by then."""
        saved = max(self._checkpoints.steps(), default=0)
        if not saved:
            return 0, Cursor()
        tensors = self._checkpoints.load(saved)
        cursor = read_cursor(tensors, self._identity)
        self._optimisation.restore(tensors)
        return saved, cursor

    def _microbatches(self, documents: Sequence[Document]) -> list[list[Document]]:
        """A batch in as many passes as its tokens need."""
        lengths = [len(document.token_ids) for document in documents]
        (passes,) = pack(lengths, max_tokens=self._config.trainer.microbatch_tokens, ranks=1, cost=self._cost)
        return [[documents[index] for index in microbatch] for microbatch in passes]

    def _measure(self, step: int, cursor: Cursor) -> float | None:
        """The held-out loss after a step; ``None`` where nothing is held out."""
        losses = {
            name: self._trainer.measure(self._microbatches(documents))
            for name, documents in self._reading.heldout.items()
        }
        if not losses:
            return None
        shares = {name: self._reading.stream.mixture.due(name, self._reading.tokens) for name in losses}
        mean = sum(share * losses[name].mean for name, share in shares.items()) / sum(shares.values())
        self._events.write(
            HeldoutLoss(
                phase=self._phase,
                step=step,
                tokens=cursor.tokens,
                loss=mean,
                action_loss=_or_zero(sum(losses.values(), Loss()).action_mean),
                sources={name: loss.mean for name, loss in losses.items()},
            )
        )
        return mean

    def _report(self, step: int, cursor: Cursor, recent: Loss, seconds: float) -> None:
        self._events.write(
            ImitationProgress(
                phase=self._phase,
                step=step,
                steps=self._steps,
                tokens=cursor.tokens,
                loss=_or_zero(recent.mean),
                action_loss=_or_zero(recent.action_mean),
                tokens_per_s=recent.tokens / seconds,
            )
        )

    def _whole(self) -> CausalModel:
        """The model that the phase ends with; an adapter is merged into the weights as they were, in float32."""
        if self._model.adapters is None:
            return self._model
        whole = read_model(self._origin)
        assert isinstance(whole, Decoder), "refused with the recipe"
        attach(whole, adapter_spec(self._config), base=self._parent)
        load_state(whole, state_of(self._model))
        merge(whole)
        return whole

    def _end(self, cursor: Cursor, loss: float | None) -> None:
        whole = self._whole()
        record = PhaseRecord(
            phase=self._phase,
            steps=self._steps,
            tokens=cursor.tokens,
            loss=loss,
            digest=digest_of(whole),
            parent=self._parent,
        )

        def fill(target: Path) -> None:
            hand_down(self._origin, target)
            save_model(target, whole, load_format(target))
            write_record(target, record)

        place(self._lineage.model(self._phase), fill)
        self._events.write(
            PhaseEnded(
                phase=record.phase,
                steps=record.steps,
                tokens=record.tokens,
                loss=loss or 0.0,
                digest=record.digest,
                parent=record.parent,
            )
        )


def prepare(model: CausalModel, config: RunConfig) -> None:
    """Move a model to where it is trained. There is no engine yet to agree with, so the arithmetic is the fast one: in
    float32 on a CPU, with bfloat16 products where the run is a bfloat16 one and the processor multiplies these faster;
    elsewhere in the type that the run will compute with.
    """
    device = resolve_device(config.trainer.device)
    model.to(device).train()
    model.recompute = config.trainer.recomputes
    if device != "cpu":
        model.arithmetic = choose_arithmetic(config.numerics.model_copy(update={"arithmetic": "fast"}), device)
        for frozen in (parameter for parameter in model.parameters() if not parameter.requires_grad):
            frozen.data = frozen.data.to(DTYPES[config.numerics.stored_dtype])
    elif config.numerics.dtype == "bfloat16" and multiplies_bfloat16():
        model.arithmetic = FastArithmetic(products=torch.bfloat16)


def batch_schedule(settings: ImitationConfig, tokens: int) -> BatchSchedule:
    """The batch-size schedule of a phase of ``tokens``."""
    first = settings.first_batch_tokens or settings.batch_tokens
    return BatchSchedule(tokens=tokens, first=first, last=settings.batch_tokens, ramp_share=settings.ramp_share)


def optimisation_of(model: CausalModel, config: RunConfig, settings: ImitationConfig, *, steps: int) -> Optimisation:
    """The optimiser and schedules of a phase of so many steps."""
    optimiser = build_optimiser(
        model,
        config.optimiser,
        learning_rate=settings.learning_rate,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
    )
    schedule = RateSchedule(
        steps=steps,
        warmup_steps=settings.warmup_steps,
        decay_share=settings.decay_share,
        shape=settings.schedule,
    )
    return Optimisation(model, optimiser, schedule, clip_norm=CLIP_NORM, progress=Heartbeat().beat)


def make_start(target: Path, config: RunConfig) -> None:
    """Make a random model in ``target``, with a tokenizer trained on the data that it will read."""
    shape = config.model.shape
    assert isinstance(shape, ModelShape), "a checkpoint is a start by itself"
    chat = ChatTemplate.train(tokenizer_texts(open_demonstrations(config), config.seed), shape.vocab_size)
    model = Decoder(spec_from_shape(shape, chat.vocab_size))
    model.initialise(config.seed)
    chat.save(target)
    save_model(target, model, chat)


def publish_start(folder: RunFolder, origin: Path, events: EventLog, outages: StoreOutages) -> None:
    """Make the last phase's model the run's model, and publish it as weight version 0: as the base of all versions an
    adapter over it that changes nothing, where RL trains one.
    """
    config = folder.config()
    place(folder.model, lambda target: _make_model(origin, target, config))
    keep(folder, *MODEL, outages=outages)  # weights are of no use without it
    with WeightPublishing(open_log(folder, outages), config.name, events) as publishing, outages:
        base, impl = frozen_base(folder.model, config), config.model.impl
        spec = load_spec(folder.model, impl)
        model = read_model(folder.model, impl) if base is None else training_model(spec, config.numerics, "cpu", base)
        publishing.start(published_state(model, config.numerics), 0)
        publishing.land()


def read_model(origin: Path, impl: Impl = "native") -> CausalModel:
    """Load a Hugging Face model folder, in float32. Raises :class:`~etude.errors.DamagedError`."""
    stored = StoredCheckpoint(origin, impl)
    model = make_causal_model(stored.spec)
    stored.load(model)
    return model


def save_model(target: Path, model: CausalModel, chat: ChatFormat) -> None:
    """Write a model's float32 weights and config into ``target``."""
    save_state(target, model.spec, state_of(model), chat, extra={})


def save_state(
    target: Path, spec: ModelSpec, state: Mapping[str, Tensor], chat: ChatFormat, extra: Mapping[str, Json]
) -> None:
    """Write weights and config into ``target``, with the ids of end and padding tokens; ``extra`` goes beside."""
    end_id = chat.stop_ids[0]
    pad_id = chat.pad_id if isinstance(chat, ChatTemplate) else end_id
    save_checkpoint(target, spec, state, end_id=end_id, pad_id=pad_id, extra=extra)


def cursor_tensors(cursor: Cursor, identity: str) -> dict[str, Tensor]:
    """The data cursor as tensors of a checkpoint, so that weights and data position are saved together."""
    tensors = {
        f"{CURSOR}/{name}": torch.tensor([taken.documents, taken.tokens]) for name, taken in cursor.taken.items()
    }
    return tensors | {IDENTITY: _fingerprint(identity)}


def read_cursor(tensors: Mapping[str, Tensor], identity: str) -> Cursor:
    """The inverse of :func:`cursor_tensors`. Raises :class:`~etude.errors.RunFolderError` if the data has changed."""
    if not torch.equal(tensors[IDENTITY], _fingerprint(identity)):
        raise RunFolderError(
            f"the checkpoint was made with other data or another schedule than {identity[:400]}: restore the files and "
            f"run.toml, or start a new run"
        )
    taken = {
        name.removeprefix(f"{CURSOR}/"): Taken(documents=int(tensor[0]), tokens=int(tensor[1]))
        for name, tensor in tensors.items()
        if name.startswith(f"{CURSOR}/")
    }
    return Cursor(taken=taken)


def digest_of(model: CausalModel) -> str:
    """Digest of a model's float32 weights."""
    return state_digest(to_stored(state_of(model)))


def hand_down(origin: Path, target: Path) -> None:
    """Copy the tokenizer's files from one model folder to another."""
    for name in TOKENIZER_FILES:
        if (origin / name).is_dir():
            shutil.copytree(origin / name, target / name)
        elif (origin / name).is_file():
            shutil.copyfile(origin / name, target / name)


def _make_model(origin: Path, target: Path, config: RunConfig) -> None:
    """Copy a model, or write it anew with a draft head where the recipe has one."""
    if has_drafts(config):
        hand_down(origin, target)
        save_model(target, with_draft_head(origin, config), load_format(origin, config.gateway.chat_template_kwargs))
    else:
        shutil.copytree(origin, target, dirs_exist_ok=True)


def _fingerprint(identity: str) -> Tensor:
    return torch.tensor([*hashlib.sha256(identity.encode()).digest()], dtype=torch.uint8)


def _or_zero(value: float) -> float:
    """NaN is no JSON."""
    return 0.0 if math.isnan(value) else value


HELDOUT_SEED = 0
"""Seed of the held-out documents, the same for every run, so that runs can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationData:
    """The data of a phase."""

    stream: BatchStream
    heldout: Mapping[str, Sequence[Document]]
    """Source → documents that are never learnt from; without those that have none, or where nothing is measured."""

    @property
    def tokens(self) -> int:
        """Tokens of the whole phase."""
        return self.stream.mixture.tokens


def settings_of(config: RunConfig, phase: Phase) -> ImitationConfig:
    """The recipe section of a phase."""
    return config.midtrain if phase == "midtrain" else config.sft


def open_reading(config: RunConfig, phase: Phase, chat: ChatFormat, folder: Path) -> ImitationData:
    """Open the data of a phase: checked sources, their stream, and held-out documents. Sources in the ``folder`` of the
    run are named as its ``run.toml`` names them, so that a checkpoint's cursor is of the same ones on every machine.

    Raises :class:`~etude.errors.ConfigError` for a source that is missing or has lines that cannot be learnt from.
    """
    named = config.midtrain.shares if phase == "midtrain" else {f"chat:{config.sft.file}": (1.0, 1.0)}
    shares = {change_source(name, lambda path: in_run(path, folder)): share for name, share in named.items()}
    files = dict(zip(shares, named, strict=True))
    sources = _open(config, phase, files, chat, Split.TRAIN)
    tokens = config.midtrain.tokens if phase == "midtrain" else config.sft.epochs * _tokens(sources)
    heldout = _open(config, phase, files, chat, Split.HELDOUT) if config.eval.enabled else {}
    by_source = {name: heldout_documents(source, HELDOUT_DOCUMENTS) for name, source in heldout.items()}
    return ImitationData(
        stream=BatchStream(mixture=Mixture(shares=shares, tokens=tokens), sources=sources),
        heldout={name: documents for name, documents in by_source.items() if documents},
    )


def _open(
    config: RunConfig, phase: Phase, files: Mapping[str, str], chat: ChatFormat, split: Split
) -> dict[str, Source]:
    """The sources of a phase by name, on one side of the hold-out; none where the phase reads nothing. ``files`` are
    their names with whole paths.
    """
    if phase == "midtrain" and not config.midtrain.tokens:
        return {}
    seed = config.seed if split is Split.TRAIN else HELDOUT_SEED
    text, side = PlainText(chat), Side(split=split, seed=seed, one_in=config.eval.heldout_every)
    weight = settings_of(config, phase).context_weight
    opened: dict[str, Source] = {}
    if any(name in FAMILY_SOURCES for name in files):
        opened = demonstration_sources(open_demonstrations(config, split), text, side, context_weight=weight)
    for name, file in files.items():
        kind, _, path = file.partition(":")
        if kind == "text":
            opened[name] = TextFiles(Path(path), text, side, chunk_bytes=DOCUMENT_BYTES)
        elif kind == "chat":
            opened[name] = Conversations(Path(path), chat, side, context_weight=weight)
    return {name: opened[name] for name in files}


def _tokens(sources: Mapping[str, Source]) -> int:
    """Sum over all conversations."""
    return sum(source.tokens for source in sources.values() if isinstance(source, Conversations))

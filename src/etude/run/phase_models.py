"""The models of mid-training and SFT: initialised or loaded, trained by one process or several, and saved.

    folder ──▶ model, whole or sharded over ranks, in the arithmetic of a phase ──▶ folder ──▶ weight version 0

:mod:`etude.run.phases` runs the steps.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from etude.config.imitation import ImitationConfig
from etude.config.recipe import RunConfig, has_drafts
from etude.config.training import ModelShape
from etude.models.checkpoint import (
    Impl,
    StoredCheckpoint,
    fill,
    load_spec,
    save_checkpoint,
    spec_from_shape,
    state_of,
)
from etude.models.decoder import Decoder
from etude.models.fast import FastArithmetic, multiplies_bfloat16
from etude.models.hf import CausalModel, make_causal_model
from etude.models.spec import ModelSpec
from etude.run.draft_head import with_draft_head
from etude.run.folder import RunFolder
from etude.run.heartbeat import Heartbeat
from etude.run.numerics import DTYPES, frozen_base, published_state, training_model
from etude.run.phase_folders import place
from etude.run.publishing import WeightPublishing
from etude.run.resolve import resolve_device
from etude.run.store_outages import StoreOutages
from etude.run.task_families import open_demonstrations
from etude.run.weight_log import open_log
from etude.run.working_folder import MODEL, keep
from etude.tasks.corpora.corpus import tokenizer_texts
from etude.telemetry.log import EventLog
from etude.tokens.chat import ChatTemplate
from etude.tokens.jinja import load_format
from etude.tokens.messages import ChatFormat
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
from etude.trainer.parallel import Grid, materialise, parallelise
from etude.types import Json
from etude.weights.digest import state_digest
from etude.weights.tensors import to_stored

BETAS, WEIGHT_DECAY, CLIP_NORM = (0.9, 0.98), 0.05, 1.0
"""AdamW's moment decay rates, the decay of matrices, and the bound on the global gradient norm. A short memory of
second moments (0.98) follows the gradients of the first steps from random weights; the others are the common choice.
"""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "generation_config.json", "additional_chat_templates"),
)
"""Optional files that are copied from one model folder to the next."""


def make_start(target: Path, config: RunConfig) -> None:
    """Create a random model in ``target``, with a tokenizer trained on its training data."""
    shape = config.model.shape
    assert isinstance(shape, ModelShape), "a checkpoint is a start by itself"
    chat = ChatTemplate.train(tokenizer_texts(open_demonstrations(config), config.seed), shape.vocab_size)
    model = Decoder(spec_from_shape(shape, chat.vocab_size))
    model.initialise(config.seed)
    chat.save(target)
    save_model(target, model, chat)


def publish_start(folder: RunFolder, origin: Path, events: EventLog, outages: StoreOutages) -> None:
    """Make the last phase's model the run's model, and publish it as weight version 0. If RL trains an adapter, version
    0 is an adapter on it that changes nothing.
    """
    config = folder.config()
    place(folder.model, lambda target: _make_model(origin, target, config))
    keep(folder, *MODEL, outages=outages)  # weights are useless without the model folder
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
    """Write weights and config into ``target``, with the ids of end and padding tokens; ``extra`` is added to the
    config.
    """
    end_id = chat.stop_ids[0]
    pad_id = chat.pad_id if isinstance(chat, ChatTemplate) else end_id
    save_checkpoint(target, spec, state, end_id=end_id, pad_id=pad_id, extra=extra)


def digest_of(model: CausalModel) -> str:
    """Digest of a model's float32 weights."""
    return state_digest(to_stored(state_of(model)))


def copy_tokenizer(origin: Path, target: Path) -> None:
    """Copy the tokenizer's files from one model folder to another."""
    for name in TOKENIZER_FILES:
        if (origin / name).is_dir():
            shutil.copytree(origin / name, target / name)
        elif (origin / name).is_file():
            shutil.copyfile(origin / name, target / name)


def _make_model(origin: Path, target: Path, config: RunConfig) -> None:
    """Copy a model, or write it with a draft head if the recipe has one."""
    if has_drafts(config):
        copy_tokenizer(origin, target)
        save_model(target, with_draft_head(origin, config), load_format(origin, config.gateway.chat_template_kwargs))
    else:
        shutil.copytree(origin, target, dirs_exist_ok=True)


def prepare(model: CausalModel, config: RunConfig) -> None:
    """Move a whole model to its training device, in a phase's arithmetic; frozen weights get the published type."""
    device = resolve_device(config.trainer.device)
    model.arithmetic = phase_arithmetic(config, device)
    model.to(device).train()
    model.recompute = config.trainer.recomputes
    if device != "cpu":
        for frozen in (parameter for parameter in model.parameters() if not parameter.requires_grad):
            frozen.data = frozen.data.to(DTYPES[config.numerics.stored_dtype])


def sharded_model(origin: Path, config: RunConfig, grid: Grid) -> CausalModel:
    """Read a rank's shards of the model in ``origin``, with at most one whole block in memory at a time; without
    sharding, read all of it.

    Raises :class:`~etude.errors.DamagedError`, and :class:`~etude.errors.ConfigError` for experts that cannot be
    divided over the grid.
    """
    device, stored = resolve_device(config.trainer.device), StoredCheckpoint(origin, config.model.impl)
    with torch.device("meta"):
        model = make_causal_model(stored.spec, phase_arithmetic(config, device))
    stored.check(model)

    def fill_in(part: nn.Module) -> None:
        materialise(part, device)
        fill(part, stored.read)

    parallelise(model, grid, fill_in, torch.float32 if device == "cpu" else DTYPES[config.numerics.stored_dtype])
    model.recompute = config.trainer.recomputes
    return model.train()


def phase_arithmetic(config: RunConfig, device: str) -> FastArithmetic:
    """The arithmetic of a phase. There is no engine yet to agree with, so it is the fast one: float32 on a CPU, with
    bfloat16 products if the run uses bfloat16 and the CPU multiplies it faster; on other devices the run's type.
    """
    if device != "cpu":
        return FastArithmetic(DTYPES[config.numerics.stored_dtype])
    is_faster = config.numerics.dtype == "bfloat16" and multiplies_bfloat16()
    return FastArithmetic(products=torch.bfloat16) if is_faster else FastArithmetic()


def optimisation_of(
    model: CausalModel, config: RunConfig, settings: ImitationConfig, *, steps: int, grid: Grid | None = None
) -> Optimisation:
    """The optimiser and schedules of a phase with ``steps`` steps."""
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
    return Optimisation(model, optimiser, schedule, clip_norm=CLIP_NORM, progress=Heartbeat().beat, grid=grid)

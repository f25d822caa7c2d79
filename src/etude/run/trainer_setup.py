"""The ranks of one trainer take their places: the policy with its weights, sharded over them, and what trains it.

version 0 ──▶ whole model                                        one process
└─▶ meta ──▶ block: memory, weights, its shard ──▶ …   several: no device ever holds more than a block
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from etude.config.recipe import RunConfig
from etude.models.checkpoint import check_state, fill, load_spec, load_state
from etude.models.decoder import Decoder
from etude.run.folder import RunFolder
from etude.run.liveness import Heartbeat
from etude.run.numerics import decoded_state, training_model, unfilled_model
from etude.run.tensors import to_tensors
from etude.run.trainer_group import Crew
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.optimisation import Optimisation
from etude.trainer.optimisers import build_optimiser
from etude.trainer.parallel import Grid, materialise, parallelise
from etude.trainer.policy import PolicyTrainer
from etude.trainer.schedule import RateSchedule
from etude.weights.log import WeightLog
from etude.weights.pull import pull


def muster(folder: RunFolder, config: RunConfig, grid: Grid | None, log: WeightLog) -> Crew:
    """The crew that trains the policy. Raises as :func:`policy_model` does."""
    context = None if grid is None else grid.context
    model = policy_model(folder, config, grid, log)
    policy = PolicyTrainer(optimisation_of(model, config), config.loss, config.numerics, context, config.hints)
    return Crew(policy, Checkpoints(folder.checkpoints, None if grid is None else grid.everyone), grid)


def policy_model(folder: RunFolder, config: RunConfig, grid: Grid | None, log: WeightLog) -> Decoder:
    """The model to be trained, sharded over the ranks: of version 0, or without weights where a checkpoint has them.

    Raises :class:`~etude.errors.ConfigError` where it cannot be divided.
    """
    torch.set_num_threads(config.trainer.threads)
    spec, numerics, device = load_spec(folder.model), config.numerics, config.trainer.device
    state: Mapping[str, Tensor] | None = None
    if not Checkpoints(folder.checkpoints).steps():
        state = decoded_state(to_tensors(pull(log, 0).state), numerics)
    if grid is None:
        model = training_model(spec, numerics, device)
        if state is not None:
            load_state(model, state)
    else:
        model = unfilled_model(spec, numerics, device)
        if state is not None:
            check_state(model, state)
        parallelise(model, grid, partial(_fill, state=state, device=device))
    model.recompute = config.trainer.checkpoint_activations
    return model.train()


def optimisation_of(model: Decoder, config: RunConfig) -> Optimisation:
    """What takes the optimiser steps of reinforcement learning."""
    trainer = config.trainer
    optimiser = build_optimiser(model, config.optimiser, learning_rate=trainer.learning_rate, betas=trainer.betas)
    schedule = RateSchedule(
        steps=trainer.steps,
        warmup_steps=trainer.warmup_steps,
        decay_share=trainer.decay_share,
        shape=trainer.schedule,
    )
    return Optimisation(model, optimiser, schedule, clip_norm=trainer.clip_norm, progress=Heartbeat().beat)


def _fill(part: nn.Module, *, state: Mapping[str, Tensor] | None, device: str) -> None:
    """Give a part of a model its memory, and its weights where there are any yet."""
    materialise(part, device)
    if state is not None:
        fill(part, state.__getitem__)

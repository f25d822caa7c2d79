"""Models and weights according to the ``[numerics]`` section: the arithmetic of a device, and the form of weights on
both sides of the store.

trainer: float32 parameters ──rounded, quantised──▶ published state ──decoded──▶ engine: parameters
forward rounds each weight where it is used          =          forward takes them as they are
"""

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from etude.config.inference import NumericsConfig
from etude.config.recipe import RunConfig
from etude.engines.kinds import EngineContext
from etude.errors import ConfigError
from etude.models.adapters import ABOUT, AdapterSpec, attach, is_adapter
from etude.models.arithmetic import Arithmetic
from etude.models.checkpoint import StoredCheckpoint, load_spec, load_state, state_of, views
from etude.models.decoder import Decoder
from etude.models.experts import RoutedExperts
from etude.models.fast import FastArithmetic
from etude.models.hf import CausalModel, make_causal_model
from etude.models.invariant import InvariantArithmetic
from etude.models.lora import LowRank
from etude.models.lowprecision import (
    EXPERT_FORMATS,
    ExpertFormat,
    dequantised_state,
    is_routed_expert,
    quantised_state,
    quantization_config,
)
from etude.models.peft import read_peft
from etude.models.spec import ModelSpec
from etude.run.resolve import is_invariant
from etude.telemetry.log import EventLog
from etude.types import Json, RouteSpace
from etude.weights.digest import state_digest
from etude.weights.pull import ReceiveOptions
from etude.weights.state import State
from etude.weights.tensors import to_stored, to_tensors

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

EXACT = "e_score_correction_bias"
"""A tensor that checkpoints keep in float32, since it decides ties."""


def choose_arithmetic(config: NumericsConfig, device: str) -> Arithmetic:
    """The arithmetic of the section on ``device``. Raises :class:`~etude.errors.ConfigError`."""
    if not is_invariant(config, device):
        return FastArithmetic(DTYPES[config.stored_dtype])
    if device != "cpu":
        raise ConfigError(
            f"numerics.arithmetic = 'invariant' runs on CPUs, the device is {device!r}: set 'fast', and "
            f"numerics.replay = 'completion' to repair routes"
        )
    return InvariantArithmetic(DTYPES[config.stored_dtype])


def route_space(spec: ModelSpec, config: NumericsConfig) -> RouteSpace | None:
    """The route space for router replay; ``None`` if the trainer replays none or the model has none."""
    if spec.experts is None or config.replay == "off":
        return None
    layers, slots = spec.routes_shape
    return RouteSpace(layers=layers, slots=slots, experts=spec.experts.count)


def expert_format(config: NumericsConfig) -> ExpertFormat | None:
    """The number format of expert matrices; ``None`` if it is the same as for all other weights."""
    return None if config.experts == "plain" else EXPERT_FORMATS[config.experts]


def training_model(
    spec: ModelSpec, config: NumericsConfig, device: str, base: "FrozenBase | None" = None
) -> CausalModel:
    """A model for training: float32 parameters, the arithmetic of an engine with published weights. With a ``base``,
    this only applies to its adapter.
    """
    if base is not None:
        return base.model(device, torch.float32)
    model = make_causal_model(spec, choose_arithmetic(config, device)).to(device)
    _set_formats(model, expert_format(config))
    return model


def unfilled_model(spec: ModelSpec, config: NumericsConfig, device: str) -> CausalModel:
    """A training model on ``meta``, without memory until each part is filled and sharded."""
    with torch.device("meta"):
        model = make_causal_model(spec, choose_arithmetic(config, device))
    _set_formats(model, expert_format(config))
    return model


def serving_model(spec: ModelSpec, config: NumericsConfig, device: str, base: "FrozenBase | None" = None) -> Decoder:
    """A model for serving published weights, or published adapters over a ``base``. Quantised experts are held in
    float32, which represents all their values.
    """
    if base is not None:
        return base.model(device, DTYPES[config.stored_dtype])
    model = Decoder(spec, choose_arithmetic(config, device)).to(device, DTYPES[config.stored_dtype]).eval()
    form = expert_format(config)
    if form is not None:
        for routed in _routed(model):
            routed.gate_up.data, routed.down.data = routed.gate_up.data.float(), routed.down.data.float()
    _set_formats(model, form, published=True)
    return model


def frozen_base(model: Path, config: RunConfig) -> "FrozenBase | None":
    """The base of a run whose RL trains adapters; ``None`` if it trains whole models. ``model`` is the run's."""
    return FrozenBase(model, config) if config.lora.trains("rl") else None


def adapter_spec(config: RunConfig) -> AdapterSpec:
    """The shape of the adapters of a recipe."""
    return AdapterSpec(rank=config.lora.rank, scale=config.lora.scale, targets=config.lora.targets)


@final
class FrozenBase:
    """The frozen weights of a run's model as engines hold them, and the initial adapter on them.

    All models of one process and device share them; each has its own adapter.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._folder = folder
        self._config = config
        self._models: dict[str, Decoder] = {}

    def model(self, device: str, dtype: torch.dtype) -> Decoder:
        """A model with the adapter of version 0 in ``dtype``."""
        if device not in self._models:
            self._models[device] = self._build(device)
        model = self._models[device]
        shared = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
        twin = copy.deepcopy(model, shared)
        for module in twin.modules():
            if isinstance(module, LowRank):
                module.to(dtype)
        return twin

    def published(self) -> State:
        """The frozen weights in published form, read from disk again."""
        stored = StoredCheckpoint(self._folder)
        whole = Decoder(stored.spec)
        stored.load(whole)
        return to_stored(published_state(whole, self._config.numerics))

    def _build(self, device: str) -> Decoder:
        numerics, published = self._config.numerics, self.published()
        model = serving_model(load_spec(self._folder), numerics, device)
        load_published(model, to_tensors(published), numerics)
        spec, digest = adapter_spec(self._config), state_digest(published)
        attach(model, spec, base=digest, seed=self._config.seed)
        if self._config.lora.start:
            load_state(model, state_of(model) | read_peft(Path(self._config.lora.start), model, spec))
        return model


def count_parameters(spec: ModelSpec) -> int:
    """Count the weights of a model without allocating them."""
    with torch.device("meta"):
        return sum(view.numel() for _, view in views(make_causal_model(spec)))


def largest_state(spec: ModelSpec) -> ReceiveOptions:
    """Receive options that limit a state to the model's size in float32, the largest published type."""
    return ReceiveOptions(most_bytes=count_parameters(spec) * torch.float32.itemsize)


def published_state(model: CausalModel, config: NumericsConfig) -> dict[str, Tensor]:
    """The state to publish: weights rounded to the section's type, experts encoded in its format; for an adapted model
    the adapter, in the section's type.
    """
    state, form = state_of(model), expert_format(config)
    if is_adapter(state):
        dtype = DTYPES[config.stored_dtype]
        return {name: tensor if name in ABOUT else tensor.to(dtype) for name, tensor in state.items()}
    encoded = {} if form is None else quantised_state(state, form)
    rounded = {
        name: tensor if name.endswith(EXACT) else tensor.to(DTYPES[config.stored_dtype])
        for name, tensor in state.items()
        if form is None or not is_routed_expert(name)
    }
    return encoded | rounded


def published_types(model: CausalModel, config: NumericsConfig) -> dict[str, torch.dtype]:
    """The types to which :func:`published_state` rounds a model's parameters, by their names; encoded parameters and
    buffers are excluded.
    """
    encoded = set() if expert_format(config) is None else {id(w) for one in _routed(model) for w in one.parameters()}
    dtype = DTYPES[config.stored_dtype]
    return {name: dtype for name, parameter in model.named_parameters() if id(parameter) not in encoded}


def engine_context(
    config: RunConfig,
    spec: ModelSpec,
    *,
    model_folder: Path,
    logs: Path,
    events: EventLog,
    base: "FrozenBase | None" = None,
) -> EngineContext:
    """The context of a resolved recipe's engine, with functions that create and fill its models; with ``base`` it
    serves adapters on it.
    """
    return EngineContext(
        config=config,
        spec=spec,
        model_folder=model_folder,
        logs=logs,
        events=events,
        make_model=partial(serving_model, spec, config.numerics, config.engine.device, base),
        load=partial(load_published, config=config.numerics),
        base=None if base is None else base.published,
    )


def load_published(model: CausalModel, state: Mapping[str, Tensor], config: NumericsConfig) -> None:
    """Copy a published state into a model. Raises :class:`~etude.errors.DamagedError` for a tensor that
    does not fit.
    """
    load_state(model, decoded_state(state, config))


def decoded_state(state: Mapping[str, Tensor], config: NumericsConfig) -> Mapping[str, Tensor]:
    """A published state with its experts decoded to plain matrices."""
    form = expert_format(config)
    return state if form is None or is_adapter(state) else dequantised_state(state, form)


def checkpoint_extra(state: Mapping[str, Tensor], config: NumericsConfig) -> dict[str, Json]:
    """Keys of a published state's ``config.json`` in addition to its model's shape: the quantisation of experts, if
    any.
    """
    form = expert_format(config)
    return {} if form is None else {"quantization_config": quantization_config(state, form)}


def _set_formats(model: CausalModel, form: ExpertFormat | None, *, published: bool = False) -> None:
    if form is not None and model.spec.experts is not None and model.spec.experts.fused:
        raise ConfigError(
            f"numerics.experts = {form.name!r} is not implemented for a checkpoint with a layer's experts in "
            "one tensor (gpt-oss): set numerics.experts to 'plain'"
        )
    for routed in _routed(model):
        routed.format, routed.published = form, published


def _routed(model: CausalModel) -> list[RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]

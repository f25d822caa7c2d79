"""Models and weights as the ``[numerics]`` section says: the arithmetic of a device, the form of weights on both sides
of the store.

trainer: float32 parameters ──rounded, quantised──▶ published state ──decoded──▶ engine: parameters
forward rounds each weight where it is used          =          forward takes them as they are
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from etude.config.inference import NumericsConfig
from etude.errors import ConfigError
from etude.models.arithmetic import Arithmetic
from etude.models.checkpoint import load_state, state_of
from etude.models.decoder import Decoder
from etude.models.experts import RoutedExperts
from etude.models.fast import FastArithmetic
from etude.models.invariant import InvariantArithmetic
from etude.models.lowprecision import (
    EXPERT_FORMATS,
    ExpertFormat,
    dequantised_state,
    is_routed_expert,
    quantised_state,
    quantization_config,
)
from etude.models.spec import ModelSpec
from etude.run.resolve import is_invariant
from etude.types import Json, RouteSpace
from etude.weights.pull import ReceiveOptions

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

EXACT = "e_score_correction_bias"
"""Checkpoints keep this in float32: it decides ties."""


def choose_arithmetic(config: NumericsConfig, device: str) -> Arithmetic:
    """The arithmetic that the section asks for on ``device``. Raises :class:`~etude.errors.ConfigError`."""
    if not is_invariant(config, device):
        return FastArithmetic(DTYPES[config.stored_dtype])
    if device != "cpu":
        raise ConfigError(
            f"numerics.arithmetic = 'invariant' runs on CPUs, the device is {device!r}: set 'fast', and "
            f"numerics.replay = 'completion' to repair routes"
        )
    return InvariantArithmetic(DTYPES[config.stored_dtype])


def route_space(spec: ModelSpec, config: NumericsConfig) -> RouteSpace | None:
    """The route space for router replay; ``None`` where the trainer replays none, or the model has none."""
    if spec.experts is None or config.replay == "off":
        return None
    layers, slots = spec.routes_shape
    return RouteSpace(layers=layers, slots=slots, experts=spec.experts.count)


def expert_format(config: NumericsConfig) -> ExpertFormat | None:
    """The number format of expert matrices; ``None`` if it is that of all others."""
    return None if config.experts == "plain" else EXPERT_FORMATS[config.experts]


def training_model(spec: ModelSpec, config: NumericsConfig, device: str) -> Decoder:
    """A model for training: float32 parameters, the arithmetic of an engine with published weights."""
    model = Decoder(spec, choose_arithmetic(config, device)).to(device)
    _set_formats(model, expert_format(config))
    return model


def unfilled_model(spec: ModelSpec, config: NumericsConfig, device: str) -> Decoder:
    """A training model on ``meta``, without memory until each part is filled and sharded."""
    with torch.device("meta"):
        model = Decoder(spec, choose_arithmetic(config, device))
    _set_formats(model, expert_format(config))
    return model


def serving_model(spec: ModelSpec, config: NumericsConfig, device: str) -> Decoder:
    """A model for serving published weights. Quantised experts are held in float32, which has all their values."""
    model = Decoder(spec, choose_arithmetic(config, device)).to(device, DTYPES[config.stored_dtype]).eval()
    form = expert_format(config)
    if form is not None:
        for routed in _routed(model):
            routed.gate_up.data, routed.down.data = routed.gate_up.data.float(), routed.down.data.float()
    _set_formats(model, form, published=True)
    return model


def count_parameters(spec: ModelSpec) -> int:
    """Count the weights of a model without making them."""
    with torch.device("meta"):
        return sum(tensor.numel() for tensor in Decoder(spec).state_dict().values())


def largest_state(spec: ModelSpec) -> ReceiveOptions:
    """Receive options that limit a state to the model's size in float32, the largest published type."""
    return ReceiveOptions(most_bytes=count_parameters(spec) * torch.float32.itemsize)


def published_state(model: Decoder, config: NumericsConfig) -> dict[str, Tensor]:
    """The state to publish: weights rounded to the section's type, experts encoded in its format."""
    state, form = state_of(model), expert_format(config)
    encoded = {} if form is None else quantised_state(state, form)
    rounded = {
        name: tensor if name.endswith(EXACT) else tensor.to(DTYPES[config.stored_dtype])
        for name, tensor in state.items()
        if form is None or not is_routed_expert(name)
    }
    return encoded | rounded


def published_types(model: Decoder, config: NumericsConfig) -> dict[str, torch.dtype]:
    """The types to which :func:`published_state` rounds a model's parameters, by their names; those that it encodes
    from what they are, and buffers, are left out.
    """
    encoded = set() if expert_format(config) is None else {id(w) for one in _routed(model) for w in one.parameters()}
    dtype = DTYPES[config.stored_dtype]
    return {name: dtype for name, parameter in model.named_parameters() if id(parameter) not in encoded}


def load_published(model: Decoder, state: Mapping[str, Tensor], config: NumericsConfig) -> None:
    """Copy a published state into a model. Raises :class:`~etude.errors.DamagedError` on a tensor that does not fit."""
    load_state(model, decoded_state(state, config))


def decoded_state(state: Mapping[str, Tensor], config: NumericsConfig) -> Mapping[str, Tensor]:
    """A published state with its experts decoded to plain matrices."""
    form = expert_format(config)
    return state if form is None else dequantised_state(state, form)


def checkpoint_extra(state: Mapping[str, Tensor], config: NumericsConfig) -> dict[str, Json]:
    """Keys that the ``config.json`` of a published state has beyond its model's shape: how experts are quantised, if
    so.
    """
    form = expert_format(config)
    return {} if form is None else {"quantization_config": quantization_config(state, form)}


def _set_formats(model: Decoder, form: ExpertFormat | None, *, published: bool = False) -> None:
    for routed in _routed(model):
        routed.format, routed.published = form, published


def _routed(model: Decoder) -> list[RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]

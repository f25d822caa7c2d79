"""Experts in eight or four bits: rounding of their inputs and weights, and the published form of the latter.

Owns the formats that ``[numerics] experts`` names, as a rounding with a straight-through gradient and as checkpoint
tensors. :mod:`etude.models.formats` defines the formats; matrix products are an
:class:`~etude.models.arithmetic.Arithmetic`'s.

The trainer rounds its float32 weights in every forward pass and publishes the codes of the same rounding; an engine
decodes them. Both round activations, each token by itself: a scale shared by a batch would make a token depend on its
batch mates and on its own future (Cursor, Composer 2 report: RL with the stock per-tensor NVFP4 scale diverged). So
both multiply the same numbers, to the bit, in float32 as in bfloat16.

Uses own code instead of torchao (0.18): its nvfp4 has one activation scale per tensor, multiplies by rounded
reciprocals, and trains on Blackwell GPUs only.

GPUs with block-scaled matrix units can multiply the codes themselves (``torch.nn.functional.scaled_grouped_mm``). That
belongs into a leaf of ``Arithmetic``, as a grouped product of two :class:`~etude.models.formats.Quantised`, on both
sides or on neither: its order of summation differs from that of decoded numbers.

Shape legend: R rows (tokens), E experts, P matrices that are one fused parameter (gate and up), O outputs, I inputs,
M matrices, each on its own.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from etude.errors import ConfigError, DamagedError, DivergedError
from etude.models import formats
from etude.models.formats import BlockFormat, Quantised
from etude.models.kernels import lowprecision as loops

ROUTED_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")
SCALE_2 = "weight_scale_2"
"""ModelOpt's name for the second scale."""

State = Mapping[str, Tensor]
Choice = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFormat:
    """The number formats of experts' inputs and weights."""

    name: str
    """The name in configurations."""
    blocks: BlockFormat
    loop: Callable[[loops.Floats, loops.Floats], None]
    """(x_MOI, out_MOI): encode and decode in one pass over memory, on the CPU."""
    scale_name: str
    """Suffix of a weight's block scales in checkpoints."""
    config: Mapping[str, Any]
    """The entry in ``config.json``, without the modules that are not quantised."""
    ignored_key: str
    """And the key under which it lists those."""

    def __deepcopy__(self, _memo: object) -> "ExpertFormat":
        """A constant on every rank and engine."""
        return self

    def activation(self, x_RI: Tensor) -> Tensor:
        """[R,I] of the format's numbers, in ``x``'s type; the gradient passes straight through.

        A row depends on itself alone. A block (with nvfp4 a row) with a number that is not finite becomes NaN.
        """
        return _through(x_RI.unsqueeze(1), self).squeeze(1)

    def weight(self, w_EOI: Tensor, *, parts: int) -> Tensor:
        """[E,O,I] of the format's numbers, in ``w``'s type; the gradient passes straight through.

        ``parts`` matrices of O/parts rows are stacked: 2 for gate and up, 1 for down. In checkpoints they are separate,
        so no block of a square format may extend into the next matrix; they share a second scale, as a fused product
        requires.

        For the trainer, on its float32 weights, before they are cast. Decoded weights are already rounded: rounding
        them again has no effect in float32, but would in bfloat16.
        """
        return _through(self._matrices(w_EOI, parts), self).view(w_EOI.shape)

    def encode(self, w_POI: Tensor) -> list[dict[str, Tensor]]:
        """Codes of the matrices of one expert's parameter: checkpoint tensors by the last part of their names.

        ``decode`` of them is ``weight(w, parts=P)`` of the matrices, to the bit, and encodes to the same codes.
        """
        parts, outputs, _ = w_POI.shape
        matrices_MOI = self._matrices(w_POI.float().flatten(0, 1).unsqueeze(0), parts)
        codes = formats.to_codes(formats.quantise(matrices_MOI, self.blocks), self.blocks)
        elements_POI = codes.elements_MOI.reshape(parts, outputs, -1)
        scales_Poi = codes.scales_Moi.reshape(parts, -1, codes.scales_Moi.shape[-1])
        encoded = [
            {"weight": elements_OI, self.scale_name: scales_oi}
            for elements_OI, scales_oi in zip(elements_POI, scales_Poi, strict=True)
        ]
        if codes.outer_M is not None:
            for tensors in encoded:
                tensors[SCALE_2] = codes.outer_M[0].clone()
        return encoded

    def decode(self, encoded: Mapping[str, Tensor]) -> Tensor:
        """[O,I] float32: the numbers that one matrix's checkpoint tensors stand for."""
        outer_M = encoded[SCALE_2].view(1) if self.blocks.has_outer else None
        codes = Quantised(encoded["weight"].unsqueeze(0), encoded[self.scale_name].unsqueeze(0), outer_M)
        return formats.dequantise(formats.from_codes(codes, self.blocks), self.blocks).squeeze(0)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The last parts of the names of a matrix's checkpoint tensors."""
        return ("weight", self.scale_name, *((SCALE_2,) if self.blocks.has_outer else ()))

    def _matrices(self, w_EOI: Tensor, parts: int) -> Tensor:
        """[M,O,I]: split so that all numbers with a common scale are one matrix."""
        experts, outputs, inputs = w_EOI.shape
        if outputs % parts:
            raise ValueError(f"{parts} matrices below each other cannot have {outputs} rows together")
        return w_EOI if self.blocks.has_outer else w_EOI.reshape(experts * parts, outputs // parts, inputs)


FP8 = ExpertFormat(
    name="fp8",
    blocks=formats.FP8,
    loop=loops.fp8,
    scale_name="weight_scale_inv",
    config=MappingProxyType(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [formats.FP8.rows, formats.FP8.columns],
        }
    ),
    ignored_key="modules_to_not_convert",
)
"""DeepSeek-V3's format and names. transformers (5.23) reads it only if 128 divides both sides of every matrix."""
MXFP8 = ExpertFormat(
    name="mxfp8",
    blocks=formats.MXFP8,
    loop=loops.mxfp8,
    scale_name="weight_scale",
    config=MappingProxyType({"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    ignored_key="ignore",
)
"""The OCP's format, with ModelOpt's names."""
NVFP4 = ExpertFormat(
    name="nvfp4",
    blocks=formats.NVFP4,
    loop=loops.nvfp4,
    scale_name="weight_scale",
    config=MappingProxyType({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16}),
    ignored_key="ignore",
)
"""NVIDIA's, with ModelOpt's names. To other engines only the weights are in four bits: they know no scale per token."""

EXPERT_FORMATS: Mapping[str, ExpertFormat] = MappingProxyType({form.name: form for form in (FP8, MXFP8, NVFP4)})
"""By what ``[numerics] experts`` calls them; ``plain`` is none."""


# ── published weights ───────────────────────────────────────────────────────────────────────────────────────────────


def is_routed_expert(name: str) -> bool:
    """Report whether a checkpoint tensor is a projection of a routed expert, not a shared one or the router."""
    return ROUTED_EXPERT.search(name) is not None


def quantised_state(state: State, form: ExpertFormat, chosen: Choice = is_routed_expert) -> dict[str, Tensor]:
    """A weight state with the expert matrices as codes and scales, the others unchanged.

    Give it the weights that the forward pass rounds, that is the trainer's own float32, not a copy in less precision.
    Raises :class:`~etude.errors.DivergedError` for a weight that is not finite and
    :class:`~etude.errors.ConfigError` for a matrix that the format cannot store; both name it.
    """
    published = {name: tensor for name, tensor in state.items() if not chosen(name)}
    for names in _parameters(state, chosen):
        for name in names:
            _check(name, state[name], form)
        encoded = form.encode(torch.stack([state[name].detach() for name in names]))
        for name, tensors in zip(names, encoded, strict=True):
            stem = name.removesuffix("weight")
            published |= {stem + last: tensor for last, tensor in tensors.items()}
    return published


def dequantised_state(state: State, form: ExpertFormat, chosen: Choice = is_routed_expert) -> dict[str, Tensor]:
    """The inverse of :func:`quantised_state`, up to rounding: expert matrices are float32 again.

    Raises :class:`~etude.errors.DamagedError` naming a tensor that is missing or has another type or shape.
    """
    plain = dict(state)
    for name in filter(chosen, state):
        stem = name.removesuffix("weight")
        encoded = {last: plain.pop(stem + last, None) for last in form.tensor_names}
        plain[name] = form.decode(_complete(encoded, stem, form))
    return plain


def quantization_config(state: State, form: ExpertFormat, chosen: Choice = is_routed_expert) -> dict[str, Any]:
    """The value of this key of ``config.json`` for a state that :func:`quantised_state` made or is to make."""
    left_alone = [
        name.removesuffix(".weight")
        for name, tensor in state.items()
        if name.endswith(".weight") and tensor.dim() == 2 and not chosen(name)
    ]
    return {**form.config, form.ignored_key: left_alone}


def _parameters(state: State, chosen: Choice) -> Iterator[tuple[str, ...]]:
    """Names of the chosen matrices; gate and up form one group, since a model multiplies with them as one matrix."""
    names = dict.fromkeys(filter(chosen, state))
    for name in names:
        gate, up = name.replace(".up_proj.", ".gate_proj."), name.replace(".gate_proj.", ".up_proj.")
        if gate == up or gate not in names or up not in names:
            yield (name,)
        elif name == gate:
            yield (gate, up)


def _check(name: str, matrix_OI: Tensor, form: ExpertFormat) -> None:
    if not bool(matrix_OI.isfinite().all()):
        count = int((~matrix_OI.isfinite()).sum())
        raise DivergedError(f"{count} of {matrix_OI.numel()} weights in {name!r} are not finite: nothing is published")
    if form.blocks.has_outer and matrix_OI.shape[-1] % 2:
        raise ConfigError(
            f"{name!r} has {matrix_OI.shape[-1]} columns, {form.name} stores two numbers per byte: "
            "choose even widths, or another format in [numerics] experts"
        )


def _complete(encoded: Mapping[str, Tensor | None], stem: str, form: ExpertFormat) -> dict[str, Tensor]:
    """The tensors of one matrix, checked."""
    blocks, weight = form.blocks, encoded["weight"]
    height, width = weight.shape if weight is not None else (0, 0)
    columns = 2 * width if blocks.has_outer else width
    expected = {
        "weight": (torch.uint8 if blocks.has_outer else torch.float8_e4m3fn, (height, width)),
        form.scale_name: (blocks.scale_dtype, (-(-height // blocks.rows), -(-columns // blocks.columns))),
        SCALE_2: (torch.float32, ()),
    }
    complete = {}
    for last, tensor in encoded.items():
        dtype, shape = expected[last]
        if tensor is None or tensor.dtype != dtype or tensor.shape != shape:
            actual = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise DamagedError(
                f"{stem + last!r} should be {dtype} {list(shape)}, it is {actual}: is this a state in {form.name}?"
            )
        complete[last] = tensor
    return complete


# ── rounding ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _StraightThrough(torch.autograd.Function):
    """Rounding, with the gradient of doing nothing."""

    @staticmethod
    def forward(_ctx: Any, x_MOI: Tensor, form: ExpertFormat) -> Tensor:
        return _rounded(x_MOI, form)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _through(x_MOI: Tensor, form: ExpertFormat) -> Tensor:
    if not (x_MOI.requires_grad and torch.is_grad_enabled()):
        return _rounded(x_MOI, form)
    rounded: Tensor = _StraightThrough.apply(x_MOI, form)  # type: ignore[no-untyped-call]  # torch annotates it not
    return rounded


def _rounded(x_MOI: Tensor, form: ExpertFormat) -> Tensor:
    """Encode and decode: compiled loops on the CPU, torch's operators elsewhere; the same bits."""
    exact_MOI = x_MOI.detach().float()
    if exact_MOI.device.type != "cpu":
        return formats.dequantise(formats.quantise(exact_MOI, form.blocks), form.blocks).to(x_MOI.dtype)
    out_MOI = torch.empty_like(exact_MOI, memory_format=torch.contiguous_format)
    form.loop(exact_MOI.contiguous().numpy(), out_MOI.numpy())
    return out_MOI.to(x_MOI.dtype)

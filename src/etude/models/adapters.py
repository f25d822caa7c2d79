"""The adapter of a whole model: attached to a frozen base, read and written as a state, merged into it.

    frozen base ──attach──▶ adapted model ──state_of──▶ ``<projection>.lora_A.weight``, ``….lora_B.weight``, base, scale

Names are those of the base's checkpoint tensors, so that each projection and expert has its own factors in any
parameter layout: PEFT's names, without its prefix. A state also has its scale and the digest of the base that it was
trained on, so it cannot be applied to other weights by mistake. Owns the placement of adapters;
:mod:`etude.models.lora` computes them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from etude.errors import DamagedError, UserError
from etude.models.decoder import Decoder, DecoderBlock
from etude.models.experts import Experts, FeedForward, RoutedExperts
from etude.models.lora import Adapters, Factors, LoraSite, LowRank
from etude.models.naming import Views, block_views

Target: TypeAlias = Literal["attention", "feed_forward", "experts"]
"""Products that get an adapter. Routers never do, because an engine's routes are replayed as the base chose them."""
TARGETS: tuple[Target, ...] = get_args(Target)

BASE, SCALE = "adapter.base", "adapter.scale"
"""Names in a state: the digest of the frozen weights (uint8 [16]) and the factor of B(Ax) (float32 [1])."""
ABOUT = (BASE, SCALE)
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the names of A [r,I] and B [O,r]."""
WEIGHT = ".weight"
SITE = "_lora"
"""A module's product with ``name`` has its adapter in ``name_lora``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The shape of an adapter."""

    rank: int
    scale: float
    """The factor of B(Ax): alpha / rank."""
    targets: tuple[Target, ...] = TARGETS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Product:
    """A product of a model that may have an adapter."""

    module: nn.Module
    name: str
    """The parameter's."""
    key: str
    target: Target
    projections: tuple[tuple[tuple[str, int], ...], ...]
    """For each expert, or for the single matrix: its projections, as names without ``.weight`` and numbers of
    outputs.
    """

    @property
    def weight(self) -> nn.Parameter:
        """[O,I] or [E,O,I]."""
        weight = getattr(self.module, self.name)
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def parts(self) -> tuple[int, ...]:
        """Outputs of each projection."""
        return tuple(rows for _, rows in self.projections[0])

    @property
    def site(self) -> LoraSite | None:
        """The adapter, if it has one."""
        site = getattr(self.module, self.name + SITE)
        assert site is None or isinstance(site, LoraSite)
        return site

    def factors(self, low_rank: LowRank) -> Views:
        """Views of A and B of each projection, by name."""
        down, up, rank = low_rank.a.data, low_rank.b.data, low_rank.rank
        for index, names in enumerate(self.projections):
            a, b = (down, up) if down.ndim == 2 else (down[index], up[index])
            chunks = zip(names, a.split(rank), b.split(self.parts), strict=True)
            for (name, _), one, other in chunks:
                yield name + DOWN, one
                yield name + UP, other


def attach(model: Decoder, spec: AdapterSpec, *, base: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Freeze a model and add an adapter of ``dtype`` that initially changes nothing. ``base`` is the state digest of
    its weights, in hex. Raises :class:`~etude.errors.UserError` if no product is among the targets.
    """
    adapters = Adapters(bytes.fromhex(base), spec.scale, model.embedding.device)
    places = [place for place in _places(model) if place.target in spec.targets]
    if not places:
        raise UserError(f"lora.targets = {list(spec.targets)}: this model has no such layers")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for place in places:
        own = LowRank.zero(place.weight, place.parts, spec.rank, spec.scale, torch.float32)
        own.initialise(generator)
        site = LoraSite(place.key, own.to(dtype), adapters.selection)
        setattr(place.module, place.name + SITE, site)
    model.adapters = adapters


def count_factors(model: Decoder, spec: AdapterSpec) -> int:
    """Number of elements of A and B that :func:`attach` would create; the model may be on ``meta``."""
    shapes = [(place.weight.shape, len(place.parts)) for place in _places(model) if place.target in spec.targets]
    return sum(
        spec.rank * (parts * inputs + outputs) * math.prod(experts) for (*experts, outputs, inputs), parts in shapes
    )


def adapter_views(model: Decoder) -> Views:
    """Views of all tensors of an adapted model's state, by name."""
    for place in _places(model):
        if place.site is not None:
            yield from place.factors(place.site.own)
    assert model.adapters is not None
    yield BASE, model.adapters.base
    yield SCALE, model.adapters.scale


def is_adapter(state: Mapping[str, Tensor]) -> bool:
    """True for the state of an adapter, false for that of a whole model."""
    return BASE in state


def base_of(state: Mapping[str, Tensor]) -> str:
    """The digest, in hex, of the weights that an adapter was trained on."""
    return bytes(state[BASE].tolist()).hex()


def check_base(model: Decoder, state: Mapping[str, Tensor]) -> None:
    """Raise :class:`~etude.errors.DamagedError` for an adapter that was trained on other weights than ``model`` has."""
    assert model.adapters is not None
    own = bytes(model.adapters.base.tolist()).hex()
    if (other := base_of(state)) != own:
        raise DamagedError(f"the adapter was trained on the weights {other[:12]}, this model's are {own[:12]}")


def factors_of(model: Decoder, state: Mapping[str, Tensor]) -> Factors:
    """Another adapter for an adapted model, on its device and in its type; it may have any rank and cover only some
    products.

    Raises :class:`~etude.errors.DamagedError` for one of another base or another shape.
    """
    check_base(model, state)
    scale, dtype = float(state[SCALE]), model.embedding.dtype
    left = {name for name in state if name not in ABOUT}
    rank, *others = {tensor.shape[0] for name, tensor in state.items() if name.endswith(DOWN)} or {0}
    if others or not rank:
        raise DamagedError(f"an adapter of the ranks {sorted([rank, *others])}: expected one, above 0")
    result: dict[str, LowRank] = {}
    for place in _places(model):
        names = {name + end for names in place.projections for name, _ in names for end in (DOWN, UP)}
        if not left & names:
            continue
        low_rank = LowRank.zero(place.weight, place.parts, rank, scale, dtype).requires_grad_(False)
        for name, view in place.factors(low_rank):
            if name in state:
                _copy(name, view, state[name])
        left -= names
        result[place.key] = low_rank
    if left:
        raise DamagedError(f"tensor {min(left)!r} has no place in this model: the adapter is another model's")
    return result


def _copy(name: str, view: Tensor, tensor: Tensor) -> None:
    if view.shape != tensor.shape:
        raise DamagedError(f"tensor {name!r} should be {list(view.shape)}, it is {list(tensor.shape)}")
    view.copy_(tensor)


@torch.no_grad()
def merge(model: Decoder) -> None:
    """Add the adapter to the weights, W + scale · BA, rounded to their type, and remove it."""
    for place in _places(model):
        if place.site is not None:
            place.weight.copy_(place.weight.float() + place.site.own.merged())
            setattr(place.module, place.name + SITE, None)
    model.adapters = None
    model.requires_grad_(True)


def _places(model: Decoder) -> Iterator[_Product]:
    """All products that may have an adapter, in the order of their use."""
    for index, block in enumerate(model.blocks):
        assert isinstance(block, DecoderBlock)
        views = [(name, view) for name, view in block_views(block) if view.ndim == 2]
        for where, module, target, names in _products(block):
            for name in names:
                weight = getattr(module, name, None)
                if isinstance(weight, nn.Parameter):
                    key = f"{index}.{where}.{name}"
                    projections = _projections(key, weight, views)
                    yield _Product(module=module, name=name, key=key, target=target, projections=projections)


def _products(block: DecoderBlock) -> Iterator[tuple[str, nn.Module, Target, tuple[str, ...]]]:
    """The modules of a block whose products may have an adapter, and their names. Excluded are ``expand_latents``,
    which latent attention folds into queries and never multiplies with a token, and fused experts, whose projections
    have no separate names.
    """
    yield "attention", block.attention, "attention", ("qkv", "compress", "expand_queries", "output")
    feed = block.feed
    layers: list[tuple[str, FeedForward | RoutedExperts | None, Target]] = (
        [("routed", None if feed.routed.is_fused else feed.routed, "experts"), ("shared", feed.shared, "feed_forward")]
        if isinstance(feed, Experts)
        else [("feed", feed, "feed_forward")]
    )
    for where, module, target in layers:
        if module is not None:
            yield where, module, target, ("gate_up", "down")


def _projections(
    key: str, weight: nn.Parameter, views: list[tuple[str, Tensor]]
) -> tuple[tuple[tuple[str, int], ...], ...]:
    """The checkpoint's matrices in a parameter, in their order, for each expert."""
    storage = weight.untyped_storage()._cdata  # of weights on meta, too
    inside = sorted(
        (view.storage_offset(), name.removesuffix(WEIGHT), view)
        for name, view in views
        if view.untyped_storage()._cdata == storage
    )
    outputs, inputs = weight.shape[-2:]
    is_plain = all(view.is_contiguous() and view.shape[1] == inputs for _, _, view in inside)
    if not is_plain or sum(view.shape[0] for _, _, view in inside) * inputs != weight.numel():
        raise UserError(f"lora: the projections in {key} do not lie below each other, so they get no adapters")
    experts = weight.numel() // (outputs * inputs)
    per_expert = len(inside) // experts
    rows = [(name, view.shape[0]) for _, name, view in inside]
    return tuple(tuple(rows[start : start + per_expert]) for start in range(0, len(rows), per_expert))

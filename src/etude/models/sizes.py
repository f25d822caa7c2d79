"""Sizes of a model, from its spec alone: parameters by part, and the activations that a training step saves.

    outside of blocks     embedding, output matrix, last norm
    of each block         attention, router, dense or shared feed-forward; separately the routed experts

Activations are those that :class:`~etude.models.fast.FastArithmetic` saves for a backward pass, operation by operation.
``fused`` is a CUDA device, whose kernels save less than torch's operations on a CPU. A linear layer and a norm save
their inputs; attention by a flash kernel saves queries, keys, values and outputs (arXiv 2205.14135 §3.1); latent
attention, for which there is no such kernel, saves its scores, too. Pure except for a model on ``meta``, whose shapes
are counted.
"""

from dataclasses import dataclass
from functools import cache

import torch

from etude.models.decoder import DecoderBlock
from etude.models.experts import Experts
from etude.models.hf import make_causal_model
from etude.models.spec import ExpertsSpec, GroupedSpec, LatentSpec, ModelSpec

FLOAT = 4
"""Bytes of a float32 number."""
INDEX = 8
"""Bytes of an int64 number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Numbers of parameters, buffers of a checkpoint included."""

    outer: int
    """Outside of blocks, a draft head's included."""
    largest_outer: int
    """The largest of these matrices."""
    shared: tuple[int, ...]
    """Each block's, without routed experts."""
    routed: tuple[int, ...]
    """Each block's routed experts alone."""

    @classmethod
    @cache
    def of(cls, spec: ModelSpec) -> "ModelSizes":
        """Count the parameters of a model without making them."""
        with torch.device("meta"):
            model = make_causal_model(spec)
        parts = [*model.blocks, *(() if model.draft is None else (model.draft,))]
        inner = {id(parameter) for part in parts for parameter in part.parameters()}
        blocks = [(_count(block), _count_routed(block)) for block in model.blocks]
        outer = [parameter.numel() for parameter in model.parameters() if id(parameter) not in inner]
        head = 0 if model.draft is None else _count(model.draft)
        return cls(
            outer=sum(outer) + head,
            largest_outer=max(outer),
            shared=tuple(whole - routed for whole, routed in blocks),
            routed=tuple(routed for _, routed in blocks),
        )

    @property
    def total(self) -> int:
        """All of them."""
        return self.outer + sum(self.shared) + sum(self.routed)

    def largest_block(self, ep: int = 1) -> int:
        """Parameters that a rank gathers to compute the largest block, whose experts are spread over ``ep`` ranks."""
        return max(shared + routed // ep for shared, routed in zip(self.shared, self.routed, strict=True))


def _count(block: torch.nn.Module) -> int:
    return sum(tensor.numel() for tensor in block.state_dict().values())


def _count_routed(block: torch.nn.Module) -> int:
    if isinstance(block, DecoderBlock) and isinstance(block.feed, Experts):
        return _count(block.feed.routed)
    return 0


def saved_bytes(spec: ModelSpec, layer: int, *, item: int, fused: bool, length: int) -> int:
    """Bytes per token that a block saves for its backward pass, including its input.

    ``item`` is the bytes of an activation, ``length`` the tokens of a sequence.
    """
    norms = 2 * (_norm_saved(spec.hidden_size, item, fused) + item * spec.hidden_size)
    return norms + _attention_saved(spec, item, fused, length) + _feed_saved(spec, layer, item)


def _norm_saved(width: int, item: int, fused: bool) -> int:
    """A norm's input or result, and its factor; torch's operations for narrow numbers on a CPU save all in float32."""
    if fused or item == FLOAT:
        return item * width + FLOAT
    return 2 * FLOAT * width + FLOAT


def _attention_saved(spec: ModelSpec, item: int, fused: bool, length: int) -> int:
    match spec.attention:
        case GroupedSpec() as grouped:
            return _grouped_saved(grouped, item, fused)
        case LatentSpec() as latent:
            return _latent_saved(latent, item, fused, length)


def _grouped_saved(grouped: GroupedSpec, item: int, fused: bool) -> int:
    heads, width = grouped.heads + grouped.kv_heads, grouped.head_dim
    products = item * (heads + grouped.kv_heads) * width
    normed = 0
    if grouped.normed:
        normed = FLOAT * heads if fused else heads * _norm_saved(width, item, fused)
    turned = item * heads * width
    outputs = item * grouped.heads * width * (1 if fused else 2) + FLOAT * grouped.heads
    return products + normed + turned + outputs


def _latent_saved(latent: LatentSpec, item: int, fused: bool, length: int) -> int:
    """Scores are saved: the products of queries and keys of every head, in float32."""
    width, heads = latent.kv_rank + latent.rope_dim, latent.heads
    ranks = (latent.q_rank or 0) + latent.kv_rank
    compressed = item * (ranks + latent.rope_dim) if fused else 2 * FLOAT * ranks
    queries = item * ((latent.q_rank or 0) + heads * latent.nope_dim)
    attended = FLOAT * heads * (2 * width + latent.kv_rank + length)
    return compressed + queries + attended + item * heads * (latent.kv_rank + latent.value_dim)


def _feed_saved(spec: ModelSpec, layer: int, item: int) -> int:
    if spec.experts is None or layer not in spec.sparse_layers:
        return _gated_saved(spec.dense_size, item)
    experts, hidden = spec.experts, spec.hidden_size
    pair = 2 * item * hidden + _gated_saved(experts.size, item) + 3 * INDEX + FLOAT
    return experts.per_token * pair + _gated_saved(experts.shared_size, item) + _router_saved(experts, hidden)


def _router_saved(experts: ExpertsSpec, hidden: int) -> int:
    """Scores; a router of sigmoids reads its input in float32."""
    return FLOAT * experts.count if experts.scoring == "softmax" else FLOAT * (hidden + 3 * experts.count)


def _gated_saved(size: int, item: int) -> int:
    """Gate and up, and their product."""
    return item * size * 3

"""Attention layers: from hidden states to queries, keys and values, and back. They own neither masks nor caches.

Keys and values go to an :data:`Attend` that the caller passes: packed sequences in the trainer, a paged cache in an
engine. So both sides run one model and can differ only in the location of keys.
Shape legend: N tokens, H hidden, Q query heads, K key heads, D width of a key, W width of a value, L latent width, I
inputs, O outputs, h heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from etude.models.arithmetic import Arithmetic, AttentionRule
from etude.models.lora import LoraSite, linear
from etude.models.spec import GroupedSpec, LatentSpec, ModelSpec

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, AttentionRule], Tensor]
"""(layer, queries [N,Q,D], keys [N,K,D], values [N,K,W], the layer's rule) → attended values [N,Q,W].

Latent attention's values are a view of the first W columns of keys.
"""

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside latent attention, added to the mean square, independent of the model's ``norm_eps``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The rotary tables at the positions of one forward pass."""

    cosines_ND: Tensor
    """float32"""
    sines_ND: Tensor
    """float32"""


@final
class GroupedAttention(nn.Module):
    """Attention with grouped queries (arXiv 2305.13245), optionally with biases, norms of heads (Qwen3) and sinks
    (gpt-oss).
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        attention = spec.attention
        assert isinstance(attention, GroupedSpec)
        self.spec = attention
        self.layer = layer
        self._eps, self._offset = spec.norm_eps, spec.gain_offset
        self._window = spec.window_of(layer)
        self._split = (attention.heads, attention.kv_heads, attention.kv_heads)
        rows = sum(self._split) * attention.head_dim
        self.qkv = nn.Parameter(torch.empty(rows, spec.hidden_size))
        self.bias = nn.Parameter(torch.zeros(rows)) if attention.bias else None
        self.query_gain = nn.Parameter(gains(spec, attention.head_dim)) if attention.normed else None
        self.key_gain = nn.Parameter(gains(spec, attention.head_dim)) if attention.normed else None
        self.output = nn.Parameter(torch.empty(spec.hidden_size, attention.heads * attention.head_dim))
        self.output_bias = nn.Parameter(torch.zeros(spec.hidden_size)) if attention.output_bias else None
        self.sinks = nn.Parameter(torch.zeros(attention.heads)) if attention.sinks else None
        self.qkv_lora: LoraSite | None = None
        self.output_lora: LoraSite | None = None

    def forward(self, x_NH: Tensor, arithmetic: Arithmetic, rotation: Rotation, attend: Attend) -> Tensor:
        """[N,H] → [N,H]."""
        heads_NhD = linear(arithmetic, x_NH, self.qkv, self.qkv_lora, self.bias).unflatten(-1, (-1, self.spec.head_dim))
        q_NQD, k_NKD, v_NKD = heads_NhD.split(self._split, dim=1)
        if self.query_gain is not None and self.key_gain is not None:
            q_NQD = arithmetic.norm(q_NQD, self.query_gain, self._eps, self._offset)
            k_NKD = arithmetic.norm(k_NKD, self.key_gain, self._eps, self._offset)
        q_NQD, k_NKD = (self._turn(x_NhD, arithmetic, rotation) for x_NhD in (q_NQD, k_NKD))
        rule = AttentionRule(scale=self.spec.scale, window=self._window, sinks_Q=self.sinks)
        attended_NQD = attend(self.layer, q_NQD, k_NKD, v_NKD, rule)
        return linear(arithmetic, attended_NQD.flatten(1), self.output, self.output_lora, self.output_bias)

    def _turn(self, x_NhD: Tensor, arithmetic: Arithmetic, rotation: Rotation) -> Tensor:
        """Apply positions to the first columns of each head."""
        width = self.spec.rotary_width
        turned_NhD = arithmetic.rotate(x_NhD[..., :width], rotation.cosines_ND, rotation.sines_ND)
        return turned_NhD if width == x_NhD.shape[-1] else torch.cat((turned_NhD, x_NhD[..., width:]), dim=-1)


@final
class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434 §2.1) in its absorbed form.

    Instead of expanding the latent vector of every past token to keys and values of every head, queries are folded into
    the latent space, and what they attend to there is expanded: q·(Kc) = (qK)·c. So there is one key head, its first L
    columns are the values, and a cache holds L + rope_dim numbers per token. In training that costs more products than
    the expanded form; the sums are then the engine's, which is why both sides use it.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        attention = spec.attention
        assert isinstance(attention, LatentSpec)
        self.spec = attention
        self.layer = layer
        self._eps = spec.norm_eps
        self._interleaved = spec.rope.interleaved
        query_rows = attention.heads * (attention.nope_dim + attention.rope_dim)
        self.split = (attention.q_rank or query_rows, attention.kv_rank, attention.rope_dim)
        """Widths of the parts of ``compress``'s rows: (compressed) queries, latent vector, the key with position."""
        self.compress = nn.Parameter(torch.empty(sum(self.split), spec.hidden_size))
        self.query_gain = nn.Parameter(torch.ones(attention.q_rank)) if attention.q_rank else None
        self.expand_queries = nn.Parameter(torch.empty(query_rows, attention.q_rank)) if attention.q_rank else None
        self.latent_gain = nn.Parameter(torch.ones(attention.kv_rank))
        expanded_rows = attention.heads * (attention.nope_dim + attention.value_dim)
        self.expand_latents = nn.Parameter(torch.empty(expanded_rows, attention.kv_rank))
        self.output = nn.Parameter(torch.empty(spec.hidden_size, attention.heads * attention.value_dim))
        self.compress_lora: LoraSite | None = None
        self.expand_queries_lora: LoraSite | None = None
        self.output_lora: LoraSite | None = None

    def forward(self, x_NH: Tensor, arithmetic: Arithmetic, rotation: Rotation, attend: Attend) -> Tensor:
        """[N,H] → [N,H]."""
        spec = self.spec
        compressed = linear(arithmetic, x_NH, self.compress, self.compress_lora)
        q_NI, latent_NL, turned_ND = compressed.split(self.split, dim=-1)
        if self.query_gain is not None and self.expand_queries is not None:
            normed_NI = arithmetic.norm(q_NI, self.query_gain, LATENT_NORM_EPS)
            q_NI = linear(arithmetic, normed_NI, self.expand_queries, self.expand_queries_lora)
        q_NQI = q_NI.unflatten(-1, (spec.heads, -1))
        plain_NQI, turned_NQD = q_NQI.split((spec.nope_dim, spec.rope_dim), dim=-1)
        to_keys_QIL, to_values_QWL = self.expand_latents.unflatten(0, (spec.heads, -1)).split(
            (spec.nope_dim, spec.value_dim), dim=1
        )
        folded_NQL = per_head(arithmetic, plain_NQI, to_keys_QIL.transpose(1, 2))
        q_NQD = torch.cat((folded_NQL, self._turn(turned_NQD, arithmetic, rotation)), dim=-1)
        latent_NKL = arithmetic.norm(latent_NL, self.latent_gain, LATENT_NORM_EPS).unsqueeze(1)
        k_NKD = torch.cat((latent_NKL, self._turn(turned_ND.unsqueeze(1), arithmetic, rotation)), dim=-1)
        rule = AttentionRule(scale=spec.scale)
        attended_NQL = attend(self.layer, q_NQD, k_NKD, k_NKD[..., : spec.kv_rank], rule)
        values_NQW = per_head(arithmetic, attended_NQL, to_values_QWL)
        return linear(arithmetic, values_NQW.flatten(1), self.output, self.output_lora)

    def _turn(self, x_NhD: Tensor, arithmetic: Arithmetic, rotation: Rotation) -> Tensor:
        """Apply positions. Interleaved pairs are first sorted into halves; scores do not depend on the order."""
        if self._interleaved:
            x_NhD = x_NhD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return arithmetic.rotate(x_NhD, rotation.cosines_ND, rotation.sines_ND)


def gains(spec: ModelSpec, width: int) -> Tensor:
    """[width] the gains of a norm that multiplies by 1."""
    return torch.full((width,), 1.0 - spec.gain_offset)


def per_head(arithmetic: Arithmetic, x_NhI: Tensor, weight_hOI: Tensor) -> Tensor:
    """[N,h,O]: each head's rows times that head's matrix."""
    tokens, heads, _ = x_NhI.shape
    rows_RI = x_NhI.transpose(0, 1).flatten(0, 1)
    ends_h = torch.arange(1, heads + 1, dtype=torch.int32, device=rows_RI.device) * tokens
    out_hNO: Tensor = arithmetic.grouped(rows_RI, ends_h, weight_hOI).unflatten(0, (heads, tokens))
    return out_hNO.transpose(0, 1)

"""Qwen3-MoE, once, for training and for inference.

The trainer and the native engine call the same :meth:`Qwen3Moe.forward`; they differ only in the ``attend`` they pass,
which owns keys and values (a padded batch there, a cache here). So the two sides cannot drift apart in anything but
the order of sums. Reference: Qwen3 technical report, arXiv 2505.09388, and Hugging Face's ``Qwen3MoeForCausalLM``,
whose checkpoints :mod:`etude.models.checkpoint` reads and writes.

Shape legend: N tokens (flattened), H hidden, Q query heads, K key/value heads, D head width, E experts, k experts per
token, I expert width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [N,Q,D], keys [N,K,D], values [N,K,D]) → attended values [N,Q,D]."""

DENSE_EXPERTS_MAX_TOKENS = 160
"""Up to here running every expert on every token (one batched matmul) beats sorting tokens by expert, on CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a Qwen3-MoE."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_size: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_positions: int = 4096


TINY = ModelSpec(
    vocab_size=50,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=4,
    experts_per_token=2,
    expert_size=16,
)
"""The smallest model with every part in it, grouped queries included: for tests and first experiments."""


class RmsNorm(nn.Module):
    """Root-mean-square normalisation with a gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self._eps)


class Experts(nn.Module):
    """The sparse feed-forward layer: softmax router over all experts, top-k renormalised to 1."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._top_k = spec.experts_per_token
        self.router = nn.Parameter(torch.empty(spec.experts, spec.hidden_size))
        self.gate_up = nn.Parameter(torch.empty(spec.experts, 2 * spec.expert_size, spec.hidden_size))
        self.down = nn.Parameter(torch.empty(spec.experts, spec.hidden_size, spec.expert_size))

    def forward(self, x_NH: Tensor) -> Tensor:
        """[N,H] → [N,H]."""
        gates_NE = functional.linear(x_NH, self.router).softmax(-1, dtype=torch.float32)
        weights_Nk, experts_Nk = gates_NE.topk(self._top_k, -1)
        weights_Nk = (weights_Nk / weights_Nk.sum(-1, keepdim=True)).to(x_NH.dtype)
        if x_NH.shape[0] <= DENSE_EXPERTS_MAX_TOKENS:
            return self._dense(x_NH, torch.zeros_like(gates_NE, dtype=x_NH.dtype).scatter(1, experts_Nk, weights_Nk))
        return self._sorted(x_NH, experts_Nk, weights_Nk)

    def _dense(self, x_NH: Tensor, weights_NE: Tensor) -> Tensor:
        """Every expert on every token; unused results are multiplied by 0."""
        gate, up = torch.matmul(x_NH, self.gate_up.transpose(1, 2)).chunk(2, -1)
        inner_ENI = functional.silu(gate) * up * weights_NE.t().unsqueeze(-1)
        return torch.bmm(inner_ENI, self.down.transpose(1, 2)).sum(0)

    def _sorted(self, x_NH: Tensor, experts_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Tokens grouped by expert, one matmul per expert, results put back in order."""
        flat = experts_Nk.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.router.shape[0]).tolist()
        chunks = x_NH[order // self._top_k].split(counts)
        outputs = []
        for chunk, gate_up, down in zip(chunks, self.gate_up.unbind(0), self.down.unbind(0), strict=True):
            gate, up = functional.linear(chunk, gate_up).chunk(2, -1)
            outputs.append(functional.linear(functional.silu(gate) * up, down))
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        y_NkH = torch.cat(outputs)[inverse].view(*experts_Nk.shape, -1)
        return (y_NkH * weights_Nk.unsqueeze(-1)).sum(1)


class Block(nn.Module):
    """One transformer layer: attention with per-head q/k norms and rotary positions, then experts."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._split = (spec.heads, spec.kv_heads, spec.kv_heads)
        self._head_dim = spec.head_dim
        self.attention_norm = RmsNorm(spec.hidden_size, spec.norm_eps)
        self.qkv = nn.Parameter(torch.empty(sum(self._split) * spec.head_dim, spec.hidden_size))
        self.query_norm = RmsNorm(spec.head_dim, spec.norm_eps)
        self.key_norm = RmsNorm(spec.head_dim, spec.norm_eps)
        self.output = nn.Parameter(torch.empty(spec.hidden_size, spec.heads * spec.head_dim))
        self.experts_norm = RmsNorm(spec.hidden_size, spec.norm_eps)
        self.experts = Experts(spec)

    def forward(self, x_NH: Tensor, rotation: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        """[N,H] → [N,H]."""
        heads = functional.linear(self.attention_norm(x_NH), self.qkv).unflatten(-1, (-1, self._head_dim))
        q, k, v = heads.split(self._split, dim=1)
        attended = attend(layer, rotate(self.query_norm(q), rotation), rotate(self.key_norm(k), rotation), v)
        x_NH = x_NH + functional.linear(attended.flatten(1), self.output)
        update_NH: Tensor = self.experts(self.experts_norm(x_NH))
        return x_NH + update_NH


class Qwen3Moe(nn.Module):
    """A causal language model with tied input and output embeddings."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = RmsNorm(spec.hidden_size, spec.norm_eps)
        cosines, sines = rotary_tables(spec)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def initialise(self, seed: int, std: float = 0.04) -> None:
        """Fill every matrix from a normal distribution; gains stay 1."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def forward(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [N,H] of N tokens, normalised."""
        rotation = (self.cosines[positions_N].unsqueeze(1), self.sines[positions_N].unsqueeze(1))
        x_NH = functional.embedding(token_ids_N, self.embedding)
        for layer, block in enumerate(self.blocks):
            x_NH = block(x_NH, rotation, layer, attend)
        out: Tensor = self.norm(x_NH)
        return out

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N,H] → [N,V]."""
        return functional.linear(hidden_NH, self.embedding)

    def forward_padded(self, token_ids_BT: Tensor) -> Tensor:
        """Hidden states [B,T,H] of right-padded rows; no row sees another and no token sees its future."""
        batch, length = token_ids_BT.shape

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(batch, length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
            grouped = q.shape[1] != k.shape[1]
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return out.transpose(1, 2).flatten(0, 1)

        positions_N = torch.arange(length, device=token_ids_BT.device).repeat(batch)
        hidden: Tensor = self(token_ids_BT.reshape(-1), positions_N, attend)
        return hidden.view(batch, length, -1)


def rotary_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, D] of rotary embeddings, halves repeated as Hugging Face does."""
    inverse = 1.0 / spec.rope_theta ** (torch.arange(0, spec.head_dim, 2).float() / spec.head_dim)
    angles = torch.outer(torch.arange(spec.max_positions).float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x_NhD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to heads: rotation tables are [N,1,D]."""
    cosines, sines = rotation
    low, high = x_NhD.chunk(2, -1)
    return x_NhD * cosines + torch.cat([-high, low], -1) * sines

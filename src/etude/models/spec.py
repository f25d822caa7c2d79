"""The spec of a decoder: every number that defines its parameters or its computation.

A spec defines a model independently of its family: :mod:`etude.models.families` reads it from a Hugging Face
``config.json``, :class:`~etude.models.decoder.Decoder` is built from it, engines size their caches by it.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from etude.types import NO_ROUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """The inner step of a gated feed-forward (arXiv 2002.05202): g · σ(slope · (g + cubic · g³)) · (u + shift).

    g is a row of the gate, u the row that it multiplies.
    """

    slope: float = 1.0
    cubic: float = 0.0
    shift: float = 0.0
    limit: float | None = None
    """Upper bound of g, and bound of the magnitude of u; ``None``: no bound."""
    interleaved: bool = False
    """True if the columns of g and u alternate, false if all of g come first."""


SILU = GateSpec()
"""SwiGLU."""
GELU_TANH = GateSpec(slope=2.0 * math.sqrt(2.0 / math.pi), cubic=0.044715)
"""GeGLU by the tangent approximation (arXiv 1606.08415 §2), for (1 + tanh x)/2 = σ(2x)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Linear RoPE scaling: positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1 RoPE scaling: low frequencies divided by a factor, high ones kept, those between blended."""

    factor: float
    low_factor: float
    high_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN RoPE scaling (arXiv 2309.00071 §3): frequencies blended by their turns in the original context."""

    factor: float
    original_positions: int
    fast_turns: float = 32.0
    """Frequencies that turn more often than this are kept."""
    slow_turns: float = 1.0
    """Frequencies that turn less often than this are divided by ``factor``."""
    mscale: float = 0.0
    """DeepSeek's coefficient for the amplitude of the tables; 0 if not given."""
    mscale_all_dim: float = 0.0
    """DeepSeek's coefficient for attention scores, including the parts without positions; 0 if not given."""
    attention_factor: float | None = None
    """Factor of the tables; ``None``: derived from the other fields."""
    truncate: bool = True
    """True if the blended range begins and ends at whole frequencies."""

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines (eq. 22; with DeepSeek's quotient)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._stretch(self.mscale) / self._stretch(self.mscale_all_dim)
        return self._stretch(1.0)

    @property
    def latent_sharpness(self) -> float:
        """Factor of the scores of latent attention."""
        return self._stretch(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _stretch(self, strength: float) -> float:
        return 0.1 * strength * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


Scaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding (arXiv 2104.09864)."""

    theta: float = 10_000.0
    scaling: Scaling | None = None
    interleaved: bool = False
    """True if rotated pairs are adjacent columns (DeepSeek), false if they are one column of each half."""

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines."""
        return self.scaling.amplitude if isinstance(self.scaling, YarnScaling) else 1.0

    @property
    def latent_sharpness(self) -> float:
        """Factor of the scores of latent attention."""
        return self.scaling.latent_sharpness if isinstance(self.scaling, YarnScaling) else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSpec:
    """Grouped-query attention: groups of query heads share a key and a value head (arXiv 2305.13245)."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    """True if queries, keys and values have one."""
    output_bias: bool = False
    normed: bool = False
    """True if each head of queries and keys is normalised (Qwen3)."""
    rotary_dim: int | None = None
    """Number of leading columns of a head that are rotated by position; ``None``: all."""
    query_width: int | None = None
    """Scores are divided by the square root of this number; ``None``: ``head_dim``."""
    sinks: bool = False
    """True if each head has a learned score without a value, which takes a share of attention (gpt-oss)."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary positions")
        if self.rotary_width % 2 or not 0 < self.rotary_width <= self.head_dim:
            raise ValueError(f"rotary_dim={self.rotary_dim} must be even and within head_dim={self.head_dim}")

    @property
    def scale(self) -> float:
        """Factor of scores."""
        return float((self.query_width or self.head_dim) ** -0.5)

    @property
    def key_heads(self) -> int:
        """Number of key heads in a cache."""
        return self.kv_heads

    @property
    def key_width(self) -> int:
        """Width of one key."""
        return self.head_dim

    @property
    def value_width(self) -> int:
        """Width of one value."""
        return self.head_dim

    @property
    def rotary_width(self) -> int:
        """Number of columns that are rotated by position."""
        return self.rotary_dim or self.head_dim

    @property
    def values_in_keys(self) -> bool:
        """True if values are the first columns of keys, so that a cache need not store them."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1): all heads share one compressed key."""

    heads: int
    q_rank: int | None
    """Width that queries are compressed to; ``None``: no compression."""
    kv_rank: int
    """Width of the latent vector that keys and values of all heads are made from."""
    nope_dim: int
    """Width of the part of a query without position."""
    rope_dim: int
    """Width of the part that is rotated by position; its key is shared by all heads."""
    value_dim: int
    sharpness: float = 1.0
    """A further factor of scores: :attr:`RopeSpec.latent_sharpness`."""

    def __post_init__(self) -> None:
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim={self.rope_dim} must be even for rotary positions")

    @property
    def scale(self) -> float:
        """Factor of scores, from the width of a query before it is folded into the latent space."""
        return float((self.nope_dim + self.rope_dim) ** -0.5 * self.sharpness)

    @property
    def key_heads(self) -> int:
        """Number of key heads in a cache."""
        return 1

    @property
    def key_width(self) -> int:
        """Width of one key: the latent vector and the part with position."""
        return self.kv_rank + self.rope_dim

    @property
    def value_width(self) -> int:
        """Width of one value: the latent vector."""
        return self.kv_rank

    @property
    def rotary_width(self) -> int:
        """Number of columns that are rotated by position."""
        return self.rope_dim

    @property
    def values_in_keys(self) -> bool:
        """True if values are the first columns of keys, so that a cache need not store them."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The experts of one layer and the router that chooses among them."""

    count: int
    per_token: int
    size: int
    """Inner width of one expert."""
    shared_size: int = 0
    """Inner width of the shared experts, which every token also goes through; 0: none."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """``sigmoid`` (DeepSeek-V3, arXiv 2412.19437 §2.1.2) chooses by score plus a correction that balances load."""
    normalise: bool = True
    """True if the gates of a token are divided by their sum."""
    groups: int = 1
    """Number of groups of neighbours into which experts are split …"""
    top_groups: int = 1
    """… and number of groups from which they are chosen."""
    scale: float = 1.0
    """Factor of gates."""
    bias: bool = False
    """True if the router and the matrices of routed experts have one."""
    fused: bool = False
    """True if checkpoints have a layer's experts in one tensor, inputs before outputs (gpt-oss)."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count < NO_ROUTE:
            raise ValueError(f"per_token={self.per_token} and count={self.count}: a token goes to 1 … count < 65,535")
        if self.count % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"{self.count} experts cannot be chosen from {self.top_groups} of {self.groups} groups")
        group_size = self.count // self.groups
        if group_size * self.top_groups < self.per_token or (self.groups > 1 and group_size < GROUP_WITNESSES):
            raise ValueError(
                f"{self.top_groups} groups of {group_size} experts: too few for per_token={self.per_token}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """Sliding-window attention of some layers (arXiv 2004.05150 §3.1)."""

    size: int
    """Positions that a token sees, including its own."""
    layers: tuple[int, ...]
    """The layers that have it, ascending."""
    rope: RopeSpec | None = None
    """Rotary positions of these layers; ``None``: those of the other layers."""

    def __post_init__(self) -> None:
        if self.size < 1 or not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"a window of {self.size} positions in layers {self.layers}: both start at 1, ascending")


GROUP_WITNESSES = 2
"""Number of a group's best experts whose sum ranks the group (arXiv 2412.19437 §2.1.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The architecture of a decoder."""

    vocab_size: int
    hidden_size: int
    layers: int
    attention: GroupedSpec | LatentSpec
    dense_size: int = 0
    """Inner width of the feed-forward of layers without experts; 0 if there is no such layer."""
    experts: ExpertsSpec | None = None
    sparse_layers: tuple[int, ...] = ()
    """Layers with experts, ascending; routes count these only."""
    rope: RopeSpec = RopeSpec()
    window: WindowSpec | None = None
    """Layers whose tokens do not see all of their past."""
    gate: GateSpec = SILU
    norm_eps: float = 1e-6
    gain_offset: float = 0.0
    """Added to all gains of norms (Gemma: 1)."""
    sandwich: bool = False
    """True if the outputs of attention and feed-forward are normalised, too, before they are added (Gemma)."""
    embedding_scale: float = 1.0
    """Factor of the embedding at the input."""
    max_positions: int = 4096
    tied: bool = True
    """True if the output matrix is the embedding."""
    draft: bool = False
    """True if there is a draft head (:mod:`etude.models.draft`)."""

    def __post_init__(self) -> None:
        if list(self.sparse_layers) != sorted(set(self.sparse_layers) & set(range(self.layers))):
            raise ValueError(f"sparse_layers={self.sparse_layers} must ascend within the {self.layers} layers")
        if bool(self.sparse_layers) != (self.experts is not None):
            raise ValueError(f"{len(self.sparse_layers)} sparse layers, but experts={self.experts}")
        dense_layers = self.layers - len(self.sparse_layers)
        if bool(dense_layers) != (self.dense_size > 0):
            raise ValueError(f"{dense_layers} of {self.layers} layers are dense, but dense_size={self.dense_size}")
        if self.window is not None and self.window.layers[-1] >= self.layers:
            raise ValueError(f"window.layers={self.window.layers} must be within the {self.layers} layers")
        if isinstance(self.attention, GroupedSpec):
            if self.rope.interleaved:
                raise ValueError("interleaved rotary positions are implemented for latent attention only")
        elif self.window is not None:
            raise ValueError("windows are implemented for grouped attention only")
        elif self.attention.sharpness != self.rope.latent_sharpness:
            raise ValueError(
                f"sharpness={self.attention.sharpness}, but the rope asks for {self.rope.latent_sharpness}"
            )

    def window_of(self, layer: int) -> int | None:
        """Positions that a token sees in a layer, including its own; ``None``: its whole past."""
        return self.window.size if self.window is not None and layer in self.window.layers else None

    def rope_of(self, layer: int) -> RopeSpec:
        """Rotary positions of a layer."""
        local = self.window.rope if self.window is not None and layer in self.window.layers else None
        return local or self.rope

    @property
    def cached_numbers(self) -> int:
        """Count of one token's key and value numbers over all layers, including a draft head's. Layers with a window
        store all positions, too.
        """
        attention = self.attention
        return (self.layers + self.draft) * attention.key_heads * (attention.key_width + attention.value_width)

    @property
    def routes_shape(self) -> tuple[int, int]:
        """(sparse layers, experts per token): a token's routes."""
        return len(self.sparse_layers), self.experts.per_token if self.experts else 0


TINY = ModelSpec(
    vocab_size=50,
    hidden_size=32,
    layers=2,
    attention=GroupedSpec(heads=4, kv_heads=2, head_dim=16, normed=True),
    experts=ExpertsSpec(count=4, per_token=2, size=16),
    sparse_layers=(0, 1),
)
"""The smallest Qwen3-MoE with every part, including grouped queries: for tests and first experiments."""

TINY_DENSE = ModelSpec(
    vocab_size=50,
    hidden_size=32,
    layers=2,
    attention=GroupedSpec(heads=4, kv_heads=2, head_dim=16),
    dense_size=48,
    tied=False,
)
"""The smallest Llama: no experts, no norms of heads, a separate output matrix."""

TINY_LATENT = ModelSpec(
    vocab_size=50,
    hidden_size=32,
    layers=3,
    attention=LatentSpec(heads=4, q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16),
    dense_size=48,
    experts=ExpertsSpec(
        count=8, per_token=3, size=16, shared_size=16, scoring="sigmoid", groups=4, top_groups=2, scale=2.5
    ),
    sparse_layers=(1, 2),
    rope=RopeSpec(interleaved=True),
    tied=False,
)
"""The smallest DeepSeek-V3: latent attention, a dense layer, shared experts, groups of experts."""

TINY_GLM = ModelSpec(
    vocab_size=50,
    hidden_size=32,
    layers=2,
    attention=GroupedSpec(heads=4, kv_heads=2, head_dim=16, bias=True, normed=True, rotary_dim=8),
    dense_size=48,
    experts=ExpertsSpec(count=4, per_token=2, size=16, shared_size=16, scoring="sigmoid"),
    sparse_layers=(1,),
    tied=False,
)
"""The smallest GLM-4.5: rotary positions of half a head, DeepSeek-V3's router with grouped attention."""

TINY_GEMMA = ModelSpec(
    vocab_size=50,
    hidden_size=32,
    layers=3,
    attention=GroupedSpec(heads=4, kv_heads=2, head_dim=16, normed=True, query_width=24),
    dense_size=48,
    rope=RopeSpec(theta=1_000_000.0, scaling=LinearScaling(factor=8.0)),
    window=WindowSpec(size=11, layers=(0, 2), rope=RopeSpec()),
    gate=GELU_TANH,
    gain_offset=1.0,
    sandwich=True,
    embedding_scale=32**0.5,
)
"""The smallest Gemma 3: windows with a rope of their own, a sandwich of norms, a scaled embedding."""

TINY_OSS = ModelSpec(
    vocab_size=50,
    hidden_size=32,
    layers=2,
    attention=GroupedSpec(heads=4, kv_heads=2, head_dim=16, bias=True, output_bias=True, sinks=True),
    experts=ExpertsSpec(count=4, per_token=2, size=16, bias=True, fused=True),
    sparse_layers=(0, 1),
    rope=RopeSpec(scaling=YarnScaling(factor=4.0, original_positions=1024, truncate=False)),
    window=WindowSpec(size=13, layers=(0,)),
    gate=GateSpec(slope=1.702, shift=1.0, limit=7.0, interleaved=True),
    tied=False,
)
"""The smallest gpt-oss: a window, sinks, biases everywhere, experts with clamped gates in one tensor."""

TINIEST = (TINY, TINY_DENSE, TINY_LATENT, TINY_GLM, TINY_GEMMA, TINY_OSS)
"""One spec of each supported architecture."""

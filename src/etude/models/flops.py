"""Floating-point operations of a forward pass, from the model spec alone.

One multiplication and one addition are two operations, and a backward pass costs twice its forward pass. Norms, gates
and the softmax are left out, since they grow linearly in the model's width, and products quadratically. Pure.
"""

from etude.models.spec import GroupedSpec, LatentSpec, ModelSpec

MATRICES_PER_FEED = 3
"""Gate, up and down."""


def token_flops(spec: ModelSpec) -> int:
    """Operations of the layers, per token, whatever the length of its sequence: 2 for each matrix entry that the token
    meets.
    """
    feeds = (spec.layers - len(spec.sparse_layers)) * MATRICES_PER_FEED * spec.hidden_size * spec.dense_size
    if spec.experts is not None:
        routed = spec.experts.per_token * spec.experts.size + spec.experts.shared_size
        per_layer = spec.hidden_size * (spec.experts.count + MATRICES_PER_FEED * routed)
        feeds += len(spec.sparse_layers) * per_layer
    return 2 * (spec.layers * _attention_entries(spec) + feeds)


def pair_flops(spec: ModelSpec) -> int:
    """Operations of the layers that see everything, per pair of a token and one that it attends to: a score and a share
    of a value, in each head.
    """
    return (spec.layers - _windowed(spec)) * _pair_of_layer(spec)


def window_flops(spec: ModelSpec) -> int:
    """The same of the layers with a window, per pair of a token and one inside its window."""
    return _windowed(spec) * _pair_of_layer(spec)


def head_flops(spec: ModelSpec) -> int:
    """Operations of the output matrix, per token whose logits are computed; in training those are the loss tokens
    only.
    """
    return 2 * spec.hidden_size * spec.vocab_size


def _windowed(spec: ModelSpec) -> int:
    return len(spec.window.layers) if spec.window is not None else 0


def _pair_of_layer(spec: ModelSpec) -> int:
    attention = spec.attention
    return 2 * attention.heads * (attention.key_width + attention.value_width)


def _attention_entries(spec: ModelSpec) -> int:
    """Entries of one layer's attention matrices."""
    match spec.attention:
        case GroupedSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim):
            return spec.hidden_size * head_dim * (2 * heads + 2 * kv_heads)
        case LatentSpec() as latent:
            query_rows = latent.heads * (latent.nope_dim + latent.rope_dim)
            compressed = (latent.q_rank or query_rows) + latent.kv_rank + latent.rope_dim
            expanded = latent.heads * (latent.nope_dim + latent.value_dim) * latent.kv_rank
            outputs = latent.heads * latent.value_dim * spec.hidden_size
            return spec.hidden_size * compressed + (latent.q_rank or 0) * query_rows + expanded + outputs

"""Checkpoint tensors as views into parameters: Hugging Face's names, one per projection and expert.

A decoder stores parameters fused (``qkv``, ``gate_up``, all experts in one tensor); only this module has the mapping
between the two. Owns names and views, no files.
"""

from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor

from etude.models.attention import GroupedAttention, LatentAttention
from etude.models.decoder import Decoder, DecoderBlock
from etude.models.draft import DraftHead
from etude.models.experts import Experts, FeedForward

Views: TypeAlias = Iterator[tuple[str, Tensor]]
"""Pairs of a name and a view into a parameter; writing to the view writes to the model."""

HEAD = "lm_head.weight"
"""The output matrix of a model that does not use its embedding for it."""


def outer_views(model: Decoder) -> Views:
    """Views of the checkpoint tensors outside of blocks, by name."""
    yield "model.embed_tokens.weight", model.embedding.data
    yield "model.norm.weight", model.gain.data
    if model.head is not None:
        yield HEAD, model.head.data
    if model.draft is not None:
        yield from _draft(model.draft)


def _draft(draft: DraftHead) -> Views:
    """DeepSeek-V3's names of its module for multi-token prediction: those of a layer behind the last."""
    assert isinstance(draft.block, DecoderBlock)
    layer = f"model.layers.{draft.block.attention.layer}."
    yield layer + "enorm.weight", draft.token_gain.data
    yield layer + "hnorm.weight", draft.hidden_gain.data
    yield layer + "eh_proj.weight", draft.join.data
    yield layer + "shared_head.norm.weight", draft.gain.data
    yield from block_views(draft.block)


def block_views(block: DecoderBlock) -> Views:
    """Views of one block's checkpoint tensors, by name."""
    for name, view in _block(block):
        yield f"model.layers.{block.attention.layer}.{name}", view


def _block(block: DecoderBlock) -> Views:
    attention = _grouped(block.attention) if isinstance(block.attention, GroupedAttention) else _latent(block.attention)
    for name, view in attention:
        yield f"self_attn.{name}", view
    yield "input_layernorm.weight", block.attention_gain.data
    if block.attended_gain is None or block.fed_gain is None:
        yield "post_attention_layernorm.weight", block.feed_gain.data
    else:
        yield "post_attention_layernorm.weight", block.attended_gain.data
        yield "pre_feedforward_layernorm.weight", block.feed_gain.data
        yield "post_feedforward_layernorm.weight", block.fed_gain.data
    for name, view in _experts(block.feed) if isinstance(block.feed, Experts) else _feed_forward(block.feed):
        yield f"mlp.{name}", view


def _grouped(attention: GroupedAttention) -> Views:
    spec = attention.spec
    widths = [heads * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
    for projection, view in zip("qkv", attention.qkv.data.split(widths), strict=True):
        yield f"{projection}_proj.weight", view
    if attention.bias is not None:
        for projection, view in zip("qkv", attention.bias.data.split(widths), strict=True):
            yield f"{projection}_proj.bias", view
    yield "o_proj.weight", attention.output.data
    if attention.output_bias is not None:
        yield "o_proj.bias", attention.output_bias.data
    if attention.query_gain is not None and attention.key_gain is not None:
        yield "q_norm.weight", attention.query_gain.data
        yield "k_norm.weight", attention.key_gain.data
    if attention.sinks is not None:
        yield "sinks", attention.sinks.data


def _latent(attention: LatentAttention) -> Views:
    queries, *latents = attention.split
    queries_view, latents_view = attention.compress.data.split((queries, sum(latents)))
    if attention.query_gain is not None and attention.expand_queries is not None:
        yield "q_a_proj.weight", queries_view
        yield "q_a_layernorm.weight", attention.query_gain.data
        yield "q_b_proj.weight", attention.expand_queries.data
    else:
        yield "q_proj.weight", queries_view
    yield "kv_a_proj_with_mqa.weight", latents_view
    yield "kv_a_layernorm.weight", attention.latent_gain.data
    yield "kv_b_proj.weight", attention.expand_latents.data
    yield "o_proj.weight", attention.output.data


def _experts(experts: Experts) -> Views:
    if experts.spec.fused:
        yield from _fused_experts(experts)
        return
    yield "gate.weight", experts.router.weight.data
    if experts.router.correction is not None:
        yield "gate.e_score_correction_bias", experts.router.correction.values
    routed = experts.routed
    for index, (gate_up, down) in enumerate(zip(routed.gate_up.data, routed.down.data, strict=True)):
        gate, up = gate_up.chunk(2)
        yield f"experts.{index}.gate_proj.weight", gate
        yield f"experts.{index}.up_proj.weight", up
        yield f"experts.{index}.down_proj.weight", down
    if experts.shared is not None:
        for name, view in _feed_forward(experts.shared):
            yield f"shared_experts.{name}", view


def _fused_experts(experts: Experts) -> Views:
    parts = {
        "router.weight": experts.router.weight,
        "router.bias": experts.router.bias,
        "experts.gate_up_proj": experts.routed.gate_up,
        "experts.gate_up_proj_bias": experts.routed.gate_up_bias,
        "experts.down_proj": experts.routed.down,
        "experts.down_proj_bias": experts.routed.down_bias,
    }
    for name, parameter in parts.items():
        if parameter is not None:
            yield name, parameter.data


def _feed_forward(feed: FeedForward) -> Views:
    gate, up = feed.gate_up.data.chunk(2)
    yield "gate_proj.weight", gate
    yield "up_proj.weight", up
    yield "down_proj.weight", feed.down.data

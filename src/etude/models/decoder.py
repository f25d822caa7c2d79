"""One decoder for every family and for both sides: the trainer and the native engine call the same forward pass.

They differ only in the ``attend`` that they pass, which owns keys and values (packed sequences in the trainer, a paged
cache in the engine), so the two sides cannot diverge. :attr:`Decoder.arithmetic` does the computation.

Transformers' modules compute the same function (``tests/numerics/test_hugging_face.py``: within 1e-5). They are not
used because each has its own attention, cache and expert kernels, so there is no single place where both sides could be
made equal, and because they serve more slowly: 566 and 374 tokens per CPU-second at batch 16 and 64 with their
continuous batching, 1,054 and 1,963 with one ``attend`` seam (20 M parameters, 16 experts, float32).

Shape legend: N tokens, H hidden, V vocabulary, Q query heads, K key heads, D width of a key, W width of a value.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from etude.models.arithmetic import Arithmetic, AttentionRule, PackedRows, packed_rows
from etude.models.attention import Attend, GroupedAttention, LatentAttention, Rotation, gains
from etude.models.draft import DraftHead, block_spec
from etude.models.experts import Experts, FeedForward, Routing
from etude.models.fast import FastArithmetic
from etude.models.lora import Adapters
from etude.models.precise import Precise
from etude.models.rotary import rotary_tables
from etude.models.shared_rows import SharedRows, shared_rows
from etude.models.spec import GroupedSpec, ModelSpec, RopeSpec

RECOMPUTED = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Calls a module without storing its activations; a block uses no random numbers."""


@final
class DecoderBlock(nn.Module):
    """One transformer layer: attention, then a dense or sparse feed-forward, pre-normalised, with residuals.

    With sandwich norms (Gemma) the outputs of both are also normalised before they are added.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self._eps, self._offset = spec.norm_eps, spec.gain_offset
        self.attention_gain = nn.Parameter(gains(spec, spec.hidden_size))
        is_grouped = isinstance(spec.attention, GroupedSpec)
        self.attention = GroupedAttention(spec, layer) if is_grouped else LatentAttention(spec, layer)
        self.attended_gain = nn.Parameter(gains(spec, spec.hidden_size)) if spec.sandwich else None
        self.feed_gain = nn.Parameter(gains(spec, spec.hidden_size))
        self.feed: FeedForward | Experts
        if spec.experts is not None and layer in spec.sparse_layers:
            self.feed = Experts(spec.experts, spec.hidden_size, spec.sparse_layers.index(layer), spec.gate)
        else:
            self.feed = FeedForward(spec.hidden_size, spec.dense_size, spec.gate)
        self.fed_gain = nn.Parameter(gains(spec, spec.hidden_size)) if spec.sandwich else None

    def forward(
        self, x_NH: Tensor, arithmetic: Arithmetic, rotation: Rotation, attend: Attend, routing: Routing | None
    ) -> Tensor:
        """[N,H] → [N,H]."""
        attended_NH: Tensor = self.attention(
            self._norm(arithmetic, x_NH, self.attention_gain), arithmetic, rotation, attend
        )
        x_NH = x_NH + self._norm(arithmetic, attended_NH, self.attended_gain)
        normed_NH = self._norm(arithmetic, x_NH, self.feed_gain)
        update_NH: Tensor
        if isinstance(self.feed, Experts):
            update_NH = self.feed(normed_NH, arithmetic, routing)
        else:
            update_NH = self.feed(normed_NH, arithmetic)
        return x_NH + self._norm(arithmetic, update_NH, self.fed_gain)

    def _norm(self, arithmetic: Arithmetic, x_NH: Tensor, gain: Tensor | None) -> Tensor:
        """[N,H], unchanged if the layer lacks this norm."""
        return x_NH if gain is None else arithmetic.norm(x_NH, gain, self._eps, self._offset)


@final
class RotaryTables(nn.Module):
    """The rotary positions that some layers share."""

    def __init__(self, spec: ModelSpec, rope: RopeSpec) -> None:
        super().__init__()
        cosines_PD, sines_PD = rotary_tables(spec, rope)
        self.cosines_PD = Precise(cosines_PD, persistent=False)
        self.sines_PD = Precise(sines_PD, persistent=False)

    def forward(self, positions_N: Tensor) -> Rotation:
        """The rows of the tables at int64 [N] positions."""
        return Rotation(cosines_ND=self.cosines_PD.values[positions_N], sines_ND=self.sines_PD.values[positions_N])


@final
class Decoder(nn.Module):
    """A causal language model, built from its spec."""

    def __init__(self, spec: ModelSpec, arithmetic: Arithmetic | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.arithmetic: Arithmetic = FastArithmetic() if arithmetic is None else arithmetic
        """The arithmetic of all computation; may be replaced between forward passes."""
        self.recompute = False
        """Activation checkpointing: a backward pass recomputes each block's activations. Memory holds one hidden state
        per token and block; a third more work, the same gradients.
        """
        self.adapters: Adapters | None = None
        """Adapters of a frozen model; if there are any, only they are the model's state."""
        self.embedding = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))
        self.blocks = nn.ModuleList(DecoderBlock(spec, layer) for layer in range(spec.layers))
        self.gain = nn.Parameter(gains(spec, spec.hidden_size))
        self.head = None if spec.tied else nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))
        self.draft = DraftHead(spec, DecoderBlock(block_spec(spec), spec.layers)) if spec.draft else None
        """Predicts further tokens; ``None`` if the spec has no draft head."""
        ropes = [spec.rope_of(layer) for layer in range(spec.layers)]
        distinct = list(dict.fromkeys(ropes))
        self.rotary = nn.ModuleList(RotaryTables(spec, rope) for rope in distinct)
        self._rotary_of_layer = [distinct.index(rope) for rope in ropes]

    def initialise(self, seed: int, std: float = 0.04) -> None:
        """Fill every matrix from a normal distribution, in the order of their use; gains stay neutral, biases and sinks
        0.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self._in_order_of_use():
                if parameter.ndim > 1:
                    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def _in_order_of_use(self) -> Iterator[nn.Parameter]:
        yield self.embedding
        for block in self.blocks:
            yield from _matrices_of(block)
        if self.head is not None:
            yield self.head
        if self.draft is not None:  # after all others, so that these are the same with and without it
            yield self.draft.join
            yield from _matrices_of(self.draft.block)

    def forward(
        self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend, routing: Routing | None = None
    ) -> Tensor:
        """Final hidden states [N,H] of N tokens, normalised.

        ``token_ids_N`` and ``positions_N`` are int64. Raises ``ValueError`` if ``routing`` replays routes of another
        shape than [N, *spec.routes_shape].
        """
        rotations = [tables(positions_N) for tables in self.rotary]
        if routing is not None:
            routing.begin(len(token_ids_N), self.spec, token_ids_N.device)
        x_NH = self.arithmetic.embed(token_ids_N, self.embedding, self.spec.embedding_scale)
        for block, rotary in zip(self.blocks, self._rotary_of_layer, strict=True):
            run = partial(RECOMPUTED, block) if self.recompute else block
            x_NH = run(x_NH, self.arithmetic, rotations[rotary], attend, routing)
        return self.arithmetic.norm(x_NH, self.gain, self.spec.norm_eps, self.spec.gain_offset)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N,H] → [N,V]."""
        return self.arithmetic.linear(hidden_NH, self.embedding if self.head is None else self.head)

    def guess(
        self, hidden_NH: Tensor, token_ids_N: Tensor, positions_N: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The draft head's two hidden states [N,H] of N tokens (:meth:`etude.models.draft.DraftHead.forward`): to
        continue from, and to compute logits from.

        ``hidden_NH`` are those of the previous tokens. ``attend`` gets keys and values as those of layer
        ``spec.layers``. Gradients reach only the head's own weights.
        """
        assert self.draft is not None, "this model has no draft head"
        embedded_NH = self.arithmetic.embed(token_ids_N, self.embedding.detach(), self.spec.embedding_scale)
        rotation = self.rotary[self._rotary_of_layer[-1]](positions_N)
        guessed: tuple[Tensor, Tensor] = self.draft(hidden_NH.detach(), embedded_NH, self.arithmetic, rotation, attend)
        return guessed

    def forward_packed(
        self, token_ids_N: Tensor, lengths: Sequence[int] | None = None, routing: Routing | None = None
    ) -> Tensor:
        """Hidden states [N,H] of whole sequences concatenated in ``token_ids_N`` (int64).

        ``lengths`` are the tokens of each sequence; without it all tokens are one sequence. Positions restart with
        every sequence, sequences do not attend to each other, and attention is causal. On a CPU and without experts,
        common prefixes are computed once. Raises ``ValueError`` if the lengths do not add up to N.
        """
        lengths = (len(token_ids_N),) if lengths is None else lengths
        if sum(lengths) != len(token_ids_N):
            raise ValueError(f"sequences of {sum(lengths)} tokens in all cannot lie in {len(token_ids_N)} packed ones")
        rows = packed_rows(lengths, token_ids_N.device)
        # Tokens on a GPU would have to be waited for; routes are those of tokens, not of rows.
        if token_ids_N.device.type == "cpu" and self.spec.experts is None:
            shared = shared_rows(token_ids_N.tolist(), lengths)
            if shared is not None:
                return self._forward_shared(token_ids_N, rows, shared)

        def attend(_layer: int, q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, rule: AttentionRule) -> Tensor:
            return self.arithmetic.attend_packed(q_NQD, k_NKD, v_NKW, rows, rule)

        hidden_NH: Tensor = self(token_ids_N, rows.positions_N, attend, routing)
        return hidden_NH

    def _forward_shared(self, token_ids_N: Tensor, rows: PackedRows, shared: SharedRows) -> Tensor:
        """Hidden states [N,H], each shared row computed once; only attention works on whole sequences."""

        def attend(_layer: int, q_UQD: Tensor, k_UKD: Tensor, v_UKW: Tensor, rule: AttentionRule) -> Tensor:
            q_NQD, k_NKD, v_NKW = (x.index_select(0, shared.rows_N) for x in (q_UQD, k_UKD, v_UKW))
            out_NQW = self.arithmetic.attend_packed(q_NQD, k_NKD, v_NKW, rows, rule)
            return out_NQW.index_select(0, shared.firsts_U)

        hidden_UH: Tensor = self(token_ids_N[shared.firsts_U], rows.positions_N[shared.firsts_U], attend)
        return hidden_UH.index_select(0, shared.rows_N)


def _matrices_of(block: nn.Module) -> Iterator[nn.Parameter]:
    """A block's parameters in the order of their use, the gains in front of its parts left out."""
    assert isinstance(block, DecoderBlock)
    routed = list(block.feed.router.parameters()) if isinstance(block.feed, Experts) else []
    yield from (*block.attention.parameters(), *routed)
    for name, parameter in block.feed.named_parameters():
        if all(parameter is not other for other in routed) and not name.endswith("_bias"):
            yield parameter

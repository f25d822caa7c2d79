"""Readout of a model's logits, a chunk of tokens at a time.

    hidden states [N,H] ──▶ chunk ──▶ logits [n,V] ──▶ a few numbers per token [n]     the next chunk takes its place
                                         ▲
                     backward ───────────┘ computes them again

With a vocabulary of 151,936, one scored token takes up to 3.6 MB of logits, exponentials and their gradients, of which
the trainer needs one or two numbers. So if a pass has more logits than :data:`CHUNK_LOGITS`, only that many exist at a
time, and a pass with gradients computes each chunk twice: memory does not grow with the number of tokens.

Owns the division into chunks. The caller supplies the computation on a chunk.

Shape legend: N scored tokens, n those of a chunk, H hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TypeAlias, cast

import torch
from torch import Tensor

from etude.models.arithmetic import MaskTensors
from etude.models.decoder import RECOMPUTED
from etude.models.hf import CausalModel

CHUNK_LOGITS: Mapping[str, int] = {"cuda": 1 << 27, "cpu": 1 << 25}
"""Kind of device → logits that exist at a time: with a vocabulary of 151,936 those of 883 tokens, or of 220. Products
on a GPU need many rows; on a CPU softmax and entropy are separate passes, which store 26 bytes per logit.
"""

Column: TypeAlias = Tensor | MaskTensors | None
"""Values per scored token: a tensor [N,…], or the sampling masks of N tokens."""
Readout: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""(model, columns of a chunk …) → tensors [n]."""


def in_chunks(
    read: Readout, model: CausalModel, hidden_NH: Tensor, *columns: Column, most: int | None = None
) -> tuple[Tensor, ...]:
    """The tensors [N] that ``read`` computes from hidden states and ``columns``, with their gradients.

    ``most`` is the number of logits that exist at a time, at least those of one token; ``None``: the device's default.
    """
    rows = max(1, (most or CHUNK_LOGITS[hidden_NH.device.type]) // model.spec.vocab_size)
    if len(hidden_NH) <= rows:
        return read(model, hidden_NH, *columns)
    chunks = zip(*(_split(column, rows, len(hidden_NH)) for column in (hidden_NH, *columns)), strict=True)
    if torch.is_grad_enabled():
        results = [cast("tuple[Tensor, ...]", RECOMPUTED(read, model, *chunk)) for chunk in chunks]
    else:
        results = [read(model, *chunk) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def _split(column: Column, rows: int, tokens: int) -> Iterator[Column]:
    if isinstance(column, Tensor):
        yield from column.split(rows)
        return
    bounds = [*range(0, tokens, rows), tokens]
    if column is None:
        yield from [None] * (len(bounds) - 1)
        return
    offsets_N1 = column.offsets_N1
    places = offsets_N1[torch.tensor(bounds, device=offsets_N1.device)].tolist()
    for (start, end), (first, last) in zip(pairwise(bounds), pairwise(places), strict=True):
        yield MaskTensors(offsets_N1=offsets_N1[start : end + 1] - first, token_ids=column.token_ids[first:last])

"""Steps as CUDA graphs: the forward pass, the draw and the log-probabilities in one call.

    one copy of the step's inputs ──▶ one graph ──▶ one copy of the drawn tokens, which the host waits for

A small step launches hundreds of kernels, which take longer to start than to run. A graph replays the captured kernels
at the captured addresses: it is keyed by the model whose weights it reads, and its inputs are copied to fixed
addresses. Steps are padded to a captured size; the padding rows draw greedily, and read and write the cache's idle
page.

There are two kinds: steps that only decode, in which each row is a sequence, and mixed steps, which also read some
prompts. Attention of the latter is computed in tiles, and the rows of each tile are an input. A mixed step of many
tokens computes for longer than its launches take, and needs no graph.

Shape legend: N rows of a graph, B sequences, P pages of each, T tiles, L sparse layers, k experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.engines.native.cache import PagedCache
from etude.engines.native.sampling import Drawn, DrawnTensors, Sampler, Table, may_truncate
from etude.engines.native.scheduler import ScheduledTokens
from etude.engines.native.transfer import ByteSpan, join, split
from etude.models.arithmetic import PagedRows
from etude.models.decoder import Decoder

WARM_UPS = 2
"""Plain runs before a capture: libraries choose kernels and allocate workspaces in their first calls."""
GROUPED_PRODUCTS = (9, 10)
"""Major compute capabilities on which grouped matrix products do not wait for the host."""
MOST_ROWS, ROWS = 512, 64
"""Rows of the largest mixed graph, and the granularity of rows."""


class _Kind(NamedTuple):
    """The steps that one graph serves."""

    model: int
    rows: int
    sequences: int
    pages: int
    is_mixed: bool
    truncates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A graph with its input and output buffers."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """uint8: see :func:`_inputs`."""
    drawn: DrawnTensors
    outputs: Tensor
    """uint8: bytes of the drawn tensors."""


@final
class StepGraphs:
    """The CUDA graphs of one engine, each captured at the first step of its size."""

    def __init__(self, model: Decoder, cache: PagedCache, sampler: Sampler) -> None:
        """Later models may have other weights, of the same shapes as ``model``."""
        self._tile_tokens = _tile_tokens(model)
        self._cache = cache
        self._sampler = sampler
        self._captured: dict[_Kind, _Captured] = {}
        self._pool: tuple[int, int] | None = None

    def take(self, plan: Sequence[ScheduledTokens]) -> bool:
        """Report whether :meth:`run` supports a step: no prompt is scored, and all prompts together are short."""
        if any(work.request.scored_from is not None for work in plan):
            return False
        if only_decodes(plan):
            return True
        return sum(work.count for work in plan) < MOST_ROWS and self._tile_tokens is not None

    @torch.inference_mode()
    def run(self, model: Decoder, plan: Sequence[ScheduledTokens], table_4R: Table) -> Drawn:
        """Compute and sample like a plain step: a token and its routes after each work that samples.

        Waits for the device once. Raises like :meth:`~etude.engines.native.sampling.Sampler.sample`.
        """
        kind = _kind(model, plan, truncates=may_truncate(table_4R))
        captured = self._captured.get(kind)
        if captured is None:
            captured = self._captured[kind] = self._capture(model, kind)
        inputs = _inputs(plan, table_4R, kind, self._cache.idle_page, self._tile_tokens)
        captured.inputs.copy_(join(inputs, pinned=True), non_blocking=True)
        captured.graph.replay()
        parts = [ByteSpan.of(tensor) for tensor in captured.drawn.tensors]
        return captured.drawn.read(split(captured.outputs.cpu(), parts), table_4R.shape[1])

    def _capture(self, model: Decoder, kind: _Kind) -> _Captured:
        device = model.embedding.device
        idle = _inputs([], np.zeros((4, 0)), kind, self._cache.idle_page, self._tile_tokens)
        inputs = join(idle, pinned=True).to(device, non_blocking=True)
        token_ids_N, positions_N, sequences_N, tables_BP, table_4B, *mixed = split(
            inputs, [ByteSpan.of(tensor) for tensor in idle]
        )
        sampling_B, tiles_2T = mixed if kind.is_mixed else (None, None)
        rows = PagedRows(
            tables_BP=tables_BP,
            sequences_N=sequences_N,
            positions_N=positions_N,
            counts=() if kind.is_mixed else (1,) * kind.rows,
            tiles_2T=tiles_2T,
        )

        def step() -> DrawnTensors:
            hidden, routes = self._cache.compute(model, token_ids_N, rows)
            if sampling_B is not None:
                hidden, routes = hidden[sampling_B], None if routes is None else routes[sampling_B]
            return self._sampler.draw(model.logits(hidden), table_4B, routes, truncates=kind.truncates)

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may be staging weights on this device; that is not part of the graph and no error.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
            drawn = step()
            outputs = join(drawn.tensors)
        self._pool = self._pool or graph.pool()
        return _Captured(graph=graph, inputs=inputs, drawn=drawn, outputs=outputs)


def can_capture(model: Decoder) -> bool:
    """Report whether a model's steps can be CUDA graphs, which must never wait for the host. Grouped products of
    experts do wait, except in bfloat16 on data-centre GPUs of the Hopper and Blackwell generations.
    """
    weights = model.embedding
    if weights.device.type != "cuda" or weights.dtype is not torch.bfloat16:
        return False
    return not model.spec.sparse_layers or torch.cuda.get_device_capability(weights.device)[0] in GROUPED_PRODUCTS


def only_decodes(plan: Sequence[ScheduledTokens]) -> bool:
    """Report whether a step has exactly one token per request, each followed by a sampled one."""
    return all(work.count == 1 and work.samples for work in plan)


def _tile_tokens(model: Decoder) -> int | None:
    """Tokens of a tile; ``None`` for heads that the kernel does not support, whose prompts are read one by one."""
    from etude.models.kernels.gpu import paged_attention

    attention = model.spec.attention
    key_width, value_width = attention.key_width, attention.value_width
    if not paged_attention.attends(key_width, value_width):
        return None
    item = model.embedding.element_size()
    return paged_attention.tile_tokens(attention.heads, attention.key_heads, key_width + value_width, item)


def _kind(model: Decoder, plan: Sequence[ScheduledTokens], *, truncates: bool) -> _Kind:
    """The kind of graph for a step. A mixed one has at least one idle row and one idle sequence."""
    pages = _power_above(max(len(work.request.pages) for work in plan))
    if only_decodes(plan):
        rows = _power_above(len(plan))
        return _Kind(id(model), rows, rows, pages, is_mixed=False, truncates=truncates)
    rows = (sum(work.count for work in plan) // ROWS + 1) * ROWS
    return _Kind(id(model), rows, _power_above(len(plan) + 1), pages, is_mixed=True, truncates=truncates)


def _inputs(
    plan: Sequence[ScheduledTokens], table_4R: Table, kind: _Kind, idle_page: int, tile_tokens: int | None
) -> list[Tensor]:
    """Token ids [N], positions [N], sequences [N], pages [B,P] and sampling parameters [4,B] of a step, on the host;
    for a mixed one also the rows to sample after [B], and tiles [2,T].
    """
    token_ids, positions = np.zeros((2, kind.rows), np.int64)
    sequences = np.arange(kind.rows, dtype=np.int32)
    tables = np.full((kind.sequences, kind.pages), idle_page, np.int32)
    row = 0
    for sequence, work in enumerate(plan):
        end = work.start + work.count
        token_ids[row : row + work.count] = work.request.token_ids[work.start : end]
        positions[row : row + work.count] = range(work.start, end)
        tables[sequence, : len(work.request.pages)] = work.request.pages
        row += work.count
    table = np.zeros((4, kind.sequences))
    table[:, : table_4R.shape[1]] = table_4R
    mixed: list[Tensor] = []
    if kind.is_mixed:
        assert tile_tokens is not None, "no step of such a model is taken"
        counts = [*(work.count for work in plan), kind.rows - row]
        sequences = np.repeat(np.array([*range(len(plan)), kind.sequences - 1], np.int32), counts)
        mixed = [torch.from_numpy(array) for array in (_sampled(plan, kind), _tiles(counts, kind, tile_tokens))]
    arrays = (token_ids, positions, sequences, tables, table)
    return [*(torch.from_numpy(array) for array in arrays), *mixed]


def _sampled(plan: Sequence[ScheduledTokens], kind: _Kind) -> npt.NDArray[np.int64]:
    """[B] the last row of each work that samples, padded with the last row, which is idle."""
    rows = np.full(kind.sequences, kind.rows - 1, np.int64)
    ends = np.cumsum([work.count for work in plan], dtype=np.int64)
    last = [end - 1 for end, work in zip(ends.tolist(), plan, strict=True) if work.samples]
    rows[: len(last)] = last
    return rows


def _tiles(counts: Sequence[int], kind: _Kind, tile_tokens: int) -> npt.NDArray[np.int32]:
    """[2,T] first rows and sizes of tiles: each sequence's rows in tiles, padded with tiles of the last row."""
    tiles = np.empty((2, kind.sequences + kind.rows // tile_tokens), np.int32)
    tiles[:] = [[kind.rows - 1], [1]]
    tile = row = 0
    for count in counts:
        for first in range(row, row + count, tile_tokens):
            tiles[:, tile] = first, min(tile_tokens, row + count - first)
            tile += 1
        row += count
    return tiles


def _power_above(count: int) -> int:
    """The smallest power of two ≥ ``count``."""
    return 1 << (count - 1).bit_length()

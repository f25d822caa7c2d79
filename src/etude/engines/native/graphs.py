"""Decode steps as CUDA graphs: the forward pass, the draw and the log-probabilities in one call.

    one copy of what the step needs ──▶ one graph ──▶ one copy of what it drew, which the host waits for

A decode step launches hundreds of kernels, which take longer to start than to run. A graph replays what it captured on
the very addresses it captured: it is keyed by the model whose weights it reads, and its inputs are copied to where it
reads them. Steps are rounded up to a size that was captured; the rows beyond a step draw greedily, and read and write
the cache's idle page.

Shape legend: B rows of a graph, P pages of each, L sparse layers, k experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from etude.engines.native.cache import PagedCache
from etude.engines.native.sampling import Drawn, DrawnTensors, Sampler, Table, may_cut
from etude.engines.native.scheduler import ScheduledTokens
from etude.engines.native.transfer import ByteSpan, join, split
from etude.models.arithmetic import PagedRows
from etude.models.decoder import Decoder

WARM_UPS = 2
"""Plain runs before a capture: libraries choose kernels and take workspaces in their first calls."""
GROUPED_PRODUCTS = (9, 10)
"""Compute capabilities, their first number, on which grouped matrix products run without the host."""


class _Kind(NamedTuple):
    """The steps that one graph serves."""

    model: int
    batch: int
    pages: int
    truncates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A graph, and what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """uint8: see :func:`_inputs`."""
    drawn: DrawnTensors
    outputs: Tensor
    """uint8: the drawn tensors' bytes."""


@final
class DecodeGraphs:
    """The CUDA graphs of one engine, each captured when its size is first met."""

    def __init__(self, cache: PagedCache, sampler: Sampler) -> None:
        self._cache = cache
        self._sampler = sampler
        self._captured: dict[_Kind, _Captured] = {}
        self._pool: tuple[int, int] | None = None

    @torch.inference_mode()
    def run(self, model: Decoder, plan: Sequence[ScheduledTokens], table_4R: Table) -> Drawn:
        """Compute and sample as the plain step would: one token for each request, and the routes of the last ones.

        Waits for the device once. Raises like :meth:`~etude.engines.native.sampling.Sampler.sample`.
        """
        pages = max(len(work.request.pages) for work in plan)
        kind = _Kind(id(model), _power_above(len(plan)), _power_above(pages), may_cut(table_4R))
        captured = self._captured.get(kind)
        if captured is None:
            captured = self._captured[kind] = self._capture(model, kind)
        inputs = _inputs(plan, table_4R, kind, self._cache.idle_page)
        captured.inputs.copy_(join(inputs, pinned=True), non_blocking=True)
        captured.graph.replay()
        parts = [ByteSpan.of(tensor) for tensor in captured.drawn.tensors]
        return captured.drawn.read(split(captured.outputs.cpu(), parts), len(plan))

    def _capture(self, model: Decoder, kind: _Kind) -> _Captured:
        device = model.embedding.device
        idle = _inputs([], np.zeros((4, 0)), kind, self._cache.idle_page)
        inputs = join(idle, pinned=True).to(device, non_blocking=True)
        token_ids_B, positions_B, tables_BP, table_4B = split(inputs, [ByteSpan.of(tensor) for tensor in idle])
        rows = PagedRows(
            tables_BP=tables_BP,
            sequences_N=torch.arange(kind.batch, dtype=torch.int32, device=device),
            positions_N=positions_B,
            counts=(1,) * kind.batch,
        )

        def step() -> DrawnTensors:
            hidden_BH, routes_BLk = self._cache.compute(model, token_ids_B, rows)
            return self._sampler.draw(model.logits(hidden_BH), table_4B, routes_BLk, truncates=kind.truncates)

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may be staging weights on this device, which is no part of the graph and no error.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
            drawn = step()
            outputs = join(drawn.tensors)
        self._pool = self._pool or graph.pool()
        return _Captured(graph=graph, inputs=inputs, drawn=drawn, outputs=outputs)


def can_capture(model: Decoder) -> bool:
    """Report whether a model's decode step can be a CUDA graph, which must never wait for the host.

    Grouped products of experts do, in any type but bfloat16 and on any GPU but Hopper's and Blackwell's large ones.
    """
    weights = model.embedding
    if weights.device.type != "cuda" or weights.dtype is not torch.bfloat16:
        return False
    return not model.spec.sparse_layers or torch.cuda.get_device_capability(weights.device)[0] in GROUPED_PRODUCTS


def only_decodes(plan: Sequence[ScheduledTokens]) -> bool:
    """Report whether a step is one token of each request, each to be followed by a sampled one, and no more."""
    return all(work.count == 1 and work.samples and work.request.scored_from is None for work in plan)


def _inputs(plan: Sequence[ScheduledTokens], table_4R: Table, kind: _Kind, idle_page: int) -> list[Tensor]:
    """Token ids [B], positions [B], pages [B,P] and sampling parameters [4,B] of a step, on the host."""
    token_ids, positions = np.zeros((2, kind.batch), np.int64)
    tables = np.full((kind.batch, kind.pages), idle_page, np.int32)
    table = np.zeros((4, kind.batch))
    for row, work in enumerate(plan):
        token_ids[row], positions[row] = work.request.token_ids[work.start], work.start
        tables[row, : len(work.request.pages)] = work.request.pages
    table[:, : len(plan)] = table_4R
    return [torch.from_numpy(array) for array in (token_ids, positions, tables, table)]


def _power_above(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()

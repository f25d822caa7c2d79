"""Decode steps as CUDA graphs: a step's hundreds of kernels are launched by one call.

A graph replays what it captured on the very addresses it captured: it is keyed by the model whose weights it reads, and
its inputs are copied into tensors of its own. Steps are rounded up to a size that was captured; the rows that nobody
asked for read and write a page of the cache that belongs to nobody. Owns capture and padding; what a step computes is
the :class:`~etude.engines.native.cache.PagedCache`'s to say.

Not run yet: no CUDA device was at hand when this was written; ``tests/gpu`` compares it with plain steps.

Shape legend: N tokens of a step, one per sequence, B of them after rounding up, P pages of the longest, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from etude.models.arithmetic import PagedRows
from etude.models.decoder import Decoder

Step: TypeAlias = Callable[[Decoder, Tensor, PagedRows], tuple[Tensor, Tensor | None]]
"""(model, token ids [N], rows) → hidden states [N,H] and the routes [N,L,k], if they are recorded."""

WARM_UPS = 2
"""Plain runs before a capture: libraries choose kernels and take workspaces in their first calls."""
GROUPED_PRODUCTS = (9, 10)
"""Compute capabilities, their first number, on which grouped matrix products run without the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A graph and the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    token_ids_B: Tensor
    rows: PagedRows
    hidden_BH: Tensor
    routes_BLk: Tensor | None


@final
class DecodeGraphs:
    """Steps with one token per sequence, captured when a size is first met."""

    def __init__(self, step: Step, *, idle_page: int) -> None:
        """``idle_page`` is the page of the cache that rows without a sequence use."""
        self._step = step
        self._idle_page = idle_page
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        self._pool: tuple[int, int] | None = None

    def run(self, model: Decoder, token_ids_N: Tensor, rows: PagedRows) -> tuple[Tensor, Tensor | None]:
        """As the step that it was made with; what it returns is overwritten by the next call."""
        tokens, pages = len(token_ids_N), rows.tables_BP.shape[1]
        key = (id(model), _power_above(tokens), _power_above(pages))
        if key not in self._captured:
            self._captured[key] = self._capture(model, *key[1:])
        captured = self._captured[key]
        captured.token_ids_B[:tokens].copy_(token_ids_N)
        captured.rows.tables_BP.fill_(self._idle_page)
        captured.rows.tables_BP[:tokens, :pages].copy_(rows.tables_BP)
        captured.rows.positions_N.zero_()
        captured.rows.positions_N[:tokens].copy_(rows.positions_N)
        captured.graph.replay()
        routes = captured.routes_BLk
        return captured.hidden_BH[:tokens], None if routes is None else routes[:tokens]

    def _capture(self, model: Decoder, batch: int, pages: int) -> _Captured:
        device = model.embedding.device
        token_ids_B = torch.zeros(batch, dtype=torch.int64, device=device)
        rows = PagedRows(
            tables_BP=torch.full((batch, pages), self._idle_page, dtype=torch.int32, device=device),
            sequences_N=torch.arange(batch, dtype=torch.int32, device=device),
            positions_N=torch.zeros(batch, dtype=torch.int64, device=device),
            counts=(1,) * batch,
        )
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._step(model, token_ids_B, rows)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may be staging weights on this device, which is no part of the graph and no error.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
            hidden_BH, routes_BLk = self._step(model, token_ids_B, rows)
        self._pool = self._pool or graph.pool()
        return _Captured(graph=graph, token_ids_B=token_ids_B, rows=rows, hidden_BH=hidden_BH, routes_BLk=routes_BLk)


def can_capture(model: Decoder) -> bool:
    """Whether a decode step of a model on its device can be a graph, in which nothing may wait for the host.

    Grouped products of experts do, in any type but bfloat16 and on any GPU but Hopper's and Blackwell's large ones.
    """
    weights = model.embedding
    if weights.device.type != "cuda" or weights.dtype is not torch.bfloat16:
        return False
    return not model.spec.sparse_layers or torch.cuda.get_device_capability(weights.device)[0] in GROUPED_PRODUCTS


def _power_above(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()

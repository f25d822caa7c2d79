"""The paged key/value cache of the native engine, and what a step's tokens are to it.

Owns the tensors: keys, values and, where routes are recorded, the experts of every position, so that a reused prefix
brings its routes along. Which page belongs to whom is the scheduler's.

Shape legend: N tokens of a step, B sequences, P pages, K key heads, D width of a key, S positions per page, W width of
a value, L sparse layers, k experts per token.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from etude.engines.native.graphs import DecodeGraphs, can_capture
from etude.engines.native.pages import PAGE
from etude.engines.native.requests import Request, Work
from etude.models.arithmetic import PagedRows
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.kernels import pages
from etude.types import Routes

assert PAGE == pages.PAGE, "scheduler and kernels count pages alike"


class PagedCache:
    """Keys [P,K,D,S] and values [P,K,S,W] of every layer, in the type of the model's weights."""

    def __init__(self, model: Decoder, pages: int, *, record_routes: bool, graphs: bool = True) -> None:
        """Without ``graphs`` every pass runs module by module, where hooks see it."""
        spec, weights = model.spec, model.embedding
        attention = spec.attention
        self._graphs: DecodeGraphs | None = None
        if graphs and can_capture(model):
            self._graphs = DecodeGraphs(self._step, idle_page=pages)
            pages += 1
        keys = (pages, attention.key_heads, attention.key_width, PAGE)
        values = (pages, attention.key_heads, PAGE, attention.value_width)
        self._layers = [
            (torch.zeros(keys, dtype=weights.dtype, device=weights.device),
             torch.zeros(values, dtype=weights.dtype, device=weights.device))
            for _ in range(spec.layers)
        ]  # fmt: skip
        self._routes: Tensor | None = None
        if record_routes and spec.experts is not None:
            # The bits of uint16: torch has that type, but not the operations.
            self._routes = torch.zeros((pages * PAGE, *spec.routes_shape), dtype=torch.int16, device=weights.device)

    @property
    def records_routes(self) -> bool:
        """Whether :meth:`routes` can be asked."""
        return self._routes is not None

    @property
    def size_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(tensor.numel() * tensor.element_size() for layer in self._layers for tensor in layer)

    def forward(self, model: Decoder, plan: Sequence[Work]) -> tuple[Tensor, Tensor | None]:
        """Run a step's tokens through the model: normalised hidden states [N,H] and, if recorded, routes [N,L,k]."""
        rows, token_ids_N = _rows(plan, model.embedding.device)
        if self._graphs is not None and len(rows.counts) == len(token_ids_N):
            return self._graphs.run(model, token_ids_N, rows)
        return self._step(model, token_ids_N, rows)

    def _step(self, model: Decoder, token_ids_N: Tensor, rows: PagedRows) -> tuple[Tensor, Tensor | None]:
        scale = model.spec.attention.scale

        def attend(layer: int, q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor) -> Tensor:
            model.arithmetic.write_pages(k_NKD, v_NKW, self._layers[layer], rows)
            return model.arithmetic.attend_pages(q_NQD, self._layers[layer], rows, scale)

        routing = None if self._routes is None else Routing(record=True)
        hidden_NH: Tensor = model(token_ids_N, rows.positions_N, attend, routing)
        if self._routes is None or routing is None:
            return hidden_NH, None
        routes_NLk = routing.recorded().to(torch.int16)
        pages_N = rows.tables_BP[rows.sequences_N.long(), rows.positions_N // PAGE].long()
        self._routes[pages_N * PAGE + rows.positions_N % PAGE] = routes_NLk
        return hidden_NH, routes_NLk

    def routes(self, request: Request) -> Routes:
        """[cached, L, k] the experts of everything that a request has in the cache."""
        assert self._routes is not None, "routes are not recorded"
        positions = np.arange(request.cached)
        slots = np.array(request.pages)[positions // PAGE] * PAGE + positions % PAGE
        return as_routes(self._routes[torch.from_numpy(slots).to(self._routes.device)])


def as_routes(routes_NLk: Tensor) -> Routes:
    """Recorded routes on the host."""
    routes: Routes = routes_NLk.cpu().numpy().view(np.uint16)
    return routes


def _rows(plan: Sequence[Work], device: torch.device) -> tuple[PagedRows, Tensor]:
    """Where a step's tokens lie, and their ids [N]. Single tokens come first in a plan."""
    counts = [work.count for work in plan]
    tables = np.zeros((len(plan), max(len(work.request.pages) for work in plan)), np.int32)
    token_ids, positions = list[int](), np.empty(sum(counts), np.int64)
    start = 0
    for index, work in enumerate(plan):
        tables[index, : len(work.request.pages)] = work.request.pages
        token_ids += work.request.token_ids[work.start : work.start + work.count]
        positions[start : start + work.count] = range(work.start, work.start + work.count)
        start += work.count
    rows = PagedRows(
        tables_BP=torch.from_numpy(tables).to(device),
        sequences_N=torch.from_numpy(np.repeat(np.arange(len(plan), dtype=np.int32), counts)).to(device),
        positions_N=torch.from_numpy(positions).to(device),
        counts=tuple(counts),
    )
    return rows, torch.tensor(token_ids, device=device)

"""The paged key/value cache of the native engine: runs a step's tokens through the model, as a CUDA graph where it can.

Owns the tensors: keys, values and, where routes are recorded, the experts of every position, so that a reused prefix
brings its routes along. Which page belongs to which request is the scheduler's to decide.

A decode step launches hundreds of kernels; as a CUDA graph it is one call. A graph replays what it captured on the very
addresses it captured: it is keyed by the model whose weights it reads, and its inputs are copied into tensors of its
own. Steps are rounded up to a size that was captured; the rows beyond a step read and write a page that no request has.

Shape legend: N tokens of a step, B sequences, P pages, K key heads, D width of a key, S positions per page, W width of
a value, L sparse layers, k experts per token, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from etude.engines.native.pages import PAGE
from etude.engines.native.scheduler import EngineRequest, ScheduledTokens
from etude.models.arithmetic import PagedRows
from etude.models.attention import Attend
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.kernels import pages
from etude.types import Routes

assert PAGE == pages.PAGE, "scheduler and kernels count pages alike"


class PagedCache:
    """Keys [P,K,D,S] and values [P,K,S,W] of every layer, in the type of the model's weights."""

    def __init__(
        self, model: Decoder, pages: int, *, record_routes: bool, graphs: bool = True, drafts: bool = False
    ) -> None:
        """Without ``graphs`` every pass runs module by module, where hooks see it. With ``drafts`` the keys of the
        model's draft head are here, too.
        """
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
            for _ in range(spec.layers + drafts)
        ]  # fmt: skip
        self.tails_PH = torch.zeros(
            pages if drafts else 0, spec.hidden_size, dtype=weights.dtype, device=weights.device
        )
        """The hidden state of each page's last token, from which a draft head goes on."""
        self._routes: Tensor | None = None
        if record_routes and spec.experts is not None:
            # The bits of uint16: torch has that type, but not the operations.
            self._routes = torch.zeros((pages * PAGE, *spec.routes_shape), dtype=torch.int16, device=weights.device)

    @property
    def records_routes(self) -> bool:
        """True where :meth:`routes` can be read."""
        return self._routes is not None

    @property
    def size_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(tensor.numel() * tensor.element_size() for layer in self._layers for tensor in layer)

    def guess(self, model: Decoder, hidden_NH: Tensor, token_ids_N: Tensor, rows: PagedRows) -> tuple[Tensor, Tensor]:
        """Run tokens through the draft head, after the hidden states of those before: :meth:`Decoder.guess`."""
        return model.guess(hidden_NH, token_ids_N, rows.positions_N, self._attend(model, rows))

    def forward(self, model: Decoder, plan: Sequence[ScheduledTokens]) -> tuple[Tensor, Tensor | None]:
        """Run a step's tokens through the model: normalised hidden states [N,H] and, if recorded, routes [N,L,k]."""
        rows, token_ids_N = place_rows([run for work in plan for run in _runs(work)], model.embedding.device)
        if self._graphs is not None and len(rows.counts) == len(token_ids_N):
            return self._graphs.run(model, token_ids_N, rows)
        return self._step(model, token_ids_N, rows)

    def _step(self, model: Decoder, token_ids_N: Tensor, rows: PagedRows) -> tuple[Tensor, Tensor | None]:
        routing = None if self._routes is None else Routing(record=True)
        hidden_NH: Tensor = model(token_ids_N, rows.positions_N, self._attend(model, rows), routing)
        if self._routes is None or routing is None:
            return hidden_NH, None
        routes_NLk = routing.recorded().to(torch.int16)
        pages_N = rows.tables_BP[rows.sequences_N.long(), rows.positions_N // PAGE].long()
        self._routes[pages_N * PAGE + rows.positions_N % PAGE] = routes_NLk
        return hidden_NH, routes_NLk

    def _attend(self, model: Decoder, rows: PagedRows) -> Attend:
        scale = model.spec.attention.scale

        def attend(layer: int, q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor) -> Tensor:
            model.arithmetic.write_pages(k_NKD, v_NKW, self._layers[layer], rows)
            return model.arithmetic.attend_pages(q_NQD, self._layers[layer], rows, scale)

        return attend

    def routes(self, request: EngineRequest) -> Routes:
        """[cached, L, k] the experts of everything that a request has in the cache."""
        assert self._routes is not None, "routes are not recorded"
        positions = np.arange(request.cached)
        slots = np.array(request.pages)[positions // PAGE] * PAGE + positions % PAGE
        return as_routes(self._routes[torch.from_numpy(slots).to(self._routes.device)])


def as_routes(routes_NLk: Tensor) -> Routes:
    """Copy recorded routes to the host."""
    routes: Routes = routes_NLk.cpu().numpy().view(np.uint16)
    return routes


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Adjacent tokens of a request, from a position on."""

    pages: Sequence[int]
    start: int
    token_ids: Sequence[int]

    @property
    def singles(self) -> "Iterator[TokenRun]":
        """Each of them as a sequence of one token. All write their keys before any attends, so each sees those before
        it; and what computes decoding requests, a CUDA graph included, computes them.
        """
        for index, token_id in enumerate(self.token_ids):
            yield TokenRun(self.pages, self.start + index, (token_id,))


def _runs(work: ScheduledTokens) -> "Iterator[TokenRun]":
    """The tokens of a work, those with drafts one by one."""
    request = work.request
    run = TokenRun(request.pages, work.start, request.token_ids[work.start : work.start + work.count])
    if work.count > 1:
        yield run
    else:
        yield from TokenRun(run.pages, run.start, (*run.token_ids, *work.drafts)).singles


def place_rows(runs: Sequence[TokenRun], device: torch.device) -> tuple[PagedRows, Tensor]:
    """The places of tokens in the cache, and their ids [N]. Runs of one token come first."""
    counts = [len(run.token_ids) for run in runs]
    tables = np.zeros((len(runs), max(len(run.pages) for run in runs)), np.int32)
    token_ids, positions = list[int](), np.empty(sum(counts), np.int64)
    start = 0
    for index, (run, count) in enumerate(zip(runs, counts, strict=True)):
        tables[index, : len(run.pages)] = run.pages
        token_ids += run.token_ids
        positions[start : start + count] = range(run.start, run.start + count)
        start += count
    rows = PagedRows(
        tables_BP=torch.from_numpy(tables).to(device),
        sequences_N=torch.from_numpy(np.repeat(np.arange(len(runs), dtype=np.int32), counts)).to(device),
        positions_N=torch.from_numpy(positions).to(device),
        counts=tuple(counts),
    )
    return rows, torch.tensor(token_ids, device=device)


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
    """CUDA graphs of decode steps, captured when a batch size is first met."""

    def __init__(self, step: Step, *, idle_page: int) -> None:
        """``idle_page`` is the page of the cache that rows without a sequence use."""
        self._step = step
        self._idle_page = idle_page
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        self._pool: tuple[int, int] | None = None

    def run(self, model: Decoder, token_ids_N: Tensor, rows: PagedRows) -> tuple[Tensor, Tensor | None]:
        """Compute what the plain step would; what it returns is overwritten by the next call."""
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
    """Report whether a model's decode step can be a CUDA graph, which must never wait for the host.

    Grouped products of experts do, in any type but bfloat16 and on any GPU but Hopper's and Blackwell's large ones.
    """
    weights = model.embedding
    if weights.device.type != "cuda" or weights.dtype is not torch.bfloat16:
        return False
    return not model.spec.sparse_layers or torch.cuda.get_device_capability(weights.device)[0] in GROUPED_PRODUCTS


def _power_above(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()

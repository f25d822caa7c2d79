"""The paged key/value cache of the native engine: runs a step's tokens through the model.

Owns the tensors: keys, values and, if routes are recorded, the experts of every position, so that a reused prefix
includes its routes. The scheduler assigns pages to requests.

Shape legend: N tokens of a step, R of them that a token is sampled after, B sequences, P pages, K key heads, D width of
a key, S positions per page, W width of a value, L sparse layers, k experts per token, H hidden.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from etude.engines.native.pages import PAGE
from etude.engines.native.scheduler import EngineRequest, ScheduledTokens
from etude.engines.native.transfer import place
from etude.models.arithmetic import AttentionRule, PagedRows
from etude.models.attention import Attend
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.kernels import pages
from etude.types import Routes

assert PAGE == pages.PAGE, "scheduler and kernels count pages alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The tensors that a step computed."""

    hidden_NH: Tensor
    """Normalised hidden states."""
    routes_NLk: Tensor | None
    """int16, the bits of uint16; ``None`` where routes are not recorded."""
    sampling_R: Tensor
    """int64, on the device: indices in the step of the tokens that a token is sampled after."""


class PagedCache:
    """Keys [P,K,D,S] and values [P,K,S,W] of every layer, in the type of the model's weights."""

    def __init__(self, model: Decoder, pages: int, *, record_routes: bool, drafts: bool = False) -> None:
        """One additional page is for padding rows of a step. With ``drafts`` the cache also has the keys of a draft
        head.
        """
        spec, weights = model.spec, model.embedding
        attention = spec.attention
        self.idle_page = pages
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
        """The hidden state of each page's last token, from which a draft head continues."""
        self._routes: Tensor | None = None
        if record_routes and spec.experts is not None:
            # The bits of uint16: torch has that type, but not the operations on it.
            self._routes = torch.zeros((pages * PAGE, *spec.routes_shape), dtype=torch.int16, device=weights.device)

    @property
    def records_routes(self) -> bool:
        """True if :meth:`routes` can be read."""
        return self._routes is not None

    @property
    def size_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(tensor.numel() * tensor.element_size() for layer in self._layers for tensor in layer)

    def guess(self, model: Decoder, hidden_NH: Tensor, token_ids_N: Tensor, rows: PagedRows) -> tuple[Tensor, Tensor]:
        """Run tokens through the draft head, after the hidden states of those before: :meth:`Decoder.guess`."""
        return model.guess(hidden_NH, token_ids_N, rows.positions_N, self._attend(model, rows))

    def forward(self, model: Decoder, plan: Sequence[ScheduledTokens]) -> StepOutput:
        """Run a step's tokens through the model."""
        rows, token_ids_N, sampling_R = _rows(plan, model.embedding.device)
        hidden_NH, routes_NLk = self.compute(model, token_ids_N, rows)
        return StepOutput(hidden_NH=hidden_NH, routes_NLk=routes_NLk, sampling_R=sampling_R)

    def compute(self, model: Decoder, token_ids_N: Tensor, rows: PagedRows) -> tuple[Tensor, Tensor | None]:
        """Hidden states [N,H] and, if recorded, routes [N,L,k] of tokens with given positions in the cache."""
        routing = None if self._routes is None else Routing(record=True)
        hidden_NH: Tensor = model(token_ids_N, rows.positions_N, self._attend(model, rows), routing)
        if self._routes is None or routing is None:
            return hidden_NH, None
        routes_NLk = routing.recorded().to(torch.int16)
        pages_N = rows.tables_BP[rows.sequences_N.long(), rows.positions_N // PAGE].long()
        self._routes[pages_N * PAGE + rows.positions_N % PAGE] = routes_NLk
        return hidden_NH, routes_NLk

    def _attend(self, model: Decoder, rows: PagedRows) -> Attend:
        def attend(layer: int, q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, rule: AttentionRule) -> Tensor:
            model.arithmetic.write_pages(k_NKD, v_NKW, self._layers[layer], rows)
            return model.arithmetic.attend_pages(q_NQD, self._layers[layer], rows, rule)

        return attend

    def routes(self, request: EngineRequest) -> Routes:
        """[cached, L, k] the experts of all tokens that a request has in the cache."""
        assert self._routes is not None, "routes are not recorded"
        positions = np.arange(request.cached)
        slots = np.array(request.pages)[positions // PAGE] * PAGE + positions % PAGE
        (slots_N,) = place([torch.from_numpy(slots)], self._routes.device)
        routes: Routes = self._routes[slots_N].cpu().numpy().view(np.uint16)
        return routes


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Adjacent tokens of a request, starting at a position."""

    pages: Sequence[int]
    start: int
    token_ids: Sequence[int]

    @property
    def singles(self) -> "Iterator[TokenRun]":
        """Each of them as a sequence of one token. All write their keys before any attends, so each sees the earlier
        ones; the kernel for decoding computes them.
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


def _rows(plan: Sequence[ScheduledTokens], device: torch.device) -> tuple[PagedRows, Tensor, Tensor]:
    """The positions of a step's tokens in the cache, their ids [N], and the rows that sample [R]."""
    ends = np.cumsum([work.rows for work in plan]).tolist()
    sampling = [
        row
        for end, work in zip(ends, plan, strict=True)
        if work.samples
        for row in range(end - 1 - len(work.drafts), end)
    ]
    return place_rows([run for work in plan for run in _runs(work)], device, sampling)


def place_rows(
    runs: Sequence[TokenRun], device: torch.device, chosen: Sequence[int] = ()
) -> tuple[PagedRows, Tensor, Tensor]:
    """The positions of tokens in the cache, their ids [N], and the indices of ``chosen`` rows [R], on the device.

    Runs of one token come first.
    """
    counts = [len(run.token_ids) for run in runs]
    ends = np.cumsum(counts)
    tables = np.zeros((len(runs), max(len(run.pages) for run in runs)), np.int32)
    token_ids, positions = list[int](), np.empty(sum(counts), np.int64)
    for index, (end, run, count) in enumerate(zip(ends, runs, counts, strict=True)):
        tables[index, : len(run.pages)] = run.pages
        token_ids += run.token_ids
        positions[end - count : end] = range(run.start, run.start + count)
    sequences = np.repeat(np.arange(len(runs), dtype=np.int32), counts)
    arrays = [torch.from_numpy(array) for array in (tables, sequences, positions)]
    tables_BP, sequences_N, positions_N, token_ids_N, chosen_R = place(
        [*arrays, torch.tensor(token_ids), torch.tensor(chosen, dtype=torch.int64)], device
    )
    rows = PagedRows(tables_BP=tables_BP, sequences_N=sequences_N, positions_N=positions_N, counts=tuple(counts))
    return rows, token_ids_N, chosen_R

"""The paged key/value cache of the native engine: runs a step's tokens through the model.

Owns the tensors: keys, values and, where routes are recorded, the experts of every position, so that a reused prefix
brings its routes along. Which page belongs to which request is the scheduler's to decide.

Shape legend: N tokens of a step, R of them that a token is sampled after, B sequences, P pages, K key heads, D width of
a key, S positions per page, W width of a value, L sparse layers, k experts per token, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from etude.engines.native.pages import PAGE
from etude.engines.native.scheduler import EngineRequest, ScheduledTokens
from etude.engines.native.transfer import place
from etude.models.arithmetic import AttentionRule, PagedRows
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
    """int64: the tokens, by their place in the step, that a token is sampled after; on the device."""


class PagedCache:
    """Keys [P,K,D,S] and values [P,K,S,W] of every layer, in the type of the model's weights."""

    def __init__(self, model: Decoder, pages: int, *, record_routes: bool) -> None:
        """One page more than ``pages`` is for rows of a step that no request has."""
        spec, weights = model.spec, model.embedding
        attention = spec.attention
        self.idle_page = pages
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
        """True where :meth:`routes` can be read."""
        return self._routes is not None

    @property
    def size_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(tensor.numel() * tensor.element_size() for layer in self._layers for tensor in layer)

    def forward(self, model: Decoder, plan: Sequence[ScheduledTokens]) -> StepOutput:
        """Run a step's tokens through the model."""
        rows, token_ids_N, sampling_R = _rows(plan, model.embedding.device)
        hidden_NH, routes_NLk = self.compute(model, token_ids_N, rows)
        return StepOutput(hidden_NH=hidden_NH, routes_NLk=routes_NLk, sampling_R=sampling_R)

    def compute(self, model: Decoder, token_ids_N: Tensor, rows: PagedRows) -> tuple[Tensor, Tensor | None]:
        """Hidden states [N,H] and, if recorded, routes [N,L,k] of tokens whose places are known."""

        def attend(layer: int, q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, rule: AttentionRule) -> Tensor:
            model.arithmetic.write_pages(k_NKD, v_NKW, self._layers[layer], rows)
            return model.arithmetic.attend_pages(q_NQD, self._layers[layer], rows, rule)

        routing = None if self._routes is None else Routing(record=True)
        hidden_NH: Tensor = model(token_ids_N, rows.positions_N, attend, routing)
        if self._routes is None or routing is None:
            return hidden_NH, None
        routes_NLk = routing.recorded().to(torch.int16)
        pages_N = rows.tables_BP[rows.sequences_N.long(), rows.positions_N // PAGE].long()
        self._routes[pages_N * PAGE + rows.positions_N % PAGE] = routes_NLk
        return hidden_NH, routes_NLk

    def routes(self, request: EngineRequest) -> Routes:
        """[cached, L, k] the experts of everything that a request has in the cache."""
        assert self._routes is not None, "routes are not recorded"
        positions = np.arange(request.cached)
        slots = np.array(request.pages)[positions // PAGE] * PAGE + positions % PAGE
        (slots_N,) = place([torch.from_numpy(slots)], self._routes.device)
        routes: Routes = self._routes[slots_N].cpu().numpy().view(np.uint16)
        return routes


def _rows(plan: Sequence[ScheduledTokens], device: torch.device) -> tuple[PagedRows, Tensor, Tensor]:
    """The places of a step's tokens in the cache, their ids [N], and those that sample [R].

    Single tokens come first in a plan.
    """
    counts = [work.count for work in plan]
    ends = np.cumsum(counts)
    tables = np.zeros((len(plan), max(len(work.request.pages) for work in plan)), np.int32)
    token_ids, positions = list[int](), np.empty(sum(counts), np.int64)
    for index, (end, work) in enumerate(zip(ends, plan, strict=True)):
        tables[index, : len(work.request.pages)] = work.request.pages
        token_ids += work.request.token_ids[work.start : work.start + work.count]
        positions[end - work.count : end] = range(work.start, work.start + work.count)
    sequences = np.repeat(np.arange(len(plan), dtype=np.int32), counts)
    sampling = [int(end) - 1 for end, work in zip(ends, plan, strict=True) if work.samples]
    arrays = [torch.from_numpy(array) for array in (tables, sequences, positions)]
    tables_BP, sequences_N, positions_N, token_ids_N, sampling_R = place(
        [*arrays, torch.tensor(token_ids), torch.tensor(sampling, dtype=torch.int64)], device
    )
    rows = PagedRows(tables_BP=tables_BP, sequences_N=sequences_N, positions_N=positions_N, counts=tuple(counts))
    return rows, token_ids_N, sampling_R

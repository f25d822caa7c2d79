"""Drafts: the tokens that a draft head expects next, proposed after each step and verified in the next.

    step ──▶ hidden states ──▶ draft head reads the step's tokens ──▶ draft 1 ──▶ draft head ──▶ draft 2 ──▶ …
    next step: last token and drafts in one pass ──▶ a draw at each ──▶ those before the first wrong draft count

Speculative decoding (Leviathan et al., arXiv 2211.17192), without its rejection sampling. A token that this engine
draws is a function of the logits, the request's seed and the token's position (:mod:`etude.models.kernels.draws`). So a
draft is correct exactly if it equals the policy's own draw at its position, and this draw is the answer in any case: a
correct draft only means that the logits of the next position are already computed. For any draft, the sampled tokens,
log-probabilities, routes and sampling masks are those of plain decoding: in invariant arithmetic to the last bit, in
fast arithmetic as far as a row does not depend on the number of rows in a step.

The head draws with the request's parameters and the random number of that position, so equal distributions give equal
tokens. If they differ by ε in total variation, rejection sampling accepts 1 − ε. Drawing both by inverse cumulative sum
from one number accepts less if many tokens compete, because a shift of the sums moves all later ids; it accepts equally
many if two tokens share the probability. In return, results are the same as without drafts: seeds reproduce, parity and
digests hold, and no second random number is needed.

Owns the input and the proposals of the head. Its keys are one more layer of the cache, its weights part of the served
model: they change in the same swap, which also discards drafts of earlier weights. The head does not read the last step
of a request that has ended: drafts after a prefix of its tokens may later be accepted less often.

Shape legend: N tokens of a step, M tokens that the head reads, B requests, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from etude.engines.native.cache import PagedCache, TokenRun, place_rows
from etude.engines.native.pages import PAGE
from etude.engines.native.sampling import choose
from etude.engines.native.scheduler import EngineRequest, RequestState, ScheduledTokens, Scheduler
from etude.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The tokens of one request that the head reads: those that a step has added to the cache, and the next one."""

    request: EngineRequest
    run: TokenRun
    decodes: bool
    first: int
    """Row of the first token in the step's hidden states."""
    drafts: int
    """Number of drafts to propose; if 0, the token after those in the cache is not read yet."""

    @property
    def tails(self) -> dict[int, int]:
        """Page → row of its last cached token in the step's hidden states."""
        positions = range(self.run.start, self.request.cached)
        return {self.run.pages[p // PAGE]: self.first + p - self.run.start for p in positions}


@final
class Drafter:
    """Proposes up to ``most`` drafts for each request whose next token is to be sampled in the next step."""

    def __init__(self, cache: PagedCache, scheduler: Scheduler, *, most: int) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._most = most

    def propose(
        self,
        model: Decoder,
        plan: Sequence[ScheduledTokens],
        hidden_NH: Tensor,
        seed_of: Callable[[EngineRequest], int],
    ) -> None:
        """Read the tokens that a step has added, given its hidden states, and set the drafts of requests that continue.

        Waits for the device once, for the drafts.
        """
        # Runs of one token come first; among those with drafts, those with the most, so that each pass has fewer rows.
        readings = sorted(self._readings(plan), key=lambda reading: not reading.decodes)
        drafting = sorted((reading for reading in readings if reading.drafts), key=lambda reading: -reading.drafts)
        if not readings:
            return
        further_BH, guessed_BH = self._read(model, readings, drafting, hidden_NH)
        drafts = list[Tensor]()
        while count := sum(reading.drafts > len(drafts) for reading in drafting):
            requests = [reading.request for reading in drafting[:count]]
            if drafts:
                ends = [len(request.token_ids) + len(drafts) - 1 for request in requests]
                runs = [TokenRun(one.pages, end, (0,)) for one, end in zip(requests, ends, strict=True)]
                rows, *_ = place_rows(runs, hidden_NH.device)  # the ids are on the device
                further_BH, guessed_BH = self._cache.guess(model, further_BH[:count], drafts[-1][:count], rows)
            params, seeds = [one.params for one in requests], [seed_of(one) for one in requests]
            positions = [one.position + len(drafts) for one in requests]
            drafts.append(choose(model.logits(guessed_BH), params, seeds, positions))
        if drafting:
            columns = torch.nn.utils.rnn.pad_sequence(drafts).tolist()
            for reading, column in zip(drafting, columns, strict=True):
                reading.request.drafts = tuple(column[: reading.drafts])

    def _readings(self, plan: Sequence[ScheduledTokens]) -> Iterator[_Reading]:
        first = 0
        for work in plan:
            request = work.request
            if request.state is RequestState.RUNNING:
                drafts = self._room_for_drafts(request) if len(request.token_ids) == request.cached + 1 else 0
                run = TokenRun(request.pages, work.start, request.token_ids[work.start : request.cached + (drafts > 0)])
                yield _Reading(request=request, run=run, decodes=work.count == 1, first=first, drafts=drafts)
            first += work.rows

    def _room_for_drafts(self, request: EngineRequest) -> int:
        """Number of useful drafts with pages: the last token that may be sampled needs no draft."""
        most = min(self._most, request.params.max_tokens - request.sampled - 1)
        length = len(request.token_ids)
        return max(0, min(most, self._scheduler.reserve(request, length + most) - length))

    def _read(
        self, model: Decoder, readings: Sequence[_Reading], drafting: Sequence[_Reading], hidden_NH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The head's hidden states [B,H] after each of ``drafting``: to continue from, and to compute logits from."""
        device, tails_PH = hidden_NH.device, self._cache.tails_PH
        begins = [reading.run.start == 0 for reading in readings]
        pages = [
            0 if begin else each.run.pages[(each.run.start - 1) // PAGE]
            for each, begin in zip(readings, begins, strict=True)
        ]
        before_BH = tails_PH[torch.tensor(pages, device=device)].to(hidden_NH.dtype)
        before_BH = before_BH.masked_fill(torch.tensor(begins, device=device).unsqueeze(1), 0)
        runs, indices, ends = list[TokenRun](), list[int](), dict[int, int]()
        for index, reading in enumerate(readings):
            start = len(readings) + reading.first
            indices += [index, *range(start, start + len(reading.run.token_ids) - 1)]
            runs += reading.run.singles if reading.decodes else [reading.run]
            ends[id(reading)] = len(indices) - 1
        rows, token_ids_M, _ = place_rows(runs, device)
        hidden_MH = torch.cat((before_BH, hidden_NH))[torch.tensor(indices, device=device)]
        further_MH, guessed_MH = self._cache.guess(model, hidden_MH, token_ids_M, rows)
        tails = {page: row for reading in readings for page, row in reading.tails.items()}
        kept_NH = hidden_NH[torch.tensor(list(tails.values()), device=device)]
        tails_PH[torch.tensor(list(tails), device=device)] = kept_NH.to(tails_PH.dtype)
        lasts = torch.tensor([ends[id(reading)] for reading in drafting], dtype=torch.int64, device=device)
        return further_MH[lasts], guessed_MH[lasts]

"""The native engine: continuous batching on the trainer's own model code.

    generate() ──▶ Scheduler.plan ──▶ one forward pass ──▶ draw ──▶ futures, streams
                        ▲                                    │
                        └── next step ◀── drafts, if any ◀───┘   swap() takes effect between two steps

Owns the step loop and the calls in progress. The :class:`~etude.engines.native.scheduler.Scheduler` selects the
requests of a step, the :class:`~etude.engines.native.cache.PagedCache` has keys and values, the caller supplies
weights. Runs in one event loop: a step computes for some milliseconds, then I/O is handled. A step waits for the device
once, for the drawn tokens.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from etude.config.inference import EngineConfig
from etude.engines.native.adapters import ServedAdapter, ServedAdapters
from etude.engines.native.cache import PagedCache, StepOutput
from etude.engines.native.drafting import Drafter
from etude.engines.native.graphs import StepGraphs, can_capture
from etude.engines.native.pages import PAGE
from etude.engines.native.sampling import Drawn, Sampler, tabulated
from etude.engines.native.scheduler import Counters, EngineRequest, ScheduledTokens, Scheduler, SwapMode
from etude.engines.native.scoring import PromptScorer, PromptScores
from etude.engines.scatter import Scatter
from etude.errors import EngineUnavailable
from etude.models.decoder import Decoder
from etude.models.spec import ModelSpec
from etude.protocols import Completion, EngineHealth, SamplingParams, TokenChunk
from etude.types import Finish, Ids, Routes, SamplingMask, TokenIds, as_list

SEED_BITS = 63
"""Random bits of the seed of a call without one."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model with the version and digest of its weights; changed only between two steps."""

    model: Decoder
    version: int
    digest: str


@dataclass(slots=True, kw_only=True, eq=False)
class _PendingCall:
    """A request and the future that its caller awaits."""

    request: EngineRequest
    seed: int
    done: asyncio.Future[Completion]
    chunks: asyncio.Queue[TokenChunk | EngineUnavailable] | None
    """Receives the tokens of a stream as they are sampled; holds at most one completion."""
    scorer: PromptScorer | None
    """Receives the hidden states of the prompt, if its logprobs are requested."""
    adapter: ServedAdapter | None
    """The adapter for the whole completion; ``None``: the model's own weights."""
    routes: list[Routes] = field(default_factory=list)
    """[L,k] for each token that a token was sampled after: the router's choice at that time."""
    sampling_mask: list[Ids] = field(default_factory=list)
    """The ids that each token was drawn from, if top-k or top-p truncates."""


_Row: TypeAlias = tuple[_PendingCall, int]
"""A call, and the number of drafts before the token that is drawn for it."""


@final
class NativeEngine:
    """Samples with a :class:`~etude.models.decoder.Decoder`; implements :class:`~etude.protocols.Engine`."""

    def __init__(self, weights: Weights, config: EngineConfig, *, seed: int, record_routes: bool = False) -> None:
        self._weights = weights
        self._mode = SwapMode(config.native.swap)
        self._scheduler = Scheduler(
            pages=-(-config.resolved_cache_tokens // PAGE),
            max_running=config.max_running,
            max_waiting=config.native.max_waiting,
            max_length=config.max_length,
            step_tokens=config.native.step_tokens,
        )
        drafts = config.native.draft_tokens
        if drafts and weights.model.draft is None:
            raise ValueError(
                f"engine.options.draft_tokens = {drafts} needs a model with a draft head: this model has none"
            )
        pages = -(-config.resolved_cache_tokens // PAGE)
        self._cache = PagedCache(weights.model, pages, record_routes=record_routes, drafts=drafts > 0)
        self._drafter = Drafter(self._cache, self._scheduler, most=drafts) if drafts else None
        self._sampler = Sampler(weights.model.arithmetic)
        can_draw = can_capture(weights.model) and not drafts  # a graph returns no hidden states for a draft head
        self._graphs = StepGraphs(weights.model, self._cache, self._sampler) if can_draw else None
        self._seeds = np.random.default_rng(seed)
        self._calls: dict[EngineRequest, _PendingCall] = {}
        self.adapters = ServedAdapters(weights.model)
        """Adapters that requests may name; all others get the engine's weights."""
        self._work = asyncio.Event()
        self._stepped = asyncio.Event()
        self._failure = ""
        """The error that ended the step loop, if any."""
        self.busy_s = 0.0
        """Seconds spent computing."""

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        """Sample one completion.

        Raises ``ValueError`` for a request that can never be served (ids outside the vocabulary, a prompt that is too
        long), and :class:`~etude.errors.EngineBusy` if the queue is full.
        """
        with self._submitted(prompt_ids, params, session) as call:
            return await call.done

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Sample one completion and yield each token as it is sampled. Raises like :meth:`generate`."""
        with self._submitted(prompt_ids, params, session, streaming=True) as call:
            assert call.chunks is not None
            while True:
                chunk = await call.chunks.get()
                if isinstance(chunk, EngineUnavailable):
                    raise chunk
                yield chunk
                if chunk.completion is not None:
                    return

    async def score(self, prompt_ids: TokenIds, *, first: int = 1, top_k: int = 0, session: str) -> PromptScores:
        """Log-probabilities of the prompt's tokens from index ``first`` on, and of the ``top_k`` likeliest tokens at
        each position.

        Earlier tokens may come from the cache, all others are computed. One token is also sampled and discarded, so
        there must be room for it. Raises like :meth:`generate`, and ``ValueError`` if ``first`` is outside the prompt
        or ``top_k`` exceeds the vocabulary.
        """
        vocabulary = self._weights.model.spec.vocab_size
        if not 1 <= first <= max(1, len(prompt_ids) - 1) or not 0 <= top_k <= vocabulary:
            raise ValueError(
                f"first={first}, top_k={top_k} of a prompt of {len(prompt_ids)} tokens: expected 1 to the index of "
                f"the last token, and 0 to {vocabulary}"
            )
        scorer = PromptScorer(as_list(prompt_ids), first=first, top_k=top_k)
        params = SamplingParams(max_tokens=1, temperature=0)
        with self._submitted(prompt_ids, params, session, scorer=scorer) as call:
            await call.done
        return scorer.scores

    async def health(self) -> EngineHealth:
        """The weights being served, and the load. Raises like :meth:`generate` when a step failed."""
        if self._failure:
            raise EngineUnavailable(self._failure)
        return EngineHealth(
            version=self._weights.version,
            digest=self._weights.digest,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
        )

    @property
    def weights(self) -> Weights:
        """The weights being served."""
        return self._weights

    @property
    def cache_bytes(self) -> int:
        """Memory of the key/value cache, which never grows."""
        return self._cache.size_bytes

    @property
    def free_pages(self) -> int:
        """Pages of the cache that no call holds."""
        return self._scheduler.free_pages

    def take_counters(self) -> Counters:
        """Token counts since the last call."""
        counters, self._scheduler.counters = self._scheduler.counters, Counters()
        return counters

    async def swap(self, weights: Weights, scatters: Sequence[Scatter] = ()) -> float:
        """Sample with other weights from the next token on; returns the pause in seconds.

        ``scatters`` are first written into their model, which may be the serving one. If that raises, the weights are
        of no version: load them again. The configured :class:`~etude.engines.native.scheduler.SwapMode` determines the
        effect on turns in progress; no later turn starts from a prefix of other weights. In mode drain the call first
        waits, outside of the pause, until the turns in progress have ended; if it is cancelled before that, nothing is
        swapped. One swap at a time.
        """
        if self._mode is SwapMode.DRAIN:
            self._scheduler.begin_drain()
            try:
                while not (self._scheduler.drained or self._failure):
                    self._stepped.clear()
                    await self._stepped.wait()
            except asyncio.CancelledError:
                self._scheduler.end_drain()
                self._work.set()
                raise
        started_s = time.perf_counter()
        for scatter in scatters:
            scatter.apply()
        self._weights = weights
        pause_s = time.perf_counter() - started_s
        if self._mode is SwapMode.DRAIN:
            self._scheduler.end_drain()
        else:
            self._scheduler.swapped(self._mode)
        self._work.set()
        return pause_s

    async def run(self) -> None:
        """Run steps for ever.

        consumes: queued requests; produces: completions; waits for: a request; woken by: :meth:`generate`; on shutdown:
        cancelled, callers cancel their pending calls; if a step fails, all pending calls fail.
        """
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self.step():
                    await asyncio.sleep(0)  # let I/O run
        except Exception as error:
            self._fail(error)
            raise

    def step(self) -> bool:
        """Compute one step; false if there was nothing to do."""
        started_s = time.perf_counter()
        plan = self._scheduler.plan(self._weights.version)
        if plan:
            self._compute(plan)
            self.busy_s += time.perf_counter() - started_s
        self._stepped.set()
        return bool(plan)

    @torch.inference_mode()
    def _compute(self, plan: Sequence[ScheduledTokens]) -> None:
        """Run the planned tokens through the model, and draw a token after each work that reaches its request's last
        token, and after each of its drafts.
        """
        model, is_own = self._weights.model, True
        if model.adapters is not None:
            chosen = [(self._calls[work.request].adapter, work.rows) for work in plan]
            model.adapters.select([(None if one is None else one.factors, count) for one, count in chosen])
            is_own = model.adapters.selection.is_own
        works = [work for work in plan if work.samples]
        rows = [(self._calls[work.request], ahead) for work in works for ahead in range(1 + len(work.drafts))]
        if self._graphs is not None and is_own and self._graphs.take(plan):
            drawn = self._graphs.run(model, plan, tabulated(*_draw_parameters(rows)))
            for work in plan:
                self._scheduler.advance(work)
            self._append(works, drawn)
            return
        output = self._cache.forward(model, plan)
        for work in plan:
            self._scheduler.advance(work)
        self._score(plan, output.hidden_NH, np.cumsum([work.rows for work in plan]).tolist())
        if works:
            self._append(works, self._sample(output, rows))
        if self._drafter is not None:
            seed_of = {work.request: self._calls[work.request].seed for work in plan if work.request in self._calls}
            self._drafter.propose(model, plan, output.hidden_NH, seed_of.__getitem__)

    def _sample(self, output: StepOutput, rows: Sequence[_Row]) -> Drawn:
        """Draw a token of each row."""
        hidden_NH, routes_NLk = output.hidden_NH, output.routes_NLk
        if len(rows) < len(hidden_NH):
            hidden_NH = hidden_NH[output.sampling_R]
            routes_NLk = None if routes_NLk is None else routes_NLk[output.sampling_R]
        return self._sampler.sample(self._weights.model.logits(hidden_NH), *_draw_parameters(rows), routes_NLk)

    def _score(self, plan: Sequence[ScheduledTokens], hidden_NH: Tensor, ends: Sequence[int]) -> None:
        """Score the prompts whose logprobs are requested, as far as this step has read them."""
        for end, work in zip(ends, plan, strict=True):
            if work.request.scored_from is not None:
                scorer = self._calls[work.request].scorer
                assert scorer is not None, "no call requests these logprobs"
                scorer.add(self._weights.model, hidden_NH[end - work.count : end], work.start)

    def _append(self, works: Sequence[ScheduledTokens], drawn: Drawn) -> None:
        """Append the next token to each work's call, and further ones as long as its drafts equal the drawn tokens."""
        tokens, first = drawn.token_ids.tolist(), 0
        for work in works:
            call = self._calls[work.request]
            for ahead in range(1 + len(work.drafts)):
                self._append_row(call, drawn, first + ahead)
                if call.request.finished or work.drafts[ahead : ahead + 1] != (tokens[first + ahead],):
                    break
                self._scheduler.accept(call.request)
            first += 1 + len(work.drafts)

    def _append_row(self, call: _PendingCall, drawn: Drawn, row: int) -> None:
        """Append the next token to a call, and complete it if it has ended."""
        version = self._weights.version if call.adapter is None else call.adapter.version
        token, logprob = int(drawn.token_ids[row]), float(drawn.logprobs[row])
        self._scheduler.append(call.request, token, logprob, version)
        if drawn.routes is not None:
            call.routes.append(drawn.routes[row])
        mask = None
        if call.request.params.truncates:
            ids = drawn.kept_row(row)
            call.sampling_mask.append(ids)
            mask = SamplingMask.of_rows([ids])
        completion = self._complete(call) if call.request.finished else None
        if call.chunks is not None:
            call.chunks.put_nowait(_chunk(token, logprob, version, mask, completion))

    def _complete(self, call: _PendingCall) -> Completion:
        request = call.request
        completion = Completion(
            token_ids=np.array(request.token_ids[request.prompt_length :], np.int32),
            logprobs=np.array(request.logprobs, np.float32),
            versions=np.array(request.versions, np.int32),
            finish=Finish.STOP if request.token_ids[-1] in request.params.stop_ids else Finish.LENGTH,
            routes=_routes(call, self._cache) if request.params.want_routes else None,
            sampling_mask=SamplingMask.of_rows(call.sampling_mask) if request.params.truncates else None,
        )
        self._scheduler.finish(request)
        del self._calls[request]
        if not call.done.done():
            call.done.set_result(completion)
        return completion

    @contextmanager
    def _submitted(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams,
        session: str,
        *,
        streaming: bool = False,
        scorer: PromptScorer | None = None,
    ) -> Iterator[_PendingCall]:
        """Submit a call for the lifetime of the context; leaving it early cancels the call."""
        if self._failure:
            raise EngineUnavailable(self._failure)
        adapter = self.adapters.named(params.adapter) if params.adapter else None
        token_ids = as_list(prompt_ids)
        _check(token_ids, params, self._weights.model.spec, self._cache)
        request = EngineRequest(
            session=session,
            params=params,
            token_ids=token_ids,
            prompt_length=len(token_ids),
            scored_from=None if scorer is None else scorer.first,
            chain=None if adapter is None else adapter.chain,
        )
        self._scheduler.add(request)
        call = _PendingCall(
            request=request,
            seed=int(self._seeds.integers(1 << SEED_BITS)) if params.seed is None else params.seed,
            done=asyncio.get_running_loop().create_future(),
            chunks=asyncio.Queue() if streaming else None,
            scorer=scorer,
            adapter=adapter,
        )
        self._calls[request] = call
        self._work.set()
        try:
            yield call
        finally:
            if self._calls.pop(request, None) is not None:
                self._scheduler.cancel(request)

    def _fail(self, error: Exception) -> None:
        """Fail all pending and later calls."""
        self._failure = f"the engine's step failed: {type(error).__name__}: {error}"
        failure = EngineUnavailable(self._failure)
        for call in self._calls.values():
            if call.chunks is not None:
                call.chunks.put_nowait(failure)
            if not call.done.done():
                call.done.set_exception(failure)
                call.done.exception()  # a stream's future is never awaited
        self._stepped.set()


def _check(prompt_ids: Sequence[int], params: SamplingParams, spec: ModelSpec, cache: PagedCache) -> None:
    if not prompt_ids or min(prompt_ids) < 0 or max(prompt_ids) >= spec.vocab_size:
        raise ValueError(f"prompt ids must be in 0 … {spec.vocab_size - 1} and not empty")
    if len(prompt_ids) + params.max_tokens > spec.max_positions:
        raise ValueError(
            f"prompt of {len(prompt_ids)} tokens + max_tokens {params.max_tokens} exceeds the model's "
            f"{spec.max_positions} positions"
        )
    if params.sampled_before >= len(prompt_ids):
        raise ValueError(f"sampled_before = {params.sampled_before} of a prompt of {len(prompt_ids)} tokens")
    if params.want_routes and spec.experts is not None and not cache.records_routes:
        raise ValueError("the engine does not record routes: set numerics.replay to 'completion' or 'full'")


def _draw_parameters(rows: Sequence[_Row]) -> tuple[list[SamplingParams], list[int], list[int]]:
    """Parameters, seeds and numbers of sampled tokens, on which a draw depends."""
    requests = [call.request for call, _ in rows]
    positions = [call.request.position + ahead for call, ahead in rows]
    return [one.params for one in requests], [call.seed for call, _ in rows], positions


def _chunk(
    token: int, logprob: float, version: int, mask: SamplingMask | None, completion: Completion | None
) -> TokenChunk:
    return TokenChunk(
        token_ids=np.array([token], np.int32),
        logprobs=np.array([logprob], np.float32),
        versions=np.array([version], np.int32),
        sampling_mask=mask,
        completion=completion,
    )


def _routes(call: _PendingCall, cache: PagedCache) -> Routes | None:
    """[P + C − 1, L, k]: for the prompt the routes in the cache, for sampled tokens those at their sampling.

    The two differ if new weights or a lack of pages made the engine read sampled tokens again.
    """
    if not cache.records_routes:
        return None
    prompt = cache.routes(call.request)[: call.request.prompt_length - 1]
    return np.concatenate([prompt, np.stack(call.routes)])

"""The native engine's scheduler: the pure, synchronous choice of the tokens of the next step.

    add ──▶ waiting ──▶ running ──plan──▶ works ──(forward pass)──▶ advance, append ──▶ finish
               ▲           │
               └───────────┘   preempted, or its keys are of old weights

Owns the requests, the queue of waiting and running ones, the pages that the latter hold, the step in which each token
is computed, and the effect of new weights on requests in progress. Knows neither tensors nor time.

Each step is bounded: every running request that is ready to sample gets one token, and the others share the remaining
tokens of the step to read their prompts in chunks, best rank first (Agrawal et al. 2024, arXiv:2403.02310: long prompts
must not stall decoding).

All decisions follow one order, the rank: priority, then arrival. No two ranks are equal, so the best request can always
get what it needs, and there is always progress.

* A running request without room for its next token takes the pages of the worst-ranked one. If it is itself the worst,
  it pauses until others end; it keeps its computed keys.
* A waiting request preempts only running ones of a worse *priority*. If it does not fit, no request behind it is
  admitted, or it could wait for ever.
* A waiting request whose next pages are being computed by a running one is skipped until it can reuse them. It holds
  nothing meanwhile, and is reconsidered as soon as the other stops for any reason.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from etude.engines.native.pages import PAGE, PageNode, PagePool
from etude.errors import EngineBusy
from etude.protocols import SamplingParams


class RequestState(StrEnum):
    """The state of a request."""

    NEW = "new"
    """Not submitted yet."""
    WAITING = "waiting"
    """In the queue; it holds no page."""
    RUNNING = "running"
    """It holds pages for all its tokens."""
    DONE = "done"
    """Finished or cancelled."""


TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = MappingProxyType(
    {
        RequestState.NEW: frozenset({RequestState.WAITING}),
        RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.DONE}),
        RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.DONE}),
        RequestState.DONE: frozenset(),
    }
)
"""Running to waiting: a better request took its pages, or its keys are of old weights."""


@dataclass(slots=True, kw_only=True, eq=False)
class EngineRequest:
    """One completion in progress. Callers set the first five fields; the scheduler the rest."""

    session: str
    params: SamplingParams
    token_ids: list[int]
    """The prompt and the tokens sampled so far."""
    prompt_length: int
    scored_from: int | None = None
    """Index of the first prompt token whose logprob is requested: the token before it and all later ones are computed,
    even if the index has them; ``None`` if no logprobs are requested.
    """
    chain: int | None = None
    """Negative number of the adapter whose keys it can reuse; ``None``: those of the serving version."""
    cached: int = 0
    """Number of leading ``token_ids`` whose keys are in ``pages``."""
    pages: list[int] = field(default_factory=list)
    """Its pages in the order of its tokens, for at least ``cached`` positions. While it runs, pages are only added at
    the end.
    """
    logprobs: list[float] = field(default_factory=list)
    """One per sampled token, like ``versions``."""
    versions: list[int] = field(default_factory=list)
    arrival: int = -1
    """Its number in the order of arrival; at equal priority the earlier one is served first."""
    state: RequestState = RequestState.NEW
    drafts: tuple[int, ...] = ()
    """The tokens that a draft head expects next; useless once a token is sampled or the weights change."""
    rereads: int = 0
    """Number of times that its prompt was read again because of new weights."""
    leaf: PageNode | None = None
    """The index node of its last full page; ``None`` while it does not run, and if its keys are of several versions, as
    these are never indexed.
    """
    indexed: int = 0
    """Number of its pages that are full and in the index."""
    reader: "EngineRequest | None" = None
    """A running request that is computing pages that this one also needs."""
    awaited: int = 0
    """Number of pages that ``reader`` has to index before this request can continue."""
    room: int = 0
    """Pages that must be available before it is checked again whether this request fits."""

    @property
    def rank(self) -> tuple[int, int]:
        """Its sort key in the queue: the lowest is served first. No two requests have the same."""
        return (self.params.priority, self.arrival)

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.prompt_length

    @property
    def position(self) -> int:
        """Index of the next token among all tokens sampled for its completion, by this or another engine."""
        return self.params.sampled_before + self.sampled

    @property
    def finished(self) -> bool:
        """True once the last sampled token ended the completion."""
        stopped = self.sampled > 0 and self.token_ids[-1] in self.params.stop_ids
        return stopped or self.sampled >= self.params.max_tokens

    def move(self, state: RequestState) -> None:
        """Change the state; only moves in ``TRANSITIONS`` are allowed."""
        assert state in TRANSITIONS[self.state], f"a request went from {self.state} to {state}"
        self.state = state


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Tokens ``start : start + count`` of a request, to be computed in this step, and drafts of the next ones."""

    request: EngineRequest
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    """Drafts after its last token, if it samples: computed as if they had been sampled."""

    @property
    def rows(self) -> int:
        """Number of tokens that are computed, including drafts."""
        return self.count + len(self.drafts)

    @property
    def samples(self) -> bool:
        """True if this work reaches the request's last token, so that the next one is sampled."""
        return self.start + self.count == len(self.request.token_ids)


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counts of scheduled work since the last read."""

    steps: int = 0
    """Planned steps with something to compute."""
    generated_tokens: int = 0
    """Sampled tokens."""
    drafted_tokens: int = 0
    """Drafts that were computed for verification."""
    accepted_tokens: int = 0
    """Drafts that equal the sampled token; each saves a step."""
    prefill_tokens: int = 0
    """Tokens that were computed: prompts, and tokens that a request reads again after losing its pages."""
    reused_tokens: int = 0
    """Tokens whose pages were found in the index."""
    preempted: int = 0
    """Running requests that lost their pages to better-ranked ones."""
    evicted_pages: int = 0
    """Indexed pages that were reused for other content."""
    rereads: int = 0
    """Running requests whose keys were discarded because the weights changed."""


class RequestQueue:
    """The waiting and the running requests of one engine, each in order of priority."""

    def __init__(self, *, pages: int, max_running: int) -> None:
        self.pool = PagePool(pages)
        self.max_running = max_running
        self.waiting: list[EngineRequest] = []
        self.running: list[EngineRequest] = []

    def enqueue(self, request: EngineRequest) -> None:
        """Put a request into the waiting queue, by rank."""
        request.move(RequestState.WAITING)
        insort(self.waiting, request, key=_rank)

    def requeue(self, request: EngineRequest) -> None:
        """Take a running request's pages and queue it again, with its sampled tokens."""
        self._leave(request)
        self.enqueue(request)

    def dismiss(self, request: EngineRequest) -> None:
        """Remove a request that waits or runs."""
        if request.state is RequestState.RUNNING:
            self._leave(request)
        else:
            _take_out(self.waiting, request)
        request.move(RequestState.DONE)

    def grow(self, counters: Counters) -> None:
        """Give every running request room for its next token, best first, as far as there are pages."""
        for request in tuple(self.running):
            if len(request.pages) * PAGE >= len(request.token_ids) or request.state is not RequestState.RUNNING:
                continue
            while not self.pool.available and (worst := self.running[-1]) is not request:
                self.requeue(worst)
                counters.preempted += 1
            if self.pool.available:
                request.pages.append(self.pool.take())

    def admit(self, counters: Counters, *, begun_only: bool) -> None:
        """Start waiting requests, best first, until one does not fit. With ``begun_only``, requests that have sampled
        nothing yet are skipped.
        """
        if not self.waiting or not self._may_run(self.waiting[0]):
            return
        place = 0
        while place < len(self.waiting):
            request = self.waiting[place]
            if _awaits_reader(request) or (begun_only and not request.sampled):
                place += 1
                continue
            if not self._may_run(request) or not self._may_fit(request):
                return
            chain = self.pool.find(request.token_ids, _reusable(request), self.pool.root_of(request.chain))
            if self._follow(request, chain):
                place += 1
                continue
            if not self._make_room(request, chain, counters):
                return
            del self.waiting[place]
            self._start(request, chain)
            counters.reused_tokens += request.cached

    def index(self, request: EngineRequest) -> None:
        """Index the pages that a running request has filled."""
        while request.leaf is not None and request.indexed < request.cached // PAGE:
            start = request.indexed * PAGE
            token_ids = tuple(request.token_ids[start : start + PAGE])
            request.leaf = self.pool.enter(request.leaf, token_ids, request.pages[request.indexed])
            request.indexed += 1

    def check(self) -> None:
        """Assert every invariant; for tests, it reads everything."""
        self.pool.check([request.pages for request in self.running])
        assert len(self.running) <= self.max_running
        for line, state in ((self.waiting, RequestState.WAITING), (self.running, RequestState.RUNNING)):
            assert line == sorted(line, key=_rank), f"the {state} line is out of order"
            assert all(request.state is state for request in line)
        for request in self.waiting:
            assert not request.pages and not request.cached and request.leaf is None
        for request in self.running:
            room = len(request.pages) * PAGE
            assert request.cached <= min(room, len(request.token_ids))
            assert request.leaf is None or request.indexed == request.cached // PAGE
            assert all(self.pool.is_mutable(page) for page in request.pages[request.cached // PAGE :])

    def _may_run(self, request: EngineRequest) -> bool:
        """Report whether one more may run, if necessary in place of a request of worse priority."""
        return len(self.running) < self.max_running or _outranks(request, self.running[-1])

    def _may_fit(self, request: EngineRequest) -> bool:
        """Report whether an index lookup is worth its time: the first in the queue gets one in every step."""
        return self.pool.available >= request.room or bool(self.running and _outranks(request, self.running[-1]))

    def _follow(self, request: EngineRequest, chain: Sequence[PageNode]) -> bool:
        """Report whether a running request computes the pages that this one needs after ``chain``, and make it wait for
        them. No request waits for one of worse priority, which could be stalled for long.
        """
        leaf = chain[-1] if chain else self.pool.root_of(request.chain)
        limit = _reusable(request)
        for reader in self.running:
            if reader.leaf is not leaf or _outranks(request, reader):
                continue
            shared = _shared_pages(reader.token_ids, request.token_ids, len(chain), limit)
            if shared > len(chain):
                request.reader, request.awaited = reader, shared
                return True
        return False

    def _make_room(self, request: EngineRequest, chain: Sequence[PageNode], counters: Counters) -> bool:
        """Find a free slot, and pages for all tokens after ``chain`` and one more; if successful, ``chain`` is held."""
        for node in chain:
            self.pool.retain(node.page)
        needed = _pages_for(request) - len(chain)
        victims = [other for other in self.running if _outranks(request, other)]
        # Pages that victims share are counted several times: this may be too optimistic, but never refuses wrongly.
        if needed <= self.pool.available + sum(len(victim.pages) for victim in victims):
            while victims and not self._has_room(needed):
                self.requeue(victims.pop())
                counters.preempted += 1
            if self._has_room(needed):
                return True
        missing = needed - self.pool.available
        self.pool.release([node.page for node in chain])
        request.room = self.pool.available + missing
        return False

    def _has_room(self, pages: int) -> bool:
        return len(self.running) < self.max_running and self.pool.available >= pages

    def _start(self, request: EngineRequest, chain: Sequence[PageNode]) -> None:
        """Start a request after ``chain``, which is held for it."""
        request.move(RequestState.RUNNING)
        request.room = 0
        fresh = _pages_for(request) - len(chain)
        request.pages = [node.page for node in chain] + [self.pool.take() for _ in range(fresh)]
        request.indexed = len(chain)
        request.cached = len(chain) * PAGE
        request.leaf = chain[-1] if chain else self.pool.root_of(request.chain)
        insort(self.running, request, key=_rank)

    def _leave(self, request: EngineRequest) -> None:
        _take_out(self.running, request)
        self.pool.release(request.pages)
        request.pages, request.cached, request.indexed, request.leaf, request.drafts = [], 0, 0, None, ()


def _rank(request: EngineRequest) -> tuple[int, int]:
    return request.rank


def _outranks(request: EngineRequest, other: EngineRequest) -> bool:
    """Report whether a waiting request may preempt ``other``: only by priority, regardless of arrival."""
    return request.params.priority < other.params.priority


def _take_out(line: list[EngineRequest], request: EngineRequest) -> None:
    place = bisect_left(line, request.rank, key=_rank)
    assert line[place] is request, "a request is not in its line"
    del line[place]


def _awaits_reader(request: EngineRequest) -> bool:
    """Report whether the request that it follows has still to index pages that it needs."""
    reader = request.reader
    if reader is not None and reader.leaf is not None and reader.indexed < request.awaited:
        return True
    request.reader = None
    return False


def _reusable(request: EngineRequest) -> int:
    """Number of pages that could be reused. The last token is always computed, because its logits choose the next one;
    so are tokens whose logprobs are requested.
    """
    computed = len(request.token_ids) if request.scored_from is None else request.scored_from
    return (computed - 1) // PAGE


def _pages_for(request: EngineRequest) -> int:
    """Number of pages for all tokens and the next sampled one."""
    return len(request.token_ids) // PAGE + 1


def _shared_pages(token_ids: Sequence[int], others: Sequence[int], first: int, limit: int) -> int:
    """Number of full pages that two sequences share, at most ``limit``, given that they share ``first``."""
    for page in range(first, limit):
        start = page * PAGE
        if token_ids[start : start + PAGE] != others[start : start + PAGE]:
            return page
    return limit


MAX_REREADS = 2
"""Most times that a prompt is read again in mode keep. After that its keys may be of several versions: weights that
change faster than a prompt is read must not starve it.
"""


class SwapMode(StrEnum):
    """The effect of a weight swap on completions in progress."""

    KEEP = "keep"
    """Completions continue with their existing keys. Prompts without a sampled token are read again."""
    RECOMPUTE = "recompute"
    """Prompt and sampled tokens are read again under the new weights before the next one is sampled."""
    DRAIN = "drain"
    """The swap waits until no completion is in progress; the client holds back new ones."""


class Scheduler:
    """Continuous batching over a fixed number of pages.

    In each step the caller runs :meth:`plan`, computes, calls :meth:`advance` for every work, :meth:`append` for each
    sampled token, :meth:`accept` if it was a draft, and :meth:`finish` for each ended request. :meth:`add`,
    :meth:`cancel` and :meth:`swapped` are called between steps; a request may also be cancelled inside a step, the rest
    of which then skips it.
    """

    def __init__(self, *, pages: int, max_running: int, max_waiting: int, max_length: int, step_tokens: int) -> None:
        """Limits: pages of the cache, running requests, waiting requests, tokens of a request, tokens of a step."""
        if step_tokens < max_running:
            raise ValueError(
                f"step_tokens is {step_tokens}, less than max_running {max_running}: running requests need a token each"
            )
        self.max_running = max_running
        self.counters = Counters()
        """Counts since this attribute was last replaced."""
        self._pages = pages
        self._max_waiting = max_waiting
        self._max_length = max_length
        self._step_tokens = step_tokens
        self._queue = RequestQueue(pages=pages, max_running=max_running)
        self._version: int | None = None
        """Weight version of the last plan; ``None`` if the weights were swapped since."""
        self._arrivals = 0
        self._draining = False

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return len(self._queue.running)

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._queue.waiting)

    @property
    def free_pages(self) -> int:
        """Number of pages that no request holds, including those available for reuse."""
        return self._queue.pool.available

    @property
    def drained(self) -> bool:
        """True if the weights may be swapped in mode drain: no completion is in progress and none can begin."""
        begun = any(request.sampled for request in self._queue.waiting)
        return self._draining and not self._queue.running and not begun

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ``ValueError`` if it could not run even alone, :class:`~etude.errors.EngineBusy` if
        the queue is full.
        """
        tokens = request.prompt_length + request.params.max_tokens
        if request.prompt_length < 1 or request.params.max_tokens < 1:
            raise ValueError(
                f"prompt of {request.prompt_length} tokens, max_tokens {request.params.max_tokens}: each is at least 1"
            )
        limit = min(self._max_length, self._pages * PAGE)
        if tokens > limit:
            raise ValueError(
                f"prompt of {request.prompt_length} tokens + max_tokens {request.params.max_tokens} exceeds {limit}: "
                f"the engine's max_length is {self._max_length}, its cache has {self._pages} pages of {PAGE} tokens"
            )
        if self.waiting >= self._max_waiting:
            raise EngineBusy(f"{self.waiting} requests are waiting, the most that this engine queues: retry later")
        request.arrival = self._arrivals
        self._arrivals += 1
        self._queue.enqueue(request)

    def cancel(self, request: EngineRequest) -> None:
        """Cancel a request in any state; repeating it, or calling it after the end, is harmless."""
        if request.state in (RequestState.WAITING, RequestState.RUNNING):
            self._queue.dismiss(request)

    def plan(self, version: int) -> list[ScheduledTokens]:
        """The next step under weights ``version``: first requests that decode, one token each, then chunks of prompts.

        Allocates the pages for it. A version that changed without a call of :meth:`swapped` counts as a swap in mode
        keep. Empty if nothing can be computed: then nothing runs.
        """
        if version != self._version:
            if self._version is not None:
                self.swapped(SwapMode.KEEP)
            self._queue.pool.serve(version)
            self._version = version
        evicted = self._queue.pool.evicted
        self._queue.grow(self.counters)
        self._queue.admit(self.counters, begun_only=self._draining)
        self.counters.evicted_pages += self._queue.pool.evicted - evicted
        works = _works(self._queue.running, self._step_tokens)
        self.counters.steps += bool(works)
        self.counters.drafted_tokens += sum(len(work.drafts) for work in works)
        return works

    def reserve(self, request: EngineRequest, positions: int) -> int:
        """Give a running request room for ``positions`` positions, as far as there are free pages; returns its room."""
        pool = self._queue.pool
        evicted = pool.evicted
        while len(request.pages) * PAGE < positions and pool.available:
            request.pages.append(pool.take())
        self.counters.evicted_pages += pool.evicted - evicted
        return len(request.pages) * PAGE

    def advance(self, work: ScheduledTokens) -> None:
        """Record that the tokens of a work are now in the cache; full pages are indexed."""
        request = work.request
        if request.state is not RequestState.RUNNING:
            return  # cancelled while its step was computed
        assert work.start == request.cached, f"a work starts at {work.start}, {request.cached} tokens are cached"
        request.cached += work.count
        if work.count > 1 or not request.sampled:
            self.counters.prefill_tokens += work.count
        self._queue.index(request)

    def accept(self, request: EngineRequest) -> None:
        """Record that the last sampled token was a draft of this step, so it is in the cache."""
        if request.state is not RequestState.RUNNING:
            return  # cancelled while its step was computed
        request.cached += 1
        self.counters.accepted_tokens += 1
        self._queue.index(request)

    def append(self, request: EngineRequest, token_id: int, logprob: float, version: int) -> None:
        """Add a sampled token to a request."""
        if request.state is not RequestState.RUNNING:
            return  # cancelled while its step was computed
        request.drafts = ()
        request.token_ids.append(token_id)
        request.logprobs.append(logprob)
        request.versions.append(version)
        self.counters.generated_tokens += 1

    def finish(self, request: EngineRequest) -> None:
        """Free the pages of an ended request; indexed ones remain for reuse until pages are short."""
        self.cancel(request)

    def swapped(self, mode: SwapMode) -> None:
        """Record that the weights were swapped: the keys of running requests are of the old weights.

        Raises ``ValueError`` in mode drain while anything runs.
        """
        if mode is SwapMode.DRAIN and self.running:
            raise ValueError(f"weights were exchanged in mode drain while {self.running} requests run: await drained")
        for request in tuple(self._queue.running):
            if request.chain is not None:
                continue  # an adapter's weights never change
            unread = not request.sampled and request.rereads < MAX_REREADS
            if mode is SwapMode.RECOMPUTE or unread:
                request.rereads += request.cached > 0
                self.counters.rereads += request.cached > 0
                self._queue.requeue(request)
            else:
                request.leaf, request.drafts = None, ()
        self._version = None

    def begin_drain(self) -> None:
        """Stop starting completions; those in progress, including preempted ones, run to their end."""
        self._draining = True

    def end_drain(self) -> None:
        """Resume starting completions."""
        self._draining = False

    def check(self) -> None:
        """Assert every invariant; for tests, it reads everything."""
        self._queue.check()


def _works(running: Sequence[EngineRequest], step_tokens: int) -> list[ScheduledTokens]:
    """Share a step of ``step_tokens`` among running requests, given best first. Drafts get the remaining tokens: when
    prompts fill a step, additional rows are no longer free.
    """
    works, readers = list[ScheduledTokens](), list[EngineRequest]()
    for request in running:
        missing = len(request.token_ids) - request.cached
        if missing > 1:
            readers.append(request)
        elif missing and request.cached < len(request.pages) * PAGE:  # otherwise it waits for a page
            works.append(ScheduledTokens(request, request.cached, 1))
    budget = step_tokens - len(works)
    for request in readers:
        if budget <= 0:
            break
        works.append(ScheduledTokens(request, request.cached, min(len(request.token_ids) - request.cached, budget)))
        budget -= works[-1].count
    for index, work in enumerate(works):
        request = work.request
        most = min(len(request.drafts), len(request.pages) * PAGE - len(request.token_ids), budget)
        if most > 0:
            works[index] = replace(work, drafts=request.drafts[:most])
            budget -= most
    return works

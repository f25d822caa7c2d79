"""Which tokens the native engine computes next: a pure, synchronous core.

    add ──▶ waiting ──▶ running ──plan──▶ works ──(forward pass)──▶ advance, append ──▶ finish
               ▲           │
               └───────────┘   preempted, or its keys are of old weights

Owns when requests are taken, in which step each token is computed and what an exchange of weights does to requests in
progress. Knows neither tensors nor time. Seats and pages are the :class:`~etude.engines.native.request_queue.Roster`'s.

Each step is bounded: every running request that is ready to sample gets one token, the others share what is left of
the step's tokens to read their prompts in chunks, best rank first (Agrawal et al. 2024, arXiv:2403.02310: long prompts
must not stall decoding).
"""

from collections.abc import Sequence
from enum import StrEnum

from etude.engines.native.pages import PAGE
from etude.engines.native.request_queue import Roster
from etude.engines.native.requests import Counters, Request, State, Work
from etude.errors import EngineBusy

MAX_REREADS = 2
"""In mode keep, a prompt is read again this often, then its keys may be a mixture of versions: weights that change
faster than prompts are read must not starve them.
"""


class SwapMode(StrEnum):
    """What an exchange of weights does to completions in progress."""

    KEEP = "keep"
    """They go on with the keys they have. Prompts from which nothing was sampled are read again."""
    RECOMPUTE = "recompute"
    """Prompt and sampled tokens are read again under the new weights before the next one is sampled."""
    DRAIN = "drain"
    """None is in progress: the exchange waits for them, and new ones wait for the exchange."""


class Scheduler:
    """Continuous batching over a fixed number of pages.

    One step of its user: :meth:`plan`, compute, :meth:`advance` every work, :meth:`append` what the works that sample
    gave, :meth:`finish` what ended. :meth:`add`, :meth:`cancel` and :meth:`swapped` come between steps; a request may
    also be cancelled inside one, the rest of which then passes it by.
    """

    def __init__(self, *, pages: int, max_running: int, max_waiting: int, max_length: int, step_tokens: int) -> None:
        """Bounds: pages of the cache, requests in a step, requests in line, tokens of a request, tokens of a step."""
        if step_tokens < max_running:
            raise ValueError(
                f"step_tokens is {step_tokens}, less than max_running {max_running}: running requests need a token each"
            )
        self.max_running = max_running
        self.counters = Counters()
        """Since somebody last put new ones here."""
        self._pages = pages
        self._max_waiting = max_waiting
        self._max_length = max_length
        self._step_tokens = step_tokens
        self._roster = Roster(pages=pages, max_running=max_running)
        self._version: int | None = None
        """What the last plan was made for; ``None`` when the weights were exchanged since."""
        self._arrivals = 0
        self._draining = False

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return len(self._roster.running)

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._roster.waiting)

    @property
    def free_pages(self) -> int:
        """Pages that no request holds, those kept for reuse included."""
        return self._roster.pool.available

    @property
    def drained(self) -> bool:
        """Whether the weights may be exchanged in mode drain: no completion is in progress, none can begin."""
        begun = any(request.sampled for request in self._roster.waiting)
        return self._draining and not self._roster.running and not begun

    def add(self, request: Request) -> None:
        """Put a request in line.

        Raises ``ValueError`` when it could not run even alone, :class:`~etude.errors.EngineBusy` when the line is full.
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
            raise EngineBusy(f"{self.waiting} requests are waiting, which is all this engine takes: ask again later")
        request.arrival = self._arrivals
        self._arrivals += 1
        self._roster.enqueue(request)

    def cancel(self, request: Request) -> None:
        """Forget a request, wherever it is; doing it twice, or after its end, is harmless."""
        if request.state in (State.WAITING, State.RUNNING):
            self._roster.dismiss(request)

    def plan(self, version: int) -> list[Work]:
        """The next step under weights ``version``: first requests that decode, one token each, then chunks of prompts.

        Pages for all of it are allocated. A version that differs from the last one without a call of :meth:`swapped`
        counts as exchanged in mode keep. Empty when nothing can be computed: then nothing runs.
        """
        if version != self._version:
            if self._version is not None:
                self.swapped(SwapMode.KEEP)
            self._roster.pool.serve(version)
            self._version = version
        evicted = self._roster.pool.evicted
        self._roster.grow(self.counters)
        self._roster.admit(self.counters, begun_only=self._draining)
        self.counters.evicted_pages += self._roster.pool.evicted - evicted
        return _works(self._roster.running, self._step_tokens)

    def advance(self, work: Work) -> None:
        """Note that the tokens of a work are in the cache now; pages that are full become known to others."""
        request = work.request
        if request.state is not State.RUNNING:
            return  # cancelled while its step was computed
        assert work.start == request.cached, f"a work starts at {work.start}, {request.cached} tokens are cached"
        request.cached += work.count
        if work.count > 1 or not request.sampled:
            self.counters.prefill_tokens += work.count
        self._roster.index(request)

    def append(self, request: Request, token_id: int, logprob: float, version: int) -> None:
        """Add a sampled token to a request."""
        if request.state is not State.RUNNING:
            return  # cancelled while its step was computed
        request.token_ids.append(token_id)
        request.logprobs.append(logprob)
        request.versions.append(version)
        self.counters.generated_tokens += 1

    def finish(self, request: Request) -> None:
        """Free the pages of a request that ended; those known to others stay for reuse until pages are short."""
        self.cancel(request)

    def swapped(self, mode: SwapMode) -> None:
        """Note that the weights were exchanged: what running requests have in the cache is of the old ones.

        Raises ``ValueError`` in mode drain while anything runs.
        """
        if mode is SwapMode.DRAIN and self.running:
            raise ValueError(f"weights were exchanged in mode drain while {self.running} requests run: await drained")
        for request in tuple(self._roster.running):
            unread = not request.sampled and request.rereads < MAX_REREADS
            if mode is SwapMode.RECOMPUTE or unread:
                request.rereads += request.cached > 0
                self.counters.rereads += request.cached > 0
                self._roster.requeue(request)
            else:
                request.leaf = None
        self._version = None

    def begin_drain(self) -> None:
        """Begin no further completion; those in progress go on to their end, preempted ones included."""
        self._draining = True

    def end_drain(self) -> None:
        """Begin completions again."""
        self._draining = False

    def check(self) -> None:
        """Assert every invariant; for tests, it reads everything."""
        self._roster.check()


def _works(running: Sequence[Request], step_tokens: int) -> list[Work]:
    """Share a step of ``step_tokens`` among running requests, given best first."""
    works, readers = list[Work](), list[Request]()
    for request in running:
        missing = len(request.token_ids) - request.cached
        if missing > 1:
            readers.append(request)
        elif missing and request.cached < len(request.pages) * PAGE:  # else it waits for a page
            works.append(Work(request, request.cached, 1))
    budget = step_tokens - len(works)
    for request in readers:
        if budget <= 0:
            break
        works.append(Work(request, request.cached, min(len(request.token_ids) - request.cached, budget)))
        budget -= works[-1].count
    return works

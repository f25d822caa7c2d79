"""Who waits, who runs, and which pages the running ones hold.

Owns both lines and the page pool; every request is in one line. All decisions follow one order, the rank: priority,
then arrival. No two ranks are equal, so the best request can always take what it needs, and something always moves.

* A running request without room for its next token takes the pages of the worst-ranked one. If it is the worst itself
  it stays without work until others end; it keeps what it has computed.
* A waiting request takes the seat and the pages of running ones of a worse *priority* only. Where it does not fit,
  nobody behind it is let in, or it could wait for ever.
* A waiting request whose next pages are being computed by a running one is passed over until it can reuse them. It
  holds nothing meanwhile, and it looks anew as soon as the other stops for any reason.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from etude.engines.native.pages import PAGE, Node, PagePool
from etude.engines.native.requests import Counters, Request, State


class Roster:
    """The waiting and the running requests of one engine, each line best first."""

    def __init__(self, *, pages: int, max_running: int) -> None:
        self.pool = PagePool(pages)
        self.max_running = max_running
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def enqueue(self, request: Request) -> None:
        """Put a request in the waiting line, by rank."""
        request.move(State.WAITING)
        insort(self.waiting, request, key=_rank)

    def requeue(self, request: Request) -> None:
        """Take a running request's pages and let it wait again, with all it has sampled."""
        self._leave(request)
        self.enqueue(request)

    def dismiss(self, request: Request) -> None:
        """Forget a request that waits or runs."""
        if request.state is State.RUNNING:
            self._leave(request)
        else:
            _take_out(self.waiting, request)
        request.move(State.DONE)

    def grow(self, counters: Counters) -> None:
        """Give every running request room for its next token, the best first, as far as pages go."""
        for request in tuple(self.running):
            if len(request.pages) * PAGE >= len(request.token_ids) or request.state is not State.RUNNING:
                continue
            while not self.pool.available and (worst := self.running[-1]) is not request:
                self.requeue(worst)
                counters.preempted += 1
            if self.pool.available:
                request.pages.append(self.pool.take())

    def admit(self, counters: Counters, *, begun_only: bool) -> None:
        """Let waiting requests run, the best first, until one finds no room.

        With ``begun_only`` those that have sampled nothing yet are passed over.
        """
        if not self.waiting or not self._may_seat(self.waiting[0]):
            return
        place = 0
        while place < len(self.waiting):
            request = self.waiting[place]
            if _awaits_reader(request) or (begun_only and not request.sampled):
                place += 1
                continue
            if not self._may_seat(request) or not self._may_fit(request):
                return
            chain = self.pool.find(request.token_ids, _reusable(request))
            if self._follow(request, chain):
                place += 1
                continue
            if not self._make_room(request, chain, counters):
                return
            del self.waiting[place]
            self._start(request, chain)
            counters.reused_tokens += request.cached

    def index(self, request: Request) -> None:
        """Make the pages that a running request has filled known to others."""
        while request.leaf is not None and request.indexed < request.cached // PAGE:
            start = request.indexed * PAGE
            token_ids = tuple(request.token_ids[start : start + PAGE])
            request.leaf = self.pool.enter(request.leaf, token_ids, request.pages[request.indexed])
            request.indexed += 1

    def check(self) -> None:
        """Assert every invariant; for tests, it reads everything."""
        self.pool.check([request.pages for request in self.running])
        assert len(self.running) <= self.max_running
        for line, state in ((self.waiting, State.WAITING), (self.running, State.RUNNING)):
            assert line == sorted(line, key=_rank), f"the {state} line is out of order"
            assert all(request.state is state for request in line)
        for request in self.waiting:
            assert not request.pages and not request.cached and request.leaf is None
        for request in self.running:
            room = len(request.pages) * PAGE
            assert request.cached <= min(room, len(request.token_ids))
            assert request.leaf is None or request.indexed == request.cached // PAGE
            assert all(self.pool.is_mutable(page) for page in request.pages[request.cached // PAGE :])

    def _may_seat(self, request: Request) -> bool:
        """Whether a seat is free, or taken by a request of worse priority."""
        return len(self.running) < self.max_running or _outranks(request, self.running[-1])

    def _may_fit(self, request: Request) -> bool:
        """Whether a look at the index is worth its time: the first in line is asked in every step."""
        return self.pool.available >= request.room or bool(self.running and _outranks(request, self.running[-1]))

    def _follow(self, request: Request, chain: Sequence[Node]) -> bool:
        """Whether somebody is computing what the request needs next behind ``chain``; if so, it awaits that one.

        Nobody waits for a request of worse priority: it could be kept from its work for long.
        """
        leaf = chain[-1] if chain else self.pool.root
        limit = _reusable(request)
        for reader in self.running:
            if reader.leaf is not leaf or _outranks(request, reader):
                continue
            shared = _shared_pages(reader.token_ids, request.token_ids, len(chain), limit)
            if shared > len(chain):
                request.reader, request.awaited = reader, shared
                return True
        return False

    def _make_room(self, request: Request, chain: Sequence[Node], counters: Counters) -> bool:
        """Find a seat, and pages for all tokens behind ``chain`` and one more; ``chain`` is held if there are."""
        for node in chain:
            self.pool.retain(node.page)
        needed = _pages_for(request) - len(chain)
        victims = [other for other in self.running if _outranks(request, other)]
        # Pages that victims share are counted several times: too much hope at worst, never a refusal that is wrong.
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

    def _start(self, request: Request, chain: Sequence[Node]) -> None:
        """Let a request run behind ``chain``, which is held for it."""
        request.move(State.RUNNING)
        request.room = 0
        fresh = _pages_for(request) - len(chain)
        request.pages = [node.page for node in chain] + [self.pool.take() for _ in range(fresh)]
        request.indexed = len(chain)
        request.cached = len(chain) * PAGE
        request.leaf = chain[-1] if chain else self.pool.root
        insort(self.running, request, key=_rank)

    def _leave(self, request: Request) -> None:
        _take_out(self.running, request)
        self.pool.release(request.pages)
        request.pages, request.cached, request.indexed, request.leaf = [], 0, 0, None


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _outranks(request: Request, other: Request) -> bool:
    """Whether a waiting request may take the place of ``other``: by priority only, arrival does not count."""
    return request.params.priority < other.params.priority


def _take_out(line: list[Request], request: Request) -> None:
    place = bisect_left(line, request.rank, key=_rank)
    assert line[place] is request, "a request is not in its line"
    del line[place]


def _awaits_reader(request: Request) -> bool:
    """Whether the one it follows is still about to index what it needs."""
    reader = request.reader
    if reader is not None and reader.leaf is not None and reader.indexed < request.awaited:
        return True
    request.reader = None
    return False


def _reusable(request: Request) -> int:
    """How many pages could be reused: the last token is always computed, its logits choose the next one."""
    return (len(request.token_ids) - 1) // PAGE


def _pages_for(request: Request) -> int:
    """Pages for all tokens and the one that is sampled next."""
    return len(request.token_ids) // PAGE + 1


def _shared_pages(token_ids: Sequence[int], others: Sequence[int], first: int, limit: int) -> int:
    """How many full pages two sequences share, at most ``limit``, given that they share ``first``."""
    for page in range(first, limit):
        start = page * PAGE
        if token_ids[start : start + PAGE] != others[start : start + PAGE]:
            return page
    return limit

"""Which tokens the native engine computes next: a pure, synchronous core.

Owns the waiting line, the slots of the key/value cache and what each slot holds. Knows neither tensors nor time. Each
call of :meth:`Scheduler.plan` hands out one step: every running request that is ready to sample gets one token,
requests that still have prompt to read share a budget of prefill tokens.

Prefix reuse is keyed by session *and* weight version: a slot keeps the tokens of its session's last turn, and the next
turn starts behind the longest common prefix, unless the weights have changed meanwhile. So a token's context is never
a mixture of versions, except inside the one turn during which a swap fell.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from etude.protocols import SamplingParams

MIXED = -1
"""The version of a cache entry that more than one weight version wrote."""
MAX_REREADS = 2
"""After this many swaps during one prompt its cache may be a mixture: faster swaps than prompts must not starve it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One completion in progress."""

    session: str
    params: SamplingParams
    token_ids: list[int]
    """Prompt, then what was sampled so far."""
    prompt_length: int
    cached: int = 0
    """How many of ``token_ids`` are in the cache."""
    slot: int = -1
    rereads: int = 0
    """How often a swap made its prompt be read anew."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.prompt_length

    @property
    def finished(self) -> bool:
        """Whether the last sampled token ended the completion."""
        stopped = self.sampled > 0 and self.token_ids[-1] in self.params.stop_ids
        return stopped or self.sampled >= self.params.max_tokens


@dataclass(slots=True)
class Slot:
    """One row of the cache and what it holds."""

    request: Request | None = None
    session: str = ""
    token_ids: Sequence[int] = ()
    """The tokens whose keys and values are in the row, when no request is running in it."""
    version: int = MIXED
    last_used: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens ``start : start + count`` of a request, to be computed in this step."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether this work reaches the request's last token, so that a next one is sampled."""
        return self.start + self.count == len(self.request.token_ids)


@dataclass(slots=True)
class Counters:
    """What the scheduler has handed out since it was last asked."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0


class Scheduler:
    """Continuous batching over a fixed number of slots."""

    def __init__(self, *, slots: int, max_length: int, prefill_tokens: int) -> None:
        self._slots = [Slot() for _ in range(slots)]
        self._max_length = max_length
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[Request] = deque()
        self._sessions: dict[str, int] = {}
        self._tick = 0
        self.counters = Counters()

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return sum(slot.request is not None for slot in self._slots)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ``ValueError`` when it cannot fit a slot even alone."""
        if request.params.max_tokens < 1:
            raise ValueError(f"max_tokens is {request.params.max_tokens}: a completion has at least one token")
        needed = request.prompt_length + request.params.max_tokens
        if needed > self._max_length:
            raise ValueError(
                f"prompt of {request.prompt_length} tokens + max_tokens {request.params.max_tokens} "
                f"exceeds the engine's max_length {self._max_length}"
            )
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request, queued or running; its slot's content is kept for the session."""
        if request.slot >= 0:
            self.finish(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def plan(self, version: int) -> list[Work]:
        """The next step under ``version``: decoding first, then prefill within the budget."""
        self._tick += 1
        while self._waiting and (index := self._slot_for(self._waiting[0].session)) is not None:
            self._start(self._waiting.popleft(), index, version)
        self._forget_stale_prefixes(version)
        running = [slot.request for slot in self._slots if slot.request is not None]
        decode = [Work(r, r.cached, 1) for r in running if r.cached == len(r.token_ids) - 1]
        prefill, budget = list[Work](), self._prefill_tokens
        for request in running:
            missing = len(request.token_ids) - request.cached
            if missing > 1 and budget > 0:
                prefill.append(Work(request, request.cached, min(missing, budget)))
                budget -= prefill[-1].count
        self.counters.prefill_tokens += self._prefill_tokens - budget
        return decode + prefill

    def advance(self, work: Work) -> None:
        """Note that a piece of work is in the cache now."""
        work.request.cached = work.start + work.count

    def append(self, request: Request, token_id: int, logprob: float, version: int) -> None:
        """Add a sampled token to a request."""
        request.token_ids.append(token_id)
        request.logprobs.append(logprob)
        request.versions.append(version)
        self.counters.generated_tokens += 1
        slot = self._slots[request.slot]
        if slot.version != version:
            slot.version = MIXED

    def finish(self, request: Request) -> None:
        """Free the request's slot, which keeps its tokens for the session's next turn."""
        slot = self._slots[request.slot]
        slot.request, slot.token_ids, slot.last_used = None, request.token_ids[: request.cached], self._tick
        request.slot = -1

    def _forget_stale_prefixes(self, version: int) -> None:
        """Prompts still being read when the weights changed are read again: nothing was sampled from the old ones."""
        for slot in self._slots:
            request = slot.request
            if request is None or request.sampled or slot.version == version:
                continue
            if request.rereads == MAX_REREADS:
                slot.version = MIXED
            else:
                request.cached, slot.version, request.rereads = 0, version, request.rereads + 1

    def _slot_for(self, session: str) -> int | None:
        own = self._sessions.get(session)
        if own is not None and self._slots[own].request is None:
            return own
        idle = [index for index, slot in enumerate(self._slots) if slot.request is None]
        return min(idle, key=lambda index: self._slots[index].last_used, default=None)

    def _start(self, request: Request, index: int, version: int) -> None:
        slot = self._slots[index]
        if slot.session == request.session and slot.version == version:
            # The last prompt token is always computed anew: its logits choose the first sampled token.
            request.cached = min(_common_prefix(slot.token_ids, request.token_ids), request.prompt_length - 1)
            self.counters.reused_tokens += request.cached
        elif self._sessions.get(slot.session) == index:
            del self._sessions[slot.session]
        self._sessions[request.session] = index
        slot.request, slot.session, slot.version, slot.token_ids = request, request.session, version, ()
        request.slot = index


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))

"""Whose sandboxes a server of sandboxes has, and until when. Pure.

A sandbox is held by a key. While a request on it is under way it stays; after that for the length of a lease, which
every request and every heartbeat begins anew. So a client that is lost frees what it had. And nothing is held longer
than its time to live, whoever asks for it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from etude.errors import SandboxError


@dataclass(frozen=True, slots=True)
class Held:
    """One sandbox's name, which is unique among those of its holder."""

    holder: str
    name: str


@dataclass(slots=True)
class _Terms:
    ends: float
    """When the lease is over, in monotonic seconds."""
    dies: float
    """When its time to live is."""
    requests: int = 0
    """Under way."""


class Holdings:
    """All that is held of one server."""

    def __init__(self, *, lease_s: float, limit: int) -> None:
        """``limit`` is how many each holder may have at a time."""
        self.lease_s = lease_s
        self._limit = limit
        self._terms: dict[Held, _Terms] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many are held."""
        return len(self._terms)

    def __contains__(self, held: Held) -> bool:
        """Whether it is held."""
        return held in self._terms

    def take(self, wanted: Sequence[Held], ttl_s: float, now: float) -> None:
        """Hold new ones, all or none.

        Raises ``ValueError`` for one that is held already, :class:`~etude.errors.SandboxError` beyond the limit of
        their holder.
        """
        known = [held.name for held in wanted if held in self._terms]
        if known:
            raise ValueError(f"sandbox {known[0]} is there already: give new ones names of their own")
        for holder, count in Counter(held.holder for held in wanted).items():
            if self._counts[holder] + count > self._limit:
                raise SandboxError(
                    f"{self._counts[holder]} of {self._limit} sandboxes of this key are open, {count} more do not fit: "
                    "close some, or try again later"
                )
        for held in wanted:
            self._terms[held] = _Terms(ends=now + self.lease_s, dies=now + ttl_s)
            self._counts[held.holder] += 1

    def begin(self, held: Held, now: float) -> bool:
        """A request on it begins; false, and nothing happens, if it is not held."""
        terms = self._terms.get(held)
        if terms is None:
            return False
        terms.requests += 1
        terms.ends = now + self.lease_s
        return True

    def end(self, held: Held, now: float) -> None:
        """A request on it is over; the sandbox may be, too."""
        terms = self._terms.get(held)
        if terms is not None:
            terms.requests -= 1
            terms.ends = now + self.lease_s

    def renew(self, wanted: Iterable[Held], now: float) -> list[Held]:
        """Begin the leases of some anew; returns those that are not held."""
        lost = []
        for held in wanted:
            terms = self._terms.get(held)
            if terms is None:
                lost.append(held)
            else:
                terms.ends = now + self.lease_s
        return lost

    def drop(self, held: Held) -> None:
        """It is closed, or will be; dropping it again does nothing."""
        if self._terms.pop(held, None) is not None:
            self._counts[held.holder] -= 1
            if not self._counts[held.holder]:
                del self._counts[held.holder]

    def due(self, now: float) -> list[Held]:
        """Those whose time is over, or whose lease is while no request is under way."""
        return [
            held
            for held, terms in self._terms.items()
            if terms.dies <= now or (terms.ends <= now and not terms.requests)
        ]

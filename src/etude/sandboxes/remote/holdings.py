"""Whose sandboxes a server of sandboxes has, and until when. Pure.

A sandbox is held by a key. While a request on it is under way it stays; after that for the length of a lease, which
every request and every heartbeat begins anew. So a client that is lost frees what it had. And nothing is held longer
than its time to live, whoever asks for it. What a key's sandboxes may use is bounded, each and all together: by the
limits that they were made with, not by what they use now.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from etude.errors import SandboxError, Unsupported
from etude.sandbox_spec import SandboxLimits

SANDBOXES = 256
"""Sandboxes of one key at a time, unless its operator says otherwise."""
EACH = SandboxLimits(memory_bytes=8 << 30, disk_bytes=8 << 30, processes=4096, cpus=4.0)
"""The most of one sandbox, likewise: what builds and databases take."""
TOTAL = SandboxLimits(
    **{limit.name: SANDBOXES * getattr(SandboxLimits(), limit.name) for limit in fields(SandboxLimits)}
)
"""The most of all sandboxes of a key, likewise: as many as it may have, if they are usual ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The most that the holder of one key may have at a time."""

    sandboxes: int = SANDBOXES
    each: SandboxLimits = EACH
    """The highest limits that one sandbox may be made with."""
    total: SandboxLimits = TOTAL
    """The highest sum of the limits of all."""

    def __post_init__(self) -> None:
        if self.sandboxes < 1:
            raise ValueError(f"sandboxes={self.sandboxes}: expected at least 1")
        for name, most in _amounts(self.each):
            if most > getattr(self.total, name):
                raise ValueError(f"each.{name}={most} is more than total.{name}={getattr(self.total, name)}")

    def check(self, limits: SandboxLimits, holder: str) -> None:
        """Raise :class:`~etude.errors.Unsupported` for limits that no sandbox of ``holder`` may have."""
        for name, amount in _amounts(limits):
            if amount > (most := getattr(self.each, name)):
                raise Unsupported(
                    f"limits.{name}={amount}: a sandbox of key {holder!r} may have {most} on this server; "
                    "ask for less, or let its operator allow more"
                )


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
    limits: SandboxLimits
    requests: int = 0
    """Under way."""


class Holdings:
    """All that is held of one server."""

    def __init__(self, *, lease_s: float, quotas: Mapping[str, Quota]) -> None:
        """``quotas`` by holder."""
        self.lease_s = lease_s
        self._quotas = quotas
        self._terms: dict[Held, _Terms] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many are held."""
        return len(self._terms)

    def __contains__(self, held: Held) -> bool:
        """Whether it is held."""
        return held in self._terms

    def take(self, wanted: Sequence[Held], limits: SandboxLimits, ttl_s: float, now: float) -> None:
        """Hold new ones, all or none.

        Raises ``ValueError`` for one that is held already, :class:`~etude.errors.SandboxError` beyond the quota of
        their holder.
        """
        known = [held.name for held in wanted if held in self._terms]
        if known:
            raise ValueError(f"sandbox {known[0]} is there already: give new ones names of their own")
        for holder, count in Counter(held.holder for held in wanted).items():
            self._check_room(holder, count, limits)
        for held in wanted:
            self._terms[held] = _Terms(ends=now + self.lease_s, dies=now + ttl_s, limits=limits)
            self._counts[held.holder] += 1

    def limits(self, held: Held) -> SandboxLimits:
        """Those that it was made with. ``KeyError`` if it is not held."""
        return self._terms[held].limits

    def _check_room(self, holder: str, count: int, limits: SandboxLimits) -> None:
        """Raise unless ``count`` more sandboxes of a holder fit."""
        quota, fix = self._quotas[holder], "close some, or try again later"
        if self._counts[holder] + count > quota.sandboxes:
            raise SandboxError(
                f"{self._counts[holder]} of {quota.sandboxes} sandboxes of key {holder!r} are open, {count} more do "
                f"not fit: {fix}"
            )
        for name, amount in _amounts(limits):
            used = sum(getattr(terms.limits, name) for held, terms in self._terms.items() if held.holder == holder)
            if used + count * amount > (most := getattr(quota.total, name)):
                raise SandboxError(
                    f"sandboxes of key {holder!r} have {name}={used} of {most}, {count * amount} more do not fit: {fix}"
                )

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


def _amounts(limits: SandboxLimits) -> list[tuple[str, float]]:
    return [(limit.name, getattr(limits, limit.name)) for limit in fields(limits)]

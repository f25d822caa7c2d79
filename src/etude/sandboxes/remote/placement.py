"""The choice of a host for the next sandbox, from the hosts' own reports. Pure.

    hosts, reports, silences, refusals ──▶ HostTable ──▶ choose(image) ──▶ the name of a host, or none

Two goals are balanced. *Capacity*: prefer the host with the most free memory. *Image locality*: a host that ran
sandboxes of an image has its files in memory, and maybe its template. Every image therefore has its own order of all
hosts (the highest random weight of Thaler and Ravishankar, 1998), and takes the first that has at least ``LOCAL_SHARE``
of the freest host's memory. Independent clients use the same order, and a host that joins or leaves moves only its own
images.

A host is excluded while it is silent, drains, is full, has failed several times in a row, or lacks a common capability.
Sandboxes placed since a host's last report are deducted from its capacity, so that a burst between two reports is
spread. A choice reads one array with the capacity of all hosts instead of iterating over them: with 2,000 hosts it
takes some microseconds.

Owns no connection and no clock: ``now`` comes from any monotonic clock. Each host enforces its clients' quotas
(:mod:`etude.sandboxes.remote.principals`).
"""

import hashlib
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from etude.backoff import Backoff
from etude.sandbox_spec import Capability

LOCAL_SHARE = 0.5
"""Share of the freest host's memory above which an image's own host is preferred."""
SANDBOX_BYTES = 64 << 20
"""Expected memory of a sandbox, until a report gives a better value."""
FAILURES = 3
"""Consecutive failures before a host is excluded for a while: its disk may be full, and a host that fails at once has
the most free memory.
"""
REST = Backoff(first_s=1.0, longest_s=60.0)
"""Durations of this exclusion."""
NO_IMAGE_S = 60.0
"""Time after which a host without an image may be tried again: the image may have been added."""
GOLDEN, ONE = np.uint32(0x9E3779B1), np.uint32(1)
"""The golden ratio as a share of 2^32, a prime; the lowest weight."""
IMAGES = 4096
"""Number of images whose weights are cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """A host's report of its capacity."""

    incarnation: str
    """Id of its server process: a new process has none of the earlier sandboxes and snapshots."""
    free_bytes: int
    """Memory available to new sandboxes: 0 while the machine is short of it."""
    places: int
    """Sandboxes that the requesting client may still make."""
    sandboxes: int
    """Open sandboxes of all clients."""
    is_draining: bool
    """True if it accepts no new sandboxes, and stops after its last one."""


@dataclass(slots=True)
class _Host:
    name: str
    report: HostReport | None = None
    """The last report; ``None`` while it is silent."""
    incarnation: str = ""
    fault: str = "no report yet"
    """Reason why there is no report."""
    placed: int = 0
    """Sandboxes placed since the report."""
    is_full: bool = False
    """True if it rejected a sandbox since the report."""
    failures: int = 0
    """Consecutive sandboxes that it failed to make."""
    rests_until: float = 0.0
    lacks: str = ""
    """Common capabilities that it lacks."""

    def obstacle(self, now: float) -> str:
        """Reason why it gets no sandboxes now, of any image; empty if it may."""
        if self.report is None:
            return self.fault
        if self.report.is_draining:
            return "it is being drained"
        if self.lacks:
            return f"it lacks {self.lacks}"
        if self.is_full or self.placed >= self.report.places or self.free_bytes < SANDBOX_BYTES:
            return f"it is full, with {self.report.sandboxes} sandboxes"
        if now < self.rests_until:
            return f"the last {self.failures} sandboxes could not be made"
        return ""

    @property
    def free_bytes(self) -> int:
        """Free memory, minus that of sandboxes placed since the report."""
        return self.report.free_bytes - self.placed * SANDBOX_BYTES if self.report else 0

    def room(self, now: float) -> int:
        """Sandboxes that it could still take, by places and by free memory."""
        if self.report is None or self.obstacle(now):
            return 0
        return min(self.report.places - self.placed, self.free_bytes // SANDBOX_BYTES)


class HostTable:
    """All hosts, with their state. Hosts join and leave (:meth:`follow`); what is recorded of one that has left is
    ignored.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names: tuple[str, ...] = ()
        self._places: dict[str, int] = {}
        self._hosts: dict[str, _Host] = {}
        self._free_bytes = np.zeros(0, np.int64)
        """Memory by place in the order of names; 0 for a host that gets nothing, of whatever image."""
        self._rests: list[tuple[float, str]] = []  # a heap: when a host's rest is over; it may have been prolonged
        self._hashes = host_hashes(self._names)
        self._weights: OrderedDict[str, NDArray[np.uint32]] = OrderedDict()  # by image, the longest unused first
        self._without: dict[str, dict[str, float]] = {}  # image → host without it → until when
        self._agreed: frozenset[Capability] | None = None
        self.follow(names)

    def follow(self, names: Collection[str]) -> None:
        """Replace the set of hosts; those that stay keep their state, and their order for each image."""
        hosts, free_bytes = self._hosts, dict(zip(self._names, self._free_bytes, strict=True))
        self._names = tuple(sorted(set(names)))
        self._places = {name: place for place, name in enumerate(self._names)}
        self._hosts = {name: hosts.get(name) or _Host(name) for name in self._names}
        self._free_bytes = np.array([free_bytes.get(name, 0) for name in self._names], np.int64)
        self._rests = sorted(rest for rest in self._rests if rest[1] in self._hosts)  # a sorted list is a heap
        self._hashes = host_hashes(self._names)
        self._weights.clear()
        for missing in self._without.values():
            for name in missing.keys() - self._hosts.keys():
                del missing[name]

    def is_anew(self, name: str, report: HostReport) -> bool:
        """True if a report comes from a new process: everything made on that host earlier is gone."""
        return self._hosts[name].incarnation not in ("", report.incarnation)

    def record_report(self, name: str, report: HostReport, now: float) -> None:
        """Record a report."""
        host = self._hosts[name]
        if self.is_anew(name, report):
            for missing in self._without.values():
                missing.pop(name, None)
            host.failures, host.rests_until = 0, 0.0
        host.report, host.incarnation, host.fault = report, report.incarnation, ""
        host.placed, host.is_full = 0, False
        self._count(host, now)

    def record_silence(self, name: str, fault: str) -> None:
        """Exclude a host until its next report."""
        host = self._hosts[name]
        host.report, host.fault = None, fault
        self._leave_out(name)

    def refused(self, name: str) -> None:
        """Record that a host is full: exclude it until its next report."""
        if name in self._hosts:
            self._hosts[name].is_full = True
            self._leave_out(name)

    def has_no_image(self, name: str, image: str, now: float) -> None:
        """Record that a host lacks an image: exclude it for that image, for a while."""
        if name in self._hosts:
            self._without.setdefault(image, {})[name] = now + NO_IMAGE_S

    def failed(self, name: str, now: float) -> None:
        """Record a failure to make a sandbox. Of simultaneous failures, as when it falls silent, only the
        first counts.
        """
        host = self._hosts.get(name)
        if host is None or host.report is None or now < host.rests_until:
            return
        host.failures += 1
        if host.failures >= FAILURES:
            host.rests_until = now + REST.delay_s(host.failures - FAILURES + 1)
            heapq.heappush(self._rests, (host.rests_until, name))
            self._leave_out(name)

    def made(self, name: str) -> None:
        """Record that it made a sandbox."""
        if name in self._hosts:
            self._hosts[name].failures = 0

    def agree(self, capabilities: Mapping[str, frozenset[Capability]], now: float) -> frozenset[Capability]:
        """The common capabilities of some hosts; later calls return those of the first: a host that has fewer is
        excluded, since callers rely on them.
        """
        if self._agreed is None:
            self._agreed = frozenset.intersection(*capabilities.values())
        for name, own in capabilities.items():
            self._hosts[name].lacks = ", ".join(sorted(self._agreed - own))
            self._count(self._hosts[name], now)
        return self._agreed

    def is_silent(self, name: str) -> bool:
        """True if a host did not answer the last poll."""
        return self._hosts[name].report is None

    def is_nowhere(self, image: str, now: float) -> bool:
        """True if every host, silent or not, recently reported that it lacks an image."""
        return 0 < len(self._hosts) == len(self._missing(image, now))

    def room(self, now: float) -> int:
        """Sandboxes that all hosts together could still take, by places and by free memory."""
        return sum(host.room(now) for host in self._hosts.values())

    def choose(self, image: str, now: float, *, without: Collection[str] = ()) -> str | None:
        """The host of the next sandbox, which is counted as placed there; none if no host has room.

        ``image`` is a digest, empty for none; hosts in ``without`` were tried already.
        """
        while self._rests and self._rests[0][0] <= now:
            self._count(self._hosts[heapq.heappop(self._rests)[1]], now)
        if not self._names:
            return None
        free_bytes = self._free_bytes
        if excluded := [*without, *self._missing(image, now)]:
            free_bytes = free_bytes.copy()
            free_bytes[[self._places[name] for name in excluded if name in self._places]] = 0
        place = int(free_bytes.argmax())
        if not free_bytes[place]:
            return None
        if image:
            enough_bytes = math.ceil(LOCAL_SHARE * int(free_bytes[place]))
            place = int((self._weights_of(image) * (free_bytes >= enough_bytes)).argmax())
        chosen = self._hosts[self._names[place]]
        chosen.placed += 1
        self._count(chosen, now)
        return chosen.name

    def share(self, image: str, count: int, now: float) -> Mapping[str, int]:
        """The hosts on which ``count`` sandboxes of an image would be placed now, with the number on each; fewer if
        capacity is short. Places nothing.
        """
        shares = Counter(islice(iter(partial(self.choose, image, now), None), count))
        for name, placed in shares.items():
            self._hosts[name].placed -= placed
            self._count(self._hosts[name], now)
        return shares

    def obstacles(self, image: str, now: float) -> Mapping[str, str]:
        """The hosts that get no sandboxes of an image now, with the reasons."""
        obstacles = {name: host.obstacle(now) for name, host in self._hosts.items()}
        obstacles |= {name: obstacles[name] or "it does not have the image" for name in self._missing(image, now)}
        return {name: obstacle for name, obstacle in obstacles.items() if obstacle}

    def explain(self, image: str, now: float) -> str:
        """The same in a line, for people."""
        if not self._hosts:
            return "none is known yet"
        return "; ".join(f"{name}: {obstacle}" for name, obstacle in self.obstacles(image, now).items())

    def _count(self, host: _Host, now: float) -> None:
        """Update the capacity of a host that has changed."""
        self._free_bytes[self._places[host.name]] = 0 if host.obstacle(now) else host.free_bytes

    def _leave_out(self, name: str) -> None:
        self._free_bytes[self._places[name]] = 0

    def _missing(self, image: str, now: float) -> Collection[str]:
        """The hosts that do not have an image."""
        missing = self._without.get(image)
        if missing is None:
            return ()
        for name in [name for name, until_s in missing.items() if until_s <= now]:
            del missing[name]
        if not missing:
            del self._without[image]
        return missing

    def _weights_of(self, image: str) -> NDArray[np.uint32]:
        """The weight of each host for an image; those of a new image are computed once."""
        weights = self._weights.get(image)
        if weights is None:
            weights = self._weights[image] = image_weights(image, self._hashes)
            if len(self._weights) > IMAGES:
                self._weights.popitem(last=False)
        self._weights.move_to_end(image)
        return weights


def host_hashes(names: Sequence[str]) -> NDArray[np.uint32]:
    """A pseudo-random number for each host, always the same."""
    return np.array([_hash(name) for name in names], np.uint32)


def image_weights(image: str, hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The weights of hosts for an image, random and above 0: the host with the highest is the first in its order.

    The mixing is Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): comparisons mostly depend on the
    high bits, into which a product carries all lower ones. Of hosts with the same weight the first by name wins.
    """
    weights = hashes ^ np.uint32(_hash(image))
    weights *= GOLDEN
    weights |= ONE
    return weights


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

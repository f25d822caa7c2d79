"""The choice of a region for a new session, and of the weight version at which rollouts are admitted. Pure.

    reports of regions ──▶ Regions ──admitted_version──▶ admission: the window of docs/control.md
                              │ ──choose─▶ the region of one session, or none yet
    sessions that end ────────┘

A region is a remote site with its own gateways, engines and store. A weight version reaches regions one after another.
If rollouts were admitted when the first region serves it, that region would take all the work; if they were admitted
when the last one does, the slowest would delay all others. So they are admitted at the version that a share of the
capacity serves, and sessions go to the region with the fewest sessions relative to its capacity. A late region keeps
its claim: others may be ``lead`` of their capacity ahead of it, then sessions wait for it, but at most ``max_wait_s``.
A region that cannot take a session loses its claim: full, unavailable or late regions are not compensated afterwards.

The staleness bound depends only on serving at least a group's version; it depends neither on fairness nor on the
correctness of reports (``docs/control.md``).

No clock and no I/O: facts and ``now`` in seconds are arguments. Polling of regions and sessions themselves are
elsewhere.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLimits:
    """Conditions under which a region counts, and the lead of others. Raises ``ValueError`` for impossible values."""

    quorum: float = 0.5
    """Share of the reachable capacity that must serve a version before rollouts are admitted at it."""
    lead: float = 0.25
    """Lead of a region over a late one, in sessions as a share of its capacity."""
    max_wait_s: float = 20.0
    """Longest wait for a region behind the admitted version; then it is excluded until it follows."""
    away_s: float = 3.0
    """Time without a report after which a region is unavailable and excluded until its next report."""

    def __post_init__(self) -> None:
        if not (0 < self.quorum <= 1 and self.lead >= 0 and self.max_wait_s >= 0 and self.away_s > 0):
            raise ValueError(f"{self}: quorum is in (0, 1], lead and max_wait_s are not negative, away_s is positive")


USUAL_LIMITS = RegionLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionReport:
    """A region's report about itself."""

    version: int
    """The oldest weight version that a reachable engine serves; it samples with no older one."""
    capacity: int
    """Its capacity in concurrent sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionView:
    """A snapshot of one region, for display."""

    name: str
    version: int
    capacity: int
    open: int
    """Number of open sessions."""
    given: int
    """Number of sessions assigned so far."""
    is_away: bool


@dataclass(slots=True, kw_only=True, eq=False)
class _RegionRecord:
    """The table's mutable record of one region."""

    name: str
    report: RegionReport = RegionReport(version=-1, capacity=0)
    heard_s: float = -math.inf
    """Time of its last report."""
    late_since_s: float | None = None
    """Time since which it has been behind the admitted version or unreachable."""
    open: int = 0
    given: int = 0
    account: float = 0.0
    """Sessions assigned to it, or lost without a claim, divided by its capacity."""

    @property
    def has_place(self) -> bool:
        """True if it has capacity for another session."""
        return self.open < self.report.capacity

    @property
    def fill(self) -> float:
        """Open sessions as a share of its capacity, which must not be 0."""
        return self.open / self.report.capacity


class Regions:
    """The regions of a run, and the sessions of one process in them.

    ``names`` lists all possible regions; each is unavailable until its first report.
    """

    def __init__(self, names: Iterable[str], limits: RegionLimits = USUAL_LIMITS) -> None:
        self._limits = limits
        self._regions = {name: _RegionRecord(name=name) for name in names}
        if not self._regions:
            raise ValueError("a run has at least one region")
        self._admitted_version = -1

    @property
    def admitted_version(self) -> int:
        """The newest weight version that enough capacity serves, at which rollouts may be admitted; −1 before any.

        It never decreases: if the capacity that serves it is lost, sessions wait.
        """
        return self._admitted_version

    def report(self, name: str, report: RegionReport, now: float) -> None:
        """Process a region's report."""
        region = self._regions[name]
        if self._is_away(region, now):
            region.late_since_s = None  # the region gets the full waiting time again, from now on
        region.report, region.heard_s = report, now
        self._admitted_version = max(self._admitted_version, self._served_by_quorum(now))
        for each in self._present(now):
            if each.report.version >= self._admitted_version:
                each.late_since_s = None
            elif each.late_since_s is None:
                each.late_since_s = now

    def lose(self, name: str) -> None:
        """Record that a region could not be reached: it is unavailable until its next report."""
        self._regions[name].heard_s = -math.inf

    def choose(self, version: int, now: float) -> str | None:
        """Choose the region of a new session whose tokens may not be older than ``version``, and assign the session to
        it.

        ``None`` if no region is eligible: call again after a report, the end of a session, or some time.
        """
        able = [each for each in self._present(now) if each.has_place and each.report.version >= version]
        if not able:
            return None
        chosen = min(able, key=lambda each: (each.account, each.fill, each.name))
        awaited = [each for each in self._present(now) if self._is_awaited(each, version, now)]
        least = min((each.account for each in awaited), default=math.inf)
        if chosen.account >= least + self._limits.lead:
            return None
        for each in self._regions.values():
            if each not in able and each not in awaited:
                each.account = max(each.account, chosen.account)
        _give(chosen)
        return chosen.name

    def add(self, name: str) -> None:
        """Record a session that must open in a given region, such as one that continues another one's sandbox."""
        _give(self._regions[name])

    def ended(self, name: str) -> None:
        """Record the end of a session in a region, for any reason."""
        self._regions[name].open -= 1
        assert self._regions[name].open >= 0, f"more sessions ended in region {name!r} than it was given"

    def free_places(self, now: float) -> int:
        """Number of additional sessions that the reachable regions have capacity for."""
        return sum(max(0, each.report.capacity - each.open) for each in self._present(now))

    def views(self, now: float) -> tuple[RegionView, ...]:
        """The state of each region, in the order of their names in the recipe."""
        return tuple(
            RegionView(
                name=each.name,
                version=each.report.version,
                capacity=each.report.capacity,
                open=each.open,
                given=each.given,
                is_away=self._is_away(each, now),
            )
            for each in self._regions.values()
        )

    def _present(self, now: float) -> list[_RegionRecord]:
        return [each for each in self._regions.values() if not self._is_away(each, now)]

    def _is_away(self, region: _RegionRecord, now: float) -> bool:
        return now - region.heard_s > self._limits.away_s

    def _is_awaited(self, region: _RegionRecord, version: int, now: float) -> bool:
        """True for a region that could take a session if it served ``version``, and that will serve it soon."""
        if not region.has_place or region.report.version >= version:
            return False
        return region.late_since_s is None or now - region.late_since_s < self._limits.max_wait_s

    def _served_by_quorum(self, now: float) -> int:
        """The newest version that a quorum of the reachable capacity serves (or a newer one); −1 if there is none."""
        newest_first = sorted(self._present(now), key=lambda each: -each.report.version)
        needed, capacity = self._limits.quorum * sum(each.report.capacity for each in newest_first), 0
        for region in newest_first:
            capacity += region.report.capacity
            if capacity and capacity >= needed:
                return region.report.version
        return -1


def _give(region: _RegionRecord) -> None:
    region.open += 1
    region.given += 1
    region.account += 1 / max(1, region.report.capacity)

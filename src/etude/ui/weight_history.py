"""Weight versions over time, folded from a run's events: what each was, and when each engine served it.

    StepDone ─▶ WeightsPublished ─▶ WeightsSwapped, by every engine
       └──────────── lag ───────────────┘     from the end of a step to the last engine of a region

Owns this fold. An engine counts for a version from the first one on that it was seen to serve; one that goes over some
versions has served these when it serves a later one.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import RLock

from etude.run.process_name import ProcessName
from etude.telemetry.events import (
    EngineStats,
    Logged,
    ProcessStarted,
    RegionServed,
    StepDone,
    WeightsPublished,
    WeightsSwapped,
)

RECENT = 50
"""Swaps of an engine that means are of."""


@dataclass(slots=True, kw_only=True)
class EngineHistory:
    """What one engine served, and its load."""

    name: str
    region: str
    version: int = -1
    since_s: float = 0.0
    """Unix time of its last swap."""
    first: int = -1
    """The first version that it was seen to serve."""
    lags_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    stages_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    pauses_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    load: EngineStats | None = None
    seen_s: float = 0.0
    """Unix time of its newest event."""


class WeightHistory:
    """The versions of one run, up to the last event added. May be read by one thread while another one adds."""

    def __init__(self) -> None:
        self.lock = RLock()
        """Held by :meth:`add`, and by who reads."""
        self.published: dict[int, tuple[float, WeightsPublished]] = {}
        """Version → time of its event, and that."""
        self.engines: dict[str, EngineHistory] = {}
        self.lags_s: dict[str, dict[int, float]] = {}
        """Region → version → lag of its last engine."""
        self.regions: dict[str, tuple[float, RegionServed]] = {}
        """Region → the newest that rollouts saw of it."""
        self.started: dict[str, tuple[float, ProcessStarted]] = {}
        """Process → its newest start."""
        self._step_ends: dict[int, float] = {}

    def add(self, logged: Logged) -> None:
        """Fold in one event."""
        with self.lock:
            match logged.event:
                case StepDone(step=step):
                    self._step_ends[step] = logged.at_s
                case WeightsPublished() as published:
                    self.published[published.version] = logged.at_s, published
                case WeightsSwapped() as swapped:
                    self._swap(logged.at_s, self._engine(logged), swapped)
                case EngineStats() as stats:
                    self._engine(logged).load = stats
                case RegionServed() as served:
                    self.regions[served.region] = logged.at_s, served
                case ProcessStarted() as started:
                    self.started[started.process] = logged.at_s, started
                case _:
                    pass

    @property
    def newest(self) -> int | None:
        """The newest version that is known to be published."""
        return max(self.published, default=None)

    def has_changed(self, version: int) -> bool | None:
        """True if the weights of a version differ from those of the one before; ``None`` where that is not known."""
        digests = [self.published[one][1].digest for one in (version - 1, version) if one in self.published]
        return digests[0] != digests[1] if len(digests) == 2 and all(digests) else None

    def lags_of(self, version: int) -> Mapping[str, float]:
        """Region → seconds from the end of the step to its last engine."""
        return {region: lags[version] for region, lags in self.lags_s.items() if version in lags}

    def _engine(self, logged: Logged) -> EngineHistory:
        name = logged.process
        if name not in self.engines:
            self.engines[name] = EngineHistory(name=name, region=ProcessName.parse(name).region)
        self.engines[name].seen_s = logged.at_s
        return self.engines[name]

    def _swap(self, at_s: float, engine: EngineHistory, swapped: WeightsSwapped) -> None:
        engine.stages_ms.append(swapped.stage_ms)
        engine.pauses_ms.append(swapped.pause_ms)
        if engine.first >= 0:
            lags = self.lags_s.setdefault(engine.region, {})
            for version in range(engine.version + 1, swapped.version + 1):
                if version in self._step_ends:
                    lag_s = at_s - self._step_ends[version]
                    lags[version] = max(lag_s, lags.get(version, lag_s))
            if swapped.version in self._step_ends:
                engine.lags_s.append(at_s - self._step_ends[swapped.version])
        engine.first = swapped.version if engine.first < 0 else engine.first
        engine.version, engine.since_s = swapped.version, at_s

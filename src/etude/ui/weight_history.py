"""Weight versions over time, folded from a run's events: their facts, and the times at which engines served them.

    StepDone ─▶ WeightsPublished ─▶ WeightsSwapped, by every engine
       └──────────── lag ───────────────┘     from the end of a step to the last engine of a region

Owns this fold. An engine counts for a version only after the first version that it was seen to serve; versions that it
skips count as served when it serves a later one.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from etude.run.process_name import ProcessName
from etude.ui.event_lines import Fields

RECENT = 50
"""Number of an engine's newest swaps over which means are taken."""


@dataclass(slots=True, kw_only=True)
class EngineHistory:
    """Versions that one engine served, and its load."""

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
    load: Fields | None = None
    """The newest report of its load."""
    seen_s: float = 0.0
    """Unix time of its newest event."""


class WeightHistory:
    """The versions of one run, up to the last settled event.

    Events of several processes arrive in any order; :meth:`settle` folds in the new ones in order of time.
    """

    KINDS: ClassVar[frozenset[str]] = frozenset(
        {"StepDone", "WeightsPublished", "WeightsSwapped", "EngineStats", "RegionServed", "ProcessStarted"}
    )

    def __init__(self) -> None:
        self.published: dict[int, Fields] = {}
        """Version → its event."""
        self.engines: dict[str, EngineHistory] = {}
        self.lags_s: dict[str, dict[int, float]] = {}
        """Region → version → lag of its last engine."""
        self.regions: dict[str, Fields] = {}
        """Region → the newest report about it by rollouts."""
        self.started: dict[str, Fields] = {}
        """Process → its newest start."""
        self._step_ends: dict[int, float] = {}
        self._pending: list[tuple[float, str, Fields]] = []

    def add(self, kind: str, fields: Fields) -> None:
        """Add one event to be folded in."""
        self._pending.append((fields["at_s"], kind, fields))

    def settle(self) -> None:
        """Fold in the added events, in order of time."""
        pending, self._pending = sorted(self._pending, key=lambda event: event[0]), []
        for at_s, kind, fields in pending:
            match kind:
                case "StepDone":
                    self._step_ends[fields["step"]] = at_s
                case "WeightsPublished":
                    self.published[fields["version"]] = fields
                case "WeightsSwapped":
                    self._swap(at_s, self._engine(fields), fields)
                case "EngineStats":
                    self._engine(fields).load = fields
                case "RegionServed":
                    self.regions[fields["region"]] = fields
                case "ProcessStarted":
                    self.started[fields["process"]] = fields
                case _:
                    pass

    @property
    def newest(self) -> int | None:
        """The newest published version, according to events."""
        return max(self.published, default=None)

    def has_changed(self, version: int) -> bool | None:
        """True if the weights of a version differ from the previous one's; ``None`` if unknown."""
        digests = [self.published[one].get("digest") for one in (version - 1, version) if one in self.published]
        return digests[0] != digests[1] if len(digests) == 2 and all(digests) else None

    def lags_of(self, version: int) -> Mapping[str, float]:
        """Region → seconds from the end of the step to its last engine."""
        return {region: lags[version] for region, lags in self.lags_s.items() if version in lags}

    def _engine(self, fields: Fields) -> EngineHistory:
        name = fields["writer"]
        if name not in self.engines:
            self.engines[name] = EngineHistory(name=name, region=ProcessName.parse(name).region)
        self.engines[name].seen_s = fields["at_s"]
        return self.engines[name]

    def _swap(self, at_s: float, engine: EngineHistory, fields: Fields) -> None:
        served = fields["version"]
        engine.stages_ms.append(fields["stage_ms"])
        engine.pauses_ms.append(fields["pause_ms"])
        if engine.first >= 0:
            lags = self.lags_s.setdefault(engine.region, {})
            for version in range(engine.version + 1, served + 1):
                if version in self._step_ends:
                    lag_s = at_s - self._step_ends[version]
                    lags[version] = max(lag_s, lags.get(version, lag_s))
            if served in self._step_ends:
                engine.lags_s.append(at_s - self._step_ends[served])
        engine.first = served if engine.first < 0 else engine.first
        engine.version, engine.since_s = served, at_s

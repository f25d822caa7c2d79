"""Facts and metrics of a run, folded from its events.

Owns the facts that a report contains: phases, durations, results, staleness. Neither reads files
(:class:`~etude.telemetry.log.EventReader`) nor draws (:mod:`~etude.dashboard.terminal`, :mod:`~etude.dashboard.page`).

    events ──▶ RunMetrics.add ──▶ timelines, tallies ──▶ build_report, render

Processes write separate files, so events may arrive slightly out of order; every timeline is sorted by the time of the
event, and durations are measured between events, not between their arrivals.
"""

import math
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from etude.telemetry.events import (
    AlertChanged,
    EngineStats,
    EvalDone,
    EvalFailed,
    GatewayStats,
    GroupAdmitted,
    HeldoutLoss,
    ImitationProgress,
    JudgeAlarm,
    Logged,
    MemoryUsed,
    MismatchMeasured,
    MismatchWarned,
    ModelCall,
    Outage,
    PhaseEnded,
    PhaseStarted,
    ProcessStarted,
    RegionServed,
    RolloutClosed,
    RolloutsStats,
    RunStarted,
    SinkFailed,
    StepDone,
    WeightsPublished,
    WeightsSwapped,
)
from etude.telemetry.hacks import HackRates, Judged
from etude.types import RolloutStatus

PHASES = ("midtrain", "sft", "eval-before", "rl", "eval-after")
"""The phases that take time, in order; a run may lack some. ``done`` follows."""

TRAIN = "train"
"""Purpose of the simulated rollouts that are trained on; evaluations have ``before-sampled``, …"""
LIVE = "live"
"""Purpose of users' sessions."""

RECENT_ROLLOUTS = 50
"""Number of rollouts over which stage times are averaged."""
ALIKE = 3
"""Number of consecutive failures after which they are checked for a common cause."""

E = TypeVar("E")
Numbered = TypeVar("Numbered", ImitationProgress, StepDone)
Span: TypeAlias = tuple[float, float]
"""Start and end in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Timed(Generic[E]):
    """An event and its time, in Unix seconds."""

    at_s: float
    event: E


@dataclass(slots=True)
class Tally:
    """Counts of rollouts by status and reason, for one purpose."""

    statuses: Counter[str] = field(default_factory=Counter)
    """Status → number of rollouts."""
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Status and reason → number of rollouts."""
    sampled_tokens: int = 0

    def add(self, closed: RolloutClosed) -> None:
        """Count one rollout."""
        self.statuses[closed.status] += 1
        self.reasons[closed.status, closed.reason] += 1
        self.sampled_tokens += closed.sampled_tokens

    @property
    def closed(self) -> int:
        """Number of rollouts of any status."""
        return self.statuses.total()


@dataclass(slots=True)
class TimelineSegment:
    """A period in which the run was alive, from its first event to its last."""

    start_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class RegionUse:
    """Use of one region by all rollouts processes together."""

    version: int = -1
    """The newest version that was served there."""
    sessions: int = 0
    payload_bytes: int = 0
    """Size of the routes and sampling masks of its sessions, which are in its store."""

    def add(self, served: RegionServed) -> None:
        """Count the use since the last event."""
        self.version = max(self.version, served.version)
        self.sessions += served.sessions
        self.payload_bytes += served.payload_bytes


class RunMetrics:
    """The facts of one run, up to the last event added."""

    def __init__(self) -> None:
        self.segments: list[TimelineSegment] = []
        self.imitation: dict[str, list[Timed[ImitationProgress]]] = {}
        """Phase → its progress."""
        self.heldout: dict[tuple[str, int], HeldoutLoss] = {}
        """Phase and step → the loss on held-out data."""
        self.lineage: dict[str, PhaseEnded] = {}
        """Phase → the event at its end."""
        self.steps: list[Timed[StepDone]] = []
        self.mismatch: dict[tuple[int, str, int], MismatchMeasured] = {}
        """(step, breakdown, first) → the newest row of the mismatch's breakdown."""
        self.warnings: list[Timed[MismatchWarned]] = []
        self.judge_alarms: list[JudgeAlarm] = []
        self.published: list[Timed[WeightsPublished]] = []
        self.swapped: list[Timed[WeightsSwapped]] = []
        self.engine: list[Timed[EngineStats]] = []
        """Reports of all engines."""
        self.engines: dict[str, EngineStats] = {}
        """The newest report of each engine, by the name of its process."""
        self.gateways: dict[str, list[Timed[GatewayStats]]] = {}
        """Reports of each gateway, by the name of its process."""
        self.places: dict[str, list[Timed[RolloutsStats]]] = {}
        """Reports of each rollouts process, by its name."""
        self.swapped_to: dict[str, int] = {}
        """The weight version of each engine that has swapped."""
        self.rollouts: dict[str, Tally] = {}
        self.failures: deque[str] = deque(maxlen=ALIKE)
        """Reasons of the newest failed rollouts since the last graded one."""
        self.hacks: dict[str, HackRates] = {}
        """Purpose → tally; see :data:`TRAIN`."""
        self.evals: dict[str, EvalDone] = {}
        """``before``, ``after`` or ``step-N`` → the newest result."""
        self.regions: dict[str, RegionUse] = {}
        """Region → its use, in a run with several regions."""
        self.outages: dict[tuple[str, str], Timed[Outage]] = {}
        """(process, unavailable resource) → start and reason of the outage."""
        self.processes: dict[str, ProcessStarted] = {}
        """Process → its newest start."""
        self.restarts = 0
        """Number of processes that died and were restarted, over the whole run."""
        self.memory_bytes_max: int | None = None
        """Maximum memory of all processes of the run together."""
        self.memory_bytes: int | None = None
        """Their current memory."""
        self.last_rollout: Timed[RolloutClosed] | None = None
        """The newest graded rollout, of any purpose."""
        self.last_failure: Timed[str] | None = None
        """The newest reason of a failed rollout, evaluation during RL, or sink."""
        self.errors = 0
        """Number of rollouts that infrastructure failed, of failed evaluations during RL, and of sink failures."""
        self.stages: deque[Mapping[str, float]] = deque(maxlen=RECENT_ROLLOUTS)
        """Seconds by stage of the newest graded rollouts."""
        self.alerts: dict[str, Timed[AlertChanged]] = {}
        """Rule → its newest change; the newest one last."""
        self._phases: list[Timed[str]] = []

    def add(self, logged: Logged) -> None:
        """Add one event."""
        at_s, event = logged.at_s, logged.event
        self._live(at_s, resumed=isinstance(event, RunStarted) and event.resumed)
        match event:
            case RunStarted():
                pass
            case Outage():
                self.outages.pop((logged.process, event.what), None)
                if event.seconds:
                    self.outages[logged.process, event.what] = Timed(at_s - event.seconds, event)
            case RegionServed():
                self.regions.setdefault(event.region, RegionUse()).add(event)
            case PhaseStarted():
                _insert(self._phases, Timed(at_s, event.phase))
            case ProcessStarted():
                self.processes[event.process] = event
                self.outages = {key: outage for key, outage in self.outages.items() if key[0] != event.process}
                self.restarts += event.restarts > 0
            case MemoryUsed():
                self.memory_bytes = event.size_bytes
                self.memory_bytes_max = max(self.memory_bytes_max or 0, event.size_bytes)
            case ImitationProgress():
                _supersede(self.imitation.setdefault(event.phase, []), Timed(at_s, event))
            case HeldoutLoss():
                self.heldout[event.phase, event.step] = event
            case PhaseEnded():
                self.lineage[event.phase] = event
            case StepDone():
                _supersede(self.steps, Timed(at_s, event))
                if "after" in self.evals and event.step > self.evals["after"].version:
                    del self.evals["after"]  # the run continues beyond its former end
            case MismatchMeasured():
                self.mismatch[event.step, event.by, event.first] = event
            case MismatchWarned():
                _insert(self.warnings, Timed(at_s, event))
            case JudgeAlarm():
                self.judge_alarms.append(event)
            case WeightsPublished():
                _insert(self.published, Timed(at_s, event))
            case WeightsSwapped():
                _insert(self.swapped, Timed(at_s, event))
                self.swapped_to[logged.process] = event.version
            case EngineStats():
                _insert(self.engine, Timed(at_s, event))
                self.engines[logged.process] = event
            case GatewayStats():
                _insert(self.gateways.setdefault(logged.process, []), Timed(at_s, event))
            case RolloutsStats():
                _insert(self.places.setdefault(logged.process, []), Timed(at_s, event))
            case RolloutClosed():
                self.rollouts.setdefault(event.purpose, Tally()).add(event)
                if event.status == RolloutStatus.FAILED_INFRA:
                    self.failures.append(event.reason)
                    self._fail(at_s, event.reason)
                if event.status == RolloutStatus.GRADED:
                    self.failures.clear()
                    self.last_rollout = Timed(at_s, event)
                    self.stages.append(event.stage_s)
                    self.hacks.setdefault(event.purpose, HackRates()).add(_judged(event))
            case EvalDone():
                self.evals[event.label] = event
            case AlertChanged():
                self.alerts.pop(event.alert, None)
                self.alerts[event.alert] = Timed(at_s, event)
            case EvalFailed():
                self._fail(at_s, f"evaluation {event.label}: {event.reason}")
            case SinkFailed():
                self._fail(at_s, f"{event.sink}: {event.reason}")
            case GroupAdmitted() | ModelCall():
                pass

    @property
    def changed(self) -> dict[int, bool]:
        """Version from 1 → whether its weights differ from the previous version's, for versions with known digests."""
        digests = {timed.event.version: timed.event.digest for timed in self.published if timed.event.digest}
        return {
            version: digest != digests[version - 1]
            for version, digest in sorted(digests.items())
            if version - 1 in digests
        }

    @property
    def phase(self) -> str | None:
        """The current phase; ``None`` before the first."""
        return self._phases[-1].event if self._phases else None

    def entered(self, phase: str) -> bool:
        """True if the run ever was in ``phase``."""
        return any(mark.event == phase for mark in self._phases)

    def in_phase(self, at_s: float, phase: str) -> bool:
        """True if the run was in ``phase`` at ``at_s``."""
        index = bisect_right(self._phases, at_s, key=lambda mark: mark.at_s) - 1
        return index >= 0 and self._phases[index].event == phase

    def total_s(self, until_s: float | None = None) -> float:
        """Seconds that the run was active and not yet done; time while it was stopped does not count.

        ``until_s`` measures up to that time instead of the last event, as if the newest segment still continued.
        """
        finished = self._phase_s("done", until_s) if self.entered("done") else 0.0
        return _overlap_s([(-math.inf, math.inf)], self._alive(until_s)) - finished

    def phase_s(self, phase: str, until_s: float | None = None) -> float | None:
        """Active seconds in ``phase``, over all segments; ``None`` if it never began.

        ``until_s`` is as in :meth:`total_s`.
        """
        return self._phase_s(phase, until_s) if self.entered(phase) else None

    def engine_in(self, phase: str) -> list[EngineStats]:
        """Reports of engines during ``phase``."""
        return [stats.event for stats in self.engine if self.in_phase(stats.at_s, phase)]

    def _phase_s(self, phase: str, until_s: float | None) -> float:
        ends = [mark.at_s for mark in self._phases[1:]] + [math.inf]
        spans = [(mark.at_s, end) for mark, end in zip(self._phases, ends, strict=True) if mark.event == phase]
        return _overlap_s(spans, self._alive(until_s))

    def _alive(self, until_s: float | None) -> Iterator[Span]:
        for segment in self.segments[:-1]:
            yield segment.start_s, segment.end_s if until_s is None else min(segment.end_s, until_s)
        for segment in self.segments[-1:]:
            yield segment.start_s, segment.end_s if until_s is None else until_s

    def _fail(self, at_s: float, reason: str) -> None:
        self.errors += 1
        self.last_failure = Timed(at_s, reason)

    def _live(self, at_s: float, *, resumed: bool) -> None:
        """Extend the segment that contains ``at_s``; a resumption begins a new one."""
        if resumed or not self.segments:
            insort(self.segments, TimelineSegment(at_s, at_s), key=lambda segment: segment.start_s)
        index = max(0, bisect_right(self.segments, at_s, key=lambda segment: segment.start_s) - 1)
        segment = self.segments[index]
        segment.start_s = min(segment.start_s, at_s)
        segment.end_s = max(segment.end_s, at_s)


def total(steps: Iterable[StepDone], metric: str) -> float:
    """A metric summed over steps; steps without it add nothing."""
    return sum(step.metrics.get(metric, 0) for step in steps)


def _insert(timeline: list[Timed[E]], timed: Timed[E]) -> None:
    insort(timeline, timed, key=lambda earlier: earlier.at_s)


def _supersede(timeline: list[Timed[Numbered]], timed: Timed[Numbered]) -> None:
    """Append a step; a step that is repeated after a resumption replaces itself and all later ones."""
    while timeline and timeline[-1].event.step >= timed.event.step:
        timeline.pop()
    timeline.append(timed)


def _overlap_s(spans: list[Span], alive: Iterator[Span]) -> float:
    return sum(
        max(0.0, min(end, alive_end) - max(start, alive_start))
        for alive_start, alive_end in alive
        for start, end in spans
    )


def _judged(event: RolloutClosed) -> Judged:
    return Judged(
        template=event.template,
        step=event.version,
        hacked=event.hacked,
        flags=tuple(event.flags),
        disposition=event.disposition,
        reason=event.cheat_reason,
        impossible=event.impossible,
        passed=event.passed,
    )

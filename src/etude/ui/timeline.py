"""Who did what when, folded from a run's events: lanes of processes, with the states that each is in.

    StepDone, StepSaved ─▶ trainer     computing · waiting for the batch · waiting for the version before · saving …
    EngineStats ─────────▶ each engine busy, of what it reported; swaps are marks
    GatewayStats ────────▶ each gateway calls at an engine, calls that wait for one
    RolloutClosed ───────▶ rollouts    how many are in which stage; evaluations how many are tried
    WeightsPublished ────▶ publishing  beside the next step

Only what an event tells is in a lane: rollouts that have not ended are not there yet, an engine that reports nothing
has no lane. Owns this fold. What a window of it looks like is :mod:`etude.ui.timeline_view`'s, what it means
:mod:`etude.ui.waits`'.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from etude.dashboard.run_metrics import LIVE, TRAIN
from etude.run.process_name import PRODUCTION, ProcessName
from etude.telemetry.events import (
    EngineStats,
    EvalDone,
    GatewayStats,
    Logged,
    Outage,
    PhaseStarted,
    ProcessStarted,
    RegionServed,
    RolloutClosed,
    RunStarted,
    StepDone,
    StepSaved,
    WeightsPublished,
    WeightsSwapped,
)
from etude.types import RolloutStage
from etude.ui.spans import Spans

TRAINER, PUBLISHING, ENGINES, GATEWAYS, ROLLOUTS, EVALUATIONS, AWAY = (
    "trainer",
    "publishing",
    "engines",
    "gateways",
    "rollouts",
    "evaluations",
    "away",
)
"""Groups of lanes, in the order in which work goes round."""
COMPUTING, WAITING, LANDING, SAVING, HANDING = "computing", "waiting", "landing", "saving", "handing over"
"""States of the trainer: with a batch; for one; for the version before; writing a checkpoint; starting to publish."""
BUSY, IDLE = "busy", "idle"
AT_ENGINE, QUEUED = "at an engine", "queued"
UNTOLD = "not told"
"""Stage of rollouts that an older étude recorded."""
STATES: Mapping[str, tuple[str, ...]] = {
    TRAINER: (COMPUTING, LANDING, SAVING, HANDING, WAITING),
    PUBLISHING: ("publishing",),
    ENGINES: (BUSY, IDLE),
    GATEWAYS: (AT_ENGINE, QUEUED),
    ROLLOUTS: (*map(str, RolloutStage), UNTOLD),
    EVALUATIONS: ("tried",),
    AWAY: ("away",),
}
"""Group → the states that its lanes have, as they are stacked."""


@dataclass(slots=True)
class Lane:
    """One process, or all of a kind, over time."""

    group: str
    name: str
    """Of its process; of rollouts that of all."""
    region: str = ""
    """Empty: home."""
    states: dict[str, Spans] = field(default_factory=dict)

    @property
    def serves_users(self) -> bool:
        """True for an engine that samples nothing for the trainer."""
        return self.name.startswith(PRODUCTION.command)

    def add(self, state: str, start_s: float, end_s: float, rate: float = 1.0) -> None:
        """Add a span of a state."""
        self.states.setdefault(state, Spans()).add(start_s, end_s, rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at one time, or in a short one."""

    at_s: float
    kind: str
    """``step``, ``published``, ``swapped``, ``evaluated``, ``restarted`` or ``outage``."""
    text: str
    lane: str = ""
    """Name of the lane that it is of; empty for all."""
    number: int = 0
    """Step or version."""
    facts: Mapping[str, float] = field(default_factory=dict)


class Timeline:
    """The lanes of one run, up to the last event added. May be read by one thread while another one adds."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held by :meth:`add`, and by who reads."""
        self.origin_s = 0.0
        """Unix time of the first event: all other times count from there."""
        self.end_s = 0.0
        self.lanes: dict[tuple[str, str], Lane] = {}
        """Group and name → lane."""
        self.phases: list[tuple[float, str]] = []
        self.gaps: list[tuple[float, float]] = []
        """Times in which the run was stopped."""
        self.marks: list[Mark] = []
        """In the order of their events, which is nearly that of time."""
        self._step_ends: dict[int, float] = {}
        self._handed: dict[int, float] = {}
        self._away: dict[str, float] = {}

    def add(self, logged: Logged) -> None:
        """Fold in one event."""
        with self.lock:
            if not self.origin_s:
                self.origin_s = logged.at_s
            at_s = logged.at_s - self.origin_s
            if isinstance(logged.event, RunStarted) and logged.event.resumed:
                self.gaps.append((self.end_s, at_s))
            self.end_s = max(self.end_s, at_s)
            self._fold(at_s, logged)

    def _fold(self, at_s: float, logged: Logged) -> None:
        match logged.event:
            case PhaseStarted(phase=phase):
                self.phases.append((at_s, phase))
            case StepDone() as done:
                self._add_step(at_s, logged.process, done)
            case StepSaved() as saved:
                self._add_saved(at_s, logged.process, saved)
            case WeightsPublished() as published:
                self._add_published(at_s, published)
            case EngineStats() as stats:
                self._add_load(at_s, logged.process, stats)
            case WeightsSwapped() as swapped:
                self._add_swap(at_s, logged.process, swapped)
            case GatewayStats() as stats:
                lane = self._lane(GATEWAYS, logged.process)
                lane.add(AT_ENGINE, at_s - stats.window_s, at_s, (stats.call_s - stats.waited_s) / stats.window_s)
                lane.add(QUEUED, at_s - stats.window_s, at_s, stats.waited_s / stats.window_s)
            case RolloutClosed() as closed:
                self._add_rollout(at_s, closed)
            case EvalDone() as done:
                text = f"evaluated {done.label}: {100 * done.sampled_pass:.1f}% passed"
                self.marks.append(Mark(at_s=at_s, kind="evaluated", text=text, lane=EVALUATIONS, number=done.version))
            case ProcessStarted(restarts=restarts) as started if restarts:
                self.marks.append(Mark(at_s=at_s, kind="restarted", text=f"{started.process} was started again"))
            case Outage(seconds=seconds) as outage if seconds:
                text = f"{logged.process} waits for {outage.what}: {outage.reason}"
                self.marks.append(Mark(at_s=at_s - seconds, kind="outage", text=text))
            case RegionServed() as served:
                self._add_region(at_s, served)
            case _:
                pass

    def lanes_of(self, group: str) -> list[Lane]:
        """The lanes of a group: home first, then by region and number."""
        return sorted((lane for lane in self.lanes.values() if lane.group == group), key=_place)

    def window_of(self, phase: str) -> tuple[float, float] | None:
        """From the first to the last moment of a phase; ``None`` where it never began."""
        begun = [at_s for at_s, name in self.phases if name == phase]
        if not begun:
            return None
        later = [at_s for at_s, name in self.phases if at_s > begun[-1] and name != phase]
        return begun[0], later[0] if later else self.end_s

    def step_end_s(self, step: int) -> float | None:
        """The time at which a step was computed, the last time that it was; ``None`` where no event says so."""
        return self._step_ends.get(step)

    def _lane(self, group: str, name: str) -> Lane:
        key = group, name
        if key not in self.lanes:
            self.lanes[key] = Lane(group, name, _region(name))
        return self.lanes[key]

    def _add_step(self, at_s: float, process: str, done: StepDone) -> None:
        lane, busy_s, wait_s = self._lane(TRAINER, process), done.metrics["busy_s"], done.metrics.get("wait_s", 0.0)
        lane.add(COMPUTING, at_s - busy_s, at_s)
        lane.add(WAITING, at_s - busy_s - wait_s, at_s - busy_s)
        self._step_ends[done.step] = at_s
        facts = {"busy_s": busy_s, "wait_s": wait_s}
        text = f"step {done.step}: computed {busy_s:.2f} s after waiting {wait_s:.2f} s"
        self.marks.append(Mark(at_s=at_s, kind="step", text=text, lane=process, number=done.step, facts=facts))

    def _add_saved(self, at_s: float, process: str, saved: StepSaved) -> None:
        lane, end_s = self._lane(TRAINER, process), at_s
        parts = (HANDING, saved.publish_s), (SAVING, saved.save_s), (LANDING, saved.landed_s)
        for state, seconds in parts:
            lane.add(state, end_s - seconds, end_s)
            end_s -= seconds
        self._handed[saved.step] = at_s

    def _add_published(self, at_s: float, published: WeightsPublished) -> None:
        """A version is logged when the trainer comes by; it began when the step handed it over."""
        start_s = self._handed.get(published.version, at_s - published.seconds)
        self._lane(PUBLISHING, PUBLISHING).add("publishing", start_s, start_s + published.seconds)
        text = f"version {published.version} published: {published.kind}, {published.size_bytes / 1e6:.2f} MB"
        facts = {"seconds": published.seconds, "size_bytes": float(published.size_bytes)}
        self.marks.append(Mark(
            at_s=start_s + published.seconds, kind="published", text=text, lane=PUBLISHING, number=published.version,
            facts=facts,
        ))  # fmt: skip

    def _add_load(self, at_s: float, process: str, stats: EngineStats) -> None:
        lane, busy = self._lane(ENGINES, process), min(1.0, stats.busy_s / stats.window_s)
        lane.add(BUSY, at_s - stats.window_s, at_s, busy)
        lane.add(IDLE, at_s - stats.window_s, at_s, 1 - busy)

    def _add_swap(self, at_s: float, process: str, swapped: WeightsSwapped) -> None:
        text = f"{process} serves version {swapped.version}: paused {swapped.pause_ms:.3g} ms"
        facts = {"stage_ms": swapped.stage_ms, "pause_ms": swapped.pause_ms}
        self.marks.append(Mark(at_s=at_s, kind="swapped", text=text, lane=process, number=swapped.version, facts=facts))

    def _add_rollout(self, at_s: float, closed: RolloutClosed) -> None:
        if closed.purpose == LIVE:
            return  # between a user's calls nobody waits
        start_s = at_s - closed.seconds
        if closed.purpose != TRAIN:
            self._lane(EVALUATIONS, EVALUATIONS).add("tried", start_s, at_s)
            return
        lane, stages = self._lane(ROLLOUTS, ROLLOUTS), closed.stage_s
        if not stages:
            lane.add(UNTOLD, start_s, at_s)
            return
        playing_s = stages.get(RolloutStage.MODEL, 0.0) + stages.get(RolloutStage.TOOLS, 0.0)
        for stage, seconds in stages.items():
            if stage in (RolloutStage.MODEL, RolloutStage.TOOLS):  # they take turns
                lane.add(stage, start_s, start_s + playing_s, seconds / playing_s if playing_s else 0.0)
                start_s += playing_s if stage == RolloutStage.TOOLS else 0.0
            else:
                lane.add(stage, start_s, start_s + seconds)
                start_s += seconds

    def _add_region(self, at_s: float, served: RegionServed) -> None:
        since_s = self._away.pop(served.region, None)
        if since_s is not None:
            self._lane(AWAY, f"region {served.region or 'home'}").add("away", since_s, at_s)
        if served.is_away:
            self._away[served.region] = at_s


def alive(timeline: Timeline, from_s: float, to_s: float) -> Iterator[tuple[float, float]]:
    """The parts of a window in which the run was not stopped."""
    for gap_start_s, gap_end_s in timeline.gaps:
        if gap_end_s > from_s and gap_start_s < to_s:
            if gap_start_s > from_s:
                yield from_s, gap_start_s
            from_s = gap_end_s
    if from_s < to_s:
        yield from_s, to_s


def _region(name: str) -> str:
    try:
        return ProcessName.parse(name).region
    except ValueError:
        return ""


def _place(lane: Lane) -> tuple[str, str, int]:
    try:
        name = ProcessName.parse(lane.name)
    except ValueError:
        return lane.region, lane.name, 0
    return name.region, name.command, name.replica

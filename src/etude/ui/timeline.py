"""A timeline folded from a run's events: lanes of processes, with their states over time.

    StepDone, StepSaved ─▶ trainer     computing · waiting for the batch · waiting for the last version · saving …
    EngineStats ─────────▶ each engine busy share, as reported; swaps are marks
    GatewayStats ────────▶ each gateway calls at an engine, and calls that wait for one
    RolloutClosed ───────▶ rollouts    number in each stage; for evaluations the number of attempts
    WeightsPublished ────▶ publishing  during the next step

A lane contains only data from events: unfinished rollouts are not yet included, and an engine that reports nothing has
no lane. Owns this fold. :mod:`etude.ui.timeline_view` renders a window of it, :mod:`etude.ui.time_use` interprets it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from etude.dashboard.run_metrics import LIVE, TRAIN
from etude.run.process_name import PRODUCTION, ProcessName
from etude.types import RolloutStage
from etude.ui.event_lines import Fields
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
"""Groups of lanes, in the order of the training loop."""
COMPUTING, WAITING, LANDING, SAVING, HANDING = "computing", "waiting", "landing", "saving", "handing over"
"""Trainer states: computing on a batch; waiting for one; for the last version; saving; starting to publish."""
BUSY, IDLE = "busy", "idle"
AT_ENGINE, QUEUED = "at an engine", "queued"
UNTOLD = "not told"
"""Stage of rollouts that were recorded by an older étude."""
TURNS = (RolloutStage.MODEL, RolloutStage.TOOLS)
"""Stages between which a rollout alternates."""
STATES: Mapping[str, tuple[str, ...]] = {
    TRAINER: (COMPUTING, LANDING, SAVING, HANDING, WAITING),
    PUBLISHING: ("publishing",),
    ENGINES: (BUSY, IDLE),
    GATEWAYS: (AT_ENGINE, QUEUED),
    ROLLOUTS: (*map(str, RolloutStage), UNTOLD),
    EVALUATIONS: ("tried",),
    AWAY: ("away",),
}
"""Group → the states of its lanes, in stacking order."""


@dataclass(slots=True)
class Lane:
    """The timeline of one process, or of all rollouts."""

    group: str
    name: str
    """Name of its process; one name for all rollouts."""
    region: str = ""
    """Empty: home."""
    states: dict[str, Spans] = field(default_factory=dict)

    @property
    def serves_users(self) -> bool:
        """True for an engine that does not sample for the trainer."""
        return self.name.startswith(PRODUCTION.command)

    def add(self, state: str, start_s: float, end_s: float, rate: float = 1.0) -> None:
        """Add a span of a state."""
        self.states.setdefault(state, Spans()).add(start_s, end_s, rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event at a point in time, or over a short time."""

    at_s: float
    kind: str
    """``step``, ``published``, ``swapped``, ``evaluated``, ``restarted`` or ``outage``."""
    text: str
    lane: str = ""
    """Name of its lane; empty for all."""
    number: int = 0
    """Step or version."""
    facts: Mapping[str, float] = field(default_factory=dict)


class Timeline:
    """The lanes of one run, up to the last settled event.

    Events of several processes arrive in any order; :meth:`settle` folds in the new ones in order of time.
    """

    KINDS: ClassVar[frozenset[str]] = frozenset(
        {"RunStarted", "PhaseStarted", "ProcessStarted", "StepDone", "StepSaved", "WeightsPublished", "WeightsSwapped"}
        | {"EngineStats", "GatewayStats", "RolloutClosed", "EvalDone", "EvalFailed", "Outage", "RegionServed"}
    )

    def __init__(self) -> None:
        self.origin_s = 0.0
        """Unix time of the first event; all other times are relative to it."""
        self.end_s = 0.0
        self.lanes: dict[tuple[str, str], Lane] = {}
        """Group and name → lane."""
        self.phases: list[tuple[float, str]] = []
        self.gaps: list[tuple[float, float]] = []
        """Times in which the run was stopped."""
        self.marks: list[Mark] = []
        """In the order of their events, which is almost that of time."""
        self._pending: list[tuple[float, str, Fields]] = []
        self._handed: dict[int, float] = {}
        self._away: dict[str, float] = {}

    def add(self, kind: str, fields: Fields) -> None:
        """Add one event to be folded in."""
        self._pending.append((fields["at_s"], kind, fields))

    def settle(self) -> None:
        """Fold in the added events, in order of time."""
        pending, self._pending = sorted(self._pending, key=lambda event: event[0]), []
        if pending and not self.origin_s:
            self.origin_s = pending[0][0]
        for time_s, kind, fields in pending:
            at_s = time_s - self.origin_s
            if kind == "RunStarted" and fields["resumed"]:
                self.gaps.append((self.end_s, at_s))
            self.end_s = max(self.end_s, at_s)
            self._fold(at_s, kind, fields)

    def _fold(self, at_s: float, kind: str, fields: Fields) -> None:
        match kind:
            case "PhaseStarted":
                self.phases.append((at_s, fields["phase"]))
            case "StepDone":
                self._add_step(at_s, fields)
            case "StepSaved":
                self._add_saved(at_s, fields)
            case "WeightsPublished":
                self._add_published(at_s, fields)
            case "EngineStats":
                self._add_load(at_s, fields)
            case "WeightsSwapped":
                self._add_swap(at_s, fields)
            case "GatewayStats":
                self._add_calls(at_s, fields)
            case "RolloutClosed":
                self._add_rollout(at_s, fields)
            case "EvalDone":
                text = f"evaluated {fields['label']}: {100 * fields['sampled_pass']:.1f}% passed"
                mark = Mark(at_s=at_s, kind="evaluated", text=text, lane=EVALUATIONS, number=fields["version"])
                self.marks.append(mark)
            case "EvalFailed":
                text = f"evaluation {fields['label']} failed: {fields['reason']}"
                self.marks.append(Mark(at_s=at_s, kind="outage", text=text, lane=EVALUATIONS))
            case "ProcessStarted" if fields["restarts"]:
                self.marks.append(Mark(at_s=at_s, kind="restarted", text=f"{fields['process']} was restarted"))
            case "Outage" if fields["seconds"]:
                text = f"{fields['writer']} waits for {fields['what']}: {fields['reason']}"
                self.marks.append(Mark(at_s=at_s - fields["seconds"], kind="outage", text=text))
            case "RegionServed":
                self._add_region(at_s, fields)
            case _:
                pass

    def lanes_of(self, group: str) -> list[Lane]:
        """The lanes of a group: home first, then by region and number."""
        return sorted((lane for lane in self.lanes.values() if lane.group == group), key=_place)

    def window_of(self, phase: str) -> tuple[float, float] | None:
        """Start and end of a phase; ``None`` if it never began."""
        begun = [at_s for at_s, name in self.phases if name == phase]
        if not begun:
            return None
        later = [at_s for at_s, name in self.phases if at_s > begun[-1] and name != phase]
        return begun[0], later[0] if later else self.end_s

    def _lane(self, group: str, name: str) -> Lane:
        key = group, name
        if key not in self.lanes:
            self.lanes[key] = Lane(group, name, _region(name))
        return self.lanes[key]

    def _add_step(self, at_s: float, fields: Fields) -> None:
        metrics, process, step = fields["metrics"], fields["writer"], fields["step"]
        lane, busy_s, wait_s = self._lane(TRAINER, process), metrics["busy_s"], metrics.get("wait_s", 0.0)
        lane.add(COMPUTING, at_s - busy_s, at_s)
        lane.add(WAITING, at_s - busy_s - wait_s, at_s - busy_s)
        text = f"step {step}: computed {busy_s:.2f} s after waiting {wait_s:.2f} s"
        facts = {"busy_s": busy_s, "wait_s": wait_s}
        self.marks.append(Mark(at_s=at_s, kind="step", text=text, lane=process, number=step, facts=facts))

    def _add_saved(self, at_s: float, fields: Fields) -> None:
        lane, end_s = self._lane(TRAINER, fields["writer"]), at_s
        for state, name in ((HANDING, "publish_s"), (SAVING, "save_s"), (LANDING, "commit_s")):
            lane.add(state, end_s - fields[name], end_s)
            end_s -= fields[name]
        self._handed[fields["step"]] = at_s

    def _add_published(self, at_s: float, fields: Fields) -> None:
        """Add a published version. Its event is logged late; publishing began when the step handed it over."""
        version, seconds = fields["version"], fields["seconds"]
        start_s = self._handed.get(version, at_s - seconds)
        end_s = start_s + seconds
        self._lane(PUBLISHING, PUBLISHING).add("publishing", start_s, end_s)
        text = f"version {version} published: {fields['kind']}, {fields['size_bytes'] / 1e6:.2f} MB"
        facts = {"seconds": seconds, "size_bytes": float(fields["size_bytes"])}
        self.marks.append(Mark(at_s=end_s, kind="published", text=text, lane=PUBLISHING, number=version, facts=facts))

    def _add_load(self, at_s: float, fields: Fields) -> None:
        lane, start_s = self._lane(ENGINES, fields["writer"]), at_s - fields["window_s"]
        busy = min(1.0, fields["busy_s"] / fields["window_s"])
        lane.add(BUSY, start_s, at_s, busy)
        lane.add(IDLE, start_s, at_s, 1 - busy)

    def _add_calls(self, at_s: float, fields: Fields) -> None:
        lane, window_s = self._lane(GATEWAYS, fields["writer"]), fields["window_s"]
        lane.add(AT_ENGINE, at_s - window_s, at_s, (fields["call_s"] - fields["waited_s"]) / window_s)
        lane.add(QUEUED, at_s - window_s, at_s, fields["waited_s"] / window_s)

    def _add_swap(self, at_s: float, fields: Fields) -> None:
        version, process = fields["version"], fields["writer"]
        text = f"{process} serves version {version}: paused {fields['pause_ms']:.3g} ms"
        facts = {"stage_ms": fields["stage_ms"], "pause_ms": fields["pause_ms"]}
        self.marks.append(Mark(at_s=at_s, kind="swapped", text=text, lane=process, number=version, facts=facts))

    def _add_rollout(self, at_s: float, fields: Fields) -> None:
        purpose, start_s = fields["purpose"], at_s - fields["seconds"]
        if purpose == LIVE:
            return  # the time between a user's calls is not waiting
        if purpose != TRAIN:
            self._lane(EVALUATIONS, EVALUATIONS).add("tried", start_s, at_s)
            return
        lane, stages = self._lane(ROLLOUTS, ROLLOUTS), fields.get("stage_s")
        if not stages:
            lane.add(UNTOLD, start_s, at_s)
            return
        playing_s = sum(stages.get(stage, 0.0) for stage in TURNS)
        for stage, seconds in stages.items():
            if stage in TURNS:
                lane.add(stage, start_s, start_s + playing_s, seconds / playing_s if playing_s else 0.0)
                start_s += playing_s if stage == RolloutStage.TOOLS else 0.0
            else:
                lane.add(stage, start_s, start_s + seconds)
                start_s += seconds

    def _add_region(self, at_s: float, fields: Fields) -> None:
        region = fields["region"]
        since_s = self._away.pop(region, None)
        if since_s is not None:
            self._lane(AWAY, f"region {region or 'home'}").add("away", since_s, at_s)
        if fields["is_away"]:
            self._away[region] = at_s


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

"""Interpretation of a run's time: what the trainer waits for, in figures and in one sentence. Pure.

    lanes of a window ──▶ shares of the trainer's time ─┐
                     └──▶ while it waited: the rollouts' stages, the engines' load ──▶ the sentence

Without events the sentence says that something is unknown and never guesses: engines that report no load, rollouts of
an older étude, a window without a step. A stage is named as the cause if it has the largest share of the rollouts'
time; that is where time goes, not a proof that less of it would be faster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from etude.types import RolloutStage
from etude.ui.spans import Floats, Spans
from etude.ui.timeline import (
    BUSY,
    COMPUTING,
    ENGINES,
    HANDING,
    IDLE,
    LANDING,
    ROLLOUTS,
    SAVING,
    TRAINER,
    UNTOLD,
    WAITING,
    Timeline,
    alive,
)

OTHER = "other"
"""State of the trainer while no event accounts for it."""
GRID = 4000
"""Number of bins of a window in which two lanes are compared, such as waiting and busy at the same time."""
NEARLY_NONE = 0.05
"""Share of the time below which a state is not mentioned."""
SATURATED = 0.8
"""Busy share of engines above which they are full."""
STAGE_WORDS: Mapping[str, str] = {
    RolloutStage.SESSION: "opening sessions",
    RolloutStage.SANDBOX: "starting sandboxes",
    RolloutStage.MODEL: "with the model",
    RolloutStage.TOOLS: "in tools",
    RolloutStage.GRADING: "being graded",
    RolloutStage.SCORING: "being scored",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """The figures of one window."""

    seconds: float
    """Time in which the run was active."""
    trainer: Mapping[str, float] = field(default_factory=dict)
    """State → share of that time, with ``OTHER`` for the rest. Empty without a step."""
    engines_busy: float | None = None
    """Mean over engines and their reported time."""
    engines_busy_meanwhile: float | None = None
    """Mean busy share of the engines while the trainer waited."""
    engines: int = 0
    """Number of engines that reported."""
    in_flight: float | None = None
    """Mean number of rollouts for training."""
    in_flight_meanwhile: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    """Stage → share of the rollouts' time while the trainer waited, or of all time if it never waited."""
    idle_alone: float | None = None
    """Share of the engines' idle time in which less than one rollout was in flight."""


def time_use(timeline: Timeline, from_s: float, to_s: float) -> TimeUse:
    """The figures of a window, in seconds since the timeline's origin."""
    seconds = sum(end - start for start, end in alive(timeline, from_s, to_s))
    if seconds <= 0:
        return TimeUse(seconds=0.0)
    edges = np.linspace(from_s, to_s, GRID + 1)
    trainers = timeline.lanes_of(TRAINER)
    waiting = sum((_rates(lane.states.get(WAITING), edges) for lane in trainers), np.zeros(GRID))
    engines = [lane for lane in timeline.lanes_of(ENGINES) if not lane.serves_users]
    busy, idle = (sum((_rates(lane.states.get(s), edges) for lane in engines), np.zeros(GRID)) for s in (BUSY, IDLE))
    rollouts = {
        name: _rates(spans, edges) for lane in timeline.lanes_of(ROLLOUTS) for name, spans in lane.states.items()
    }
    in_flight = sum(rollouts.values(), np.zeros(GRID))
    is_waiting = bool(waiting.sum() > 0)
    weights = waiting if is_waiting else np.ones(GRID)
    inside = float((weights * in_flight).sum())
    return TimeUse(
        seconds=seconds,
        trainer=_trainer_shares(timeline, from_s, to_s, seconds),
        engines_busy=_ratio(busy.sum(), (busy + idle).sum()),
        engines_busy_meanwhile=_ratio((waiting * busy).sum(), (waiting * (busy + idle)).sum()),
        engines=sum(lane.states[BUSY].total(from_s, to_s) + lane.states[IDLE].total(from_s, to_s) > 0
                    for lane in engines if {BUSY, IDLE} <= lane.states.keys()),
        in_flight=float(in_flight.sum()) * (to_s - from_s) / GRID / seconds if rollouts else None,
        in_flight_meanwhile=_ratio((waiting * in_flight).sum(), waiting.sum()) if rollouts else None,
        stages={name: float((weights * rates).sum()) / inside for name, rates in rollouts.items()} if inside else {},
        idle_alone=_ratio((idle * (in_flight < 1)).sum(), idle.sum()) if rollouts else None,
    )  # fmt: skip


def sentence(use: TimeUse, *, limit: int | None = None, sessions: int = 0) -> str:
    """The figures as text. ``limit`` bounds rollouts in flight; a batch takes ``sessions`` of users."""
    if not use.trainer:
        return "No step was computed in this time, so no process waited for one."
    waited = use.trainer.get(WAITING, 0.0)
    shares = [f"computed {_percent(use.trainer.get(COMPUTING, 0.0))} of the time"]
    keeping = sum(use.trainer.get(state, 0.0) for state in (LANDING, SAVING, HANDING))
    if keeping >= NEARLY_NONE / 5:
        shares.append(f"saved and published {_percent(keeping)}")
    shares.append(f"waited {_percent(waited)}")
    first = f"The trainer {_list(shares)}"
    untold = use.trainer.get(OTHER, 0.0)
    last = (
        f" The other {_percent(untold)} no event tells: starts, and the step that is under way." if untold > 0.1 else ""
    )
    if waited < NEARLY_NONE:
        return f"{first}: it is the trainer that others wait for{_idle_words(use)}.{last}"
    if use.in_flight is None and sessions:
        return f"{first} for users: a batch takes {sessions} of their sessions, each when its window is over.{last}"
    return f"{first}: {_cause(use, limit)}.{last}"


def _cause(use: TimeUse, limit: int | None) -> str:
    flying = use.in_flight_meanwhile
    if flying is None:
        return "what rollouts did meanwhile no event tells"
    if flying < 0.5:
        return "for most of it no rollout was in flight: none was admitted, or their processes were away"
    most = f" of at most {limit}" if limit is not None and flying < 0.5 * limit else ""
    number = f"while it waited, {max(1.0, flying):.0f}{most} rollouts were in flight"
    if use.stages.get(UNTOLD, 0.0) > 0.5:
        return f"{number}, whose stages were not recorded{_load_words(use)}"
    largest = sorted(use.stages.items(), key=lambda pair: -pair[1])[:3]
    spent = [f"{_percent(share)} {STAGE_WORDS.get(stage, stage)}" for stage, share in largest if share >= 0.01]
    return f"{number}, {_list(spent)} of their time{_load_words(use)}"


def _list(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else "".join(words)


def _load_words(use: TimeUse) -> str:
    busy = use.engines_busy_meanwhile
    if busy is None:
        return "; how busy engines were they do not say"
    engines = "the engine was" if use.engines == 1 else f"{use.engines} engines were"
    return f"; {engines} {_percent(busy)} busy{', so sampling is the bottleneck' if busy >= SATURATED else ''}"


def _idle_words(use: TimeUse) -> str:
    if use.engines_busy is None or use.engines_busy > SATURATED:
        return ""
    alone = use.idle_alone
    tail = f", for {_percent(alone)} of that without a rollout in flight" if alone is not None and alone >= 0.2 else ""
    engines = "the engine was" if use.engines == 1 else "engines were"
    return f"; {engines} idle {_percent(1 - use.engines_busy)} of the time{tail}"


def _trainer_shares(timeline: Timeline, from_s: float, to_s: float, seconds: float) -> Mapping[str, float]:
    lanes = timeline.lanes_of(TRAINER)
    shares = {
        state: sum(lane.states[state].total(from_s, to_s) for lane in lanes if state in lane.states) / seconds
        for state in (COMPUTING, LANDING, SAVING, HANDING, WAITING)
        if any(state in lane.states for lane in lanes)
    }
    if not shares.get(COMPUTING):
        return {}
    return {**shares, OTHER: max(0.0, 1 - sum(shares.values()))}


def _rates(spans: Spans | None, edges: Floats) -> Floats:
    return np.zeros(len(edges) - 1) if spans is None else spans.rates(edges)


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole > 1e-9 else None


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"

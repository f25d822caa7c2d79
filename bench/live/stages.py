"""The way of a signal to users, stage by stage, read from a live run: in seconds, and in training steps.

    received ─window─▶ joined ─batch─▶ claimed ─▶ trained ─▶ candidate ─gate─▶ gated ─▶ canary ─test─▶ released

Of each signal the version is found that learnt it first and was released. ``steps`` is how many optimiser steps the
trainer took from the moment of the signal to that version. Sessions that were stale, quarantined or not yet learnt from
are counted beside. Reads the run's two databases and its events, and none of the code that wrote them.
"""

import sqlite3
import statistics
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from etude.errors import RunFolderError
from etude.run.folder import RunFolder, feedback_place
from etude.telemetry.events import StepDone, WeightsPublished
from etude.telemetry.log import EventReader
from etude.types import Json

STAGES = ("joined", "claimed", "trained", "candidate", "gated", "canary", "released")
"""Stages after the receipt of a signal, in order; the first release of a run has no canary."""


LOADS = "SELECT step FROM steps WHERE step NOT IN (SELECT step FROM groups WHERE step IS NOT NULL)"
"""Steps that loaded weights, and trained on nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """One signal's way."""

    steps: int
    """Optimiser steps from the signal to the released version that learnt it."""
    seconds: Mapping[str, float]
    """Stage → seconds from the one before."""

    @property
    def total_s(self) -> float:
        """From the signal to everybody."""
        return sum(self.seconds.values())


def measure_signal_to_live(run: Path) -> dict[str, Json]:
    """Stages of a run's signals. Raises :class:`~etude.errors.RunFolderError` where none was ever released."""
    folder = RunFolder.open(run, writes=False)
    journeys, others = _journeys(folder)
    if not journeys:
        raise RunFolderError(f"{run} has released no version that learnt from a signal")
    return {
        "signals": len(journeys),
        "on_the_way": dict(others),
        "signal_to_live_steps": statistics.median(one.steps for one in journeys),
        "steps_worst": max(one.steps for one in journeys),
        "seconds": {
            stage: round(statistics.median(one.seconds[stage] for one in journeys if stage in one.seconds), 2)
            for stage in STAGES
            if any(stage in one.seconds for one in journeys)
        },
        "total_s": round(statistics.median(one.total_s for one in journeys), 1),
    }


def _journeys(folder: RunFolder) -> tuple[list[Journey], Counter[str]]:
    trained_s, published_s = _times(folder.events)
    with closing(_read(folder.ledger)) as ledger:
        step_of = dict(ledger.execute("SELECT task_id, step FROM groups WHERE purpose = 'live' AND step IS NOT NULL"))
        loads = [step for (step,) in ledger.execute(LOADS)]
        moves = ledger.execute("SELECT version, to_state, moved_at FROM release_moves ORDER BY number").fetchall()
    with closing(_read(feedback_place(folder))) as feedback:
        signals = feedback.execute(
            "SELECT g.session_id, g.received_at, s.taken_at, s.result FROM signals AS g JOIN sessions AS s "
            "ON s.session_id = g.session_id WHERE g.late = 0"
        ).fetchall()
    moved: dict[int, dict[str, float]] = {}
    for version, state, at_s in moves:
        moved.setdefault(version, {}).setdefault(state, at_s)
    released = sorted(version for version, states in moved.items() if "released" in states)
    versions = sorted(published_s)
    times = [published_s[version] for version in versions]
    journeys, others = list[Journey](), Counter[str]()
    for session_id, received_s, taken_s, result in signals:
        step = step_of.get(session_id)
        live = None if step is None else _first_live(step, released, loads)
        if step is None or live is None or step not in trained_s or live not in published_s:
            others[result or "window open"] += step is None
            others["not released yet"] += step is not None
            continue
        position = bisect_right(times, received_s)
        before = versions[position - 1] if position else 0
        at_s = {
            "joined": taken_s,
            "claimed": trained_s[step][0],
            "trained": published_s[live],
            **{state: at for state, at in moved[live].items() if state in STAGES},
        }
        journeys.append(Journey(steps=live - before, seconds=_between(received_s, at_s)))
    return journeys, others


def _first_live(step: int, released: Sequence[int], loads: Sequence[int]) -> int | None:
    """The first released version that descends from a step: none behind a load of other weights does."""
    last = min((load for load in loads if load > step), default=sys.maxsize)
    return next((version for version in released if step <= version < last), None)


def _between(start_s: float, at_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds from stage to stage; one that began before the last one ended took none."""
    seconds, before_s = {}, start_s
    for stage in STAGES:
        if stage in at_s:
            seconds[stage] = max(0.0, at_s[stage] - before_s)
            before_s = max(before_s, at_s[stage])
    return seconds


def _times(events: Path) -> tuple[dict[int, tuple[float, float]], dict[int, float]]:
    """Step → when its batch was there and when it was computed; version → when it was published; the last of each."""
    trained: dict[int, tuple[float, float]] = {}
    published: dict[int, float] = {}
    for logged in EventReader(events).new():
        match logged.event:
            case StepDone() as done:
                computed_s = done.metrics.get("busy_s", 0.0)
                trained[done.step] = (logged.at_s - computed_s, logged.at_s)
            case WeightsPublished() as weights:
                published[weights.version] = logged.at_s
            case _:
                pass
    return trained, published


def _read(place: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{place}?mode=ro", uri=True)


def stage_rows(measured: Mapping[str, Json]) -> list[Sequence[str]]:
    """The stages as rows of a table."""
    seconds = measured["seconds"]
    assert isinstance(seconds, dict)
    return [(stage, f"{value:.1f} s") for stage, value in _items(seconds)]


def _items(seconds: Mapping[str, Json]) -> Iterable[tuple[str, float]]:
    return ((stage, float(value)) for stage, value in seconds.items() if isinstance(value, int | float))

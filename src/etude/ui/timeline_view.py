"""The tab *Timeline*: which process waits for which, in a window of the run's time, with a given number of bins.

    GET /timeline?from=12.5&to=80&bins=400      seconds since the run's first event; without them its RL phase

The size of the response is independent of the window: each state of a lane has one number per bin, its share or its
mean count. Marks (steps, versions, swaps) are listed if there are few, else counted by bin.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from etude.errors import UserError
from etude.types import Json
from etude.ui.routes import Routes, RunQuery
from etude.ui.spans import Floats
from etude.ui.time_use import sentence, time_use
from etude.ui.timeline import STATES, Lane, Mark, Timeline

MOST_BINS = 2000
MOST_MARKS = 400
"""Maximum number of listed marks of a kind in a window; more are counted by bin."""
LEAST_S = 0.05
"""Minimum length of a window: no measurement is finer."""


def timeline(query: RunQuery) -> Json:
    """A window of the run's time, with its interpretation."""
    bins = query.number("bins", 400)
    if not 1 <= bins <= MOST_BINS:
        raise UserError(f"bins={bins}: expected 1 to {MOST_BINS}")
    with query.run.folded(Timeline) as folded:
        folded.settle()
        from_s, to_s = _window(query, folded)
        config, use = query.run.config, time_use(folded, from_s, to_s)
        words = sentence(use, limit=config.rollouts.concurrency, sessions=config.live.groups_per_step)
        return {**view(folded, from_s, to_s, bins), "words": words, "waits": asdict(use)}


def view(timeline: Timeline, from_s: float, to_s: float, bins: int) -> dict[str, Json]:
    """A window of a timeline, without its interpretation."""
    edges = np.linspace(from_s, to_s, bins + 1)
    lanes = [_lane(lane, edges) for group in STATES for lane in timeline.lanes_of(group)]
    return {
        "origin_s": timeline.origin_s,
        "end_s": timeline.end_s,
        "from_s": from_s,
        "to_s": to_s,
        "bins": bins,
        "phases": [{"at_s": at_s, "phase": phase} for at_s, phase in timeline.phases],
        "gaps": [list(gap) for gap in timeline.gaps if gap[1] > from_s and gap[0] < to_s],
        "lanes": [lane for lane in lanes if lane["seconds"]],
        **_marks([mark for mark in timeline.marks if from_s <= mark.at_s <= to_s], edges),
    }


def _window(query: RunQuery, timeline: Timeline) -> tuple[float, float]:
    whole = 0.0, max(timeline.end_s, LEAST_S)
    first_s, last_s = timeline.window_of("rl") or whole
    from_s, to_s = (_seconds(query, name, default) for name, default in (("from", first_s), ("to", last_s)))
    from_s, to_s = max(whole[0], from_s), min(whole[1], to_s)
    if not to_s - from_s >= LEAST_S:
        to_s = min(whole[1], from_s + LEAST_S)
        from_s = to_s - LEAST_S
    return from_s, to_s


def _seconds(query: RunQuery, name: str, default: float) -> float:
    text = query.options.get(name, "")
    try:
        return float(text) if text else default
    except ValueError as error:
        raise UserError(f"{name}={text!r} is not a number of seconds") from error


def _lane(lane: Lane, edges: Floats) -> dict[str, Json]:
    """Values of each state by bin: shares, or mean counts for rollouts and calls."""
    states: list[Json] = []
    seconds = 0.0
    for state in STATES[lane.group]:
        if state not in lane.states:
            continue
        rates = lane.states[state].rates(edges)
        total_s = float(rates.sum() * (edges[1] - edges[0]))
        seconds += total_s
        states.append({"state": state, "seconds": round(total_s, 3), "values": _rounded(rates)})
    return {"group": lane.group, "name": lane.name, "region": lane.region, "seconds": seconds, "states": states}


def _rounded(rates: Floats) -> list[Json]:
    rounded: list[Json] = np.round(np.maximum(rates, 0.0), 3).tolist()
    return rounded


def _marks(marks: Sequence[Mark], edges: Floats) -> dict[str, Json]:
    """Marks as a list; kinds with too many are counts by bin."""
    kinds = Counter(mark.kind for mark in marks)
    crowded = {kind for kind, number in kinds.items() if number > MOST_MARKS}
    counted: dict[str, Json] = {
        kind: np.histogram([mark.at_s for mark in marks if mark.kind == kind], edges)[0].tolist() for kind in crowded
    }
    return {"marks": [asdict(mark) for mark in marks if mark.kind not in crowded], "counted": counted}


ROUTES: Routes = {"GET /timeline": timeline}

"""Figures of a day, from the hidden truth of the simulator and the moves of releases. Pure.

    truth.jsonl, a row a session ──▶ satisfaction of the whole population, at go-live and in the evening ──▶ rise
    moves of releases            ──▶ how many were released, what was stopped at the gate, what was taken back

Satisfaction is that of the *whole honest population* with what the agent did, each kind of person by share, at noon
(``population_satisfied``): who happens to be awake, and who has left, changes nothing in it. What those who came really
felt stands beside it.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.dashboard.statistics import Estimate, mean_amount, mean_over_seeds
from etude.types import Json

EVENING = 0.8
"""Share of the day's sessions before the evening, which is what the day has come to."""
POINTS = 20
"""Points of the curve over the day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthRow:
    """What the simulator knows of one session."""

    unix_s: float
    template: str
    versions: tuple[int, ...]
    satisfied: float
    population_satisfied: float
    solved: bool
    tested: bool
    turns: int
    conduct: str
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseMove:
    """One move of a release."""

    unix_s: float
    version: int
    to: str
    planted: str = ""
    """``noise`` or ``habit`` where the recipe planted its weights."""


def read_truth(file: Path) -> list[TruthRow]:
    """The rows of a day, in the order of time, without what came after it or a line that a dying simulator cut."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["day"] >= 1.0:
            continue
        outcome = row["outcome"]
        rows.append(
            TruthRow(
                unix_s=row["unix_s"],
                template=row["template"],
                versions=tuple(int(version) for version in row["versions"]),
                satisfied=row["satisfied"],
                population_satisfied=row["population_satisfied"],
                solved=outcome["solved"],
                tested=outcome["tested"],
                turns=outcome["turns"],
                conduct=row["conduct"],
                user=row["user"],
            )
        )
    return sorted(rows, key=lambda row: row.unix_s)


def day_figures(rows: Sequence[TruthRow], moves: Sequence[ReleaseMove]) -> dict[str, Json]:
    """All figures of one day. Raises ``ValueError`` where nobody was ever served."""
    if not rows:
        raise ValueError("the file of truth has no session: nobody was served")
    before, after = at_go_live(rows, moves), rows[int(EVENING * len(rows)) :]
    return {
        "sessions": len(rows),
        "users": len({row.user for row in rows}),
        "satisfied_before": _estimate(before),
        "satisfied_after": _estimate(after),
        "rise": round(_mean(after) - _mean(before), 4),
        "felt_before": round(statistics.fmean(row.satisfied for row in before), 4),
        "felt_after": round(statistics.fmean(row.satisfied for row in after), 4),
        "solved": [round(share(part, "solved"), 4) for part in (before, after)],
        "tested": [round(share(part, "tested"), 4) for part in (before, after)],
        "releases": release_figures(moves),
        "curve": curve(rows),
    }


def at_go_live(rows: Sequence[TruthRow], moves: Sequence[ReleaseMove]) -> Sequence[TruthRow]:
    """Sessions that the first release alone served; where it was never replaced, the first fifth of the day's."""
    released = [move.version for move in moves if move.to == "released"]
    first = [row for row in rows if released and row.versions == (released[0],)]
    return first if len(set(released)) > 1 and first else rows[: max(1, int((1 - EVENING) * len(rows)))]


def release_figures(moves: Sequence[ReleaseMove]) -> dict[str, Json]:
    """How many versions ended where, and what became of the planted ones."""
    ends: dict[int, str] = {}
    ever_released: list[int] = []
    for move in sorted(moves, key=lambda move: move.unix_s):
        ends[move.version] = move.to
        if move.to == "released" and move.version not in ever_released:
            ever_released.append(move.version)
    return {
        "released": len(ever_released),
        "rejected": sum(end == "rejected" for end in ends.values()),
        "rolled_back": sum(end == "rolled_back" for end in ends.values()),
        "planted": {move.planted: ends[move.version] for move in moves if move.planted},
    }


def curve(rows: Sequence[TruthRow]) -> list[Json]:
    """Satisfaction over the day, in :data:`POINTS` parts of equally many sessions."""
    size = max(1, len(rows) // POINTS)
    parts = [rows[at : at + size] for at in range(0, len(rows), size)]
    began_s = rows[0].unix_s
    return [
        {
            "second": round(statistics.fmean(row.unix_s for row in part) - began_s, 1),
            "sessions": len(part),
            "satisfied": round(_mean(part), 4),
            "solved": round(share(part, "solved"), 4),
            "tested": round(share(part, "tested"), 4),
            "turns": round(statistics.fmean(row.turns for row in part), 3),
        }
        for part in parts
    ]


def over_seeds(days: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """The rise over seeds, with its interval. Raises ``ValueError`` for fewer than two, or if planted weights won."""
    for day in days:
        if released := released_plants(day):
            raise ValueError(
                f"seed {day['seed']}: planted {' and '.join(released)} released: the rise is not users' alone"
            )
    rises = [day["rise"] for day in days]
    return asdict(mean_over_seeds([rise for rise in rises if isinstance(rise, float)]))


def released_plants(day: Mapping[str, Json]) -> list[str]:
    """The kinds of planted weights that all users of a day had at some time."""
    releases = day["releases"]
    assert isinstance(releases, dict) and isinstance(releases["planted"], dict)
    return [kind for kind, end in releases["planted"].items() if end in ("released", "superseded")]


def share(rows: Iterable[TruthRow], name: str) -> float:
    """Share of sessions of which something is true."""
    return statistics.fmean(bool(getattr(row, name)) for row in rows)


def _mean(rows: Sequence[TruthRow]) -> float:
    return statistics.fmean(row.population_satisfied for row in rows)


def _estimate(rows: Sequence[TruthRow]) -> Json:
    """The mean with its interval, templates as clusters."""
    estimate: Estimate = mean_amount([row.population_satisfied for row in rows], [row.template for row in rows])
    return {"value": round(estimate.value, 4), "low": round(estimate.low, 4), "high": round(estimate.high, 4)}

"""Calls of agents turn by turn on held-out tasks: those of many sessions, as shares.

    a session ──▶ read · edit · test · edit again · submit        sessions ──▶ turn 1: edit 83 %, read 17 %; turn 2: …

Owns the counting and the words. How a call is read from a reply is :mod:`etude.harnesses.actions`'.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from etude.dashboard.formatting import percent
from etude.types import Json

NO_CALL = "no call"
"""A turn whose reply has no call that could be read."""
AGAIN = " again"
"""Behind the name of a call that the same session has made before."""
MOST_TURNS = 12
"""Turns of a session that are counted, from its first."""
FEW = 0.05
"""Share of sessions below which a turn, or a call, is not told of."""


def named_calls(tools: Sequence[str]) -> list[str]:
    """The tools that one session called, the first call of each turn, by name; ``""`` where there was none."""
    seen = set[str]()
    names = []
    for tool in tools:
        names.append((tool + AGAIN * (tool in seen)) if tool else NO_CALL)
        seen.add(tool)
    return names


def turn_shares(sessions: Sequence[Sequence[str]]) -> list[dict[str, float]]:
    """For each turn, the share of all sessions by what they called in it; what lacks to 1 had ended before."""
    turns = zip_longest(*(named_calls(tools)[:MOST_TURNS] for tools in sessions))
    counts = [Counter(name for name in turn if name is not None) for turn in turns]
    return [{name: number / len(sessions) for name, number in count.most_common()} for count in counts]


def told_turns(turns: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """The turns, from the first, that more than a few sessions got to."""
    return [turn for turn in turns if sum(turn.values()) >= FEW]


def in_words(turn: Mapping[str, float], most: int = 2) -> str:
    """The most frequent calls of a turn: ``edit 83 %, read 17 %``."""
    calls = [f"{name} {percent(share, 0)}" for name, share in turn.items() if share >= FEW]
    return ", ".join(calls[:most])


def reported_turns(report: Mapping[str, Json], label: str) -> list[Mapping[str, float]]:
    """The turns of sampled sessions ``before`` or ``after`` RL, from a report; none where they are unknown."""
    heldout = report["heldout"]
    turns = heldout.get(f"calls_{label}") if isinstance(heldout, dict) else None
    rows = turns if isinstance(turns, list) else []
    return told_turns(
        [
            {name: share for name, share in row.items() if isinstance(share, float)}
            for row in rows
            if isinstance(row, dict)
        ]
    )

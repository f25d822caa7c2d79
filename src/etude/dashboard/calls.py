"""Calls of agents on held-out tasks, turn by turn, as shares of many sessions.

    a session ──▶ read · edit · test · edit again · submit        sessions ──▶ turn 1: edit 83 %, read 17 %; turn 2: …

Owns the counting and the text. :mod:`etude.harnesses.actions` parses the calls.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from etude.dashboard.formatting import percent
from etude.types import Json

NO_CALL = "no call"
"""Name of a turn without a call that could be parsed."""
AGAIN = " again"
"""Suffix of a call that the same session has made before."""
MOST_TURNS = 12
"""Maximum number of turns of a session that are counted."""
FEW = 0.05
"""Share of sessions below which a turn or a call is not shown."""


def named_calls(tools: Sequence[str]) -> list[str]:
    """The name of the first call of each turn of one session; ``tools`` has ``""`` for a turn without a call."""
    seen = set[str]()
    names = []
    for tool in tools:
        names.append((tool + AGAIN * (tool in seen)) if tool else NO_CALL)
        seen.add(tool)
    return names


def turn_shares(sessions: Sequence[Sequence[str]]) -> list[dict[str, float]]:
    """For each turn, the share of all sessions by their call; the rest up to 1 had ended before."""
    turns = zip_longest(*(named_calls(tools)[:MOST_TURNS] for tools in sessions))
    counts = [Counter(name for name in turn if name is not None) for turn in turns]
    return [{name: number / len(sessions) for name, number in count.most_common()} for count in counts]


def told_turns(turns: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """The turns, from the first, that at least a share ``FEW`` of the sessions reached."""
    return [turn for turn in turns if sum(turn.values()) >= FEW]


def in_words(turn: Mapping[str, float], most: int = 2) -> str:
    """The most frequent calls of a turn: ``edit 83 %, read 17 %``."""
    calls = [f"{name} {percent(share, 0)}" for name, share in turn.items() if share >= FEW]
    return ", ".join(calls[:most])


def reported_turns(report: Mapping[str, Json], label: str) -> list[Mapping[str, float]]:
    """The turns of sampled sessions ``before`` or ``after`` RL, from a report; empty if it has none."""
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

"""The join: which session a signal is of, whether it is in time, and the session with all that was said in time.

                     opened            ended               ended + window
    ────────────────────┬────────────────┬─────────────────────┬────────────────────▶ the server's clock
     waits for its      │  accepted      │  accepted           │  late: counted
     session, at most   │                │                     │
     for a window       turns            calls are over        closed: joined once, in the order of ended

An event that comes before its session, or its turn, waits for it; one whose session does not come within a window is
*unmatched*. The same event again is a *duplicate*, whatever it says then. Client clocks decide nothing: an event counts
by when the server received it. So the joined session depends on which events were received in time, and neither on
their order nor on how often each came.

Owns these rules. Pure; where sessions and signals are kept is :mod:`etude.feedback.store`'s.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from etude.feedback.follow_up import FollowUpRule
from etude.types import JoinedSession, LiveSession, Signal, SignalKind, Turn

MAX_SIGNALS = 4096
"""Signals of one session that count, the earliest; a session of 4,096 turns has one for each."""


class EventResult(StrEnum):
    """Result of one event, as its sender is told."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """It was received before."""
    LATE = "late"
    """Its session's window is over."""
    UNKNOWN_SESSION = "unknown_session"
    """No such session of this product is kept: it may still come, for a window's time, and the event is then joined."""
    REFUSED = "refused"
    """It is no event; the sender is told why."""


UNMATCHED, EXCESS = "unmatched", "excess"
"""Counted beside outcomes: signals whose session or turn never came, and those beyond :data:`MAX_SIGNALS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedSession:
    """The session that an event names."""

    session_id: str
    turn: int | None
    """The turn of the answer that it names; ``None`` where it names none."""
    ended_at: float | None
    is_closed: bool
    """True once the session was handed on: nothing that comes is read any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTurn:
    """One turn of a live session, and what its call told beside."""

    turn: Turn
    completion: str
    """Id of its answer, without prefix."""
    follows: int | None
    """Index of the turn whose reply its call continued."""
    message: str
    """The user's message that came with its call; empty for none."""


def result_of(place: MatchedSession | None, received_at: float, window_s: float) -> EventResult:
    """The result of a new event that is received now."""
    if place is None:
        return EventResult.UNKNOWN_SESSION
    late = place.is_closed or is_late(place.ended_at, received_at, window_s)
    return EventResult.LATE if late else EventResult.ACCEPTED


def is_late(ended_at: float | None, received_at: float, window_s: float) -> bool:
    """True if a window was over when something was received."""
    return ended_at is not None and received_at > ended_at + window_s


def join(
    session: LiveSession,
    turns: Sequence[LiveTurn],
    signals: Iterable[Signal],
    *,
    window_s: float,
    follow_up: FollowUpRule | None = None,
) -> tuple[JoinedSession, Counter[str]]:
    """Join a session that ended with the signals about it, in any order; and the number of those left out, by reason.

    ``follow_up`` judges the users' next messages; where a client reported the same of a turn, its word counts.
    """
    left_out: Counter[str] = Counter()
    in_time: list[Signal] = []
    for signal in _first_of_each(signals):
        if is_late(session.ended_at, signal.received_at, window_s):
            left_out[EventResult.LATE] += 1
        elif signal.turn is not None and signal.turn >= len(turns):
            left_out[UNMATCHED] += 1
        else:
            in_time.append(signal)
    left_out[EXCESS] += max(0, len(in_time) - MAX_SIGNALS)
    counted = in_time[:MAX_SIGNALS]
    joined = JoinedSession(
        session=session,
        turns=tuple(one.turn for one in turns),
        messages=tuple(one.message for one in turns),
        follows=tuple(one.follows for one in turns),
        signals=(*counted, *_judged(session, turns, counted, follow_up)),
    )
    return joined, +left_out


def _first_of_each(signals: Iterable[Signal]) -> list[Signal]:
    """Each event once, as it was received first; in the order in which they were."""
    first: dict[str, Signal] = {}
    for signal in sorted(signals, key=lambda one: (one.received_at, one.event_id)):
        first.setdefault(signal.event_id, signal)
    return list(first.values())


def _judged(
    session: LiveSession, turns: Sequence[LiveTurn], signals: Sequence[Signal], follow_up: FollowUpRule | None
) -> list[Signal]:
    """The verdicts of ``follow_up`` on turns that the user followed up with words; on the latest, if with several."""
    if follow_up is None:
        return []
    reported = {one.turn for one in signals if one.kind is SignalKind.FOLLOW_UP}
    latest = {one.follows: one.message for one in turns if one.follows is not None and one.message}
    ended_at = session.opened_at if session.ended_at is None else session.ended_at
    judged = []
    for turn, message in sorted(latest.items()):
        value = None if turn in reported else follow_up.judge(turns[turn].turn, message)
        if value is not None:
            judged.append(
                Signal(
                    event_id=f"{follow_up.name}.{turn}",
                    session_id=session.session_id,
                    kind=SignalKind.FOLLOW_UP,
                    value=value,
                    turn=turn,
                    span=None,
                    user=session.user,
                    sent_at=ended_at,
                    received_at=ended_at,
                )
            )
    return judged

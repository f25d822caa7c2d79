"""The join of signals with their sessions: match, check of the time window, and the joined session.

                     opened            ended               ended + window
    ────────────────────┬────────────────┬─────────────────────┬────────────────────▶ the server's clock
     waits for its      │  accepted      │  accepted           │  late: counted
     session, at most   │                │                     │
     for a window       turns            calls are over        closed: joined once, in the order of ended

An event that arrives before its session, or its turn, waits for it; if the session does not arrive within a window, the
event is *unmatched*. A repeated event id is a *duplicate*, whatever its content. Client clocks have no effect: the time
of receipt at the server counts. So the joined session depends only on the set of events received in time, not on their
order or repetition.

Owns these rules. Pure; :mod:`etude.feedback.store` owns the storage of sessions and signals.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from etude.feedback.follow_up import FollowUpRule
from etude.types import JoinedSession, LiveSession, Signal, SignalKind, Turn

MAX_SIGNALS = 4096
"""Maximum signals per session that count, the earliest first; enough for one per turn of 4,096 turns."""


class EventResult(StrEnum):
    """Result of one event, as reported to its sender."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """It was received before."""
    LATE = "late"
    """Its session's window is over."""
    UNKNOWN_SESSION = "unknown_session"
    """This product has no such session yet: if it arrives within a window, the event is joined."""
    REFUSED = "refused"
    """It is not a valid event; the response has the reason."""


UNMATCHED, EXCESS = "unmatched", "excess"
"""Counts besides results: signals whose session or turn never arrived, and those beyond :data:`MAX_SIGNALS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedSession:
    """The session that an event names."""

    session_id: str
    turn: int | None
    """Turn of the answer that the event names; ``None`` if it names none."""
    ended_at: float | None
    is_closed: bool
    """True once the window is closed: later events are not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTurn:
    """One turn of a live session, with data from its call."""

    turn: Turn
    completion: str
    """Id of its answer, without prefix."""
    follows: int | None
    """Index of the turn whose reply its call continues."""
    message: str
    """The user's message in its call; empty for none."""


def result_of(place: MatchedSession | None, received_at: float, window_s: float) -> EventResult:
    """The result of a new event with this time of receipt."""
    if place is None:
        return EventResult.UNKNOWN_SESSION
    late = place.is_closed or is_late(place.ended_at, received_at, window_s)
    return EventResult.LATE if late else EventResult.ACCEPTED


def is_late(ended_at: float | None, received_at: float, window_s: float) -> bool:
    """Return true if the window was over at the time of receipt."""
    return ended_at is not None and received_at > ended_at + window_s


def join(
    session: LiveSession,
    turns: Sequence[LiveTurn],
    signals: Iterable[Signal],
    *,
    window_s: float,
    follow_up: FollowUpRule | None = None,
) -> tuple[JoinedSession, Counter[str]]:
    """Join an ended session with its signals, in any order; also return the number of omitted signals by reason.

    ``follow_up`` judges the user's next messages, except for turns on which a client reported a follow-up itself.
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
    """Each event once, as first received, in the order of receipt."""
    first: dict[str, Signal] = {}
    for signal in sorted(signals, key=lambda one: (one.received_at, one.event_id)):
        first.setdefault(signal.event_id, signal)
    return list(first.values())


def _judged(
    session: LiveSession, turns: Sequence[LiveTurn], signals: Sequence[Signal], follow_up: FollowUpRule | None
) -> list[Signal]:
    """The verdicts of ``follow_up`` on turns that have a follow-up message; the latest counts if there are several."""
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

"""Parser and validation of the events that clients report.

    {"event_id": "9f3c…", "session": "chat-17", "turn": 2, "kind": "thumbs", "value": -1}
    {"event_id": "b01a…", "completion": "chatcmpl-6154ec…", "kind": "edited", "value": 0.25, "span": [120, 310]}

    event_id     chosen by the client, unique within its product: a repeated one is a duplicate
    session      the product's name for it (``X-Etude-Session``), or its id (``X-Etude-Session-Id`` of an answer)
    turn         index of the model call in its session, from 0; omitted: the whole session
    completion   id of an answer, instead of session and turn
    kind, value  :data:`VALUES`
    span         characters of that turn's text: start, end (exclusive)
    user         the product's name for the user; becomes a pseudonym before storage. Default: the session's
    sent_at      seconds since 1970 by the client's clock; stored, without effect

Owns the format of an event and the reasons to refuse one. :mod:`etude.feedback.join` owns the match with a session and
the time window. Pure.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from etude.types import Json, SignalKind

MAX_BATCH = 1000
"""Maximum events per report."""
NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Pattern of event ids, and of names of sessions and answers."""
MAX_USER = 256
"""Maximum characters of a user's name."""
MAX_TURN = 2**20
MAX_CHARACTERS = 2**31
"""Exclusive upper limit for the end of a span."""
MAX_TIME_S = 2.0**33
"""Limit for a clock's seconds since 1970: the year 2242."""
LONGEST_S = 86_400.0
"""Maximum latency: one day."""
FIELDS = ("event_id", "session", "turn", "completion", "kind", "value", "span", "user", "sent_at")
QUOTED = 80
"""Maximum characters of a refused value in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The valid values of one kind of signal."""

    low: float
    high: float
    only: tuple[float, ...] = ()
    """The only valid values; empty: every value from ``low`` to ``high``."""
    default: float | None = None
    """Value of an event without one; ``None``: a value is required."""

    def fits(self, value: float) -> bool:
        """Return true if ``value`` is valid."""
        return value in self.only if self.only else self.low <= value <= self.high

    def __str__(self) -> str:
        return " or ".join(f"{one:g}" for one in self.only) or f"a number from {self.low:g} to {self.high:g}"


VALUES: Mapping[SignalKind, Values] = MappingProxyType(
    {
        SignalKind.KEPT: Values(low=0, high=1, default=1.0),
        SignalKind.REVERTED: Values(low=1, high=1, only=(1.0,), default=1.0),
        SignalKind.EDITED: Values(low=0, high=1),
        SignalKind.FOLLOW_UP: Values(low=0, high=1),
        SignalKind.TESTS: Values(low=0, high=1),
        SignalKind.THUMBS: Values(low=-1, high=1, only=(1.0, -1.0)),
        SignalKind.LATENCY: Values(low=0, high=LONGEST_S),
        SignalKind.ABANDONED: Values(low=1, high=1, only=(1.0,), default=1.0),
    }
)
"""Kind → its valid values; :class:`~etude.types.SignalKind` explains their meaning."""
KINDS: Mapping[str, SignalKind] = MappingProxyType({kind.value: kind for kind in SignalKind})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One reported event; its user is already a pseudonym, its session not looked up yet."""

    event_id: str
    kind: SignalKind
    value: float
    session: str = ""
    """Name or id of a session; empty if there is a ``completion``."""
    completion: str = ""
    """Id of an answer without its prefix; empty: ``turn``, or the whole session without one."""
    turn: int | None = None
    span: tuple[int, int] | None = None
    user: str = ""
    """Pseudonym; empty: the session's user."""
    sent_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedEvent:
    """An invalid event."""

    event_id: str
    """Empty if it has no valid id."""
    reason: str


Pseudonym = Callable[[str], str]
"""Function from a user to a pseudonym, which cannot be reversed without the run's key."""


class NoReport(ValueError):
    """A body that is not a list of events, or is too long; the message is for its sender."""


def read_report(body: bytes, pseudonym: Pseudonym) -> list[Event | RefusedEvent]:
    """The events of a report, in order: one JSON object, a JSON list of them, or one per line.

    Raises :class:`NoReport`. An invalid event does not affect the others.
    """
    values = _values(body)
    if len(values) > MAX_BATCH:
        raise NoReport(f"the report has {len(values)} events, {MAX_BATCH} is the most: send several")
    return [read_event(value, pseudonym) for value in values]


def read_event(value: Json, pseudonym: Pseudonym) -> Event | RefusedEvent:
    """One event, or the reason why it is invalid."""
    if not isinstance(value, dict):
        return RefusedEvent(event_id="", reason=f"expected a JSON object, got {_quote(value)}")
    event_id = value.get("event_id")
    try:
        return _event(value, pseudonym)
    except ValueError as error:
        usable_id = event_id if isinstance(event_id, str) and NAME.fullmatch(event_id) else ""
        return RefusedEvent(event_id=usable_id, reason=str(error))


def completion_id(text: str) -> str:
    """The id of an answer without the prefix of its API, ``chatcmpl-``, ``cmpl-``, ``resp_`` or ``msg_``."""
    return re.split("[-_]", text)[-1]


def _values(body: bytes) -> list[Json]:
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        lines = [line for line in body.splitlines() if line.strip()]
        if len(lines) < 2:
            raise NoReport(f"the body is not JSON: {error.msg} at {error.pos}") from error
        return [_line(line, number) for number, line in enumerate(lines, 1)]
    return value if isinstance(value, list) else [value]


def _line(line: bytes, number: int) -> Json:
    try:
        value: Json = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise NoReport(f"line {number} is not JSON: {error.msg} at {error.pos}") from error
    return value


def _event(fields: dict[str, Json], pseudonym: Pseudonym) -> Event:
    unknown = next((name for name in fields if name not in FIELDS), None)
    if unknown is not None:
        raise ValueError(f"{_quote(unknown)} is not a field of an event: expected {', '.join(FIELDS)}")
    event_id = _name(fields, "event_id")
    named = fields.get("kind")
    kind = KINDS.get(named) if isinstance(named, str) else None
    session, completion, turn = _name(fields, "session"), _name(fields, "completion"), fields.get("turn")
    if not event_id:
        raise ValueError("event_id is missing: give each event one, and the same one when it is sent again")
    if kind is None:
        raise ValueError(f"kind={_quote(fields.get('kind'))}: expected one of {', '.join(KINDS)}")
    if bool(session) == bool(completion):
        raise ValueError("expected a session, or else the completion (id of an answer) that the event is about")
    if turn is not None and (completion or type(turn) is not int or not 0 <= turn < MAX_TURN):
        raise ValueError(f"turn={_quote(turn)}: expected a whole number from 0 on, and none beside completion")
    span = _span(fields.get("span"))
    if span is not None and turn is None and not completion:
        raise ValueError("span: say by turn or completion which turn's characters these are")
    user = fields.get("user")
    if user is not None and (not isinstance(user, str) or not 0 < len(user) <= MAX_USER):
        raise ValueError(f"user: expected a text of 1 to {MAX_USER} characters")
    return Event(
        event_id=event_id,
        kind=kind,
        value=_value(kind, fields.get("value")),
        session=session,
        completion=completion_id(completion),
        turn=turn,
        span=span,
        user=pseudonym(user) if user else "",
        sent_at=_time(fields.get("sent_at")),
    )


def _name(fields: dict[str, Json], field: str) -> str:
    value = fields.get(field)
    if value is None:
        return ""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(
            f"{field}={_quote(value)}: expected 1 to 128 letters, digits, dots, colons, hyphens, underscores"
        )
    return value


def _value(kind: SignalKind, value: Json) -> float:
    values = VALUES[kind]
    if value is None and values.default is not None:
        return values.default
    if isinstance(value, bool) or not isinstance(value, int | float) or not values.fits(value):
        raise ValueError(f"value={_quote(value)} of {kind.value}: expected {values}")
    return float(value)


def _span(value: Json) -> tuple[int, int] | None:
    match value:
        case None:
            return None
        case [int(start), int(end)] if 0 <= start < end < MAX_CHARACTERS and type(start) is type(end) is int:
            return start, end
    raise ValueError(f"span={_quote(value)}: expected [from, up to], two characters of the reply, the first lower")


def _time(value: Json) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_TIME_S:
        raise ValueError(f"sent_at={_quote(value)}: expected seconds since 1970")
    return float(value)


def _quote(value: Json) -> str:
    if isinstance(value, dict | list):
        return f"a {'list' if isinstance(value, list) else 'JSON object'} of {len(value)}"
    text = orjson.dumps(value[:QUOTED] if isinstance(value, str) else value).decode()
    return text if len(text) <= QUOTED else text[: QUOTED - 1] + "…"

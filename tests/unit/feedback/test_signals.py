"""Feedback events: valid ones are read, and each invalid one gets its error."""

import orjson
import pytest

from etude.feedback.signals import MAX_BATCH, Event, NoReport, RefusedEvent, read_report
from etude.types import Json, SignalKind

SOUND: dict[str, Json] = {"event_id": "a", "session": "chat", "kind": "thumbs", "value": -1}


def read(*events: Json) -> list[Event | RefusedEvent]:
    return read_report(orjson.dumps([*events]), lambda user: f"<{user}>")


def test_an_event_is_read_with_its_user_a_pseudonym() -> None:
    more: dict[str, Json] = {"kind": "edited", "value": 0.5, "span": [1, 9], "user": "ada", "sent_at": 1e9}
    by_turn, by_answer = read({**SOUND, **more, "turn": 2}, {"event_id": "b", "completion": "chatcmpl-6a", **more})
    assert by_turn == Event(
        event_id="a",
        kind=SignalKind.EDITED,
        value=0.5,
        session="chat",
        turn=2,
        span=(1, 9),
        user="<ada>",
        sent_at=1e9,
    )
    assert isinstance(by_answer, Event) and (by_answer.completion, by_answer.session) == ("6a", "")


def test_a_report_is_one_event_a_list_or_lines() -> None:
    line = orjson.dumps(SOUND)
    sound = read_report(line, str)
    assert read_report(b"[" + line + b"]", str) == sound
    assert read_report(line + b"\n\n" + line + b"\n", str) == [*sound, *sound]
    assert read_report(b"[]", str) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b'{"a": 1}\n{"a": ', "line 2 is not JSON"),
        (orjson.dumps([SOUND] * (MAX_BATCH + 1)), f"has {MAX_BATCH + 1} events, {MAX_BATCH} is the most"),
    ],
)
def test_a_body_that_is_no_report_is_refused_as_a_whole(body: bytes, message: str) -> None:
    with pytest.raises(NoReport, match=message):
        read_report(body, str)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"event_id": None}, "event_id is missing"),
        ({"event_id": "a b"}, "event_id=.*expected 1 to 128 letters"),
        ({"session": None}, "expected a session, or else the completion"),
        ({"completion": "x"}, "expected a session, or else the completion"),
        ({"kind": "like"}, 'kind="like": expected one of kept, reverted'),
        ({"kind": []}, "kind=a list of 0"),
        ({"value": 0}, "value=0 of thumbs: expected 1 or -1"),
        ({"kind": "edited", "value": 1.5}, "value=1.5 of edited: expected a number from 0 to 1"),
        ({"kind": "latency", "value": None}, "value=null of latency"),
        ({"value": True}, "value=true"),
        ({"turn": -1}, "turn=-1: expected a whole number from 0 on"),
        ({"turn": 1.0}, "turn=1.0"),
        ({"span": [0, 3]}, "span: say by turn or completion"),
        ({"turn": 0, "span": [3, 3]}, r"span=a list of 2: expected \[from, up to\]"),
        ({"user": ""}, "user: expected a text of 1 to 256"),
        ({"sent_at": 1e300}, "sent_at=.*expected seconds since 1970"),
        ({"comment": "nice"}, '"comment" is not a field of an event'),
    ],
)
def test_a_wrong_event_is_told_why_and_spoils_no_other(changes: dict[str, Json], message: str) -> None:
    refused, sound = read({**SOUND, **changes}, SOUND)
    assert isinstance(sound, Event)
    with pytest.raises(ValueError, match=message):
        raise ValueError(refused.reason if isinstance(refused, RefusedEvent) else "it was read")


def test_what_is_no_object_is_refused_and_happenings_need_no_value() -> None:
    assert [isinstance(one, RefusedEvent) for one in read(3, None, "x", [SOUND])] == [True] * 4
    kinds: list[Json] = [{"event_id": "a", "session": "s", "kind": kind} for kind in ("kept", "reverted", "abandoned")]
    assert [one.value for one in read(*kinds) if isinstance(one, Event)] == [1, 1, 1]

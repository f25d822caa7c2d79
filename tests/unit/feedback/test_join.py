"""The join depends on which events were received in time, and on nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.feedback import FOLLOW_UPS
from etude.feedback.follow_up import FollowUpRule, WordRule
from etude.feedback.join import MAX_SIGNALS, EventResult, LiveTurn, MatchedSession, join, result_of
from etude.feedback.turns import decode_records, encode_turn
from etude.types import Signal, SignalKind, Turn
from live_sessions import live_session, live_turn

WINDOW_S = 10.0
EXAMPLES = Path(__file__).parents[3] / "examples" / "extend"
ENDED = replace(live_session("s"), ended_at=100.0, turns=3)


def a_turn(index: int, follows: int | None = None, message: str = "") -> LiveTurn:
    return LiveTurn(turn=live_turn([1, index], [2]), completion=f"c{index}", follows=follows, message=message)


TURNS = [a_turn(0, message="do it"), a_turn(1, 0, "thanks"), a_turn(2, 1, "and now?")]

SIGNALS = st.builds(
    Signal,
    event_id=st.sampled_from("abcdefgh"),
    session_id=st.just("s"),
    kind=st.sampled_from(SignalKind),
    value=st.sampled_from([0.0, 1.0]),
    turn=st.sampled_from([None, 0, 1, 2, 3]),
    span=st.none(),
    user=st.just("u"),
    sent_at=st.floats(-1e9, 1e10),  # clocks that lie
    received_at=st.floats(90, 120),
)


@given(st.data(), st.lists(SIGNALS, max_size=12, unique_by=lambda one: one.event_id))
def test_order_and_repetition_change_nothing(data: st.DataObject, signals: list[Signal]) -> None:
    once, left_out = join(ENDED, TURNS, signals, window_s=WINDOW_S)
    again = (
        [replace(one, received_at=one.received_at + 1) for one in data.draw(st.lists(st.sampled_from(signals)))]
        if signals
        else []
    )
    shuffled = data.draw(st.permutations([*signals, *again]))
    assert join(ENDED, TURNS, shuffled, window_s=WINDOW_S) == (once, left_out)
    in_time = {one.event_id for one in signals if one.received_at <= 110 and one.turn != 3}
    assert {one.event_id for one in once.signals} == in_time
    assert len(once.signals) + left_out.total() == len(signals)
    assert left_out["late"] == sum(one.received_at > 110 for one in signals)


def test_clients_clocks_decide_nothing() -> None:
    signal = Signal(event_id="a", session_id="s", kind=SignalKind.KEPT, value=1, turn=None, span=None, user="u",
                    sent_at=0, received_at=105)  # fmt: skip
    lied = replace(signal, sent_at=1e10)
    assert [join(ENDED, TURNS, [one], window_s=WINDOW_S)[1].total() for one in (signal, lied)] == [0, 0]


def test_a_session_has_so_many_signals_at_most_the_earliest() -> None:
    signals = [
        Signal(event_id=f"{index}", session_id="s", kind=SignalKind.KEPT, value=1, turn=None, span=None, user="u",
               sent_at=0, received_at=50 + index / 1e4)
        for index in range(MAX_SIGNALS + 5)
    ]  # fmt: skip
    joined, left_out = join(ENDED, TURNS, reversed(signals), window_s=WINDOW_S)
    assert list(joined.signals) == signals[:MAX_SIGNALS]
    assert left_out == {"excess": 5}


@pytest.mark.parametrize(
    ("ended_at", "is_closed", "now", "result"),
    [
        (None, False, 1e9, EventResult.ACCEPTED),
        (100.0, False, 110.0, EventResult.ACCEPTED),
        (100.0, False, 110.1, EventResult.LATE),
        (100.0, True, 50.0, EventResult.LATE),
    ],
)
def test_windows_go_by_the_servers_clock(ended_at: float | None, is_closed: bool, now: float, result: str) -> None:
    place = MatchedSession(session_id="s", turn=None, ended_at=ended_at, is_closed=is_closed)
    assert result_of(place, now, WINDOW_S) is result
    assert result_of(None, now, WINDOW_S) is EventResult.UNKNOWN_SESSION


def test_users_next_messages_are_judged_unless_a_client_says() -> None:
    reported = Signal(event_id="a", session_id="s", kind=SignalKind.FOLLOW_UP, value=1, turn=0, span=None, user="u",
                  sent_at=0, received_at=100)  # fmt: skip
    turns = [*TURNS, a_turn(3, 2, "no, undo that")]
    judged = join(replace(ENDED, turns=4), turns, [], window_s=WINDOW_S, follow_up=WordRule())[0].signals
    assert [(one.event_id, one.turn, one.value) for one in judged] == [
        ("follow-up-v1.0", 0, 0),
        ("follow-up-v1.2", 2, 1),
    ]
    both = join(replace(ENDED, turns=4), turns, [reported], window_s=WINDOW_S, follow_up=WordRule())[0].signals
    assert [one.event_id for one in both] == ["a", "follow-up-v1.2"]


def test_a_judge_of_ones_own_is_named_in_the_recipe() -> None:
    judge = cast("FollowUpRule", FOLLOW_UPS.make(f"@{EXAMPLES / 'follow_up.py'}:German"))
    turns = [a_turn(0), a_turn(1, 0, "Nein, rückgängig bitte"), a_turn(2, 1, "Danke!"), a_turn(3, 2, "no, undo that")]
    judged = join(replace(ENDED, turns=4), turns, [], window_s=WINDOW_S, follow_up=judge)[0].signals
    assert [(one.event_id, one.value) for one in judged] == [("german-v1.0", 1), ("german-v1.1", 0)]


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ("no, that's not what I asked for", 1),
        ("Hmm, not quite", 1),
        ("Thanks, but it doesn't work", 1),
        ("Still failing with the same error", 1),
        ("try again", 1),
        ("I asked for a list", 1),
        ("thanks! now add a test", 0),
        ("LGTM", 0),
        ("it worked. next: docs", 0),
        ("and what about Windows?", None),
        ("no problem, go on", None),
        ("Can you explain why no tests ran?", None),
        ("There is no file called x; add one", None),
    ],
)
def test_the_rule_of_words(message: str, verdict: float | None) -> None:
    assert WordRule().judge(TURNS[0].turn, message) == verdict


@given(st.lists(st.tuples(st.integers(-1, 5), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=8))
def test_turns_come_back_as_they_were_sampled_whatever_they_continue(steps: list[tuple[int, list[int]]]) -> None:
    turns: list[Turn] = []
    links: list[int | None] = []
    for index, (link, new) in enumerate(steps):
        follows = link if 0 <= link < index else None
        prompt = [5] if follows is None else [*turns[follows].prompt_ids, *turns[follows].completion_ids]
        turns.append(live_turn([*prompt, *new], [index, 7], version=index))
        links.append(follows)
    records = []
    for turn, follows in zip(turns, links, strict=True):
        record, shared = encode_turn(turn, None if follows is None else turns[follows])
        assert shared == (0 if follows is None else turns[follows].length)
        records.append((record, follows, shared))
    for read, turn in zip(decode_records(records, "s"), turns, strict=True):
        assert read.prompt_ids.tolist() == turn.prompt_ids.tolist()
        assert read.completion_ids.tolist() == turn.completion_ids.tolist()
        assert read.versions.tolist() == turn.versions.tolist()

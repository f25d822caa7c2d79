"""Whole sessions of the coding agent with more work than fits into one context."""

from dataclasses import replace
from typing import Any

from etude.types import AnswerChecks
from playhouse import NO_ROOM, TASK, Playhouse, says

PAGES = {"p1": "tax 42\ncost 3", "p2": "fee 7", "p3": "rate 19"}
LOOKUP = replace(TASK, prompt="give tax fee", checks=AnswerChecks(answer="42 7", facts=("tax 42", "fee 7")))
LONG: dict[str, Any] = {
    "task": LOOKUP,
    "files": PAGES,
    "context": "summary",
    "summary_at_tokens": 100,
    "summary_request": "sum up",
    "max_tokens_per_summary": 33,
}


def test_a_full_context_is_summarised_and_starts_anew(house: Playhouse) -> None:
    result = house.play(
        [
            says("read p1", tokens=20),
            says("todo read all", tokens=100),
            says("p1 seen\nsummary\ntax 42\nnext p2", tokens=160),
            says("read p2", tokens=120),
            says("summary\nfee 7", finish="length", tokens=170),
            says("done 1", tokens=40),
            says("answer 42 7", tokens=60),
        ],
        **LONG,
    )
    assert house.questions == [
        "give tax fee",
        "1 tax 42\n2 cost 3",
        "todo 1\nsum up",
        "give tax fee\ntodo 1 read all\nsummary 1\ntax 42\nnext p2",
        "1 fee 7\nsum up",
        "give tax fee\ntodo 1 read all\nsummary 2\nfee 7",
        "ok",
    ]
    assert [len(request["messages"]) for request in house.requests] == [1, 3, 5, 1, 3, 1, 3]
    assert house.requests[2]["messages"][:3] == house.requests[1]["messages"]
    assert [headers.get("X-Etude-Turn") for headers in house.headers] == [
        *(None, None, "summary"),
        *(None, "summary"),
        *(None, None),
    ]
    assert [request["max_tokens"] for request in house.requests] == [40, 40, 33, 40, 33, 40, 40]
    assert (result.reason, result.answer) == ("submit", "42 7")
    assert result.counts == {"todo": 1, "read": 2, "done": 1, "submit": 1}
    assert result.measures == {
        "todo_opened": 1,
        "todo_open": 0,
        "summaries": 2,
        "restarts": 2,
        "facts_seen": 3,
        "facts_kept": 2,
    }


def test_an_empty_summary_is_what_there_is_to_go_on_from(house: Playhouse) -> None:
    result = house.play([says("read p1", tokens=100), says(""), says("answer 42")], **LONG)
    assert house.questions[-1] == "give tax fee\nsummary 1\n"
    assert (result.reason, result.measures["facts_seen"], result.measures["facts_kept"]) == ("submit", 1, 0)


def test_a_reply_that_ends_the_session_is_not_summarised(house: Playhouse) -> None:
    assert house.play([says("answer 1", tokens=100)], **LONG).measures["summaries"] == 0
    assert house.play([says("read p", finish="length", tokens=100)], **LONG).reason == "length"


def test_summaries_are_turns_like_others(house: Playhouse) -> None:
    result = house.play([says("read p1", tokens=100), says("fee 7"), says("read p2")], **LONG, max_turns=3)
    assert (result.reason, result.counts, result.measures["summaries"]) == ("turns", {"read": 2}, 1)


def test_a_truncated_context_starts_from_the_last_result(house: Playhouse) -> None:
    limits: dict[str, Any] = {"context": "truncate", "summary_at_tokens": 100, "max_summaries": 1}
    answers = [says("read p1"), says("read p2", tokens=100), says("read p3", tokens=100), says("answer 42 7")]
    result = house.play(answers, PAGES, task=LOOKUP, **limits)
    assert house.questions == ["give tax fee", "1 tax 42\n2 cost 3", "give tax fee\n1 fee 7", "1 rate 19"]
    assert result.measures == {"todo_opened": 0, "todo_open": 0, "summaries": 0, "restarts": 1}


def test_a_result_without_room_is_shortened_for_the_summary(house: Playhouse) -> None:
    answers = [says("read p1", tokens=60), NO_ROOM, NO_ROOM, NO_ROOM, says("summary\np1 is long"), says("submit")]
    result = house.play(answers, **LONG)
    assert house.questions == [
        "give tax fee",
        "1 tax 42\n2 cost 3",
        "1 tax 42\n2 cost 3\nsum up",
        "1 tax 42\n[cut]\nsum up",
        "1 ta\n[cut]\nsum up",
        "give tax fee\nsummary 1\np1 is long",
    ]
    assert result.reason == "submit"
    assert (result.measures["facts_seen"], result.measures["facts_kept"]) == (0, 0), "what was cut was not seen"


def test_a_request_that_never_fits_ends_the_session(house: Playhouse) -> None:
    result = house.play([says("read p2", tokens=100), *[NO_ROOM] * 4], **LONG)
    assert house.questions[1:] == ["1 fee 7\nsum up", "1 f\n[cut]\nsum up", "1\n[cut]\nsum up", "[cut]\nsum up"]
    assert (result.reason, result.counts) == ("context", {"read": 1})


def test_a_summary_too_long_to_go_on_from_ends_the_session(house: Playhouse) -> None:
    result = house.play([says("read p1", tokens=100), says("tax 42"), NO_ROOM], **LONG)
    assert (result.reason, result.measures["summaries"], result.measures["facts_kept"]) == ("context", 1, 1)

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.engines.http import ANSWER_TIMEOUT_S
from etude.errors import SessionLost
from etude.gateway.sessions import Message, Session, SessionLimits, Sessions
from etude.tokens.chat import ChatTemplate
from etude.types import Finish, Turn

SOURCE = ["def total(values):\n    return sum(values)\n", "for value in values:\n    total += value\n"] * 4


@cache
def template() -> ChatTemplate:
    return ChatTemplate.train(SOURCE, vocab_size=320)


def new_session(limits: SessionLimits | None = None) -> Session:
    session = Sessions(template(), limits or SessionLimits()).open("s", "key", now=0.0)
    assert session is not None
    return session


def sampled(prompt_ids: Sequence[int], ids: Sequence[int]) -> Turn:
    stops = ids[-1] == template().end_id
    return Turn(
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        completion_ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), -1.0, dtype=np.float32),
        versions=np.zeros(len(ids), dtype=np.int32),
        finish=Finish.STOP if stops else Finish.LENGTH,
    )


def user(content: str) -> Message:
    return Message(role="user", content=content)


def rendered(messages: Sequence[Message]) -> list[int]:
    """Messages that no one has sampled, and the opening of the next reply."""
    ids = [token for message in messages for token in template().render_message(message.role, message.content)]
    return ids + template().generation_prompt()


def reply_to(session: Session, messages: Sequence[Message], ids: Sequence[int]) -> tuple[list[int], Message]:
    """Play one model call; returns what is known now and the reply as the harness sees it."""
    prompt_ids = session.prompt_for(messages)
    text = template().decode(ids)
    session.record(messages, sampled(prompt_ids, ids), text)
    return [*prompt_ids, *ids], Message(role="assistant", content=text)


def test_a_fresh_conversation_is_rendered_whole() -> None:
    messages = [Message(role="system", content="fix it"), user("def total")]
    assert new_session().prompt_for(messages) == [
        *template().render_message("system", "fix it"),
        *template().render_message("user", "def total"),
        *template().generation_prompt(),
    ]


def test_sampled_tokens_are_continued_although_their_text_would_tokenise_differently() -> None:
    session, question = new_session(), user("go")
    one_by_one = [token for letter in "return" for token in template().encode(letter)]
    assert template().encode("return") != one_by_one
    ids, reply = reply_to(session, [question], [*one_by_one, template().end_id])
    assert reply.content == "return"
    assert session.prompt_for([question, reply, user("on")]) == [*ids, *rendered([user("on")])]


def test_a_reply_cut_off_by_its_allowance_is_closed_by_the_end_token() -> None:
    session, question = new_session(), user("go")
    ids, reply = reply_to(session, [question], template().encode("return"))
    assert session.prompt_for([question, reply, user("on")])[: len(ids) + 1] == [*ids, template().end_id]


def test_an_edited_history_opens_a_branch_from_the_deepest_node_that_it_keeps() -> None:
    session, end = new_session(), template().end_id
    question = user("go")
    first_ids, first = reply_to(session, [question], [40, 41, end])
    reply_to(session, [question, first, user("ran: ok")], [42, end])
    edited = user("ran: (cut)")
    assert session.prompt_for([question, first, edited]) == [*first_ids, *rendered([edited])]
    rewritten = [question, Message(role="assistant", content=first.content + "!"), user("ran: ok")]
    assert session.prompt_for(rewritten) == rendered(rewritten)


def test_where_one_reply_was_sampled_twice_the_newer_tokens_are_continued() -> None:
    session, question = new_session(), user("go")
    split, end = [token for letter in "return" for token in template().encode(letter)], template().end_id
    reply_to(session, [question], [*template().encode("return"), end])
    newer_ids, reply = reply_to(session, [question], [*split, end])
    assert session.prompt_for([question, reply])[: len(newer_ids)] == newer_ids
    assert len(session.turns) == 2


def test_a_request_that_comes_again_has_one_turn() -> None:
    session, question, end = new_session(), [user("go")], template().end_id
    prompt_ids = session.prompt_for(question)

    def record(messages: Sequence[Message], request_id: str) -> int:
        return session.record(messages, sampled(prompt_ids, [40, end]), "reply", request_id)

    assert session.answered("a", question) is None
    assert record(question, "a") == record(question, "a") == 0  # two attempts at the same time
    assert session.answered("a", question) == 0
    assert session.answered("a", [user("on")]) is None
    assert session.answered("b", question) is None
    assert [record([user("on")], "a"), record(question, "b")] == [1, 2]
    assert [record(question, ""), record(question, "")] == [3, 4]  # callers without ids
    assert session.answered("", question) is None
    assert len(session.turns) == 5


def test_role_and_content_are_told_apart() -> None:
    session = new_session()
    _, reply = reply_to(session, [user("go")], [40, template().end_id])
    with pytest.raises(ValueError, match="'userg'"):  # rendered afresh, hence not taken for the known conversation
        session.prompt_for([Message(role="userg", content="o"), reply])


CONTENTS = st.text(alphabet="aé return\n", max_size=6)
COMPLETIONS = st.lists(st.integers(0, 319), min_size=1, max_size=6)
MOVES = st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 50), CONTENTS, COMPLETIONS), max_size=8)


@given(MOVES)
def test_every_prompt_is_the_deepest_known_branch_and_then_only_new_text(
    moves: list[tuple[int, bool, int, str, list[int]]],
) -> None:
    """Random conversations with edits, against a model that compares whole histories."""
    session = new_session()
    known: dict[tuple[Message, ...], list[int]] = {(): []}
    for pick, edits, where, content, completion in moves:
        history = list(known)[pick % len(known)]
        if edits and history:
            place = where % len(history)
            edited = Message(role=history[place].role, content=history[place].content + "~")
            history = (*history[:place], edited, *history[place + 1 :])
        messages = (*history, user(content))
        deepest = max((node for node in known if messages[: len(node)] == node), key=len)
        assert session.prompt_for(messages) == [*known[deepest], *rendered(messages[len(deepest) :])]
        ids, reply = reply_to(session, messages, completion)
        known[*messages, reply] = ids if ids[-1] == template().end_id else [*ids, template().end_id]


def test_a_session_that_had_all_its_turns_is_refused_more() -> None:
    session = new_session(SessionLimits(max_turns=1))
    reply_to(session, [user("go")], [40])
    with pytest.raises(ValueError, match="1 turns"):
        session.prompt_for([user("go")])


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(ValueError, match="tool"):
        new_session().prompt_for([Message(role="tool", content="")])


def test_a_key_opens_its_own_session_until_that_is_closed() -> None:
    sessions = Sessions(template())
    first, second = sessions.open("a", "key a", now=0.0), sessions.open("b", "key b", now=0.0)
    assert first is not None
    assert sessions.authenticate("key a", now=1.0) is first
    assert sessions.authenticate("key b", now=1.0) is second
    assert sessions.authenticate("key c", now=1.0) is None
    assert sessions.close("a", now=2.0) is first
    assert sessions.authenticate("key a", now=2.0) is None
    assert len(sessions) == 1
    with pytest.raises(SessionLost, match="'a'"):
        sessions.close("a", now=2.0)


def test_a_turn_that_outlives_its_session_is_lost_loudly() -> None:
    sessions = Sessions(template())
    session = sessions.open("a", "key", now=0.0)
    assert session is not None
    sessions.close("a", now=0.0)
    with pytest.raises(SessionLost):
        session.record([user("go")], sampled([1], [2]), "")
    assert session.turns == []


def test_sessions_are_bounded_in_number_and_idle_ones_make_room() -> None:
    sessions = Sessions(template(), SessionLimits(max_sessions=2, idle_s=10.0))
    sessions.open("a", "key a", now=0.0)
    sessions.open("b", "key b", now=1.0)
    assert sessions.open("c", "key c", now=2.0) is None
    assert sessions.authenticate("key a", now=9.0) is not None
    assert sessions.authenticate("key b", now=11.0) is None  # idle since 1.0
    assert sessions.authenticate("key a", now=11.0) is not None
    assert sessions.open("c", "key c", now=11.0) is not None
    sessions.expire(now=21.0)
    assert len(sessions) == 0


def test_what_a_killed_rollouts_process_left_goes_but_no_rollout_is_that_slow() -> None:
    sessions = Sessions(template())
    sessions.open("a", "key a", now=0.0)
    sessions.expire(now=ANSWER_TIMEOUT_S + 60.0)
    assert len(sessions) == 1
    sessions.expire(now=15 * 60.0)
    assert len(sessions) == 0


def test_no_key_is_kept() -> None:
    sessions = Sessions(template())
    sessions.open("a", "a key that must not be kept", now=0.0)
    kept = [*sessions._by_key, *(entry.key_digest for entry in sessions._by_id.values())]
    assert kept
    assert all("must not" not in text for text in kept)

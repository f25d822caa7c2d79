"""A gateway that records live sessions and receives products' feedback, over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import jsonschema_rs
import orjson
import pytest

from etude.config.feedback import FeedbackConfig
from etude.errors import InfrastructureError
from etude.feedback.follow_up import WordRule
from etude.feedback.store import FeedbackStore
from etude.gateway.capture import live as live_module
from etude.gateway.capture.live import LiveRecorder
from etude.gateway.capture.sessions import SessionLimits
from etude.gateway.http.auth import KeyLimits
from etude.run.folder import RunFolder, feedback_place
from etude.run.keys import KeyRole, pseudonym, write_run_key
from etude.run.live_sessions import LiveSessions, open_live_sessions
from etude.run.process_name import GATEWAY
from etude.tokens.chat import ChatTemplate
from etude.types import JoinedSession, Json, LiveAnswer, SignalKind
from gateways import (
    BROWSER_KEY,
    CHAT,
    MESSAGES,
    OTHER_KEY,
    PRODUCT_KEY,
    QUESTION,
    Caller,
    Setting,
    fake_engine,
    gateway,
)

WINDOW_S = 3600.0
CONSENT = {"X_Etude_Consent": "train"}
ABOUT = {"X_Etude_User": "ada@example.org", "X_Etude_Template": "fix", "X_Etude_Region": "eu", **CONSENT}


def in_a_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """The test as pytest calls it."""

    @wraps(test)
    def run(**fixtures: object) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    write_run_key(tmp_path)
    run = RunFolder(tmp_path)
    ChatTemplate.train(["a b c"], vocab_size=300).save(run.model)
    return run


@asynccontextmanager
async def product(folder: RunFolder, **setting: object) -> AsyncIterator[Caller]:
    async with (
        open_live_sessions(folder, FeedbackConfig(window_s=WINDOW_S), GATEWAY) as live,
        gateway(Setting(fake_engine(), live=live, **setting)) as caller,  # type: ignore[arg-type]
    ):
        yield caller


def joined(folder: RunFolder) -> list[JoinedSession]:
    """The sessions that ended, as they would be handed on."""
    with FeedbackStore.open(feedback_place(folder), window_s=WINDOW_S) as store:
        store.close_windows(1e12, 100)
        return store.closed(100, WordRule())[0]


@dataclass(frozen=True)
class Answered:
    completion: str
    session: str
    """Id of the live session; empty where none is recorded."""
    reply: Json


async def ask(caller: Caller, name: str, messages: Json = QUESTION, **headers: str) -> Answered:
    body: Json = {"messages": messages, "max_tokens": 6}
    answer = await caller.send("POST", CHAT, PRODUCT_KEY, body, X_Etude_Session=name, **headers)
    assert answer.status == 200, answer.raw
    session = answer.headers.get("X-Etude-Session-Id", "")
    return Answered(str(answer.at("id")), session, answer.at("choices", 0, "message"))


async def report(caller: Caller, *events: Json, key: str = BROWSER_KEY) -> list[str]:
    answer = await caller.send("POST", "/feedback", key, list(events))
    assert answer.status == 202, answer.raw
    results = answer.at("results")
    assert isinstance(results, list)
    return [str(result["result"]) for result in results if isinstance(result, dict)]


@in_a_loop
async def test_a_session_with_consent_is_kept_token_for_token_with_what_was_said_of_it(folder: RunFolder) -> None:
    async with product(folder) as caller:
        first = await ask(caller, "chat-1", **ABOUT)
        follow_up: list[Json] = [*QUESTION, first.reply, {"role": "user", "content": "no, that is wrong"}]
        second = await ask(caller, "chat-1", follow_up, **ABOUT)
        assert first.session == second.session != ""
        edit: dict[str, Json] = {
            "event_id": "b",
            "completion": second.completion,
            "kind": "edited",
            "value": 0.5,
            "span": [0, 3],
            "user": "bob",
        }
        thumb: dict[str, Json] = {"event_id": "a", "session": "chat-1", "kind": "thumbs", "value": -1, "sent_at": 1e9}
        place = ("paths", "/feedback", "post", "requestBody", "content", "application/json", "schema")
        schema = (await caller.send("GET", "/openapi.json", BROWSER_KEY)).at(*place)
        assert isinstance(schema, dict)
        form = jsonschema_rs.validator_for(schema)
        assert form.is_valid([thumb, edit]) and not form.is_valid([{**thumb, "kind": "liked"}])
        assert await report(caller, thumb, edit, thumb) == ["accepted", "accepted", "duplicate"]
        status = await caller.send("GET", "/feedback/sessions/chat-1", PRODUCT_KEY)
        assert (status.at("turns"), status.at("signals"), status.at("ended_at")) == (
            2,
            {"edited": 1, "thumbs": 1},
            None,
        )
        turns = await caller.close("chat-1", PRODUCT_KEY)
    (session,) = joined(folder)
    facts = session.session
    assert (facts.owner, facts.name, facts.template, facts.region, facts.turns) == ("product", "chat-1", "fix", "eu", 2)
    users = folder.key(KeyRole.USERS)
    assert facts.user == pseudonym(users, "ada@example.org")
    assert not any(b"ada@" in file.read_bytes() for file in folder.path.glob("feedback.db*"))
    for stored, recorded in zip(session.turns, turns, strict=True):
        assert stored.prompt_ids.tolist() == recorded.prompt_ids.tolist()
        assert stored.completion_ids.tolist() == recorded.completion_ids.tolist()
        assert stored.logprobs.tolist() == recorded.logprobs.tolist()
    assert (session.messages, session.follows) == (("go", "no, that is wrong"), (None, 0))
    signals = [(one.kind, one.value, one.turn, one.span, one.user) for one in session.signals]
    assert signals == [
        (SignalKind.THUMBS, -1, None, None, facts.user),
        (SignalKind.EDITED, 0.5, 1, (0, 3), pseudonym(users, "bob")),
        (SignalKind.FOLLOW_UP, 1, 0, None, facts.user),
    ]


@in_a_loop
async def test_nothing_is_kept_without_consent_and_nothing_more_once_it_is_withdrawn(folder: RunFolder) -> None:
    async with product(folder) as caller:
        silent = await ask(caller, "silent")
        no = await ask(caller, "no", X_Etude_Consent="none")
        late = await ask(caller, "no", X_Etude_Consent="train")
        await ask(caller, "withdrawn", **CONSENT)
        assert await report(caller, {"event_id": "a", "session": "withdrawn", "kind": "kept"}) == ["accepted"]
        gone = await ask(caller, "withdrawn", X_Etude_Consent="none")
        assert {one.session for one in (silent, no, late, gone)} == {""}
        assert await report(caller, {"event_id": "b", "session": "withdrawn", "kind": "kept"}) == ["unknown_session"]
        assert len(await caller.close("withdrawn", PRODUCT_KEY)) == 2, "the product has its own session as ever"
    assert joined(folder) == []


@in_a_loop
async def test_consent_is_withdrawn_from_a_session_that_the_gateway_has_closed_or_never_had(folder: RunFolder) -> None:
    """Regression: it was deleted only where its gateway still had it in memory."""
    async with product(folder, limits=SessionLimits(idle_s=0.05)) as caller:
        for name, user in [("idle", "ada"), ("idle", "bob"), ("moved", "ada")]:
            await ask(caller, name, X_Etude_User=user, **CONSENT)
            await asyncio.sleep(0.1)
        await ask(caller, "idle", X_Etude_User="ada", X_Etude_Consent="none")
    async with product(folder) as other:
        await ask(other, "moved", X_Etude_User="ada", X_Etude_Consent="none")
    assert [one.session.user for one in joined(folder)] == [pseudonym(folder.key(KeyRole.USERS), "bob")]


@in_a_loop
async def test_an_answer_that_is_repeated_does_not_bring_a_deleted_session_back(folder: RunFolder) -> None:
    async with product(folder) as caller:
        again = {"X_Request_Id": "first", **CONSENT}
        first = await ask(caller, "chat", **again)
        with FeedbackStore.open(feedback_place(folder), window_s=WINDOW_S) as store:
            store.withdraw(first.session)
        assert (await ask(caller, "chat", **again)).completion == first.completion
    assert joined(folder) == []


@in_a_loop
async def test_a_call_without_a_session_is_one_of_a_single_turn(folder: RunFolder) -> None:
    async with product(folder) as caller:
        body = {"messages": QUESTION, "max_tokens": 4, "n": 2}
        answer = await caller.send("POST", CHAT, PRODUCT_KEY, body, **CONSENT)
        event: Json = {"event_id": "a", "completion": answer.at("id"), "kind": "kept", "value": 0.75}
        assert await report(caller, event) == ["accepted"]
    (session,) = joined(folder)
    assert (session.session.turns, session.session.name, session.signals[0].turn) == (2, "", 0)


@in_a_loop
async def test_every_api_and_stream_is_kept_before_its_end_is_sent(folder: RunFolder) -> None:
    async with product(folder) as caller:
        for path, stream in [(CHAT, True), (MESSAGES, False), (MESSAGES, True)]:
            body = {"messages": QUESTION, "max_tokens": 4, "stream": stream, "model": "policy"}
            answer = await caller.send("POST", path, PRODUCT_KEY, body, X_Etude_Session=f"s{stream}", **ABOUT)
            assert answer.status == 200 and answer.headers["X-Etude-Session-Id"]
        status = await caller.send("GET", "/feedback/sessions/sTrue", PRODUCT_KEY)
        assert status.at("turns") == 2


@in_a_loop
async def test_idle_sessions_end_and_a_name_that_is_used_again_is_another_session(folder: RunFolder) -> None:
    async with product(folder, limits=SessionLimits(idle_s=0.05)) as caller:
        first = await ask(caller, "chat", **CONSENT)
        await asyncio.sleep(0.1)
        second = await ask(caller, "chat", **CONSENT)
        assert first.session != second.session
        ended = await caller.send("GET", f"/feedback/sessions/{first.session}", PRODUCT_KEY)
        assert ended.at("ended_at") is not None
    async with product(folder):
        assert len(joined(folder)) == 2, "a gateway that starts again ends the sessions that it left open"


@in_a_loop
async def test_a_key_reports_of_its_own_product_alone(folder: RunFolder) -> None:
    event: Json = {"event_id": "a", "session": "chat", "kind": "thumbs", "value": 1}
    async with product(folder) as caller:
        await ask(caller, "chat", **CONSENT)
        assert await report(caller, event, key=OTHER_KEY) == ["unknown_session"]
        assert await report(caller, event, key=BROWSER_KEY) == ["accepted"]
        assert await report(caller, event, key=PRODUCT_KEY) == ["duplicate"]
        for method, path in [
            ("POST", CHAT),
            ("POST", "/sessions"),
            ("GET", "/feedback/sessions/chat"),
            ("GET", "/keys"),
        ]:
            assert (await caller.send(method, path, BROWSER_KEY, {"messages": QUESTION})).status == 403
        assert (await caller.send("GET", "/feedback/sessions/chat", OTHER_KEY)).status == 404
        assert (await caller.send("POST", "/feedback", "no key", event)).status == 401
        caller.parts.keyring.revoke("product")
        assert (await caller.send("POST", "/feedback", BROWSER_KEY, event)).status == 401


@in_a_loop
async def test_what_is_wrong_is_said_event_by_event_and_can_be_read_in_a_browser(folder: RunFolder) -> None:
    lines = b'{"event_id": "a", "session": "x", "kind": "thumbs", "value": 1}\n'
    lines += b'{"event_id": "b", "session": "x", "kind": "like"}'
    async with product(folder) as caller:
        answer = await caller.send("POST", "/feedback", BROWSER_KEY, lines)
        why = f'kind="like": expected one of {", ".join(SignalKind)}'
        refused = {"event_id": "b", "result": "refused", "why": why}
        assert answer.at("results") == [{"event_id": "a", "result": "unknown_session"}, refused]
        broken = await caller.send("POST", "/feedback", BROWSER_KEY, b"{")
        assert (broken.status, broken.headers["Access-Control-Allow-Origin"]) == (400, "*")
        preflight = await caller.send("OPTIONS", "/feedback", Origin="https://product.example")
        assert (preflight.status, preflight.headers["Access-Control-Allow-Headers"]) == (
            204,
            "authorization, content-type",
        )


@in_a_loop
async def test_events_use_up_the_budget_of_their_key(folder: RunFolder) -> None:
    async with product(folder, budget=KeyLimits(requests_per_minute=10)) as caller:
        events: list[Json] = [{"event_id": str(index), "session": "x", "kind": "kept"} for index in range(9)]
        await report(caller, *events)
        await report(caller, *events)
        refused = await caller.send("POST", "/feedback", BROWSER_KEY, orjson.dumps(events))
        assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (429, "*")


class AwayJournal:
    """A store that is out of reach, or does not answer."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers
        self.ended: list[str] = []
        self.withdrawn: list[str] = []

    async def keep(self, answer: LiveAnswer) -> None:
        if self.answers:
            raise InfrastructureError("the store is away")
        await asyncio.sleep(60)

    def end(self, session_id: str) -> None:
        self.ended.append(session_id)

    async def withdraw(self, session_id: str) -> None:
        self.withdrawn.append(session_id)
        if len(self.withdrawn) == 1:
            raise InfrastructureError("the store is away")

    async def withdraw_named(self, owner: str, name: str, user: str) -> None:
        raise InfrastructureError("the store is away")


@pytest.mark.parametrize("answers", [True, False])
@in_a_loop
async def test_users_are_served_while_the_store_is_away_and_the_session_ends_there(
    folder: RunFolder, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "KEEP_S", 0.05)
    journal = AwayJournal(answers=answers)
    async with open_live_sessions(folder, FeedbackConfig(window_s=1), GATEWAY) as real:
        recorder = LiveRecorder(journal, lambda user: user)
        live = LiveSessions(recorder=recorder, api=real.api)
        async with gateway(Setting(fake_engine(), live=live)) as caller:
            first = await ask(caller, "chat", **CONSENT)
            second = await ask(caller, "chat", **CONSENT)
            assert (recorder.unkept, journal.ended, second.session) == (1, [first.session], "")


@in_a_loop
async def test_a_withdrawal_that_is_not_stored_is_refused_and_can_be_repeated(folder: RunFolder) -> None:
    """Regression: it was answered, and nobody read that the store had failed. What was stored of a session whose later
    answers could not be counts, too.
    """
    journal = AwayJournal(answers=True)
    async with open_live_sessions(folder, FeedbackConfig(window_s=1), GATEWAY) as real:
        live = LiveSessions(recorder=LiveRecorder(journal, lambda user: user), api=real.api)
        async with gateway(Setting(fake_engine(), live=live)) as caller:
            session = (await ask(caller, "chat", **CONSENT)).session
            body: Json = {"messages": QUESTION, "max_tokens": 6}
            none = {"X_Etude_Session": "chat", "X_Etude_Consent": "none"}
            refused = await caller.send("POST", CHAT, PRODUCT_KEY, body, **none)
            assert (refused.status, refused.at("error", "code")) == (503, "feedback_unavailable"), refused.raw
            assert (await ask(caller, "chat", X_Etude_Consent="none")).session == ""
            await ask(caller, "chat", X_Etude_Consent="none")
            assert journal.withdrawn == [session, session]
            assert (await ask(caller, "another", X_Etude_Consent="none")).session == "", "its user is served"


@in_a_loop
async def test_headers_that_cannot_be_are_refused(folder: RunFolder) -> None:
    async with product(folder) as caller:
        for header, value in [("X_Etude_Consent", "yes"), ("X_Etude_Template", "a b"), ("X_Etude_User", "u" * 257)]:
            answer = await caller.send("POST", CHAT, PRODUCT_KEY, {"messages": QUESTION}, **{header: value})
            assert answer.error[0] == 400 and answer.error[3] == header.replace("_", "-")

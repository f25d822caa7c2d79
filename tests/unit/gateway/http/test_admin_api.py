"""The gateway's own requests over real HTTP: sessions, keys, engines, health and metrics."""

import asyncio
import fcntl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from etude.clock import SystemClock
from etude.config.inference import GatewayConfig
from etude.gateway.capture.sessions import SessionLimits
from etude.gateway.http.auth import Authenticator, KeyLimits, Scope
from etude.gateway.http.keyfile import KeyFile
from etude.gateway.routing.pool import EnginePool
from etude.protocols import Engine
from etude.types import Json
from gateways import (
    ADMIN_KEY,
    CHAT,
    MESSAGES,
    OTHER_KEY,
    PRODUCT_KEY,
    QUESTION,
    Caller,
    GatedClock,
    Setting,
    fake_engine,
    gateway,
    key_of,
    template,
)
from waiting import WAIT_S


def play(setting: Engine | Setting, scene: Callable[[Caller], Awaitable[None]]) -> None:
    async def run() -> None:
        async with gateway(setting if isinstance(setting, Setting) else Setting(setting)) as caller:
            await scene(caller)

    asyncio.run(run())


def opening(*messages: tuple[str, str]) -> list[int]:
    rendered = [token for role, content in messages for token in template().render_message(role, content)]
    return [*rendered, *template().generation_prompt()]


def test_every_route_but_health_needs_its_own_key() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        no_key = (401, "authentication_error", "invalid_api_key", None)
        not_you = (403, "permission_error", "forbidden", None)
        for path in ("/sessions", "/keys", "/engines"):
            assert (await caller.send("POST", path, "wrong")).error == no_key
            assert (await caller.send("POST", path, key)).error == not_you
        for path in ("/keys", "/engines", "/metrics"):
            assert (await caller.send("GET", path)).error == no_key
            assert (await caller.send("GET", path, PRODUCT_KEY)).error == not_you
        for path in (f"/sessions/{session_id}", "/keys/admin", "/engines/one"):
            assert (await caller.send("DELETE", path, key)).error == not_you
        for wrong in ("", "wrong", "clé"):
            assert (await caller.chat(wrong)).error == no_key
            assert (await caller.send("GET", "/v1/models", wrong)).error == no_key
        assert (await caller.chat(ADMIN_KEY)).error == not_you
        models = await caller.send("GET", "/v1/models", key)
        assert models.at("data", 0, "id") == "policy"
        assert (await caller.send("GET", "/v1/models/policy", key)).at("id") == "policy"
        assert (await caller.send("GET", "/v1/models/gpt", key)).status == 404
        assert (await caller.send("GET", "/openapi.json")).at("openapi") == "3.1.0"

    play(fake_engine(), scene)


def test_a_session_is_known_by_its_key_by_the_path_or_by_a_header() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        body = {"messages": QUESTION, "max_tokens": 4}
        ways = [
            await caller.send("POST", CHAT, key, body),
            await caller.send("POST", CHAT, "", body, x_api_key=key),
            await caller.send("POST", f"/s/{session_id}{CHAT}", key, body),
            await caller.send("POST", f"/s/{key}{CHAT}", "", body),
            await caller.send("POST", f"/s/{key}{CHAT}", "sk-of-somebody-else", body),
            await caller.send("POST", CHAT, key, body, X_Etude_Session=session_id),
        ]
        assert [answer.status for answer in ways] == [200] * len(ways)
        assert len(await caller.close(session_id)) == len(ways)

    play(fake_engine(), scene)


def test_a_product_names_its_own_sessions_only() -> None:
    async def scene(caller: Caller) -> None:
        body = {"messages": QUESTION, "max_tokens": 4}
        for path, headers in ((CHAT, {"X_Etude_Session": "mine"}), (f"/s/mine{CHAT}", {})):
            assert (await caller.send("POST", path, PRODUCT_KEY, body, **headers)).status == 200
        assert (await caller.send("POST", f"/s/mine{CHAT}", OTHER_KEY, body)).status == 200
        assert len(await caller.close("mine", PRODUCT_KEY)) == 2
        assert len(await caller.close("mine", OTHER_KEY)) == 1
        opened = await caller.send("POST", "/sessions", PRODUCT_KEY, {})
        session_id = str(opened.at("session_id"))
        assert (await caller.send("POST", f"/s/{session_id}{CHAT}", PRODUCT_KEY, body)).status == 200
        assert (await caller.send("POST", f"/s/{session_id}{CHAT}", OTHER_KEY, body)).status == 200
        assert (await caller.send("DELETE", f"/sessions/{session_id}", OTHER_KEY)).status == 200  # of its own
        assert len(await caller.close(session_id, PRODUCT_KEY)) == 1
        for bad in ("a%20b", "a/b", "x" * 200, "etude-x"):
            answer = await caller.send("POST", CHAT, PRODUCT_KEY, body, X_Etude_Session=bad)
            assert answer.status == 400

    play(fake_engine(), scene)


def test_a_call_without_a_session_leaves_nothing() -> None:
    async def scene(caller: Caller) -> None:
        assert (await caller.chat(PRODUCT_KEY)).status == 200
        assert (await caller.send("GET", "/healthz")).at("sessions") == 0

    play(fake_engine(), scene)


def test_a_rollouts_key_opens_its_own_session_and_nothing_else() -> None:
    async def scene(caller: Caller) -> None:
        first, key = await caller.open_session()
        second, other = await caller.open_session()
        body = {"messages": QUESTION, "max_tokens": 4}
        forbidden = (403, "permission_error", "forbidden", None)
        for path, headers in (
            (f"/s/{second}{CHAT}", {}),
            (CHAT, {"X_Etude_Session": second}),
            (f"/s/admin{CHAT}", {}),
        ):
            assert (await caller.send("POST", path, key, body, **headers)).error == forbidden
        no_key = (401, "authentication_error", "invalid_api_key", None)
        assert (await caller.send("POST", f"/s/{second}{CHAT}", "", body)).error == no_key
        assert (await caller.send("POST", f"/s/etude-rollout-guess{CHAT}", key, body)).error == no_key
        await caller.close(first)
        assert (await caller.chat(key)).error == no_key
        assert (await caller.send("POST", f"/s/{key}{CHAT}", "", body)).error == no_key
        assert (await caller.chat(other)).status == 200

    play(fake_engine(), scene)


def test_the_key_of_a_closed_session_is_dead() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        await caller.close(session_id)
        assert (await caller.chat(key)).error == (401, "authentication_error", "invalid_api_key", None)
        again = await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)
        assert again.error == (404, "not_found_error", "session_not_found", None)

    play(fake_engine(), scene)


def test_an_idle_session_dies_and_its_key_with_it() -> None:
    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        await asyncio.sleep(0.06)
        Authenticator(caller.parts.keyring, caller.parts.sessions).expire(SystemClock().now())
        assert (await caller.chat(key)).status == 401
        assert [one.key_id for one in caller.parts.keyring if one.session_id] == []

    play(Setting(fake_engine(), limits=SessionLimits(idle_s=0.05)), scene)


def test_the_engine_of_a_session_that_is_over_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten, forget = list[str](), EnginePool.forget

    def spy(pool: EnginePool, session: str) -> None:
        forgotten.append(session)
        forget(pool, session)

    async def close(caller: Caller) -> None:
        session_id, _ = await caller.open_session()
        await caller.close(session_id)
        assert forgotten == [session_id]

    async def call_once(caller: Caller) -> None:
        assert (await caller.chat(PRODUCT_KEY)).status == 200
        assert forgotten[-1].startswith("once-")
        forgotten.clear()

    async def idle(caller: Caller) -> None:
        session_id, _ = await caller.open_session()
        await asyncio.sleep(0.06)
        await caller.open_session()
        assert forgotten == [session_id]

    monkeypatch.setattr(EnginePool, "forget", spy)
    play(fake_engine(), close)
    play(fake_engine(), call_once)
    play(Setting(fake_engine(), limits=SessionLimits(idle_s=0.05)), idle)


def test_errors_before_parsing_have_the_shape_of_their_api() -> None:
    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        assert (await caller.send("GET", "/nowhere")).error == (404, "not_found_error", "not_found", None)
        for nowhere in ("/v1/messages/nowhere", f"/s/{key}/v1/messages/nowhere"):
            lost = await caller.send("GET", nowhere)
            assert (lost.status, lost.at("type"), lost.at("error", "type")) == (404, "error", "not_found_error")
        for nowhere in (f"/s/{key}/sessions", f"/s/{key}/healthz", "/s/", "/s//v1/models", f"/s/{key}/s/{key}{CHAT}"):
            assert (await caller.send("GET", nowhere, key)).status == 404
        wrong_method = await caller.send("GET", CHAT, key)
        assert wrong_method.error == (405, "invalid_request_error", "method_not_allowed", "POST")
        assert wrong_method.headers["Allow"] == "POST"
        large = await caller.send("POST", CHAT, key, b" " * 2**20 + b"{}")
        assert large.error == (413, "invalid_request_error", "request_too_large", None)
        unknown = await caller.send("POST", MESSAGES, "wrong", {})
        assert (unknown.status, unknown.at("error", "type")) == (401, "authentication_error")
        assert unknown.headers["request-id"].startswith("req_")
        models = await caller.send("GET", "/v1/models", "wrong", anthropic_version="2023-06-01")
        assert models.at("type") == "error"

    play(Setting(fake_engine(), max_body_bytes=2**20), scene)


def test_a_body_without_a_length_is_bounded_too() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 2**16

    async def scene(caller: Caller) -> None:
        async with caller.http.post(
            caller.url + CHAT, data=chunks(), headers={"Authorization": f"Bearer {PRODUCT_KEY}"}
        ) as response:
            assert response.status == 413

    play(Setting(fake_engine(), max_body_bytes=2**20), scene)


def test_a_key_beyond_its_budget_is_429() -> None:
    async def scene(caller: Caller) -> None:
        assert (await caller.chat(PRODUCT_KEY)).status == 200
        answer = await caller.chat(PRODUCT_KEY)
        assert answer.error == (429, "rate_limit_error", "key_budget_exceeded", None)
        assert int(answer.headers["Retry-After"]) >= 1
        assert (await caller.chat(OTHER_KEY)).status == 200
        page = (await caller.send("GET", "/metrics", ADMIN_KEY)).raw.decode()
        samples = {s.name: s.value for family in text_string_to_metric_families(page) for s in family.samples}
        assert samples["etude_budget_refusals_total"] == 1

    play(Setting(fake_engine(), budget=KeyLimits(tokens_per_minute=1)), scene)


def test_who_hangs_up_has_used_what_was_read() -> None:
    async def run() -> None:
        clock = GatedClock()
        async with gateway(Setting(fake_engine(clock, token_s=1.0), budget=KeyLimits(tokens_per_minute=1))) as caller:
            call = asyncio.create_task(caller.chat(PRODUCT_KEY, stream=True))
            await clock.waiting.wait()
            call.cancel()
            await caller.inflight(0)
            clock.gate.set()
            answer = await caller.chat(PRODUCT_KEY)
            assert answer.error == (429, "rate_limit_error", "key_budget_exceeded", None)

    asyncio.run(run())


def test_counting_tokens_is_a_request_of_its_keys_budget() -> None:
    async def scene(caller: Caller) -> None:
        body: Json = {"model": "policy", "messages": QUESTION}
        assert (await caller.send("POST", f"{MESSAGES}/count_tokens", PRODUCT_KEY, body)).status == 200
        answer = await caller.send("POST", f"{MESSAGES}/count_tokens", PRODUCT_KEY, body)
        assert (answer.status, answer.at("error", "type")) == (429, "rate_limit_error")

    play(Setting(fake_engine(), budget=KeyLimits(requests_per_minute=1)), scene)


def test_sessions_beyond_the_limit_are_429() -> None:
    async def scene(caller: Caller) -> None:
        await caller.open_session()
        answer = await caller.send("POST", "/sessions", ADMIN_KEY, {})
        assert answer.error == (429, "rate_limit_error", "too_many_sessions", None)
        named = await caller.send("POST", f"/s/mine{CHAT}", PRODUCT_KEY, {"messages": QUESTION})
        assert named.status == 200

    play(Setting(fake_engine(), limits=SessionLimits(max_rollouts=1)), scene)


def test_a_product_that_never_closes_its_sessions_takes_none_from_rollouts() -> None:
    async def scene(caller: Caller) -> None:
        for number in range(5):
            body = {"messages": QUESTION, "max_tokens": 8}
            assert (await caller.send("POST", f"/s/chat-{number}{CHAT}", PRODUCT_KEY, body)).status == 200
        own = await caller.send("POST", "/sessions", PRODUCT_KEY, {})
        assert own.status == 200
        await caller.open_session()
        assert (await caller.send("GET", "/healthz")).at("sessions") == 3
        assert (await caller.send("POST", "/sessions", PRODUCT_KEY, {})).status == 200
        assert (await caller.send("POST", "/sessions", PRODUCT_KEY, {})).status == 200
        assert (await caller.chat(str(own.at("api_key")))).status == 401

    play(Setting(fake_engine(), limits=SessionLimits(max_rollouts=1, max_production=2)), scene)


@pytest.mark.parametrize("limits", [SessionLimits(max_turns=1), SessionLimits(max_tokens=1)])
def test_a_session_that_is_full_refuses_by_name_and_keeps_its_turns(limits: SessionLimits) -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        assert (await caller.chat(key)).status == 200
        answer = await caller.chat(key)
        assert answer.error == (400, "invalid_request_error", "session_full", None)
        assert "open a new one" in str(answer.at("error", "message"))
        assert len(await caller.close(session_id)) == 1

    play(Setting(fake_engine(), limits=limits), scene)


def test_a_draining_gateway_ends_its_calls_and_takes_no_new_ones() -> None:
    async def run() -> None:
        clock = GatedClock()
        async with gateway(Setting(fake_engine(clock, token_s=1.0))) as caller:
            session_id, key = await caller.open_session()
            call = asyncio.create_task(caller.chat(key))
            await clock.waiting.wait()
            draining = asyncio.create_task(caller.parts.gateway.drain(600.0))
            await asyncio.sleep(0)
            health = await caller.send("GET", "/healthz")
            assert (health.status, health.at("draining")) == (503, True)
            turned_away = await caller.chat(key)
            assert turned_away.error == (503, "server_error", "draining", None)
            assert int(turned_away.headers["Retry-After"]) > 0
            assert (await caller.send("POST", "/sessions", ADMIN_KEY, {})).status == 503
            assert not draining.done()
            clock.gate.set()
            assert (await call).status == 200
            await asyncio.wait_for(draining, WAIT_S)
            assert len(await caller.close(session_id)) == 1

    asyncio.run(run())


def test_draining_does_not_wait_for_ever() -> None:
    async def run() -> None:
        clock = GatedClock()
        async with gateway(Setting(fake_engine(clock, token_s=1.0))) as caller:
            call = asyncio.create_task(caller.chat(PRODUCT_KEY))
            await clock.waiting.wait()
            await asyncio.wait_for(caller.parts.gateway.drain(0.05), WAIT_S)
            assert not call.done()
            call.cancel()

    asyncio.run(run())


def test_a_product_opens_sessions_on_its_own_account() -> None:
    over_budget = (429, "rate_limit_error", "key_budget_exceeded", None)

    async def scene(caller: Caller) -> None:
        key = str((await caller.send("POST", "/sessions", PRODUCT_KEY, {})).at("api_key"))
        assert (await caller.chat(key)).status == 200
        assert (await caller.chat(key)).error == over_budget
        assert (await caller.chat(PRODUCT_KEY)).error == over_budget
        assert (await caller.send("POST", "/sessions", PRODUCT_KEY, {})).error == over_budget
        page = (await caller.send("GET", "/metrics", ADMIN_KEY)).raw.decode()
        assert 'etude_calls_total{api="/v1/chat/completions",status="200",traffic="production"} 1.0' in page
        assert (await caller.send("DELETE", "/keys/product", ADMIN_KEY)).status == 200
        assert (await caller.chat(key)).error == (401, "authentication_error", "invalid_api_key", None)

    play(Setting(fake_engine(), budget=KeyLimits(requests_per_minute=2)), scene)


def test_keys_are_made_listed_and_revoked() -> None:
    async def scene(caller: Caller) -> None:
        made = await caller.send(
            "POST", "/keys", ADMIN_KEY, {"scope": "production", "label": "bot", "requests_per_minute": 2}
        )
        key_id, secret = str(made.at("key_id")), str(made.at("api_key"))
        assert secret.startswith("etude-production-")
        assert (await caller.chat(secret)).status == 200
        listed = await caller.send("GET", "/keys", ADMIN_KEY)
        assert secret.encode() not in listed.raw
        assert key_id.encode() in listed.raw
        assert (await caller.send("DELETE", f"/keys/{key_id}", ADMIN_KEY)).status == 200
        assert (await caller.chat(secret)).status == 401
        assert (await caller.send("DELETE", f"/keys/{key_id}", ADMIN_KEY)).status == 404
        for wrong in ({}, {"scope": "rollout"}, {"scope": "admin", "expires_s": 0}, {"scope": "admin", "power": 9}):
            assert (await caller.send("POST", "/keys", ADMIN_KEY, wrong)).status == 400

    play(fake_engine(), scene)


def test_a_key_that_cannot_be_kept_is_none(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"

    async def scene(caller: Caller) -> None:
        before = [key.key_id for key in caller.parts.keyring]
        with (tmp_path / ".keys.json.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused = await caller.send("POST", "/keys", ADMIN_KEY, {"scope": "production"})
        assert refused.status == 409
        assert "try again" in str(refused.at("error", "message"))
        assert [key.key_id for key in caller.parts.keyring] == before
        made = await caller.send("POST", "/keys", ADMIN_KEY, {"scope": "production"})
        assert (await caller.chat(str(made.at("api_key")))).status == 200
        assert [key.key_id for key in caller.parts.keyring] == [*before, made.at("key_id")]

    KeyFile(file, 0.0).add(key_of("filed", "filed", Scope.PRODUCTION))
    play(Setting(fake_engine(), config=GatewayConfig(keys=str(file))), scene)


def test_engines_come_and_go() -> None:
    async def scene(caller: Caller) -> None:
        added = await caller.send("POST", "/engines", ADMIN_KEY, {"name": "two", "url": "http://two", "region": "eu"})
        assert (added.at("name"), added.at("state"), added.at("region")) == ("two", "suspect", "eu")
        assert not added.at("is_lent")
        lent = await caller.send("POST", "/engines", ADMIN_KEY, {"name": "lent", "url": "http://lent", "is_lent": True})
        assert lent.at("is_lent")
        assert (await caller.send("DELETE", "/engines/lent", ADMIN_KEY)).status == 200
        again = await caller.send("POST", "/engines", ADMIN_KEY, {"name": "two", "url": "http://two"})
        assert again.status == 409
        listed = await caller.send("GET", "/engines", ADMIN_KEY)
        assert len(listed.body["engines"] if isinstance(listed.body, dict) else ()) == 2  # type: ignore[arg-type]  # a list
        assert (await caller.send("DELETE", "/engines/one", ADMIN_KEY)).status == 200
        assert (await caller.chat(PRODUCT_KEY)).status == 200
        assert (await caller.send("DELETE", "/engines/one", ADMIN_KEY)).status == 404
        for wrong in ({"name": "x", "url": "ftp://x"}, {"name": "", "url": "http://x"}, {"url": "http://x"}):
            assert (await caller.send("POST", "/engines", ADMIN_KEY, wrong)).status == 400

    play(fake_engine(), scene)


def test_metrics_are_prometheus_text_and_add_up() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        for _ in range(3):
            await caller.chat(key)
        await caller.chat(key, temperature=9)
        turns = await caller.close(session_id)
        answer = await caller.send("GET", "/metrics", ADMIN_KEY)
        samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(answer.raw.decode())
            for sample in family.samples
        ]
        calls = {labels["status"]: value for name, labels, value in samples if name == "etude_calls_total"}
        assert calls == {"200": 3, "400": 1}
        tokens = {labels["kind"]: value for name, labels, value in samples if name == "etude_tokens_total"}
        assert tokens["sampled"] == sum(len(turn.completion_ids) for turn in turns)
        assert tokens["prompt"] == sum(len(turn.prompt_ids) for turn in turns)
        states = {labels["state"]: value for name, labels, value in samples if name == "etude_engines"}
        assert states == {"healthy": 1, "suspect": 0, "stale": 0, "dead": 0}
        assert ("etude_first_token_seconds_count", {"traffic": "rollout"}, 3) in samples

    play(fake_engine(), scene)


def test_the_access_log_has_a_line_for_each_request_and_nothing_that_was_said(tmp_path: Path) -> None:
    file = tmp_path / "access.jsonl"
    answered: list[str] = []

    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        secret: list[Json] = [{"role": "user", "content": "my secret"}]
        answer = await caller.chat(key, secret)
        await caller.send("POST", f"/s/{key}{CHAT}", "", {"messages": secret, "max_tokens": 3, "stream": True})
        await caller.send("GET", f"/secret/{key}")
        await caller.chat(key, secret, temperature="secret")
        answered.extend([key, session_id, str(answer.at("choices", 0, "message", "content"))])

    play(Setting(fake_engine(), access_log=file), scene)
    text = file.read_text()
    key, session_id, reply = answered
    assert key not in text
    assert "secret" not in text
    assert len(reply) < 4 or reply not in text
    lines = [orjson.loads(line) for line in text.splitlines()]
    assert [(line["route"], line["status"]) for line in lines if "healthz" not in line["route"]] == [
        ("POST /sessions", 200),
        (f"POST {CHAT}", 200),
        (f"POST /s/{{session}}{CHAT}", 200),
        ("unknown", 404),
        (f"POST {CHAT}", 400),
    ]
    call = next(line for line in lines if line["route"] == f"POST {CHAT}")
    assert (call["session"], call["traffic"], call["versions"]) == (session_id, "rollout", [0])
    assert call["prompt_tokens"] > 0
    assert 0 < call["first_token_s"] <= call["seconds"]
    assert file.stat().st_mode & 0o077 == 0

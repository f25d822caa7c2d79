"""The gateway over real HTTP: calls in, captured turns out."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from etude.clock import SystemClock
from etude.config.inference import GatewayConfig
from etude.engines.fake import FakeEngine
from etude.gateway.routing.admission import AdmissionLimits
from etude.protocols import Completion, Engine, SamplingParams, TokenChunk
from etude.types import Json, RouteSpace, TokenIds, as_list
from gateways import (
    ADMIN_KEY,
    CHAT,
    LONG,
    MAX_LENGTH,
    MESSAGES,
    OTHER_KEY,
    PRODUCT_KEY,
    QUESTION,
    VOCAB_SIZE,
    Caller,
    GatedClock,
    Setting,
    fake_engine,
    gateway,
    template,
)
from waiting import WAIT_S, until


class BrokenEngine(FakeEngine):
    """An engine client with a bug: its error message quotes the prompt."""

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        raise RuntimeError(f"prompt {template().decode(as_list(prompt_ids))}")


class BreakingEngine(FakeEngine):
    """An engine client with a bug in the middle of a stream."""

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        async for chunk in super().stream(prompt_ids, params, session=session):
            yield chunk
            raise RuntimeError(f"prompt {template().decode(as_list(prompt_ids))}")


class ListeningEngine(FakeEngine):
    """Records the sampling parameters."""

    heard: SamplingParams | None = None

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        self.heard = params
        raise ValueError("enough heard")


def play(setting: Engine | Setting, scene: Callable[[Caller], Awaitable[None]]) -> None:
    async def run() -> None:
        async with gateway(setting if isinstance(setting, Setting) else Setting(setting)) as caller:
            await scene(caller)

    asyncio.run(run())


def opening(*messages: tuple[str, str]) -> list[int]:
    rendered = [token for role, content in messages for token in template().render_message(role, content)]
    return [*rendered, *template().generation_prompt()]


def test_a_session_is_captured_token_for_token() -> None:
    engine, end = fake_engine(), template().end_id
    letters = [token for letter in "return" for token in template().encode(letter)]
    engine.script([*letters, end], template().encode("total total total total"))

    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        first = await caller.chat(key)
        assert first.at("choices", 0, "message", "content") == "return"
        assert first.at("choices", 0, "finish_reason") == "stop"
        assert first.headers["X-Etude-Version"] == "0"
        engine.version = 3
        reply = first.at("choices", 0, "message")
        assert isinstance(reply, dict)
        second = await caller.chat(
            key, [*QUESTION, {**reply, "tool_calls": None}, {"role": "user", "content": "on"}], max_tokens=2
        )
        assert second.at("choices", 0, "finish_reason") == "length"
        assert second.headers["X-Etude-Version"] == "3"
        one, two = await caller.close(session_id)
        start, turn = opening(("user", "go")), opening(("user", "on"))
        assert one.prompt_ids.tolist() == start
        assert one.completion_ids.tolist() == [*letters, end]
        assert two.prompt_ids.tolist() == [*start, *letters, end, *turn]
        assert (one.finish.value, two.finish.value) == ("stop", "length")
        assert one.versions.tolist() == [0] * (len(letters) + 1)
        assert two.versions.tolist() == [3, 3]
        assert second.at("usage", "prompt_tokens_details", "cached_tokens") == len(start) + len(letters) + 1

    play(engine, scene)


def test_every_sampling_option_reaches_the_engine() -> None:
    engine = ListeningEngine(SystemClock(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)

    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        answer = await caller.chat(key, temperature=0.5, top_p=0.75, top_k=9, seed=3)
        assert answer.error == (400, "invalid_request_error", "invalid_request", None)

    play(engine, scene)
    assert engine.heard == SamplingParams(
        max_tokens=8, temperature=0.5, top_p=0.75, top_k=9, stop_ids=template().stop_ids, seed=3, priority=0
    )


def test_people_come_before_rollouts() -> None:
    engine = ListeningEngine(SystemClock(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)

    async def scene(caller: Caller) -> None:
        _, rollout = await caller.open_session()
        priorities = []
        for key in (rollout, PRODUCT_KEY):
            await caller.chat(key)
            assert engine.heard is not None
            priorities.append(engine.heard.priority)
        assert priorities[1] < priorities[0]

    play(engine, scene)


def test_an_engine_without_the_routes_that_a_trainer_needs_is_named_and_leaves_no_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        answer = await caller.chat(key)
        assert answer.error == (500, "server_error", "capture_failed", None)
        assert "no routes although they were requested" in str(answer.at("error", "message"))
        assert await caller.close(session_id) == ()

    play(Setting(fake_engine(), space=RouteSpace(layers=1, slots=1, experts=2)), scene)
    assert "no routes" in caplog.text


def test_without_an_allowance_the_model_may_fill_the_context() -> None:
    engine = fake_engine()
    engine.script([40] * (MAX_LENGTH - len(opening(("user", "go")))))

    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        answer = await caller.chat(key, max_tokens=None)
        assert answer.at("usage", "total_tokens") == MAX_LENGTH

    play(engine, scene)


def test_concurrent_sessions_do_not_mix() -> None:
    async def one(caller: Caller, number: int) -> None:
        session_id, key = await caller.open_session()
        messages: list[Json] = [{"role": "user", "content": f"go {number}"}]
        for _ in range(2):
            answer = await caller.chat(key, messages)
            assert answer.status == 200
            messages += [answer.at("choices", 0, "message"), {"role": "user", "content": "on"}]
        first, second = await caller.close(session_id)
        earlier = [*first.prompt_ids.tolist(), *first.completion_ids.tolist()]
        assert template().encode(f"go {number}") == first.prompt_ids.tolist()[1:-2]
        assert second.prompt_ids.tolist()[: len(earlier)] == earlier

    async def scene(caller: Caller) -> None:
        await asyncio.gather(*(one(caller, number) for number in range(20)))
        health = await caller.send("GET", "/healthz")
        assert (health.at("sessions"), health.at("inflight")) == (0, 0)

    play(fake_engine(SystemClock(), token_s=0.001), scene)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": [{"role": "oracle", "content": "go"}]}, "invalid_request", "messages[0].role"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"max_tokens": 1000}, "context_length_exceeded", "messages"),
        ({"messages": LONG}, "context_length_exceeded", "messages"),
        ({"messages": LONG, "max_tokens": None}, "context_length_exceeded", "messages"),
        ({"priority": 1}, "unsupported_parameter", "priority"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused_by_name(
    fields: dict[str, Json], code: str, param: str, stream: bool
) -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        body = {"messages": QUESTION, "max_tokens": 8, "stream": stream, **fields}
        answer = await caller.send("POST", CHAT, key, body)
        assert answer.error == (400, "invalid_request_error", code, param)
        assert answer.at("error", "message")
        assert await caller.close(session_id) == ()

    play(fake_engine(), scene)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        answer = await caller.send("POST", CHAT, key, body)
        assert answer.error == (400, "invalid_request_error", "invalid_request", None)

    play(fake_engine(), scene)


def test_an_engine_that_is_down_is_503_and_leaves_no_turn() -> None:
    engine = fake_engine()

    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        engine.fail_next(10**6)
        answer = await caller.chat(key)
        assert answer.error == (503, "server_error", "engine_unavailable", None)
        assert int(answer.headers["Retry-After"]) > 0
        sick = await caller.send("GET", "/healthz")
        assert (sick.status, sick.at("engine"), sick.at("sessions")) == (503, None, 1)
        engine.fail_next(0)
        async with asyncio.timeout(WAIT_S):
            while (well := await caller.send("GET", "/healthz")).status != 200:
                await asyncio.sleep(0.02)
        assert well.at("engine", "version") == 0
        assert well.at("engine", "digest") == (await engine.health()).digest
        assert (await caller.chat(key)).status == 200
        assert len(await caller.close(session_id)) == 1

    play(engine, scene)


def test_calls_beyond_the_limit_wait_and_beyond_the_line_are_429() -> None:
    async def run() -> None:
        clock = GatedClock()
        admission = AdmissionLimits(rollouts=1, waiting=1)
        async with gateway(Setting(fake_engine(clock, token_s=1.0), admission=admission)) as caller:
            _, key = await caller.open_session()
            first = asyncio.create_task(caller.chat(key))
            await clock.waiting.wait()
            second = asyncio.create_task(caller.chat(key))
            await caller.inflight(2)
            third = await caller.chat(key)
            assert third.error == (429, "rate_limit_error", "rate_limit_exceeded", None)
            assert int(third.headers["Retry-After"]) > 0
            clock.gate.set()
            assert [(await call).status for call in (first, second)] == [200, 200]

    asyncio.run(run())


def test_a_call_is_over_at_its_deadline() -> None:
    async def run() -> None:
        clock = GatedClock()
        admission = AdmissionLimits(rollouts=1)
        async with gateway(Setting(fake_engine(clock, token_s=1.0), admission=admission)) as caller:
            session_id, key = await caller.open_session()
            body = {"messages": QUESTION, "max_tokens": 4}
            slow = asyncio.create_task(caller.send("POST", CHAT, key, body, X_Etude_Deadline_S="0.3"))
            await clock.waiting.wait()
            waited = await caller.send("POST", CHAT, key, body, X_Etude_Deadline_S="0.05")
            assert waited.error[0] in (429, 504)
            assert (await slow).error == (504, "server_error", "deadline_exceeded", None)
            streamed = await caller.send("POST", CHAT, key, body | {"stream": True}, X_Etude_Deadline_S="0.05")
            assert streamed.status == 504
            await caller.inflight(0)
            for bad in ("soon", "-1", "nan", "1e3", ""):
                answer = await caller.send("POST", CHAT, key, body, X_Etude_Deadline_S=bad)
                assert answer.error == (400, "invalid_request_error", "invalid_request", "X-Etude-Deadline-S")
            assert await caller.close(session_id) == ()

    asyncio.run(run())


def test_a_version_that_is_not_served_yet_is_409_until_it_is() -> None:
    engine = fake_engine()

    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        body = {"messages": QUESTION, "max_tokens": 4}
        for path in (CHAT, MESSAGES):
            early = await caller.send("POST", path, key, body | {"model": "policy"}, X_Etude_Min_Version="1")
            assert early.status == 409
            assert int(early.headers["Retry-After"]) > 0
        engine.version = 1
        async with asyncio.timeout(WAIT_S):
            while (await caller.send("GET", "/healthz")).at("engine", "version") != 1:
                await asyncio.sleep(0.02)
        answer = await caller.send("POST", CHAT, key, body, X_Etude_Min_Version="1")
        assert (answer.status, answer.headers["X-Etude-Version"]) == (200, "1")
        assert (await caller.send("POST", CHAT, key, body, X_Etude_Min_Version="new")).status == 400

    play(engine, scene)


def test_calls_of_a_session_and_its_forks_wait_for_an_engine_with_its_version() -> None:
    engine = fake_engine()

    async def scene(caller: Caller) -> None:
        opened = await caller.send("POST", "/sessions", ADMIN_KEY, {"min_version": 1})
        origin, key = str(opened.at("session_id")), str(opened.at("api_key"))
        forked = await caller.send("POST", "/sessions", ADMIN_KEY, {"fork_of": origin})
        waiting = [asyncio.create_task(caller.chat(each)) for each in (key, str(forked.at("api_key")))]
        other = await caller.open_session()
        assert (await caller.chat(other[1])).headers["X-Etude-Version"] == "0"
        assert not any(call.done() for call in waiting)
        engine.version = 1
        async with asyncio.timeout(WAIT_S):
            answers = [await call for call in waiting]
        assert [(each.status, each.headers["X-Etude-Version"]) for each in answers] == [(200, "1")] * 2
        strict = await caller.send("POST", CHAT, key, {"messages": QUESTION}, X_Etude_Min_Version="2")
        assert strict.status == 409  # of its own wish a caller is told at once
        for wrong in ({"min_version": -1}, {"min_version": "1"}, {"min_version": 1, "fork_of": origin}):
            refused = await caller.send("POST", "/sessions", ADMIN_KEY, wrong)
            assert (refused.status, refused.at("error", "param")) == (400, "min_version")

    play(Setting(engine, config=GatewayConfig(engine_timeout_s=WAIT_S)), scene)


def test_a_session_closed_during_a_call_never_shows_a_reply_that_was_not_captured() -> None:
    async def run() -> None:
        clock = GatedClock()
        async with gateway(Setting(fake_engine(clock, token_s=1.0))) as caller:
            session_id, key = await caller.open_session()
            call = asyncio.create_task(caller.chat(key))
            await clock.waiting.wait()
            assert await caller.close(session_id) == ()
            clock.gate.set()
            assert (await call).error == (404, "not_found_error", "session_not_found", None)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_hangs_up_frees_its_place_and_leaves_no_turn(stream: bool) -> None:
    async def run() -> None:
        clock = GatedClock()
        async with gateway(Setting(fake_engine(clock, token_s=1.0))) as caller:
            session_id, key = await caller.open_session()
            call = asyncio.create_task(caller.chat(key, stream=stream))
            await clock.waiting.wait()
            call.cancel()
            await caller.inflight(0)
            clock.gate.set()
            assert await caller.close(session_id) == ()

    asyncio.run(run())


def test_a_retry_of_a_call_whose_answer_was_lost_gets_that_answer() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        lost = await caller.chat(key, request_id="a")
        again = await caller.chat(key, request_id="a")
        assert again.raw == lost.raw
        other = await caller.chat(key, request_id="b")
        assert other.at("choices") != lost.at("choices")
        assert (await caller.chat(key, [{"role": "user", "content": "on"}], request_id="a")).at("id") != lost.at("id")
        assert (await caller.chat(key, request_id="\udcff")).status == 200  # a header need not be text
        body = {"messages": QUESTION, "max_tokens": 8}
        message = await caller.send("POST", CHAT, key, body, x_stainless_retry_count="1")
        assert len(await caller.close(session_id)) == 4
        assert message.status == 200

    play(fake_engine(), scene)


def test_a_retry_of_a_stream_is_given_the_recorded_reply() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        lost = await caller.chat(key, request_id="a")
        again = await caller.chat(key, request_id="a", stream=True)
        answered = "".join(str(_delta(event).get("content") or "") for event in again.events)
        assert answered == lost.at("choices", 0, "message", "content")
        assert len(await caller.close(session_id)) == 1

    play(fake_engine(), scene)


def _delta(event: dict[str, Json]) -> dict[str, Json]:
    choices = event["choices"]
    assert isinstance(choices, list)
    first = choices[0]
    assert isinstance(first, dict)
    delta = first["delta"]
    assert isinstance(delta, dict)
    return delta


def test_a_retry_during_its_first_attempt_leaves_one_turn() -> None:
    async def run() -> None:
        clock = GatedClock()
        async with gateway(Setting(fake_engine(clock, token_s=1.0))) as caller:
            session_id, key = await caller.open_session()
            attempts = [asyncio.create_task(caller.chat(key, request_id="a")) for _ in range(2)]
            await caller.inflight(2)
            clock.gate.set()
            first, second = await asyncio.gather(*attempts)
            assert first.at("choices") == second.at("choices")
            assert len(await caller.close(session_id)) == 1

    asyncio.run(run())


def test_a_stream_says_what_the_whole_answer_would() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        whole = await caller.chat(key, seed=5)
        streamed = await caller.chat(key, seed=5, stream=True)
        assert (streamed.headers["Content-Type"], streamed.headers["Server"]) == ("text/event-stream", "etude")
        answered = "".join(str(_delta(event).get("content") or "") for event in streamed.events)
        assert answered == whole.at("choices", 0, "message", "content")
        one, two = await caller.close(session_id)
        assert one.completion_ids.tolist() == two.completion_ids.tolist()

    play(fake_engine(), scene)


def test_trouble_in_the_middle_of_a_stream_is_an_event_and_leaves_no_turn(caplog: pytest.LogCaptureFixture) -> None:
    engine = BreakingEngine(SystemClock(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)

    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        answer = await caller.chat(key, [{"role": "user", "content": "my secret"}], stream=True)
        assert answer.status == 200
        error = answer.events[-1]["error"]
        assert isinstance(error, dict)
        assert error["code"] == "internal_error"
        assert b"[DONE]" not in answer.raw
        assert b"secret" not in answer.raw
        assert await caller.close(session_id) == ()

    play(engine, scene)
    assert "secret" not in caplog.text


def test_a_bug_is_500_and_neither_answer_nor_log_quotes_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    engine = BrokenEngine(SystemClock(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)

    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        answer = await caller.chat(key, [{"role": "user", "content": "my secret"}])
        assert answer.error == (500, "server_error", "internal_error", None)
        assert b"secret" not in answer.raw

    with caplog.at_level(logging.DEBUG):
        play(engine, scene)
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


def test_prompts_of_tokens_come_back_as_they_went() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        prompt: list[Json] = [40, 41, 42]
        body = {"prompt": prompt, "max_tokens": 4, "return_token_ids": True}
        answer = await caller.send("POST", "/v1/completions", key, body)
        (turn,) = await caller.close(session_id)
        assert answer.at("choices", 0, "token_ids") == turn.completion_ids.tolist()
        assert turn.prompt_ids.tolist() == prompt
        assert (await caller.send("POST", "/v1/completions", key, {"prompt": [VOCAB_SIZE]})).status == 401

    play(fake_engine(), scene)


def test_counting_tokens_is_what_a_call_then_reads() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        body = {"model": "policy", "messages": QUESTION}
        counted = await caller.send("POST", f"{MESSAGES}/count_tokens", key, body)
        assert counted.at("input_tokens") == len(opening(("user", "go")))
        answer = await caller.send("POST", MESSAGES, key, body | {"max_tokens": 4})
        assert answer.at("usage", "input_tokens") == counted.at("input_tokens")
        assert len(await caller.close(session_id)) == 1

    play(fake_engine(), scene)


def test_one_product_does_not_take_every_place_and_all_of_the_line() -> None:
    clock = GatedClock()
    admission = AdmissionLimits(production=2, waiting=4)

    async def scene(caller: Caller) -> None:
        mine = [asyncio.create_task(caller.chat(PRODUCT_KEY)) for _ in range(12)]
        await until(lambda: sum(call.done() for call in mine) == 6)  # more than all the places and all the line
        yours = [asyncio.create_task(caller.chat(OTHER_KEY)) for _ in range(2)]
        await until(lambda: sum(call.done() for call in mine) == 8)  # two gave way
        clock.gate.set()
        assert [(await call).status for call in yours] == [200, 200]
        statuses = Counter([(await call).status for call in mine])
        assert statuses == {200: 4, 429: 8}

    play(Setting(fake_engine(clock, token_s=1.0), admission=admission), scene)

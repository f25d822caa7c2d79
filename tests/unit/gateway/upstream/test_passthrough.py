"""Between a harness and an external API: what is forwarded, retried, counted, and given up."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest

from api_models import CACHED_TOKENS, KEY, ApiModel, serving_model
from etude.clock import SystemClock
from etude.errors import SessionLost
from etude.gateway.upstream.apis import Api
from etude.gateway.upstream.calls import Upstream
from etude.gateway.upstream.passthrough import Passthrough
from etude.protocols import Session
from etude.run.serving import listening

BODY = {"model": "policy", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 5}
Use = Callable[[Passthrough, Session, aiohttp.ClientSession], Coroutine[None, None, None]]


def use(
    model: ApiModel, work: Use, *, api: Api = "openai", key: str = KEY, retry_s: float = 5.0, url: str = ""
) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as http, serving_model(model) as its_url:
            upstream = Upstream(url=url or its_url, model="m", api=api, key=key)
            passthrough = Passthrough(upstream, http, SystemClock(), retry_s=retry_s)
            async with listening(passthrough.app(), 0) as port:
                passthrough.serves_at(f"http://127.0.0.1:{port}")
                await work(passthrough, await passthrough.open(), http)

    asyncio.run(run())


async def post(http: aiohttp.ClientSession, session: Session, path: str, body: Any = BODY) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with http.post(f"{session.base_url}/{path}", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_a_chat_completion_is_answered_by_either_api_and_counted(api: Api) -> None:
    async def work(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        status, answer = await post(http, session, "chat/completions")
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "three four five")
        measures = passthrough.session(session.session_id).measures()
        prompt = 2 if api == "openai" else 2 + CACHED_TOKENS  # which Anthropic counts apart
        assert (measures["calls"], measures["prompt_tokens"], measures["sampled_tokens"]) == (1, prompt, 3)
        assert measures["cached_tokens"] == CACHED_TOKENS
        turns = await passthrough.close(session.session_id)
        assert [turn.length for turn in turns] == [0]
        with pytest.raises(SessionLost):
            passthrough.session(session.session_id)

    model = ApiModel(lambda messages: "three four five")
    use(model, work, api=api)
    assert model.requests[0]["model"] == "m"


def test_a_message_goes_to_anthropics_api_as_it_is() -> None:
    async def work(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        status, answer = await post(http, session, "messages")
        assert (status, answer["content"]) == (200, [{"type": "text", "text": "ok"}])

    use(ApiModel(lambda messages: "ok"), work, api="anthropic")


def test_a_body_that_no_api_can_be_sent_is_refused() -> None:
    async def work(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        nested: Any = []
        for _ in range(300):
            nested = [nested]
        tools = [{"type": "function", "function": {"name": "run", "parameters": nested}}]
        bodies: list[Any] = [[], {**BODY, "tools": tools}, {**BODY, "messages": [{"content": "no role"}]}]
        for body in bodies:
            status, answer = await post(http, session, "chat/completions", body)
            assert (status, answer["error"]["code"]) == (400, "invalid_request_error")

    model = ApiModel(lambda messages: "ok")
    use(model, work, api="anthropic")
    assert model.requests == []


def test_a_message_for_openais_api_is_refused_by_name() -> None:
    async def work(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        status, answer = await post(http, session, "messages")
        assert status == 400
        assert "/v1/messages" in answer["error"]["message"]

    use(ApiModel(lambda messages: "ok"), work)


def test_a_busy_api_is_asked_again_and_the_wait_is_no_latency() -> None:
    async def work(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        status, _ = await post(http, session, "chat/completions")
        (call,) = passthrough.session(session.session_id).calls
        assert (status, call.status) == (200, 200)
        assert call.waited_s > 0.4
        assert call.seconds < call.waited_s
        assert passthrough.fault is None

    model = ApiModel(lambda messages: "ok", [429, 529])
    use(model, work)
    assert len(model.requests) == 3


def test_an_api_that_stays_busy_is_given_up_and_said_to_be_unserved() -> None:
    async def work(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        status, _ = await post(http, session, "chat/completions")
        queue_time = passthrough.session(session.session_id).queue_time()
        assert (status, queue_time["unserved"]) == (503, True)
        assert await passthrough.close(session.session_id) == ()

    use(ApiModel(lambda messages: "ok", [503] * 9), work, retry_s=0.1)


def test_an_api_that_was_never_reached_is_a_fault_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.gateway.upstream.passthrough.UNREACHED_S", 0.1)

    async def work(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(30.0):
            status, _ = await post(http, session, "chat/completions")
        assert status == 503
        assert "has never answered: http://127.0.0.1:9/v1/chat/completions" in str(passthrough.fault)

    use(ApiModel(lambda messages: "ok"), work, retry_s=300.0, url="http://127.0.0.1:9")


def test_a_wrong_key_is_a_fault_of_all_calls() -> None:
    async def work(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        status, _ = await post(http, session, "chat/completions")
        assert status == 401
        assert "--key-env" in str(passthrough.fault)

    use(ApiModel(lambda messages: "ok"), work, key="wrong")


def test_a_bad_request_is_a_fault_only_before_the_first_answer() -> None:
    async def first(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        await post(http, session, "chat/completions")
        assert "no such parameter" in str(passthrough.fault)

    async def later(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        assert (await post(http, session, "chat/completions"))[0] == 200
        assert (await post(http, session, "chat/completions"))[0] == 400
        assert passthrough.fault is None

    use(ApiModel(lambda messages: "ok", [400], message="no such parameter"), first)
    use(ApiModel(lambda messages: "ok", [200, 400], message="no such parameter"), later)


def test_a_full_context_is_never_a_fault() -> None:
    async def work(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        status, answer = await post(http, session, "chat/completions")
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert passthrough.fault is None

    use(ApiModel(lambda messages: "ok", [400], message="prompt is too long"), work)


def test_only_the_key_of_the_session_opens_it() -> None:
    async def work(passthrough: Passthrough, session: Session, http: aiohttp.ClientSession) -> None:
        other = await passthrough.open()
        stranger = Session(session_id="", base_url=session.base_url, api_key=other.api_key)
        assert (await post(http, stranger, "chat/completions"))[0] == 401
        gone = Session(session_id="", base_url=session.base_url.replace(session.session_id, "x"), api_key=other.api_key)
        assert (await post(http, gone, "chat/completions"))[0] == 404

    use(ApiModel(lambda messages: "ok"), work)

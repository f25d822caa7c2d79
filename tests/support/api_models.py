"""A scripted policy behind OpenAI's and Anthropic's APIs over real HTTP, which counts tokens and may be busy."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import orjson
from aiohttp import web

KEY = "the key of the API"
CACHED_TOKENS = 3

Messages = Sequence[Mapping[str, Any]]
Policy = Callable[[Messages], str]
"""Messages, each with role and text → the reply."""


class ApiModel:
    """Answers what ``say`` makes of a conversation; the first calls get ``statuses`` instead."""

    def __init__(self, say: Policy, statuses: Sequence[int] = (), *, message: str = "scripted") -> None:
        self._say = say
        self._statuses = list(statuses)
        self._message = message
        self.requests: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return web.json_response({"object": "list", "data": []}, status=200 if given == KEY else 401)

    async def _refused(self, request: web.Request, key: str) -> web.Response | None:
        self.requests.append(orjson.loads(await request.read()))
        status = 401 if key != KEY else self._statuses.pop(0) if self._statuses else 200
        if status == 200:
            return None
        error = {"error": {"code": "scripted", "type": "scripted", "message": self._message}}
        return web.json_response(error, status=status, headers={"Retry-After": "0.01"})

    async def _chat(self, request: web.Request) -> web.Response:
        refused = await self._refused(request, request.headers.get("Authorization", "").removeprefix("Bearer "))
        if refused is not None:
            return refused
        body = self.requests[-1]
        text = self._say(body["messages"])
        prompt = sum(len(each["content"].split()) for each in body["messages"])
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": len(text.split()),
            "total_tokens": prompt + len(text.split()),
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
        }
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.json_response({"id": "c", "created": 1, "model": body["model"], "choices": [choice], "usage": usage})

    async def _messages(self, request: web.Request) -> web.Response:
        refused = await self._refused(request, request.headers.get("x-api-key", ""))
        if refused is not None:
            return refused
        body = self.requests[-1]
        flat = [{"role": each["role"], "content": _flat(each["content"])} for each in body["messages"]]
        text = self._say(flat)
        usage = {
            "input_tokens": sum(len(each["content"].split()) for each in flat),
            "cache_read_input_tokens": CACHED_TOKENS,
            "output_tokens": len(text.split()),
        }
        content = [{"type": "text", "text": text}]
        return web.json_response(
            {"id": "m", "model": body["model"], "content": content, "stop_reason": "end_turn", "usage": usage}
        )


@asynccontextmanager
async def serving_model(model: ApiModel) -> AsyncIterator[str]:
    """The base URL of a model on a free port."""
    runner = web.AppRunner(model.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def behind(model: ApiModel) -> Iterator[str]:
    """The URL of a model that is served by another thread."""
    loop, started, urls = asyncio.new_event_loop(), threading.Event(), list[str]()
    done = asyncio.Event()

    async def serve() -> None:
        async with serving_model(model) as url:
            urls.append(url)
            started.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(30)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def _flat(content: Any) -> str:
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)

"""A model with scripted replies, behind OpenAI's chat completions over real HTTP."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import orjson
from aiohttp import web

from etude.protocols import Session
from etude.types import Json

API_KEY = "the key of one session"


class ScriptedModel:
    """Answers each conversation with what ``say`` makes of its messages; keeps what it was asked."""

    def __init__(self, say: Callable[[Sequence[dict[str, Json]]], str], statuses: Sequence[int] = ()) -> None:
        self._say = say
        self._statuses = list(statuses)
        self.requests: list[dict[str, Json]] = []
        self.keys: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        status = self._statuses.pop(0) if self._statuses else 200
        if status != 200:
            return web.json_response({"error": {"code": "refused", "message": "scripted"}}, status=status)
        message = {"role": "assistant", "content": self._say(body["messages"])}
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )


@asynccontextmanager
async def serving(model: ScriptedModel) -> AsyncIterator[Session]:
    """A session of ``model`` on a free port."""
    app = web.Application()
    app.router.add_post("/s/one/v1/chat/completions", model.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield Session(session_id="one", base_url=f"http://127.0.0.1:{port}/s/one/v1", api_key=API_KEY)
    finally:
        await runner.cleanup()

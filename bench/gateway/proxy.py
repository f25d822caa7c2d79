"""The least that a gateway in Python can do: raw ASGI in front, an aiohttp client behind, bytes passed on unread.

A contestant of `bench gateway`: what étude's gateway costs on top of it is what knowing the tokens costs.
"""

import gc
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeAlias, final

import aiohttp
import uvicorn

Event: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]

PASSED_ON = (b"content-type", b"content-length")
"""Headers that a caller needs to read an answer."""


@final
class Proxy:
    """An ASGI application that forwards every request to ``upstream``."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """One request."""
        assert scope["type"] == "http"
        if self._http is None:  # it wants a running event loop
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        body, more = b"", True
        while more:
            event = await receive()
            body += event.get("body", b"")
            more = event.get("more_body", False)
        url = self._upstream + scope["path"]
        headers = {"content-type": "application/json"}
        async with self._http.request(scope["method"], url, data=body or None, headers=headers) as answer:
            passed = [(name, value) for name, value in answer.raw_headers if name.lower() in PASSED_ON]
            await send({"type": "http.response.start", "status": answer.status, "headers": passed})
            if answer.content_length is None:
                async for chunk in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body"})
            else:
                await send({"type": "http.response.body", "body": await answer.read()})


def main(arguments: Sequence[str]) -> None:
    """Serve on the loopback: PORT UPSTREAM."""
    port, upstream = arguments
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)  # pauses of the collector are no part of the limit
    uvicorn.run(
        Proxy(upstream),
        host="127.0.0.1",
        port=int(port),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main(sys.argv[1:])

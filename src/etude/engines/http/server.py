"""Any engine, served over HTTP to :class:`etude.engines.http.client.HttpEngine`.

    POST /generate  request → completion              (both as in engines/http/wire.py)
    POST /stream    request → chunks, the last with the completion
    GET  /health    → {"version", "digest", "running", "waiting"}

Errors are ``{"error": message}``: 400 for a request that can never be served, 413 for one that is too large, 503 with
``Retry-After`` while the engine is not ready, 429 with it while the engine has enough to do. What a vocabulary and a
context can hold is the engine's to say.

Consumes requests; produces completions; waits for the engine. Serve it with ``handler_cancellation=True``, so that a
caller that hangs up frees its place in the engine.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from etude.engines.http.wire import decode_request, encode_chunk, encode_completion
from etude.errors import EngineBusy, EngineUnavailable
from etude.protocols import Engine, TokenChunk

MAX_BODY_BYTES = 16 * 2**20
"""A longer request is refused unread; a prompt of a million tokens fits twice."""
RETRY_AFTER_S = 1
"""When a caller may try again while the engine is not ready."""
BINARY = "application/octet-stream"
BUSY, UNAVAILABLE = 429, 503


def engine_app(engine: Engine) -> web.Application:
    """A web application that serves ``engine``."""

    async def generate(request: web.Request) -> web.StreamResponse:
        prompt_ids, params, session = decode_request(await request.read())
        completion = await engine.generate(prompt_ids, params, session=session)
        return web.Response(body=encode_completion(completion), content_type=BINARY)

    async def stream(request: web.Request) -> web.StreamResponse:
        prompt_ids, params, session = decode_request(await request.read())
        response = web.StreamResponse(headers={"Content-Type": BINARY})
        async with aclosing(engine.stream(prompt_ids, params, session=session)) as chunks:
            await _send(chunks, response, request)
        return response

    async def health(_request: web.Request) -> web.StreamResponse:
        return web.json_response(asdict(await engine.health()))

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_responses])
    app.router.add_post("/generate", generate)
    app.router.add_post("/stream", stream)
    app.router.add_get("/health", health)
    return app


async def _send(chunks: AsyncIterator[TokenChunk], response: web.StreamResponse, request: web.Request) -> None:
    """Write chunks as they come. A refusal comes before the first one, and has a status of its own."""
    try:
        async for chunk in chunks:
            if not response.prepared:
                await response.prepare(request)
            await response.write(encode_chunk(chunk))
    except EngineUnavailable as error:
        if response.prepared:  # too late for a status: the connection breaks, and with it the stream
            raise ConnectionAbortedError(f"a stream ended early: {error}") from error
        raise
    await response.write_eof()


@web.middleware
async def _errors_as_responses(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as answers."""
    try:
        return await handler(request)
    except ValueError as error:
        return _error_response(400, str(error))
    except EngineBusy as error:
        return _error_response(BUSY, str(error))
    except EngineUnavailable as error:
        return _error_response(UNAVAILABLE, str(error))
    except web.HTTPRequestEntityTooLarge as error:
        return _error_response(413, error.text or "")


def _error_response(status: int, message: str) -> web.Response:
    response = web.Response(status=status, body=orjson.dumps({"error": message}), content_type="application/json")
    if status in (BUSY, UNAVAILABLE):
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response

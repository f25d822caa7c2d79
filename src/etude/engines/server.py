"""Any engine, served over HTTP to :class:`etude.engines.http.HttpEngine`.

    POST /generate  {"prompt_ids", "session", "max_tokens", "temperature", "stop_ids", "seed"}
                    → {"token_ids", "logprobs", "versions", "finish"}
    GET  /health    → {"version", "digest", "running", "waiting"}

Errors are ``{"error": message}``: 400 for a request that can never be served, 413 for one that is too large, 503 with
``Retry-After`` while the engine is not ready. Owns the checking of shapes; what a vocabulary and a context can hold is
the engine's to say.

Consumes requests; produces completions; waits for the engine. Serve it with ``handler_cancellation=True``, so that a
caller that hangs up frees its place in the engine.
"""

from dataclasses import asdict

import orjson
from aiohttp import web

from etude.errors import EngineUnavailable
from etude.protocols import Completion, Engine, SamplingParams
from etude.types import Json

MAX_BODY_BYTES = 16 * 2**20
"""A longer request is refused unread; a prompt of a million tokens fits twice."""
MAX_SEED = 2**63 - 1
"""What every random generator takes."""
RETRY_AFTER_S = 1
"""When a caller may try again while the engine is not ready."""

REQUIRED = frozenset({"prompt_ids", "session", "max_tokens"})
OPTIONAL = frozenset({"temperature", "stop_ids", "seed"})


def engine_app(engine: Engine) -> web.Application:
    """A web application that serves ``engine``."""

    async def generate(request: web.Request) -> web.Response:
        try:
            prompt_ids, params, session = _parse(await request.read())
            completion = await engine.generate(prompt_ids, params, session=session)
        except ValueError as error:
            return _refusal(400, str(error))
        except EngineUnavailable as error:
            return _refusal(503, str(error))
        except web.HTTPRequestEntityTooLarge as error:
            return _refusal(413, error.text or "")
        return _json(orjson.dumps(_answer(completion), option=orjson.OPT_SERIALIZE_NUMPY))

    async def health(request: web.Request) -> web.Response:
        try:
            return _json(orjson.dumps(asdict(await engine.health())))
        except EngineUnavailable as error:
            return _refusal(503, str(error))

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/generate", generate)
    app.router.add_get("/health", health)
    return app


def _parse(body: bytes) -> tuple[list[int], SamplingParams, str]:
    """Prompt ids, sampling parameters and session of a request. Raises ``ValueError`` naming the field at fault."""
    fields = _fields(body)
    session = fields["session"]
    if not isinstance(session, str):
        raise ValueError(f"session={session!r}: expected a string")
    temperature = fields.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature < 0:
        raise ValueError(f"temperature={temperature!r}: expected a number of at least 0")
    seed = fields.get("seed")
    params = SamplingParams(
        max_tokens=_whole("max_tokens", fields["max_tokens"], low=1),
        temperature=float(temperature),
        stop_ids=tuple(_ids("stop_ids", fields.get("stop_ids", []))),
        seed=None if seed is None else _whole("seed", seed, low=0),
    )
    return _ids("prompt_ids", fields["prompt_ids"]), params, session


def _fields(body: bytes) -> dict[str, Json]:
    fields: Json = orjson.loads(body)  # its JSONDecodeError is a ValueError
    if not isinstance(fields, dict):
        raise ValueError("the body must be a JSON object")
    if missing := REQUIRED - fields.keys():
        raise ValueError(f"missing {sorted(missing)}")
    if unknown := fields.keys() - REQUIRED - OPTIONAL:
        raise ValueError(f"unknown {sorted(unknown)}: expected {sorted(REQUIRED | OPTIONAL)}")
    return fields


def _whole(name: str, value: Json, *, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_SEED:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {low}")
    return value


def _ids(name: str, value: Json) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of token ids")
    return [_whole(f"{name}[{index}]", token, low=0) for index, token in enumerate(value)]


def _answer(completion: Completion) -> dict[str, object]:
    return {
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "versions": completion.versions,
        "finish": completion.finish.value,
    }


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _refusal(status: int, message: str) -> web.Response:
    response = _json(orjson.dumps({"error": message}), status)
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response

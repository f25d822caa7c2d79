"""Adapters of other runs on a run's native engine: added and removed over HTTP while it serves.

    POST /v1/load_lora_adapter     {"lora_name": NAME, "lora_path": URL of a run's weight store, "lora_version": n}
    POST /v1/unload_lora_adapter   {"lora_name": NAME}
    GET  /v1/adapters              {NAME: {"version": n, "digest": …}}

The first two are named as vLLM names them. An adapter comes out of a weight log, verified there, and is refused unless
the engine has exactly the base that it was trained on. Owns the routes; requests name an adapter in
``SamplingParams.adapter``, and to the gateway as the model ``policy:NAME``.
"""

import asyncio
from typing import Annotated, TypeVar

from aiohttp import web
from aiohttp.web import RouteDef
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.engines.native.engine import NativeEngine
from etude.errors import EtudeError
from etude.protocols import Engine
from etude.run.weight_log import open_store
from etude.weights.pull import pull
from etude.weights.replica import PulledWeights
from etude.weights.tensors import to_tensors

Body = TypeVar("Body", bound=BaseModel)
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class _Unload(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: Name


class _Load(_Unload):
    lora_path: str
    lora_version: int | None = None
    """``None``: the newest."""


def adapter_routes(engine: Engine) -> list[RouteDef]:
    """The routes for an engine; none unless it is a native one. Errors are answered with status 400."""
    if not isinstance(engine, NativeEngine):
        return []

    async def load(request: web.Request) -> web.StreamResponse:
        body = _parsed(_Load, await request.read())
        try:
            pulled = await asyncio.to_thread(_pull, body.lora_path, body.lora_version)
            state = to_tensors(pulled.state)
            engine.adapters.add(body.lora_name, state, version=pulled.version, digest=pulled.digest)
        except EtudeError as error:
            raise ValueError(f"{body.lora_path} cannot be served as {body.lora_name!r}: {error}") from error
        return web.json_response({"version": pulled.version, "digest": pulled.digest})

    async def unload(request: web.Request) -> web.StreamResponse:
        engine.adapters.remove(_parsed(_Unload, await request.read()).lora_name)
        return web.json_response({})

    async def show(_request: web.Request) -> web.StreamResponse:
        return web.json_response({one.name: {"version": one.version, "digest": one.digest} for one in engine.adapters})

    return [
        web.post("/v1/load_lora_adapter", load),
        web.post("/v1/unload_lora_adapter", unload),
        web.get("/v1/adapters", show),
    ]


def _pull(url: str, version: int | None) -> PulledWeights:
    return pull(open_store(url, creates=False), version)


def _parsed(kind: type[Body], body: bytes) -> Body:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(str(error)) from error

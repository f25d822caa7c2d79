"""The Tinker API over HTTP: paths in, :mod:`etude.tinker.service` out.

    POST /api/v1/forward_backward ──▶ {"request_id": …}          POST /api/v1/retrieve_future ──▶ its result, or 408

Every call but the health check has the server's key in ``X-API-Key``. Owns paths, bodies and status codes.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import orjson
from aiohttp import web

from etude.errors import EngineUnavailable, EtudeError, InfrastructureError, UserError
from etude.key_comparison import same_key
from etude.protocols import SamplingParams
from etude.tinker.jobs import Gone, ServerBusy
from etude.tinker.messages import decode_batch
from etude.tinker.sampling import MAX_SAMPLES, SampleRequest
from etude.tinker.service import TinkerService
from etude.tinker.training import AdamParams
from etude.types import Json

PROTOBUF = "application/x-protobuf"
MAX_BODY_BYTES = 64 * 1024 * 1024
FULL_TRAINING = (
    "this server trains all weights: there is no LoRA, the rank is not used. Learning rates for LoRA are about ten "
    "times too high here"
)
"""Told to each session, whose SDK prints it."""
CONFIG: Mapping[str, Json] = {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False}
"""Settings of clients that differ from their defaults: chunks of a batch come in order."""
REFUSED_SAMPLING = ("topk_sample_logprobs", "prompt_alt_tokens_k", "target_prompt_logprobs", "record_stability_info")
"""Options of a sample request that have no counterpart here; the last one is asked for by ``stable_reinforce``."""
MAX_TOP_K = 32
"""Likeliest tokens in the place of each prompt token: each costs a pass over the logits."""

Body: TypeAlias = dict[str, Any]
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def tinker_app(service: TinkerService, key: str) -> web.Application:
    """The application. ``key`` opens it."""
    api = _Api(service)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_responses, _keyed(key)])
    posts: Mapping[str, Callable[[Body], Awaitable[Json]]] = {
        "client/config": api.config,
        "client/dynamic_config": api.nothing,
        "telemetry": api.accept,
        "create_session": api.create_session,
        "session_heartbeat": api.heartbeat,
        "create_model": api.create_model,
        "get_info": api.info,
        "weights_info": api.weights_info,
        "optim_step": api.optim_step,
        "save_weights": api.save_weights,
        "load_weights": api.load_weights,
        "save_weights_for_sampler": api.save_weights_for_sampler,
        "create_sampling_session": api.create_sampling_session,
        "asample": api.sample,
    }
    for name, handler in posts.items():
        app.router.add_post(f"/api/v1/{name}", _json(handler))
    app.router.add_post("/api/v1/forward_backward", api.forward_backward)
    app.router.add_post("/api/v1/retrieve_future", api.retrieve)
    app.router.add_get("/api/v1/healthz", api.health)
    app.router.add_get("/api/v1/get_server_capabilities", api.capabilities)
    app.router.add_get("/api/v1/samplers/{sampler_id}", api.sampler)
    app.router.add_post("/api/v1/sessions/{session_id}/finish", api.finish)
    return app


class _Api:
    """The handlers of one service."""

    def __init__(self, service: TinkerService) -> None:
        self._service = service

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def capabilities(self, request: web.Request) -> web.Response:
        options = self._service.options
        model = {
            "model_name": options.name,
            "max_context_length": options.max_length,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def config(self, body: Body) -> Json:
        return dict(CONFIG)

    async def nothing(self, body: Body) -> Json:
        return {}

    async def accept(self, body: Body) -> Json:
        return {"status": "accepted"}

    async def create_session(self, body: Body) -> Json:
        session = self._service.open_session()
        return {"type": "create_session", "session_id": session, "warning_message": FULL_TRAINING}

    async def heartbeat(self, body: Body) -> Json:
        self._service.see(body["session_id"])
        return {"type": "session_heartbeat"}

    async def create_model(self, body: Body) -> Json:
        _require_model(body["base_model"], self._service.options.name)
        lora = body.get("lora_config") or {}
        for part in ("train_mlp", "train_attn", "train_unembed"):
            if not lora.get(part, True):
                raise UserError(f"{part}=False: {FULL_TRAINING}; leave it out")
        optimiser = (body.get("optimizer_config") or {}).get("type", "adamw")
        if optimiser != "adamw":
            raise UserError(f"optimizer {optimiser!r} is not one of this server's: leave it out, for AdamW")
        model_id = _model_id(body)
        self._service.create_client(f"{model_id}:create", model_id)
        return {"request_id": f"{model_id}:create", "model_id": model_id}

    async def info(self, body: Body) -> Json:
        if not self._service.has_client(body["model_id"]):
            raise Gone(f"there is no training client {body['model_id']!r}")
        name = self._service.options.name
        data: dict[str, Json] = {"arch": "decoder", "model_name": name, "tokenizer_id": name}
        return {
            "type": "get_info",
            "model_id": body["model_id"],
            "model_data": data,
            "model_name": name,
            "is_lora": False,
        }

    async def weights_info(self, body: Body) -> Json:
        self._service.saved(body["tinker_path"])
        return {"base_model": self._service.options.name, "is_lora": False}

    async def forward_backward(self, request: web.Request) -> web.Response:
        if request.content_type != PROTOBUF:
            raise UserError(f"forward_backward takes {PROTOBUF}, not {request.content_type}")
        batch = decode_batch(await request.read())
        request_id = f"{batch.model_id}:{batch.seq_id}"
        self._service.train(request_id, batch)
        return web.json_response({"request_id": request_id, "model_id": batch.model_id})

    async def optim_step(self, body: Body) -> Json:
        params = body.get("adam_params")
        if params is None:
            raise UserError("optim_step takes adam_params: AdamW is the optimiser of this server")
        request_id = _request_id(body)
        self._service.step(request_id, body["model_id"], AdamParams(**params))
        return {"request_id": request_id, "model_id": body["model_id"]}

    async def save_weights(self, body: Body) -> Json:
        request_id = _request_id(body)
        self._service.save(request_id, body["model_id"], body.get("path") or request_id.replace(":", "-"))
        return {"request_id": request_id, "model_id": body["model_id"]}

    async def load_weights(self, body: Body) -> Json:
        optimiser, path = bool(body["optimizer"]), body["path"]
        if body.get("model_id"):
            request_id = _request_id(body)
            self._service.load(request_id, body["model_id"], path, optimiser=optimiser)
            return {"request_id": request_id, "model_id": body["model_id"]}
        if body.get("base_model"):
            _require_model(body["base_model"], self._service.options.name)
        model_id = _model_id(body)
        request_id = f"{model_id}:create"
        self._service.create_client(request_id, model_id, path, optimiser=optimiser)
        return {"request_id": request_id, "model_id": model_id}

    async def save_weights_for_sampler(self, body: Body) -> Json:
        request_id = _request_id(body)
        if body.get("path"):
            self._service.export(request_id, body["model_id"], body["path"])
        else:
            self._service.sample_from_client(request_id, body["model_id"])
        return {"request_id": request_id, "model_id": body["model_id"]}

    async def create_sampling_session(self, body: Body) -> Json:
        if body.get("base_model"):
            _require_model(body["base_model"], self._service.options.name)
        sampler = await self._service.sample_from_checkpoint(body.get("model_path"))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def sampler(self, request: web.Request) -> web.Response:
        sampler = request.match_info["sampler_id"]
        self._service.require_sampler(sampler)
        return web.json_response({"sampler_id": sampler, "base_model": self._service.options.name})

    async def finish(self, request: web.Request) -> web.Response:
        self._service.close_session(request.match_info["session_id"])
        return web.Response(status=204)

    async def sample(self, body: Body) -> Json:
        sampler, seq_id = body.get("sampling_session_id"), body.get("seq_id")
        if sampler is None or seq_id is None:
            raise UserError("asample takes a sampling_session_id and a seq_id: make a sampling client first")
        request_id = f"{sampler}:{int(seq_id)}"
        request = sample_request(body, self._service.options.max_length)
        self._service.sample(request_id, sampler, request)
        return {
            "request_id": request_id,
            "sample_sequence_ids": [f"{request_id}:{number}" for number in range(request.count)],
        }

    async def retrieve(self, request: web.Request) -> web.Response:
        request_id = orjson.loads(await request.read())["request_id"]
        try:
            result = await self._service.jobs.result(request_id)
        except Gone:
            raise
        except (EtudeError, ValueError) as error:
            category = "server" if isinstance(error, InfrastructureError) else "user"
            return web.json_response({"error": str(error), "category": category})
        except OSError as error:
            return web.json_response({"error": str(error), "category": "server"})
        if result is None:
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(waiting, status=408)
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=PROTOBUF)
        return web.json_response(result)


def sample_request(body: Body, max_length: int) -> SampleRequest:
    """Read a request for samples. Raises :class:`~etude.errors.UserError` for what has no counterpart here."""
    if refused := [name for name in REFUSED_SAMPLING if body.get(name)]:
        raise UserError(f"{refused[0]} is not one of this server's options: leave it out")
    chunks = body["prompt"]["chunks"]
    if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
        raise UserError("a prompt has an image or a sound in it: this server samples from tokens alone")
    prompt = np.array([token for chunk in chunks for token in chunk["tokens"]], np.int32)
    count = int(body.get("num_samples", 1))
    if not 1 <= count <= MAX_SAMPLES:
        raise UserError(f"num_samples={count}: expected 1 to {MAX_SAMPLES}")
    given = body["sampling_params"]
    stops = given.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    room = max_length - len(prompt)
    params = SamplingParams(
        max_tokens=room if given.get("max_tokens") is None else int(given["max_tokens"]),
        temperature=float(given.get("temperature", 1.0)),
        top_p=float(given.get("top_p", 1.0)),
        top_k=max(0, int(given.get("top_k", -1))),
        seed=given.get("seed"),
        stop_ids=tuple(stop for stop in stops if isinstance(stop, int)),
    )
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    top_k = int(body.get("topk_prompt_logprobs") or 0)
    if not 0 <= top_k <= MAX_TOP_K:
        raise UserError(f"topk_prompt_logprobs={top_k}: expected 0 to {MAX_TOP_K}")
    return SampleRequest(
        prompt_ids=prompt,
        count=count,
        params=params,
        stop_texts=texts,
        scored_from=_scored_from(body, len(prompt)) if body.get("prompt_logprobs") or top_k else None,
        top_k=top_k,
    )


def _scored_from(body: Body, length: int) -> int:
    """Index of the first prompt token whose logprob is wanted: nothing predicts the one at 0."""
    last_n = body.get("prompt_logprobs_last_n")
    if last_n is None:
        return 1
    if not 1 <= int(last_n) < length:
        raise UserError(f"prompt_logprobs_last_n={last_n} of a prompt of {length} tokens: expected 1 to {length - 1}")
    return length - int(last_n)


def _require_model(name: str, served: str) -> None:
    if name != served:
        raise UserError(f"base_model={name!r} is not here: this server has {served!r}")


def _model_id(body: Body) -> str:
    """The id that the SDK derives likewise."""
    return f"{body['session_id']}:train:{int(body['model_seq_id'])}"


def _request_id(body: Body) -> str:
    return f"{body['model_id']}:{int(body['seq_id'])}"


def _json(handler: Callable[[Body], Awaitable[Json]]) -> Handler:
    """A handler of JSON objects as one of requests. A key that is missing or of a wrong type is refused."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read() or b"{}")
        if not isinstance(body, dict):
            raise UserError(f"the body is {body!r:.80}, expected a JSON object")
        try:
            return web.json_response(await handler(body))
        except KeyError as error:
            raise UserError(f"{error} is missing") from error
        except TypeError as error:
            raise UserError(f"a value has a wrong type: {error}") from error

    return handle


def _keyed(key: str) -> Any:  # a middleware, whose type aiohttp does not name
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-API-Key", "")
        if request.path != "/api/v1/healthz" and not same_key(given, key):
            return _error(401, "X-API-Key is not this server's key: set TINKER_API_KEY to what it printed")
        return await handler(request)

    return check


@web.middleware
async def _errors_as_responses(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Gone as error:
        return _error(404, str(error))
    except (ServerBusy, EngineUnavailable) as error:
        return _error(429, str(error))
    except (EtudeError, ValueError) as error:
        return _error(422, str(error))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"detail": message}, status=status)

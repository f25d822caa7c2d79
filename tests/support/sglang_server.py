"""A stand-in for SGLang: command line and HTTP API of ``sglang.launch_server`` 0.5.23, étude's engine behind them.

Names and types are those of its sources: ``srt/managers/io_struct.py`` for requests,
``srt/managers/tokenizer_manager.py`` for answers, ``srt/arg_groups/fields`` for arguments. Stricter than SGLang, which
ignores keys that it does not know.
"""

import argparse
import asyncio
import base64
import os
import stat
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from aiohttp import web

from etude.config.inference import EngineConfig, NativeOptions
from etude.engines.native.engine import NativeEngine, Weights
from etude.models.checkpoint import StoredCheckpoint
from etude.models.decoder import Decoder
from etude.models.fast import FastArithmetic
from etude.protocols import SamplingParams
from etude.types import Routes

REQUESTS: dict[str, dict[str, type]] = {
    "/generate": {
        "input_ids": list, "sampling_params": dict, "return_logprob": bool, "return_routed_experts": bool,
        "priority": int, "stream": bool,
    },
    "/pause_generation": {"mode": str},
    "/continue_generation": {"torch_empty_cache": bool},
    "/update_weights_from_disk": {"model_path": str, "weight_version": str, "flush_cache": bool},
}  # fmt: skip
"""Keys of bodies and their types, as far as étude sends any."""
SAMPLING: dict[str, tuple[type, ...]] = {
    "max_new_tokens": (int,), "temperature": (float, int), "stop_token_ids": (list,), "ignore_eos": (bool,),
    "top_p": (float,), "top_k": (int,), "sampling_seed": (int,),
}  # fmt: skip
"""Keys of ``sampling_params`` (``srt/sampling/sampling_params.py``) and their types, in the same way."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def stand_in(folder: Path, script: Path = Path(__file__)) -> Path:
    """An interpreter that runs the stand-in for ``python -m sglang.launch_server``."""
    program = folder / "python"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    program.write_text(
        f'#!/bin/sh\ntest "$1 $2" = "-m sglang.launch_server" || exit 3\nshift 2\n'
        f'PYTHONPATH="{path}" exec "{sys.executable}" "{script}" "$@"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def arguments() -> argparse.Namespace:
    """The command line; anything else ends the program, as SGLang's own parser does."""
    parser = argparse.ArgumentParser("sglang.launch_server", allow_abbrev=False)
    for name in ("model-path", "host", "weight-version", "log-level"):
        parser.add_argument(f"--{name}")
    for name in ("port", "context-length", "max-running-requests"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["auto", "half", "float16", "bfloat16", "float", "float32"])
    parser.add_argument("--sampling-defaults", choices=["openai", "model"])
    for name in ("skip-tokenizer-init", "enable-priority-scheduling", "schedule-low-priority-values-first"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    return parser.parse_args()


class StandIn:
    """The server."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self._settings = settings
        self._version = settings.weight_version
        weights = self._load(Path(settings.model_path))
        options = NativeOptions(swap="recompute")
        config = EngineConfig(
            max_running=settings.max_running_requests, max_length=settings.context_length, options=options
        )
        self._engine = NativeEngine(weights, config, seed=0, record_routes=settings.enable_return_routed_experts)
        self._spec = weights.model.spec
        self._running = 0
        self._is_aborting = False
        self._open = asyncio.Event()
        self._open.set()

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self.health)
        app.router.add_get("/model_info", self.info)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/pause_generation", self.pause)
        app.router.add_post("/continue_generation", self.resume)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.cleanup_ctx.append(self._stepping)
        return app

    async def health(self, _: web.Request) -> web.Response:
        """Without ``SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0`` it would sample."""
        assert os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
        return web.Response()

    async def info(self, _: web.Request) -> web.Response:
        """A part of the answer of ``model_info``."""
        return web.json_response({"model_path": self._settings.model_path, "weight_version": self._version})

    async def pause(self, request: web.Request) -> web.Response:
        """Mode ``abort``: what runs ends with the tokens that it has; what comes waits."""
        assert (await read(request))["mode"] == "abort"
        self._open.clear()
        self._is_aborting = True
        while self._running:
            await asyncio.sleep(0.01)
        self._is_aborting = False
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        """Let calls in."""
        await read(request)
        self._open.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update(self, request: web.Request) -> web.Response:
        """Load another checkpoint."""
        body = await read(request)
        await self._engine.swap(self._load(Path(body["model_path"])))
        self._version = body["weight_version"]
        message = f"Succeeded to update model weights. Weight version updated to {self._version}."
        return web.json_response({"success": True, "message": message, "num_paused_requests": 0})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A stream in which each event has all so far."""
        body = await read(request)
        sampling = checked(body["sampling_params"], SAMPLING)
        assert sampling["ignore_eos"] and body["stream"] and body["return_logprob"]
        await self._open.wait()
        self._running += 1
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await response.prepare(request)
            async for event in self._events(body, sampling):
                await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        finally:
            self._running -= 1
        return response

    async def _events(self, body: dict[str, Any], sampling: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        prompt, output, entries = body["input_ids"], list[int](), list[list[Any]]()
        params = SamplingParams(
            max_tokens=sampling["max_new_tokens"],
            temperature=sampling["temperature"],
            stop_ids=tuple(sampling["stop_token_ids"]),
            priority=body["priority"],
            want_routes=body["return_routed_experts"],
        )
        async with aclosing(self._engine.stream(prompt, params, session="")) as chunks:
            async for chunk in chunks:
                output += chunk.token_ids.tolist()
                entries += [[float(p), int(t), None] for p, t in zip(chunk.logprobs, chunk.token_ids, strict=True)]
                finish: dict[str, Any] | None = None
                routes = None if chunk.completion is None else chunk.completion.routes
                if chunk.completion is not None and output[-1] in params.stop_ids:
                    finish = {"type": "stop", "matched": output[-1]}
                elif chunk.completion is not None:
                    finish = {"type": "length", "length": len(output)}
                elif self._is_aborting:
                    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                    routes = await self._routes([*prompt, *output]) if params.want_routes else None
                meta = {
                    "id": "0", "finish_reason": finish, "prompt_tokens": len(prompt), "weight_version": self._version,
                    "output_token_logprobs": entries, "completion_tokens": len(output), "cached_tokens": 0,
                }  # fmt: skip
                if routes is not None:
                    meta["routed_experts"] = self._encode(routes)
                yield {"output_ids": output, "meta_info": meta}
                if finish is not None:
                    return

    async def _routes(self, read_ids: list[int]) -> Routes:
        """The routes of all but the last one."""
        params = SamplingParams(max_tokens=1, temperature=0.0, want_routes=True)
        completion = await self._engine.generate(read_ids, params, session="")
        assert completion.routes is not None
        return completion.routes[: len(read_ids) - 1]

    def _encode(self, routes: Routes) -> str:
        """Base64 of int32 [tokens, hidden layers, k]."""
        whole = np.zeros((len(routes), self._spec.layers, routes.shape[2]), np.int32)
        whole[:, list(self._spec.sparse_layers)] = routes
        return base64.b64encode(whole.tobytes()).decode("ascii")

    def _load(self, folder: Path) -> Weights:
        stored = StoredCheckpoint(folder)
        model = Decoder(stored.spec, FastArithmetic(DTYPES[self._settings.dtype]))
        stored.load(model)
        return Weights(model, 0, "")

    async def _stepping(self, _: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._engine.run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def read(request: web.Request) -> dict[str, Any]:
    """A body whose keys and types are known."""
    types = {name: (kind,) for name, kind in REQUESTS[request.path].items()}
    return checked(orjson.loads(await request.read()), types)


def checked(body: dict[str, Any], types: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The body, if it is as ``types`` say."""
    for name, value in body.items():
        if name not in types or type(value) not in types[name]:
            text = orjson.dumps({"error": {"message": f"{name} = {value!r}"}}).decode()
            raise web.HTTPUnprocessableEntity(text=text)
    return body


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = arguments()
    web.run_app(StandIn(chosen).app(), host=chosen.host, port=chosen.port, print=None)

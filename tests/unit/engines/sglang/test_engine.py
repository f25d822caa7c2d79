"""SGLang's HTTP API as the sources of SGLang 0.5.23 have it; no server of SGLang was asked."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from etude.engines.api_client import ApiClient, RequestLimits
from etude.engines.sglang.engine import SglangEngine, SglangFeatures
from etude.errors import DamagedError, EngineBusy, EngineUnavailable
from etude.protocols import SamplingParams
from etude.types import Finish, TensorSpec
from etude.weights.digest import state_digest
from etude.weights.interop.checkpoint import write_checkpoint
from etude.weights.state import StoredTensor
from waiting import until

PROMPT = [5, 6, 7]
OFFER = SglangFeatures(sparse_layers=(1,), hidden_layers=2, experts_per_token=2, seeds=True)


class Recorded:
    """Plays the server: its shapes, none of its work. Token n of a sequence is n, its logprob −n."""

    def __init__(self) -> None:
        self.version = "1"
        self.requests: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.paused = asyncio.Event()
        self.hold_after: int | None = None
        """Stop after so many tokens, or before the first one, and wait for a pause, which aborts."""
        self.status = 200
        self.loads = True

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk"):
            app.router.add_post(path, self.control)
        app.router.add_get("/health", self.health)
        app.router.add_get("/model_info", self.info)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "recorded"}}, status=self.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        first, count = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        stops = body["sampling_params"]["stop_token_ids"]
        output: list[int] = []
        finish: dict[str, Any] | None = None
        if self.hold_after == 0:
            await self.paused.wait()
            self.hold_after = None
            finish = {"type": "abort", "message": "Abort in waiting queue"}
            await self.send(response, body, output, finish)
        while finish is None:
            output.append(first + len(output))
            if output[-1] in stops:
                finish = {"type": "stop", "matched": output[-1]}
            elif len(output) == count:
                finish = {"type": "length", "length": count}
            elif len(output) == self.hold_after:
                await self.send(response, body, output, None)
                await self.paused.wait()
                self.hold_after = None
                finish = {"type": "abort", "message": "Abort before prefill"}
            await self.send(response, body, output, finish)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def send(
        self, response: web.StreamResponse, body: dict[str, Any], output: list[int], finish: dict[str, Any] | None
    ) -> None:
        tokens = len(body["input_ids"]) + len(output)
        experts = np.arange((tokens - 1) * 4, dtype=np.int32) + 1000 * len(self.requests)
        meta = {
            "id": "5f1c",
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.version,
            "num_retractions": 0,
            "output_token_logprobs": [[-float(token), token, None] for token in output],
            "completion_tokens": len(output),
            "cached_tokens": 0,
        }
        if body["return_routed_experts"] and finish is not None and output:
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode("ascii")
        event = {"text": "", "output_ids": output, "meta_info": meta}
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")

    async def control(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.calls.append(request.path)
        if request.path == "/pause_generation":
            self.paused.set()
            return web.json_response({"message": "Generation paused successfully.", "status": "ok"})
        if request.path == "/continue_generation":
            self.paused.clear()
            return web.json_response({"message": "Generation continued successfully.", "status": "ok"})
        if not self.loads:
            answer = {"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}
            return web.json_response(answer, status=400)
        self.version = body["weight_version"]
        return web.json_response(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200)

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "is_generation": True, "weight_version": self.version})


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[SglangEngine, Recorded]]:
    recorded = Recorded()
    async with TestServer(recorded.app()) as server, ClientSession() as http:
        client = ApiClient("SGLang", str(server.make_url("")), http)
        engine = SglangEngine(client, RequestLimits(vocab_size=100, max_length=64), OFFER)
        await engine.start(1, checkpoint(folder / "1"))
        yield engine, recorded


def play(folder: Path, scene: Callable[[SglangEngine, Recorded], Awaitable[None]]) -> None:
    async def run() -> None:
        async with served(folder) as (engine, recorded):
            await scene(engine, recorded)

    asyncio.run(run())


def checkpoint(folder: Path) -> Path:
    write_checkpoint(folder, state(folder.name))
    return folder


def state(seed: str) -> dict[str, StoredTensor]:
    data = np.full(8, int(seed), np.uint8)
    return {"w": StoredTensor(spec=TensorSpec(name="w", dtype="U8", shape=(8,)), data=data)}


def test_a_completion_is_read_with_its_routes(tmp_path: Path) -> None:
    async def scene(engine: SglangEngine, recorded: Recorded) -> None:
        params = SamplingParams(max_tokens=6, stop_ids=(6,), seed=3, want_routes=True, temperature=0.5)
        completion = await engine.generate(PROMPT, params, session="s")
        assert completion.token_ids.tolist() == [3, 4, 5, 6]
        assert completion.logprobs.tolist() == [-3, -4, -5, -6]
        assert completion.versions.tolist() == [1] * 4
        assert completion.finish is Finish.STOP
        assert completion.routes is not None and completion.routes.shape == (6, 1, 2)
        assert completion.routes[0, 0].tolist() == [1002, 1003]
        (sent,) = recorded.requests
        assert sent["input_ids"] == PROMPT and sent["return_logprob"] is True
        assert sent["sampling_params"]["sampling_seed"] == 3 and sent["sampling_params"]["temperature"] == 0.5
        greedy = await engine.generate(PROMPT, SamplingParams(max_tokens=2, temperature=0.0), session="s")
        assert not greedy.logprobs.any()

    play(tmp_path, scene)


def test_an_update_splits_a_completion_at_a_known_token(tmp_path: Path) -> None:
    async def scene(engine: SglangEngine, recorded: Recorded) -> None:
        recorded.hold_after = 3
        params = SamplingParams(max_tokens=8, want_routes=True)
        chunks = []
        async for chunk in engine.stream(PROMPT, params, session="s"):
            chunks.append(chunk)
            if sum(len(one.token_ids) for one in chunks) == 3 and recorded.hold_after is not None:
                folder = checkpoint(tmp_path / "2")
                updating = asyncio.create_task(engine.update(2, state_digest(state("2")), folder))
        assert await updating > 0
        whole = chunks[-1].completion
        assert whole is not None
        assert whole.token_ids.tolist() == list(range(3, 11))
        assert whole.versions.tolist() == [1] * 3 + [2] * 5
        assert np.concatenate([chunk.token_ids for chunk in chunks]).tolist() == whole.token_ids.tolist()
        assert np.concatenate([chunk.versions for chunk in chunks]).tolist() == whole.versions.tolist()
        assert recorded.requests[1]["input_ids"] == [*PROMPT, 3, 4, 5]
        assert recorded.requests[1]["sampling_params"]["max_new_tokens"] == 5
        assert whole.routes is not None and len(whole.routes) == 10
        assert (whole.routes[:5] < 2000).all() and (whole.routes[5:] > 2000).all()
        assert recorded.calls[-3:] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        health = await engine.health()
        assert (health.version, health.digest, health.running) == (2, state_digest(state("2")), 0)

    play(tmp_path, scene)


def test_a_call_that_waits_while_an_update_begins_is_asked_again(tmp_path: Path) -> None:
    async def scene(engine: SglangEngine, recorded: Recorded) -> None:
        recorded.hold_after = 0
        params = SamplingParams(max_tokens=3, want_routes=True)
        waiting = asyncio.create_task(engine.generate(PROMPT, params, session="s"))
        await until(lambda: bool(recorded.requests))
        await engine.update(2, state_digest(state("2")), checkpoint(tmp_path / "2"))
        completion = await waiting
        assert completion.versions.tolist() == [2] * 3
        assert completion.routes is not None and len(completion.routes) == len(PROMPT) + 2

    play(tmp_path, scene)


def test_a_server_of_another_version_is_not_started_with(tmp_path: Path) -> None:
    async def scene(engine: SglangEngine, recorded: Recorded) -> None:
        recorded.version = "default"
        with pytest.raises(EngineUnavailable, match="weight version 'default', not 3"):
            await engine.start(3, checkpoint(tmp_path / "3"))

    play(tmp_path, scene)


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    async def scene(engine: SglangEngine, recorded: Recorded) -> None:
        for params in (SamplingParams(max_tokens=1, top_p=0.5), SamplingParams(max_tokens=1, top_k=2)):
            with pytest.raises(ValueError, match="filters"):
                await engine.generate(PROMPT, params, session="s")
        with pytest.raises(ValueError, match="prompt"):
            await engine.generate([100], SamplingParams(max_tokens=1), session="s")
        assert recorded.requests == []
        with pytest.raises(ValueError, match="experts"):
            SglangFeatures().check(SamplingParams(max_tokens=1, want_routes=True))
        with pytest.raises(ValueError, match="seed"):
            SglangFeatures().check(SamplingParams(max_tokens=1, seed=1))

    play(tmp_path, scene)


@pytest.mark.parametrize(("status", "error"), [(400, ValueError), (429, EngineBusy), (500, EngineUnavailable)])
def test_an_api_error_is_classified(tmp_path: Path, status: int, error: type[Exception]) -> None:
    async def scene(engine: SglangEngine, recorded: Recorded) -> None:
        recorded.status = status
        with pytest.raises(error, match="recorded"):
            await engine.generate(PROMPT, SamplingParams(max_tokens=1), session="s")

    play(tmp_path, scene)


def test_wrong_files_change_nothing_and_a_failed_load_ends_service(tmp_path: Path) -> None:
    async def scene(engine: SglangEngine, recorded: Recorded) -> None:
        folder = checkpoint(tmp_path / "2")
        with pytest.raises(DamagedError):
            await engine.update(2, "0" * 32, folder)
        assert (await engine.health()).version == 1
        recorded.loads = False
        with pytest.raises(EngineUnavailable, match="weights iterator"):
            await engine.update(2, state_digest(state("2")), folder)
        with pytest.raises(EngineUnavailable, match="broke off"):
            await engine.generate(PROMPT, SamplingParams(max_tokens=1), session="s")
        with pytest.raises(EngineUnavailable, match="broke off"):
            await engine.health()

    play(tmp_path, scene)

"""The Tinker API over HTTP, used without the SDK: keys, jobs, samplers, and refused requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from etude.errors import UserError
from etude.tinker.protobuf import decode, entry, field
from etude.tinker.server import sample_request, tinker_app
from etude.tinker.service import TinkerOptions, TinkerService
from own_checkpoint import make_checkpoint

KEY = "tml-key"
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [3, 5, 8]}]}


def fields(message: object) -> dict[int, list[Any]]:
    """A message within another one."""
    assert isinstance(message, bytes)
    return {**decode(message)}


def sampled(message: object) -> tuple[list[int], int]:
    """Tokens of a sampled sequence, and why it ended."""
    sequence = fields(message)
    return np.frombuffer(sequence[2][0], np.int32).tolist(), sequence[1][0]


class Caller:
    """A client of a server in this process."""

    def __init__(self, client: "TestClient[Any, Any]", service: TinkerService) -> None:
        self.client, self.service = client, service

    async def post(self, path: str, status: int = 200, /, **body: object) -> Any:
        answer = await self.client.post(f"/api/v1/{path}", json=body, headers={"X-API-Key": KEY})
        assert answer.status == status, await answer.text()
        return await answer.json()

    async def result(self, request_id: str) -> Any:
        body, status = {"request_id": request_id}, 408
        while status == 408:  # not there yet, as on a busy machine
            answer = await self.client.post("/api/v1/retrieve_future", json=body, headers={"X-API-Key": KEY})
            status = answer.status
        assert status == 200, await answer.text()
        return await (answer.json() if answer.content_type == "application/json" else answer.read())

    async def train(self, model_id: str, seq_id: int) -> Any:
        tokens, targets = np.array([1, 2], np.int32), np.array([2, 3], np.int64)
        inputs = entry(2, "target_tokens", field(1, targets.tobytes()) + field(3, 2))
        inputs += entry(2, "weights", field(1, np.ones(2, np.float32).tobytes()) + field(3, 1))
        datum = field(1, field(1, field(1, tokens.tobytes()))) + inputs
        body = field(1, model_id) + field(2, seq_id) + field(3, datum) + field(4, "cross_entropy")
        headers = {"X-API-Key": KEY, "Content-Type": "application/x-protobuf"}
        answer = await self.client.post("/api/v1/forward_backward", data=body, headers=headers)
        return await answer.json()

    async def create(self) -> str:
        session = (await self.post("create_session"))["session_id"]
        created = await self.post("create_model", session_id=session, model_seq_id=0, base_model="tiny")
        return str((await self.result(created["request_id"]))["model_id"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@asynccontextmanager
async def served(model: Path, folder: Path, **options: int) -> AsyncIterator[Caller]:
    service = TinkerService(
        TinkerOptions(model=model, name="tiny", folder=folder, device="cpu", max_length=64, **options)
    )
    async with TestClient(TestServer(tinker_app(service, KEY))) as client:
        working = asyncio.create_task(service.jobs.run())
        yield Caller(client, service)
        working.cancel()
        service.close()


def play(model: Path, folder: Path, game: Callable[[Caller], Awaitable[None]], **options: int) -> None:
    async def main() -> None:
        async with served(model, folder, **options) as caller:
            await game(caller)

    asyncio.run(main())


def test_without_the_key_nothing_but_health_is_answered(model: Path, tmp_path: Path) -> None:
    async def game(caller: Caller) -> None:
        assert (await caller.client.get("/api/v1/healthz")).status == 200
        assert (await caller.client.get("/api/v1/get_server_capabilities")).status == 401
        assert (await caller.client.post("/api/v1/create_session", headers={"X-API-Key": "tml-other"})).status == 401

    play(model, tmp_path, game)


def test_a_step_and_a_sample(model: Path, tmp_path: Path) -> None:
    async def game(caller: Caller) -> None:
        model_id = await caller.create()
        assert (await caller.post("get_info", model_id=model_id))["is_lora"] is False
        output = fields(await caller.result((await caller.train(model_id, 1))["request_id"]))
        assert set(output) == {1, 2, 3}
        step = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
        first, again = await caller.post("optim_step", **step), await caller.post("optim_step", **step)
        assert first == again  # sent again, it is not done again: a second one would have no gradient
        assert (await caller.result(first["request_id"]))["metrics"]["grad_norm"] > 0
        saved = await caller.post("save_weights_for_sampler", model_id=model_id, seq_id=3)
        sampler = (await caller.result(saved["request_id"]))["sampling_session_id"]
        params = {"max_tokens": 4, "temperature": 1.0, "stop": []}
        response = await caller.post(
            "asample", sampling_session_id=sampler, seq_id=0, prompt=PROMPT, num_samples=3, sampling_params=params
        )
        assert len(set(response["sample_sequence_ids"])) == 3
        sequences = [sampled(sequence) for sequence in fields(await caller.result(response["request_id"]))[1]]
        assert [(len(tokens), reason) for tokens, reason in sequences] == [(4, 1)] * 3

    play(model, tmp_path, game)


def test_a_text_that_stops_ends_the_completion_with_the_token_that_completes_it(model: Path, tmp_path: Path) -> None:
    async def game(caller: Caller) -> None:
        sampler = await caller.post("create_sampling_session", session_id="s", sampling_session_seq_id=0)
        body = {
            "sampling_session_id": sampler["sampling_session_id"],
            "prompt": PROMPT,
            "sampling_params": {"max_tokens": 32, "seed": 1, "stop": []},
        }
        response = await caller.post("asample", seq_id=0, **body)
        ids, _ = sampled(fields(await caller.result(response["request_id"]))[1][0])
        text = caller.service._chat.decode(ids[:5])
        body["sampling_params"] = {"max_tokens": 32, "seed": 1, "stop": [text]}
        response = await caller.post("asample", seq_id=1, **body)
        assert sampled(fields(await caller.result(response["request_id"]))[1][0]) == (ids[:5], 0)

    play(model, tmp_path, game)


def test_logprobs_of_a_prompt_are_the_trainers_with_the_likeliest_beside_them(model: Path, tmp_path: Path) -> None:
    async def game(caller: Caller) -> None:
        model_id = await caller.create()
        trained = fields(await caller.result((await caller.train(model_id, 1))["request_id"]))  # reads 1 2, targets 2 3
        tensor = fields(fields(fields(trained[2][0])[2][0])[2][0])
        saved = await caller.post("save_weights_for_sampler", model_id=model_id, seq_id=2)
        sampler = (await caller.result(saved["request_id"]))["sampling_session_id"]
        body = {
            "sampling_session_id": sampler,
            "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 1},
            "prompt_logprobs": True,
        }
        response = await caller.post("asample", seq_id=0, **body, topk_prompt_logprobs=2)
        answer = fields(await caller.result(response["request_id"]))
        logprobs = np.frombuffer(answer[2][0], np.float32)
        assert np.isnan(logprobs[0]) and logprobs[1:].tobytes() == tensor[1][0]
        table = fields(answer[3][0])
        assert table[3] == [2] and table[4] == [3]
        ids, tops = (np.frombuffer(table[n][0], kind).reshape(3, 2) for n, kind in ((1, np.int32), (2, np.float32)))
        assert ids[0].tolist() == [0, 0] and tops[0].tolist() == [-99999.0, -99999.0]
        assert (tops[1:, 0] >= np.maximum(tops[1:, 1], logprobs[1:])).all()
        response = await caller.post("asample", seq_id=1, **body, prompt_logprobs_last_n=1)
        last = np.frombuffer(fields(await caller.result(response["request_id"]))[2][0], np.float32)
        assert np.isnan(last[:2]).all() and last[2] == logprobs[2]

    play(model, tmp_path, game)


def test_saved_weights_of_either_kind_are_sampled_from_and_only_states_are_trained_on(
    model: Path, tmp_path: Path
) -> None:
    async def game(caller: Caller) -> None:
        model_id = await caller.create()
        paths = {}
        for seq_id, kind in enumerate(("save_weights", "save_weights_for_sampler")):
            saved = await caller.post(kind, model_id=model_id, seq_id=seq_id, path="one")
            paths[kind] = (await caller.result(saved["request_id"]))["path"]
            assert (await caller.post("weights_info", tinker_path=paths[kind]))["base_model"] == "tiny"
            new = {"session_id": "s", "sampling_session_seq_id": seq_id, "model_path": paths[kind]}
            sampler = (await caller.post("create_sampling_session", **new))["sampling_session_id"]
            get = await caller.client.get(f"/api/v1/samplers/{sampler}", headers={"X-API-Key": KEY})
            assert await get.json() == {"sampler_id": sampler, "base_model": "tiny"}
        load = {"model_id": model_id, "seq_id": 9, "optimizer": False}
        assert "request_id" in await caller.post("load_weights", **load, path=paths["save_weights"])
        refused = await caller.post("load_weights", 422, **load, path=paths["save_weights_for_sampler"])
        assert "is for sampling only" in refused["detail"]

    play(model, tmp_path, game)


def test_a_session_that_is_finished_gives_its_clients_up_at_once(model: Path, tmp_path: Path) -> None:
    async def game(caller: Caller) -> None:
        model_id = await caller.create()
        path = f"/api/v1/sessions/{model_id.split(':')[0]}/finish"
        assert (await caller.client.post(path, json={}, headers={"X-API-Key": KEY})).status == 204
        await caller.post("get_info", 404, model_id=model_id)
        await caller.create()

    play(model, tmp_path, game, max_clients=1)


def test_what_is_not_here_is_named(model: Path, tmp_path: Path) -> None:
    async def game(caller: Caller) -> None:
        session = (await caller.post("create_session"))["session_id"]
        new = {"session_id": session, "model_seq_id": 0}
        other = await caller.post("create_model", 422, **new, base_model="other")
        assert other["detail"] == "base_model='other' is not here: this server has 'tiny'"
        parts = await caller.post("create_model", 422, **new, base_model="tiny", lora_config={"train_mlp": False})
        assert "train_mlp=False: this server trains all weights" in parts["detail"]
        unknown = await caller.post("create_model", 404, session_id="gone", model_seq_id=0, base_model="tiny")
        assert "there is no session 'gone'" in unknown["detail"]
        assert "'model_id' is missing" in (await caller.post("optim_step", 422, seq_id=1, adam_params={}))["detail"]
        missing = await caller.post("optim_step", 404, model_id="m", seq_id=1, adam_params={})
        assert "there is no training client 'm'" in missing["detail"]
        assert "no result of 'x'" in (await caller.post("retrieve_future", 404, request_id="x"))["detail"]
        path = {"session_id": session, "sampling_session_seq_id": 0, "model_path": "tinker://../../weights/x"}
        assert "expected tinker://" in (await caller.post("create_sampling_session", 422, **path))["detail"]

    play(model, tmp_path, game)


def test_places_are_limited_and_fall_free_when_a_program_is_silent(model: Path, tmp_path: Path) -> None:
    async def game(caller: Caller) -> None:
        first = await caller.create()
        session = (await caller.post("create_session"))["session_id"]
        new = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        assert "1 training clients are there" in (await caller.post("create_model", 429, **new))["detail"]
        caller.service._seen_s[first.split(":")[0]] -= 1000
        await caller.result((await caller.post("create_model", **new))["request_id"])
        await caller.post("get_info", 404, model_id=first)

    play(model, tmp_path, game, max_clients=1)


def test_a_snapshot_without_a_call_gives_its_place_up(model: Path, tmp_path: Path) -> None:
    async def game(caller: Caller) -> None:
        session = {"session_id": "s", "sampling_session_seq_id": 0}
        names = [(await caller.post("create_sampling_session", **session))["sampling_session_id"] for _ in range(2)]
        body = {"seq_id": 0, "prompt": PROMPT, "sampling_params": {"max_tokens": 1}}
        gone = await caller.post("asample", 404, sampling_session_id=names[0], **body)
        assert "newer ones took its place" in gone["detail"]
        await caller.post("asample", sampling_session_id=names[1], **body)

    play(model, tmp_path, game, max_samplers=1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"record_stability_info": True}, "record_stability_info is not one"),
        ({"topk_sample_logprobs": 5}, "topk_sample_logprobs is not one"),
        ({"topk_prompt_logprobs": 33}, "topk_prompt_logprobs=33: expected 0 to 32"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n=3 of a prompt of 3 tokens"),
        ({"num_samples": 0}, "num_samples=0: expected 1 to"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "an image or a sound"),
        ({"sampling_params": {"top_p": 2.0}}, "top_p=2.0"),
    ],
)
def test_samples_that_cannot_be_had_are_refused(body: dict[str, object], message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        sample_request({"prompt": PROMPT, "sampling_params": {}, **body}, 64)

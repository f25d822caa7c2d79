"""OpenEnv's environments, played over their own protocol: a real server, and one that misbehaves."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from environments import openenv_server, real
from etude.config.loading import default_recipe
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, SandboxError
from etude.harnesses.completions import HarnessContext
from etude.protocols import Grade, GraderContext, HarnessResult
from etude.rewards.graders.named import NamedGrader
from etude.run.rollouts import make_harness
from etude.run.task_families import open_family
from etude.run.task_sandboxes import PlainTaskSandboxes
from etude.sandboxes.local.provider import LocalSandboxes
from etude.tasks.openenv import FAMILY, read_action
from etude.tasks.outcomes import index_of
from etude.types import Json, Split
from scripted_model import ScriptedModel, serving


def bisect(messages: Sequence[dict[str, Json]]) -> str:
    low, high, last = 0, 99, 49
    for message in messages[1:]:
        content = str(message["content"])
        if message["role"] == "assistant":
            last = json.loads(content)["number"]
        elif "higher" in content:
            low = last + 1
        elif "lower" in content:
            high = last - 1
    return json.dumps({"number": (low + high) // 2})


async def play(
    url: str, model: ScriptedModel, scratch: Path, *, split: Split = Split.TRAIN, index: int = 7, max_steps: int = 20
) -> tuple[HarnessResult, Grade]:
    config = recipe(url, f"harness.options.max_steps={max_steps}")
    task = (await asyncio.to_thread(open_family, config)).task(split, index)  # the server may be in this loop
    sandboxes = LocalSandboxes(scratch=scratch)
    try:
        async with aiohttp.ClientSession() as http, serving(model) as session:
            context = HarnessContext(http=http, tasks=config.tasks, on_close=lambda close: None)
            sandbox = await sandboxes.create(task.files)
            result = await make_harness(config, context).run(task, session, sandbox, temperature=1.0)
            grader = NamedGrader({}, GraderContext(open_sandbox=PlainTaskSandboxes(sandboxes).open))
            return result, await grader.grade(task, sandbox, result)
    finally:
        await sandboxes.close()


def recipe(url: str, *settings: str) -> RunConfig:
    timeouts = [
        f"harness.options.{key}" for key in ("turn_timeout_s=10.0", "step_timeout_s=60.0", "wait_timeout_s=2.0")
    ]
    return default_recipe(["tasks.family=openenv", f"tasks.options.url={url}", *timeouts, *settings])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with openenv_server(tmp_path_factory.mktemp("openenv")) as url:
        yield url


@real
def test_a_real_server_is_played_to_its_end(server: str, tmp_path: Path) -> None:
    model = ScriptedModel(bisect)
    result, reward = asyncio.run(play(server, model, tmp_path))
    assert result.reason == "submit"
    assert reward.value == pytest.approx(1.0 - 0.01 * (result.counts["steps"] - 1))
    assert "number" in str(model.requests[0]["messages"])


@real
def test_a_real_server_turns_down_what_is_no_action(server: str, tmp_path: Path) -> None:
    result, reward = asyncio.run(play(server, ScriptedModel(lambda messages: '{"nummer": 1}'), tmp_path, max_steps=3))
    assert (result.reason, dict(result.counts), reward.value) == ("turns", {"malformed": 3}, 0.0)


# --- A server of recorded answers -----------------------------------------------------------------------------------


@asynccontextmanager
async def recorded(answer: Callable[[dict[str, Json]], Json]) -> AsyncIterator[str]:
    async def connect(request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        async for message in ws:
            reply = answer(json.loads(message.data))
            if reply is None:
                break
            await ws.send_str(json.dumps(reply))
        await ws.close()
        return ws

    async def metadata(request: web.Request) -> web.Response:
        return web.json_response({"name": "Guessing", "description": "Guess.", "version": "1.0.0"})

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"type": "object"}, "observation": {}, "state": {}})

    app = web.Application()
    app.router.add_get("/ws", connect)
    app.router.add_get("/metadata", metadata)
    app.router.add_get("/schema", schema)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def observation(hint: str, reward: float | None = None, *, done: bool = False) -> Json:
    return {"type": "observation", "data": {"observation": {"hint": hint}, "reward": reward, "done": done}}


def record(
    answer: Callable[[dict[str, Json]], Json], model: ScriptedModel, scratch: Path
) -> tuple[HarnessResult, Grade]:
    async def act() -> tuple[HarnessResult, Grade]:
        async with recorded(answer) as url:
            return await play(url, model, scratch, max_steps=3)

    return asyncio.run(act())


def test_rewards_of_all_steps_are_added(tmp_path: Path) -> None:
    requested: list[dict[str, Json]] = []

    def answer(message: dict[str, Json]) -> Json:
        requested.append(message)
        if message["type"] == "reset":
            return observation("go", 0.25)
        return observation("on", 0.5, done=len(requested) == 3)

    result, reward = record(answer, ScriptedModel(lambda messages: '```json\n{"number": 1}\n```'), tmp_path)
    assert (result.reason, dict(result.counts)) == ("submit", {"steps": 2})
    assert (reward.value, reward.parts) == (1.25, {"steps": 2.0})
    assert requested[0] == {"type": "reset", "data": {"seed": 9, "episode_id": "one"}}
    assert requested[1] == {"type": "step", "data": {"number": 1}}


def test_the_model_is_told_what_was_wrong_with_its_action(tmp_path: Path) -> None:
    def answer(message: dict[str, Json]) -> Json:
        if message["type"] == "reset":
            return observation("go")
        return {"type": "error", "data": {"message": "no number", "code": "EXECUTION_ERROR"}}

    model = ScriptedModel(lambda messages: "hm" if len(messages) == 1 else "{}")
    result, reward = record(answer, model, tmp_path)
    assert (result.reason, dict(result.counts), reward.value) == ("turns", {"malformed": 3}, 0.0)
    notice = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "user"]  # type: ignore[index, union-attr, call-overload]  # JSON
    assert notice[1:] == ["expected one JSON object", "EXECUTION_ERROR: no number"]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (None, "hung up"),
        ({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}, r"had no session.*\(full\)"),
        ({"type": "error", "data": {"message": "no data", "code": "EXECUTION_ERROR"}}, "cannot begin with seed"),
        ({"type": "observation", "data": {}}, "unreadable"),
        ({"type": "observation", "data": {"observation": {}, "reward": "much"}}, "unreadable"),
        ([], "unreadable"),
    ],
)
def test_a_server_that_fails_is_infrastructure(reply: Json, words: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=words):
        record(lambda message: reply, ScriptedModel(lambda messages: "{}"), tmp_path)


def test_a_rollout_waits_for_a_server_whose_sessions_are_taken(tmp_path: Path) -> None:
    replies = [{"type": "error", "data": {"message": "1/1", "code": "CAPACITY_REACHED"}}] * 2

    def answer(message: dict[str, Json]) -> Json:
        return replies.pop() if replies else observation("on", 0.5, done=True)  # type: ignore[return-value]  # JSON

    result, reward = record(answer, ScriptedModel(lambda messages: "{}"), tmp_path)
    assert (result.reason, reward.value, replies) == ("submit", 0.5, [])


def test_a_reward_that_is_no_number_is_the_environments_fault(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="finite"):
        record(lambda message: observation("x", float("nan"), done=True), ScriptedModel(lambda messages: ""), tmp_path)


def test_where_no_server_is_the_address_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9"):
        asyncio.run(play("http://127.0.0.1:9", ScriptedModel(bisect), tmp_path))
    with pytest.raises(ConfigError, match=r"tasks\.options\.url = '127\.0\.0\.1:9'"):
        asyncio.run(play("127.0.0.1:9", ScriptedModel(bisect), tmp_path))


def test_no_seed_is_on_both_sides_and_none_is_left_out(tmp_path: Path) -> None:
    async def seeds(split: Split, count: int) -> list[int]:
        async with recorded(lambda message: None) as url:
            family = await asyncio.to_thread(open_family, recipe(url, "tasks.heldout_every=4"))
        assert family.size(split) is None
        return [index_of(family.task(split, index), FAMILY) for index in range(count)]

    heldout, train = asyncio.run(seeds(Split.HELDOUT, 100)), asyncio.run(seeds(Split.TRAIN, 300))
    assert sorted([*heldout, *train]) == list(range(400))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"a": 1}', {"a": 1}),
        ('Well:\n```\n{"a": 1}\n```', {"a": 1}),
        ("[1]", None),
        ("", None),
        ("[" * 100_000, None),
        ('{"a": ' * 300 + "1" + "}" * 300, None),
        ('{"a": 1} {"a": 2}', None),
    ],
)
def test_an_action_is_one_object(text: str, action: Json) -> None:
    assert read_action(text) == action

"""Clients of other projects, unmodified, with the real gateway and the real native engine.

The clients are the SDKs of OpenAI and Anthropic, LiteLLM, and mini-swe-agent, which repairs a file. Each gets a base
URL and a key, or only the base URL. Their calls become turns, with exactly the tokens that the engine was given and
sampled.

The clients need replies that make sense: a greeting, tool calls that parse, shell commands. Therefore a tiny model is
trained for some seconds until it reproduces a few conversations.
"""

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
import torch

from etude.clock import SystemClock
from etude.config.inference import EngineConfig, GatewayConfig
from etude.config.training import ModelShape
from etude.engines.http import engine_app, http_engines
from etude.engines.native.engine import NativeEngine, Weights
from etude.gateway.http.app import http_server
from etude.gateway.http.auth import Key, Scope, digest_of
from etude.gateway.routing.router import EngineEntry
from etude.gateway.service import Recorder
from etude.ledger.payloads import Payloads
from etude.models.checkpoint import spec_from_shape
from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.objects import ObjectStore
from etude.protocols import Completion, Engine, EngineHealth, SamplingParams, Session, TokenChunk
from etude.rollouts.gateway_table import GatewayTable
from etude.rollouts.sessions import GatewaySessions
from etude.run.gateway import GatewaySpec, open_gateway
from etude.run.serving import listening
from etude.tokens.chat import ChatTemplate
from etude.tokens.messages import ChatMessage, Tool, ToolCall
from etude.trainer.batching.build import build_trajectories
from etude.types import Ids, Rollout, RolloutStatus, TokenIds, Turn

HARNESS = Path(os.environ.get("ETUDE_HARNESS_PYTHON", Path(__file__).parents[2] / ".venv-harness/bin/python"))
ADMIN = "etude-admin-" + "a" * 43
START_S = 120.0
MAX_LENGTH = 1024
CERTAIN = 0.995
"""Least probability of any token that is known by heart."""
MAX_STEPS = 600
SURENESS = 4.0
"""What logits are multiplied by in the end: then no draw at temperature 1 misses in these tests."""


@dataclass(frozen=True)
class Scene:
    """A conversation that the model learns: its messages, assistant replies included, and its tools."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()

    def texts(self) -> list[str]:
        return [message.content for message in self.messages] + [
            call.arguments for m in self.messages for call in m.tool_calls
        ]


@dataclass
class Overheard:
    """An engine that records every prompt and completion of another one; implements Engine."""

    engine: Engine
    calls: list[tuple[list[int], Ids]] = field(default_factory=list)

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        completion = await self.engine.generate(prompt_ids, params, session=session)
        self.calls.append((list(prompt_ids), completion.token_ids))
        return completion

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        async for chunk in self.engine.stream(prompt_ids, params, session=session):
            yield chunk
            if chunk.completion is not None:
                self.calls.append((list(prompt_ids), chunk.completion.token_ids))

    async def health(self) -> EngineHealth:
        return await self.engine.health()


@dataclass
class Stage:
    """The gateway, seen from outside."""

    port: int
    overheard: Overheard

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def session(self) -> Iterator["Rehearsed"]:
        """A session of its own, as a rollout has; its turns are there when it is over."""
        opened = asyncio.run(self._open())
        rehearsed = Rehearsed(session_id=opened.session_id, api_key=opened.api_key)
        first = len(self.overheard.calls)
        yield rehearsed
        rehearsed.turns = asyncio.run(self._close(rehearsed.session_id))
        rehearsed.sampled = self.overheard.calls[first:]

    async def _open(self) -> Session:
        async with aiohttp.ClientSession() as http:
            return await GatewaySessions(GatewayTable([self.url]), ADMIN, http).open()

    async def _close(self, session_id: str) -> tuple[Turn, ...]:
        async with aiohttp.ClientSession() as http:
            return await GatewaySessions(GatewayTable([self.url]), ADMIN, http).close(session_id)


@dataclass
class Rehearsed:
    """One session."""

    session_id: str
    api_key: str
    turns: tuple[Turn, ...] = ()
    sampled: list[tuple[list[int], Ids]] = field(default_factory=list)
    """What the engine was asked and what it said meanwhile."""


def rehearse(scenes: Sequence[Scene]) -> tuple[ChatTemplate, Decoder]:
    """Train a tokenizer and a model that reproduces the assistant messages of ``scenes``."""
    torch.set_num_threads(1)
    chat = ChatTemplate.train([text for scene in scenes for text in scene.texts()], 512)
    spec = spec_from_shape(
        ModelShape(hidden_size=64, layers=2, heads=2, kv_heads=2, head_dim=32, experts=4, expert_size=64),
        chat.vocab_size,
    )
    model = Decoder(spec)
    model.initialise(0)
    ids_BT, weights_BT = _batch(chat, scenes)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(MAX_STEPS):
        seen_BT = ids_BT[:, :-1]
        hidden_NH = model.forward_packed(seen_BT.flatten(), (seen_BT.shape[1],) * len(seen_BT))
        logits_BTV = model.logits(hidden_NH).unflatten(0, seen_BT.shape)
        logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
        if (logprobs_BT[weights_BT] > torch.tensor(CERTAIN).log()).all():
            break
        optimiser.zero_grad()
        (-logprobs_BT[weights_BT].mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    else:
        raise AssertionError("the model cannot remember the scenes: train longer")
    model.gain.data *= SURENESS
    return chat, model


def _batch(chat: ChatTemplate, scenes: Sequence[Scene]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T], and a mask [B, T − 1], shifted by one, of the assistant's tokens."""
    rows, masks = [], []
    for scene in scenes:
        ids: list[int] = []
        marks: list[bool] = []
        for at, message in enumerate(scene.messages):
            if message.role != "assistant":
                continue
            prompt = chat.open(scene.messages[:at], scene.tools)
            whole = chat.open(scene.messages[: at + 1], scene.tools)[: -len(chat.generation_prompt())]
            marks += [False] * (len(prompt) - len(ids)) + [True] * (len(whole) - len(prompt))
            ids = whole
        rows.append(ids)
        masks.append(marks)
    length = max(map(len, rows))
    ids_BT = torch.tensor([row + [chat.pad_id] * (length - len(row)) for row in rows])
    marks_BT = torch.tensor([row + [False] * (length - len(row)) for row in masks])
    return ids_BT, marks_BT[:, 1:]


@contextmanager
def on_stage(scenes: Sequence[Scene], folder: Path) -> Iterator[Stage]:
    """The rehearsed model behind an engine over HTTP and a gateway, in another thread, while the context is open."""
    chat, model = rehearse(scenes)
    model.arithmetic = InvariantArithmetic()
    ready: threading.Event = threading.Event()
    stages: list[Stage] = []
    failures: list[BaseException] = []
    over = threading.Event()

    async def serve() -> None:
        overheard = Overheard(
            NativeEngine(Weights(model.eval(), 3, "0" * 32), EngineConfig(max_length=MAX_LENGTH), seed=1)
        )
        async with AsyncExitStack() as stack:
            assert isinstance(overheard.engine, NativeEngine)
            steps = asyncio.create_task(overheard.engine.run())
            stack.callback(steps.cancel)
            engine_port = await stack.enter_async_context(listening(engine_app(overheard), 0))
            connect = await stack.enter_async_context(http_engines(0.0))
            plan = GatewaySpec(
                chat=chat,
                max_length=MAX_LENGTH,
                recorder=Recorder(Payloads(ObjectStore(str(folder / "payloads")))),
                engines=(EngineEntry(name="engine", url=f"http://127.0.0.1:{engine_port}"),),
                keys=(Key(key_id="test", digest=digest_of(ADMIN), scope=Scope.ADMIN, created=""),),
            )
            config = GatewayConfig()
            parts = await stack.enter_async_context(open_gateway(plan, config, SystemClock(), connect))
            server = http_server(parts.gateway.handle)
            port = await stack.enter_async_context(listening(server, 0))
            stages.append(Stage(port=port, overheard=overheard))
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.05)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)
            ready.set()
            raise

    thread = threading.Thread(target=run, name="gateway")
    thread.start()
    try:
        assert ready.wait(START_S), "the gateway did not start"
        if failures:
            raise failures[0]
        yield stages[0]
    finally:
        over.set()
        thread.join(START_S)


ADD = Tool(
    name="add",
    description="Add two numbers.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
)
HELLO = "Hello from the policy."
BROKEN, REPAIRED = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
SYSTEM = "Answer with one command in a code block."
TASK = "Repair calc.py"
COMMANDS = (
    ("```\ncat calc.py\n```", "exit 0\n" + BROKEN),
    ("```\nsed -i 's/a - b/a + b/' calc.py\n```", "exit 0\n"),
    ("```\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```", ""),
)
"""What the model types, and what the terminal answers."""


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def says(text: str = "", *calls: ToolCall) -> ChatMessage:
    return ChatMessage(role="assistant", content=text, tool_calls=calls)


def add(a: int, b: int) -> ToolCall:
    return ToolCall(call_id="any", name="add", arguments=f'{{"a": {a}, "b": {b}}}')


SCENES = (
    Scene((user("Say hello."), says(HELLO), user("Again."), says("Hello again."))),
    Scene((ChatMessage(role="system", content="Be brief."), user("Say hello."), says("Hi."))),
    Scene(
        (user("What is 2 + 3?"), says("", add(2, 3)), ChatMessage(role="tool", content="5"), says("It is 5.")), (ADD,)
    ),
    Scene((user("Add twice."), says("Twice.", add(1, 1), add(2, 2))), (ADD,)),
    Scene(
        (
            ChatMessage(role="system", content=SYSTEM),
            user(TASK),
            *(message for command, seen in COMMANDS for message in (says(command), user(seen))),
        )
    ),
)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with on_stage(SCENES, tmp_path_factory.mktemp("gateway")) as stage:
        yield stage


def check_capture(session: Rehearsed, calls: int) -> None:
    """Check that the turns equal the engine's prompts and completions, and that each completion is trained once."""
    assert len(session.turns) == len(session.sampled) == calls
    assert [turn.prompt_ids.tolist() for turn in session.turns] == [prompt for prompt, _ in session.sampled]
    assert [turn.completion_ids.tolist() for turn in session.turns] == [ids.tolist() for _, ids in session.sampled]
    assert all((turn.versions == 3).all() for turn in session.turns)
    rollout = Rollout(
        rollout_id="r", group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0, turns=session.turns
    )
    trained = sum(int(trajectory.loss_mask.sum()) for trajectory in build_trajectories(rollout, 1.0))
    assert trained == sum(len(ids) for _, ids in session.sampled)


OPENAI_TOOL: Any = {
    "type": "function",
    "function": {"name": ADD.name, "description": ADD.description, "parameters": ADD.parameters},
}
ANTHROPIC_TOOL: Any = {"name": ADD.name, "description": ADD.description, "input_schema": ADD.parameters}


def test_openai_chat_continues_its_conversation(stage: Stage) -> None:
    with stage.session() as session, openai.OpenAI(base_url=stage.url + "/v1", api_key=session.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": "Say hello."}]
        first = client.chat.completions.create(model="policy", messages=messages, logprobs=True, seed=1)
        assert first.choices[0].message.content == HELLO
        assert first.choices[0].finish_reason == "stop"
        assert first.choices[0].logprobs is not None and first.choices[0].logprobs.content
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "Again."}]
        second = client.chat.completions.create(model="policy", messages=messages)
        assert second.choices[0].message.content == "Hello again."
        assert second.usage is not None and second.usage.prompt_tokens_details is not None
        assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens  # type: ignore[union-attr]
        assert [model.id for model in client.models.list()] == ["policy"]
    check_capture(session, 2)


def test_openai_streams_and_calls_tools(stage: Stage) -> None:
    with stage.session() as session, openai.OpenAI(base_url=stage.url + "/v1", api_key=session.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
        with client.chat.completions.stream(model="policy", messages=messages, tools=[OPENAI_TOOL]) as stream:
            request = stream.get_final_completion().choices[0]
        assert request.finish_reason == "tool_calls"
        assert request.message.tool_calls is not None
        (call,) = request.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "5"},
        ]
        chunks = client.chat.completions.create(model="policy", messages=messages, tools=[OPENAI_TOOL], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "It is 5."
        twice = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Add twice."}], tools=[OPENAI_TOOL]
        )
        assert twice.choices[0].message.content == "Twice."
        assert len(twice.choices[0].message.tool_calls or ()) == 2
    check_capture(session, 3)
    assert np.array_equal(session.turns[1].prompt_ids[: len(session.turns[0].prompt_ids)], session.turns[0].prompt_ids)


def test_openai_async_and_several_choices(stage: Stage) -> None:
    async def play(key: str) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=stage.url + "/v1", api_key=key) as client:
            reply = await client.chat.completions.create(
                model="gpt-4o", messages=[{"role": "user", "content": "Say hello."}], n=3
            )
            stream = await client.chat.completions.create(
                model="gpt-4o", messages=[{"role": "user", "content": "Say hello."}], stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            return [text, *(choice.message.content for choice in reply.choices)]

    with stage.session() as session:
        assert asyncio.run(play(session.api_key)) == [HELLO] * 4
    check_capture(session, 4)


def test_openai_responses_follow_each_other(stage: Stage) -> None:
    with stage.session() as session, openai.OpenAI(base_url=stage.url + "/v1", api_key=session.api_key) as client:
        first = client.responses.create(model="policy", input="Say hello.")
        assert first.output_text == HELLO
        with client.responses.stream(model="policy", input="Again.", previous_response_id=first.id) as stream:
            assert stream.get_final_response().output_text == "Hello again."
        assert (
            client.responses.create(model="policy", instructions="Be brief.", input="Say hello.").output_text == "Hi."
        )
    check_capture(session, 3)


def test_openai_completions_take_and_give_token_ids(stage: Stage) -> None:
    with stage.session() as session, openai.OpenAI(base_url=stage.url + "/v1", api_key=session.api_key) as client:
        chat = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Say hello."}], extra_body={"return_token_ids": True}
        )
        prompt_ids = chat.model_dump()["prompt_token_ids"]
        raw = client.completions.create(
            model="policy", prompt=prompt_ids, max_tokens=50, extra_body={"return_token_ids": True}
        )
        assert raw.choices[0].text == HELLO
        assert raw.choices[0].model_dump()["token_ids"] == chat.choices[0].model_dump()["token_ids"]
    check_capture(session, 2)
    assert session.turns[0].prompt_ids.tolist() == prompt_ids


def test_anthropic_converses_and_calls_tools(stage: Stage) -> None:
    with stage.session() as session, anthropic.Anthropic(base_url=stage.url, api_key=session.api_key) as client:
        brief = client.messages.create(
            model="claude-any", max_tokens=50, system="Be brief.", messages=[{"role": "user", "content": "Say hello."}]
        )
        assert [block.text for block in brief.content if block.type == "text"] == ["Hi."]
        messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
        request = client.messages.create(model="policy", max_tokens=100, messages=messages, tools=[ANTHROPIC_TOOL])
        assert request.stop_reason == "tool_use"
        (use,) = request.content
        assert use.type == "tool_use" and use.input == {"a": 2, "b": 3}
        messages += [
            {"role": "assistant", "content": request.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "5"}]},
        ]
        with client.messages.stream(
            model="policy", max_tokens=100, messages=messages, tools=[ANTHROPIC_TOOL]
        ) as stream:
            assert stream.get_final_text() == "It is 5."
        counted = client.messages.count_tokens(model="policy", messages=messages, tools=[ANTHROPIC_TOOL])
        assert counted.input_tokens > 20
    check_capture(session, 3)
    assert counted.input_tokens == len(session.turns[2].prompt_ids)
    branch = session.turns[1]
    assert session.turns[2].prompt_ids.tolist()[: len(branch.prompt_ids) + len(branch.completion_ids)] == [
        *branch.prompt_ids.tolist(),
        *branch.completion_ids.tolist(),
    ]


def test_anthropic_async_streams(stage: Stage) -> None:
    async def play(key: str) -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=stage.url, api_key=key) as client,
            client.messages.stream(
                model="policy", max_tokens=50, messages=[{"role": "user", "content": "Say hello."}]
            ) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    with stage.session() as session:
        assert asyncio.run(play(session.api_key)) == HELLO
    check_capture(session, 1)


def test_a_session_in_the_path_needs_no_key(stage: Stage) -> None:
    with stage.session() as session:
        url = f"{stage.url}/s/{session.api_key}"
        with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
            reply = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Say hello."}])
        with anthropic.Anthropic(base_url=url, api_key="none") as other:
            message = other.messages.create(
                model="policy", max_tokens=50, messages=[{"role": "user", "content": "Say hello."}]
            )
        assert reply.choices[0].message.content == HELLO
        assert [block.text for block in message.content if block.type == "text"] == [HELLO]
    check_capture(session, 2)


def test_errors_are_the_sdks_own(stage: Stage) -> None:
    with stage.session() as session:
        with (
            openai.OpenAI(base_url=stage.url + "/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Say hello."}])
        with (
            anthropic.Anthropic(base_url=stage.url, api_key=session.api_key, max_retries=0) as other,
            pytest.raises(anthropic.BadRequestError, match="exceed"),
        ):
            other.messages.create(
                model="policy", max_tokens=50, messages=[{"role": "user", "content": "Say hello. " * 1000}]
            )
    assert session.turns == ()


@pytest.mark.filterwarnings("ignore")
def test_litellm_over_both_protocols(stage: Stage) -> None:
    import litellm  # two seconds, and warnings of its own

    with stage.session() as session:
        common: Any = {"messages": [{"role": "user", "content": "Say hello."}], "api_key": session.api_key}
        whole = litellm.completion(model="openai/policy", api_base=stage.url + "/v1", **common)
        assert whole.choices[0].message.content == HELLO
        chunks = litellm.completion(model="openai/policy", api_base=stage.url + "/v1", stream=True, **common)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == HELLO
        other = litellm.completion(model="anthropic/policy", api_base=stage.url, max_tokens=50, **common)
        assert other.choices[0].message.content == HELLO
        tools = litellm.completion(
            model="openai/policy",
            api_base=stage.url + "/v1",
            api_key=session.api_key,
            messages=[{"role": "user", "content": "What is 2 + 3?"}],
            tools=[OPENAI_TOOL],
        )
        assert json.loads(tools.choices[0].message.tool_calls[0].function.arguments) == {"a": 2, "b": 3}
    check_capture(session, 4)


MINI = {
    "agent": {"system_template": SYSTEM, "instance_template": "{{task}}", "step_limit": 5, "cost_limit": 0},
    "environment": {"timeout": 20},
    "model": {
        "model_class": "litellm_textbased",
        "model_kwargs": {"temperature": 0.0, "max_tokens": 64},
        "action_regex": "```\\n(.*?)\\n```",
        "observation_template": "exit {{output.returncode}}\n{{output.output}}",
        "cost_tracking": "ignore_errors",
    },
}
"""mini-swe-agent's configuration; JSON is YAML."""


@pytest.mark.heavy("mini-swe-agent: make .venv-harness/stamp", missing=not HARNESS.exists())
def test_mini_swe_agent_repairs_a_file(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "calc.py").write_text(BROKEN)
    (tmp_path / "mini.yaml").write_text(json.dumps(MINI))
    with stage.session() as session:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_BASE_URL": stage.url + "/v1",
            "OPENAI_API_BASE": stage.url + "/v1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
        }
        command: list[str | Path] = [
            HARNESS.with_name("mini"),
            "--yolo",
            "--exit-immediately",
            "--output",
            tmp_path / "out.json",
        ]
        command += ["--config", tmp_path / "mini.yaml", "--model", "openai/policy", "--task", TASK]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "calc.py").read_text() == REPAIRED
    assert json.loads((tmp_path / "out.json").read_text())["info"]["exit_status"] == "Submitted"
    check_capture(session, len(COMMANDS))
    rollout = Rollout(
        rollout_id="r", group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0, turns=session.turns
    )
    (trajectory,) = build_trajectories(rollout, 1.0)
    prompt, ids = session.sampled[-1]
    assert trajectory.token_ids.tolist() == [*prompt, *ids.tolist()]
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == [
        token for _, sampled in session.sampled for token in sampled.tolist()
    ]

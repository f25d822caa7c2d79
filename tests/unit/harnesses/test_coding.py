"""Whole sessions of the coding agent: a scripted model behind real HTTP, real tools in a real sandbox."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from etude.config.rollouts import HarnessConfig
from etude.errors import EngineUnavailable, SandboxError, SessionLost
from etude.harnesses.coding import CodingHarness, observe
from etude.protocols import HarnessResult, Sandbox, Session
from etude.rollouts.fake import FakeSandbox
from etude.sandboxes import tools
from etude.sandboxes.local import LocalSandboxes
from etude.types import Case, FunctionChecks, Split, Task, TestChecks

FILES = {"util.py": "def add(a, b):\n    return a - b"}
TASK = Task(
    task_id="t",
    family="bugfix",
    template="add",
    split=Split.TRAIN,
    prompt="fix add in util.py",
    files=FILES,
    checks=FunctionChecks(
        path="util.py",
        function="add",
        visible=(Case(arguments=(1, 0), expected=1), Case(arguments=(1, 2), expected=3)),
        hidden=(Case(arguments=(5, 5), expected=10),),
    ),
)
IMPATIENT = aiohttp.ClientTimeout(total=0.5)
"""What the callers' connections are made with: must not be what a turn's time ends by."""
HANG_UP = 0
"""A status that stands for closing the connection."""


@dataclass(frozen=True)
class Answer:
    """One HTTP answer of the scripted model."""

    body: Mapping[str, Any]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    after_s: float = 0.0


def says(text: str, finish: str = "stop") -> Answer:
    message = {"role": "assistant", "content": text}
    return Answer({"choices": [{"message": message, "finish_reason": finish}]})


def refuses(status: int, code: str = "busy", **headers: str) -> Answer:
    return Answer({"error": {"code": code, "message": f"scripted {code}"}}, status, headers)


class Playhouse:
    """A model server that plays answers in order, and everything around it."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self._runner = asyncio.Runner()
        self._sandboxes = LocalSandboxes(1)

    def play(
        self, answers: Sequence[Answer], files: Mapping[str, str] = FILES, *, close_sandbox: bool = False, **limits: Any
    ) -> HarnessResult:
        """One session in a fresh sandbox; every answer must be asked for."""

        async def act() -> HarnessResult:
            sandbox = await self._sandboxes.create(files)
            if close_sandbox:
                await sandbox.close()
            try:
                return await self._serve(list(answers), sandbox, HarnessConfig(**limits))
            finally:
                await sandbox.close()

        return self._runner.run(act())

    @property
    def observations(self) -> list[str]:
        """What the agent saw in the last session, as of its last request."""
        return [message["content"] for message in self.requests[-1]["messages"][2::2]]

    def close(self) -> None:
        self._runner.run(self._sandboxes.close())
        self._runner.close()

    async def _serve(self, answers: list[Answer], sandbox: Sandbox, config: HarnessConfig) -> HarnessResult:
        async def complete(request: web.Request) -> web.Response:
            self.requests.append(orjson.loads(await request.read()))
            self.headers.append(request.headers)
            answer = answers.pop(0)
            await asyncio.sleep(answer.after_s)
            if answer.status == HANG_UP:
                assert request.transport is not None
                request.transport.abort()
            return web.json_response(answer.body, status=answer.status or 200, headers=answer.headers)

        app = web.Application()
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        session = Session(session_id="s", base_url=f"http://127.0.0.1:{port}/v1", api_key="key-of-s")
        try:
            async with aiohttp.ClientSession(timeout=IMPATIENT) as http:
                result = await CodingHarness(config, http).run(TASK, session, sandbox, temperature=0.5)
        finally:
            await runner.cleanup()
        assert answers == []
        return result


@pytest.fixture(scope="module")
def stage() -> Iterator[Playhouse]:
    house = Playhouse()
    yield house
    house.close()


@pytest.fixture
def house(stage: Playhouse) -> Playhouse:
    stage.requests.clear()
    stage.headers.clear()
    return stage


# --- Sessions -----------------------------------------------------------------------------------------------------


def test_a_session_from_prompt_to_submit(house: Playhouse) -> None:
    calls = ["read util.py", "test", "edit util.py 2\n    return a + b", "test", "submit"]
    result = house.play([says(call) for call in calls], max_tokens_per_turn=17)
    assert result == HarnessResult(reason="submit", counts={"read": 1, "test": 2, "edit": 1, "submit": 1})
    assert house.observations == ["1 def add(a, b):\n2     return a - b", "FAIL add(1, 2) = -1 want 3", "ok", "PASS"]
    assert house.requests[0] == {
        "model": "policy",
        "messages": [{"role": "user", "content": "fix add in util.py"}],
        "temperature": 0.5,
        "max_tokens": 17,
    }
    for shorter, longer in zip(house.requests, house.requests[1:], strict=False):
        assert longer["messages"][: len(shorter["messages"])] == shorter["messages"]
    assert [message["content"] for message in house.requests[-1]["messages"][1::2]] == calls[:-1]
    assert {headers["Authorization"] for headers in house.headers} == {"Bearer key-of-s"}


@pytest.mark.parametrize(
    ("call", "observation"),
    [
        ("read none.py", "no file"),
        ("read ../../etc/passwd", "no file"),
        ("read .", "no file"),
        ("edit none.py 1\nx", "bad edit"),
        ("edit /etc/passwd 1\nx", "bad edit"),
        ("edit util.py 3\nx", "bad edit"),
        ("edit util.py 2", "bad call"),
        ("please fix it", "bad call"),
        ("", "bad call"),
    ],
)
def test_calls_that_go_wrong(house: Playhouse, call: str, observation: str) -> None:
    result = house.play([says(call), says("submit")])
    assert house.observations == [observation]
    assert result.counts.get("malformed", 0) == (observation == "bad call")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("    return c", "NameError"),
        ("  return", "None"),
        ("    return str(a)", "'1'"),
        ("    return True", "True"),
        ("    return 'x' * 99", "'" + "x" * 23),
        ("    return (", "SyntaxError"),
        ("    exit()", "NameError"),
        ("    raise SystemExit", "SystemExit"),
    ],
)
def test_a_failing_test_shows_what_came_out(house: Playhouse, line: str, shown: str) -> None:
    house.play([says(f"edit util.py 2\n{line}"), says("test"), says("submit")])
    assert house.observations == ["ok", f"FAIL add(1, 0) = {shown} want 1"]


def test_turns_run_out(house: Playhouse) -> None:
    result = house.play([says("test")] * 3, max_turns=3)
    assert result == HarnessResult(reason="turns", counts={"test": 3})


def test_a_cut_turn_ends_the_session_and_is_not_carried_out(house: Playhouse) -> None:
    assert house.play([says("test"), says("submit", finish="length")]) == HarnessResult(
        reason="length", counts={"test": 1}
    )


def test_a_full_context_ends_the_session(house: Playhouse) -> None:
    answers = [says("test"), refuses(400, "context_length_exceeded")]
    assert house.play(answers) == HarnessResult(reason="context", counts={"test": 1})


# --- Trouble ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [refuses(429), refuses(503), refuses(502), Answer({}, HANG_UP)])
def test_a_busy_gateway_is_asked_again(house: Playhouse, trouble: Answer) -> None:
    result = house.play([trouble, trouble, says("submit")])
    assert result.reason == "submit"
    assert house.requests[0] == house.requests[1] == house.requests[2]


def test_every_attempt_of_a_call_has_the_same_id_and_no_other_call_has_it(house: Playhouse) -> None:
    house.play([says("test"), refuses(503), Answer({}, HANG_UP), says("submit")])
    first, *attempts = [headers["X-Request-Id"] for headers in house.headers]
    assert len(set(attempts)) == 1
    assert first not in attempts


def test_a_turn_may_take_all_of_its_own_time(house: Playhouse) -> None:
    assert house.play([replace(says("submit"), after_s=0.7)], turn_timeout_s=5.0).reason == "submit"


def test_the_gateway_says_how_long_to_wait(house: Playhouse) -> None:
    with pytest.raises(EngineUnavailable, match=r"within 0\.5 s; last: HTTP 429"):
        house.play([refuses(429, **{"Retry-After": "1"})], turn_timeout_s=0.5)
    assert len(house.requests) == 1


def test_a_lost_session_is_not_asked_for_again(house: Playhouse) -> None:
    with pytest.raises(SessionLost, match="scripted session_not_found"):
        house.play([says("test"), refuses(404, "session_not_found")])


@pytest.mark.parametrize(
    "answer", [refuses(401, "bad_key"), refuses(400, "bad_request"), Answer({"nonsense": 1}), Answer({}, 500)]
)
def test_what_repeating_cannot_cure_fails_at_once(house: Playhouse, answer: Answer) -> None:
    with pytest.raises(EngineUnavailable, match=f"HTTP {answer.status}"):
        house.play([answer])


def test_a_gateway_that_is_not_there_is_an_infrastructure_error() -> None:
    async def act() -> None:
        session = Session(session_id="s", base_url="http://127.0.0.1:9/v1", api_key="k")
        provider = LocalSandboxes(1)
        sandbox = await provider.create({})
        async with aiohttp.ClientSession() as http:
            harness = CodingHarness(HarnessConfig(turn_timeout_s=0.3), http)
            with pytest.raises(EngineUnavailable, match="ClientConnectorError"):
                await harness.run(TASK, session, sandbox, temperature=1.0)
        await provider.close()

    asyncio.run(act())


def test_a_dead_sandbox_fails_the_rollout_not_the_agent(house: Playhouse) -> None:
    with pytest.raises(SandboxError):
        house.play([says("test")], close_sandbox=True)


def test_a_deleted_file_is_the_agents_doing(house: Playhouse) -> None:
    house.play([says("test"), says("submit")], files={})
    assert house.observations == ["FAIL add(1, 0) = FileNotFoundError want 1"]


class ReadOnlySandbox(FakeSandbox):
    """A sandbox whose program took the right to write its file away, which only other users than root would notice."""

    async def write_file(self, path: str, text: str) -> None:
        raise ValueError(f"{path!r} is not a file in the sandbox: Permission denied")


def test_a_file_made_read_only_is_the_agents_doing() -> None:
    sandbox = ReadOnlySandbox(FILES, lambda sandbox: None)
    assert asyncio.run(observe(tools.EditFile("util.py", 2, "    return a + b"), TASK.checks, sandbox)) == "bad edit"
    assert asyncio.run(sandbox.read_file("util.py")) == FILES["util.py"]


def test_an_error_that_is_no_text_is_shown_all_the_same(house: Playhouse) -> None:
    nameless = "    class M(type): __name__ = '\\ud800'\n    raise M('E', (Exception,), {})"
    house.play([says(f"edit util.py 2\n{nameless}"), says("test"), says("submit")])
    assert house.observations == ["ok", "FAIL add(1, 0) = \\ud800 want 1"]


@pytest.mark.parametrize(("text", "observed"), [("right", "PASS"), ("wrong", "FAIL test_calc.py - assert 1 == 2")])
def test_tests_of_a_repository_are_run_in_the_sandbox(text: str, observed: str) -> None:
    runner = (
        "import sys\n"
        "if open('calc.py').read() == 'wrong':\n"
        "    print('FAILED', sys.argv[-1], '- assert 1 == 2')\n"
        "    sys.exit(1)\n"
    )
    checks = TestChecks(
        files={},
        must_pass=("test_calc.py::test_half",),
        about=1,
        artefacts=("calc.py",),
        command=("python", "run.py"),
        visible=("test_calc.py",),
    )

    async def act() -> str:
        sandboxes = LocalSandboxes(1)
        try:
            sandbox = await sandboxes.create({"calc.py": text, "run.py": runner})
            return await observe(tools.RunTests(), checks, sandbox)
        finally:
            await sandboxes.close()

    assert asyncio.run(act()) == observed

"""An external program as harness: its command line, its variables, and what its end means."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from etude.config.rollouts import PLACEHOLDERS, HarnessConfig
from etude.errors import ConfigError, EngineUnavailable, SandboxError, SessionLost
from etude.harnesses.command import CommandHarness, client_variables, fill_in, judge_end
from etude.protocols import ExecResult, HarnessResult, Session
from etude.rollouts.fake import FakeSandbox
from etude.types import Case, FunctionChecks, Split, Task

T = TypeVar("T")

TASK = Task(
    task_id="t",
    family="bugfix",
    template="add",
    split=Split.TRAIN,
    prompt="fix {model} in util.py; $(rm -rf /)",
    files={},
    checks=FunctionChecks(path="util.py", function="add", visible=(), hidden=(Case(arguments=(5, 5), expected=10),)),
)
CONFIG = HarnessConfig(
    kind="command",
    command=("agent", "--model={model}", "-t", "{prompt}", "-T{temperature}"),
    environment={"WHERE": "{workdir} {base_url}", "PATH": "/opt"},
    timeout_s=7.0,
    success_codes=(0, 3),
)


def ended(exit_code: int, *, timed_out: bool = False) -> ExecResult:
    return ExecResult(exit_code=exit_code, stdout="", stderr="", timed_out=timed_out, truncated=False, seconds=1.0)


class ScriptedSandbox(FakeSandbox):
    """A sandbox in which every command ends as scripted; a harness has no business in its files."""

    def __init__(self, ending: ExecResult) -> None:
        super().__init__({}, lambda sandbox: None)
        self.ending = ending
        self.seen: list[tuple[list[str], float]] = []

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        self.seen.append((list(argv), timeout_s))
        return self.ending

    async def write_file(self, path: str, text: str) -> None:
        raise AssertionError("a harness has no business in the sandbox's files")


def with_gateway(status: int, act: Callable[[aiohttp.ClientSession, str], Awaitable[T]]) -> T:
    """Act beside a gateway that answers ``/v1/models`` with ``status``, if the key is right."""

    async def models(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        return web.json_response({}, status=status)

    async def main() -> T:
        app = web.Application()
        app.router.add_get("/s/s1/v1/models", models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with aiohttp.ClientSession() as http:
                return await act(http, f"http://127.0.0.1:{runner.addresses[0][1]}/s/s1/v1")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def run(ending: ExecResult, *, status: int = 200, url: str | None = None) -> tuple[HarnessResult, ScriptedSandbox]:
    sandbox = ScriptedSandbox(ending)

    async def act(http: aiohttp.ClientSession, base_url: str) -> HarnessResult:
        harness = CommandHarness(CONFIG, http, workdir="/sandbox")
        session = Session(session_id="s1", base_url=url or base_url, api_key="key")
        return await harness.run(TASK, session, sandbox, temperature=0.5)

    return with_gateway(status, act), sandbox


def test_the_command_gets_its_task_and_the_way_to_the_model() -> None:
    inside = "http://gateway:8400/s/s1"
    result, sandbox = run(ended(0), url=f"{inside}/v1")
    assert result == HarnessResult(reason="submit", counts={})
    ((argv, timeout_s),) = sandbox.seen
    assert timeout_s == 7.0
    assert argv[0] == "env"
    command = argv.index("agent")
    assert argv[command:] == ["agent", "--model=policy", "-t", TASK.prompt, "-T0.5"]
    variables = dict(pair.split("=", 1) for pair in argv[1:command])
    assert variables == {
        "OPENAI_BASE_URL": f"{inside}/v1",
        "OPENAI_API_BASE": f"{inside}/v1",
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_BASE_URL": inside,
        "ANTHROPIC_API_KEY": "key",
        "ANTHROPIC_AUTH_TOKEN": "key",
        "WHERE": f"/sandbox {inside}/v1",
        "PATH": "/opt",
    }


@pytest.mark.parametrize(
    ("ending", "reason"),
    [(ended(0), "submit"), (ended(3), "submit"), (ended(1), "exit 1"), (ended(137, timed_out=True), "timeout")],
)
def test_every_end_of_a_program_that_ran_is_graded(ending: ExecResult, reason: str) -> None:
    assert run(ending)[0].reason == reason


@pytest.mark.parametrize("exit_code", [126, 127])
def test_a_program_that_did_not_start_is_nobodys_bad_work(exit_code: int) -> None:
    with pytest.raises(SandboxError, match=str(exit_code)):
        run(ended(exit_code))


def test_a_success_code_means_what_the_recipe_says() -> None:
    assert judge_end(ended(127), (127,)) == "submit"
    assert judge_end(ended(0), (1,)) == "exit 0"
    assert judge_end(ended(0, timed_out=True), (0,)) == "timeout"


@pytest.mark.parametrize(
    ("status", "error"), [(401, SessionLost), (404, SessionLost), (503, EngineUnavailable), (500, EngineUnavailable)]
)
@pytest.mark.parametrize("ending", [ended(1), ended(137, timed_out=True)])
def test_a_failure_without_a_gateway_is_the_machines(status: int, error: type[Exception], ending: ExecResult) -> None:
    with pytest.raises(error, match="harness failed"):
        run(ending, status=status)


def test_a_failure_with_a_dead_gateway_is_the_machines() -> None:
    with pytest.raises(EngineUnavailable, match="harness failed"):
        run(ended(1), url="http://127.0.0.1:1/v1")


def test_success_asks_nobody() -> None:
    assert run(ended(0), status=500)[0].reason == "submit"


def test_anthropics_clients_add_the_version_themselves() -> None:
    assert client_variables("http://door/s/a/v1", "k")["ANTHROPIC_BASE_URL"] == "http://door/s/a"


@given(st.fixed_dictionaries({name: st.text() for name in PLACEHOLDERS}), st.text())
def test_what_is_filled_in_is_not_filled_in_again(values: dict[str, str], text: str) -> None:
    braced = values | {"prompt": "{model}{" + values["prompt"]}
    assert fill_in("a{prompt}b{{base_url}}", braced) == f"a{braced['prompt']}b{{{braced['base_url']}}}"
    if "{" not in text:
        assert fill_in(text, values) == text


def check(exit_code: int) -> list[str]:
    sandbox = ScriptedSandbox(ended(exit_code))

    async def act(http: aiohttp.ClientSession, _: str) -> None:
        await CommandHarness(CONFIG, http, workdir="/w").check(sandbox)

    with_gateway(200, act)
    return sandbox.seen[0][0]


def test_a_missing_program_is_found_out_before_any_rollout() -> None:
    argv = check(0)
    assert argv[:3] == ["env", "WHERE={workdir} {base_url}", "PATH=/opt"]
    assert argv[-1] == "agent"
    with pytest.raises(ConfigError, match="'agent'"):
        check(127)

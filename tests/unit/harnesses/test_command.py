"""An external program as harness: its command line, its variables, and the meaning of its exit."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from command_results import ended
from etude.config.rollouts import PLACEHOLDERS, CommandOptions
from etude.errors import ConfigError, EngineUnavailable, SessionLost
from etude.harnesses.command import CommandHarness, client_variables, fill_in, judge_end
from etude.protocols import ExecResult, HarnessResult, Session
from etude.rollouts.fake import FakeSandbox
from etude.types import Case, FunctionChecks, Json, Split, Task

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
CONFIG = CommandOptions(
    command=("agent", "--model={model}", "-t", "{prompt}", "-T{temperature}"),
    environment={"WHERE": "{workdir} {base_url}", "PATH": "/opt"},
    timeout_s=7.0,
    success_codes=(0, 3),
)


class ScriptedSandbox(FakeSandbox):
    """A sandbox in which every command ends as scripted; a harness has no business in its files."""

    def __init__(self, ending: ExecResult) -> None:
        super().__init__({}, lambda sandbox: None)
        self.ending = ending
        self.seen: list[tuple[list[str], float]] = []

    async def exec(self, argv: Sequence[str], *, timeout_s: float = 5.0, **_: object) -> ExecResult:
        self.seen.append((list(argv), timeout_s))
        return self.ending

    async def write_file(self, path: str, text: str) -> None:
        raise AssertionError("a harness has no business in the sandbox's files")


SERVED: dict[str, Json] = {"calls": 0, "waited_s": 0.0, "unserved": False}


def with_gateway(status: int, act: Callable[[aiohttp.ClientSession, str], Awaitable[T]], *times: dict[str, Json]) -> T:
    """Run ``act`` with a gateway that reports call statistics with ``status``, in sequence; the last one repeats."""
    answers = iter(times)
    last = times[-1] if times else SERVED

    async def waits(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        return web.json_response(next(answers, last), status=status)

    async def main() -> T:
        app = web.Application()
        app.router.add_get("/s/s1/v1/queue_time", waits)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with aiohttp.ClientSession() as http:
                return await act(http, f"http://127.0.0.1:{runner.addresses[0][1]}/s/s1/v1")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def run(
    ending: ExecResult, *times: dict[str, Json], status: int = 200, url: str | None = None, task: Task = TASK
) -> tuple[HarnessResult, ScriptedSandbox]:
    sandbox = ScriptedSandbox(ending)

    async def act(http: aiohttp.ClientSession, base_url: str) -> HarnessResult:
        harness = CommandHarness(CONFIG, http, workdir="/sandbox")
        session = Session(session_id="s1", base_url=url or base_url, api_key="key")
        return await harness.run(task, session, sandbox, temperature=0.5)

    return with_gateway(status, act, *times), sandbox


def test_the_command_gets_its_task_and_the_way_to_the_model() -> None:
    result, sandbox = run(ended(0))
    assert result == HarnessResult(reason="submit", counts={})
    ((argv, timeout_s),) = sandbox.seen
    assert timeout_s == 7.0
    assert argv[0] == "env"
    command = argv.index("agent")
    assert argv[command:] == ["agent", "--model=policy", "-t", TASK.prompt, "-T0.5"]
    variables = dict(pair.split("=", 1) for pair in argv[1:command])
    inside = variables["ANTHROPIC_BASE_URL"]
    assert inside.endswith("/s/s1")
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
    [
        (ended(0), "submit"),
        (ended(3), "submit"),
        (ended(1), "exit 1"),
        (ended(126), "exit 126"),
        (ended(127), "exit 127"),
        (ended(137, timed_out=True), "timeout"),
    ],
)
def test_every_end_of_a_program_that_ran_is_graded(ending: ExecResult, reason: str) -> None:
    assert run(ending)[0].reason == reason


def test_a_prompt_that_no_command_line_takes_is_named() -> None:
    task = replace(TASK, prompt="é" * (60 << 10))
    with pytest.raises(ConfigError, match=r"prompt of task t \(add\) filled in, at most 122880: leave the task out"):
        run(ended(0), task=task)


def test_what_a_program_printed_last_is_a_line_that_does_nothing_to_a_terminal() -> None:
    failed = replace(ended(1), stdout="b" * 600 + "\x1b[2J\n", stderr="Traceback:\n  no\u202e key\x00\n")
    printed = run(failed)[0].printed
    assert printed.endswith("b [2J Traceback: no key")
    assert len(printed) == 500
    assert run(ended(0))[0].printed == ""


def test_a_success_code_is_what_the_recipe_says() -> None:
    assert judge_end(ended(127), (127,)) == "submit"
    assert judge_end(ended(0), (1,)) == "exit 0"
    assert judge_end(ended(0, timed_out=True), (0,)) == "timeout"


@pytest.mark.parametrize(
    ("status", "error"), [(401, SessionLost), (404, SessionLost), (503, EngineUnavailable), (500, EngineUnavailable)]
)
@pytest.mark.parametrize("ending", [ended(0), ended(1), ended(137, timed_out=True)])
def test_an_end_without_a_gateway_is_the_machines(status: int, error: type[Exception], ending: ExecResult) -> None:
    with pytest.raises(error, match="harness ended"):
        run(ending, status=status)


def test_an_end_with_a_dead_gateway_is_the_machines() -> None:
    with pytest.raises(EngineUnavailable, match="harness ended"):
        run(ended(1), url="http://127.0.0.1:1/v1")


@pytest.mark.parametrize("ending", [ended(0), ended(1), ended(137, timed_out=True)])
def test_an_end_after_a_call_without_an_engine_is_the_machines(ending: ExecResult) -> None:
    with pytest.raises(EngineUnavailable, match="a call for which there was no engine"):
        run(ending, SERVED | {"unserved": True})


def test_time_that_was_waited_away_is_the_machines() -> None:
    timed_out, waited = ended(137, timed_out=True), SERVED | {"waited_s": 0.8}
    with pytest.raises(EngineUnavailable, match=r"ran out of its 7 s, of which .* for 0\.8 s"):
        run(timed_out, SERVED | {"calls": 1}, waited)  # of the killed program's last call more is known in a moment
    assert run(timed_out, SERVED | {"waited_s": 0.6})[0].reason == "timeout"
    assert run(ended(1), waited)[0].reason == "exit 1"


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

"""Whole sessions of the coding agent: a scripted model behind real HTTP, real tools in a real sandbox."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import aiohttp
import pytest

from etude.config.rollouts import CodingOptions
from etude.errors import EngineUnavailable, OutOfTime, SandboxError, SessionLost
from etude.harnesses import tools
from etude.harnesses.coding import CodingHarness, observe
from etude.protocols import ExecResult, Session
from etude.rollouts.fake import FakeSandbox
from etude.sandboxes.local.provider import LocalSandboxes
from etude.types import TestChecks
from playhouse import FILES, HANG_UP, NO_ROOM, TASK, Answer, Playhouse, refuses, says

# --- Sessions -----------------------------------------------------------------------------------------------------


def test_a_session_from_prompt_to_submit(house: Playhouse) -> None:
    calls = ["read util.py", "test", "edit util.py 2\n    return a + b", "test", "submit"]
    result = house.play([says(call) for call in calls], max_tokens_per_turn=17)
    assert (result.reason, result.answer) == ("submit", "")
    assert result.counts == {"read": 1, "test": 2, "edit": 1, "submit": 1}
    assert result.measures == {"todo_opened": 0, "todo_open": 0, "summaries": 0, "restarts": 0}
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
    assert (result.reason, result.counts) == ("turns", {"test": 3})


def test_a_cut_turn_ends_the_session_and_is_not_carried_out(house: Playhouse) -> None:
    result = house.play([says("test"), says("submit", finish="length")])
    assert (result.reason, result.counts) == ("length", {"test": 1})


@pytest.mark.parametrize("error_text", [NO_ROOM, refuses(400, "session_full")])
def test_a_full_context_or_session_ends_the_rollout(house: Playhouse, error_text: Answer) -> None:
    result = house.play([says("test"), error_text])
    assert (result.reason, result.counts) == ("context", {"test": 1})


def test_last_words_end_the_session(house: Playhouse) -> None:
    result = house.play([says("answer 47 13")])
    assert (result.reason, result.answer, result.counts) == ("submit", "47 13", {"submit": 1})


def test_items_to_do_are_numbered_struck_and_counted(house: Playhouse) -> None:
    calls = ["todo fix add", "todo test it", "done 1", "done 1", "done 7", "submit"]
    result = house.play([says(call) for call in calls])
    assert house.observations == ["todo 1", "todo 2", "ok", "no todo", "no todo"]
    assert result.counts == {"todo": 2, "done": 3, "submit": 1}
    assert (result.measures["todo_opened"], result.measures["todo_open"]) == (2, 1)


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
    assert house.play([replace(says("submit"), after_s=0.7)], turn_timeout_s=60.0).reason == "submit"


def test_the_gateway_says_how_long_to_wait(house: Playhouse) -> None:
    with pytest.raises(EngineUnavailable, match=r"within 3\.0 s; last: HTTP 429"):
        house.play([refuses(429, **{"Retry-After": "60"})], turn_timeout_s=3.0)
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
            harness = CodingHarness(CodingOptions(turn_timeout_s=3.0), http)
            with pytest.raises(EngineUnavailable, match="ClientConnectorError"):
                await harness.run(TASK, session, sandbox, temperature=1.0)
        await provider.close()

    asyncio.run(act())


def test_a_dead_sandbox_fails_the_rollout_not_the_agent(house: Playhouse) -> None:
    with pytest.raises(SandboxError):
        house.play([says("test")], close_sandbox=True)


class HangingSandbox(FakeSandbox):
    """A sandbox whose commands take all of the time limit."""

    async def exec(self, argv: Sequence[str], **_: object) -> ExecResult:
        raise OutOfTime


def test_an_agent_whose_time_is_up_has_made_its_calls_all_the_same(house: Playhouse) -> None:
    calls = ["read util.py", "todo rest", "please", "test"]
    result = house.play([says(call) for call in calls], sandbox=HangingSandbox(FILES, lambda sandbox: None))
    assert result.reason == "time"
    assert result.counts == {"read": 1, "todo": 1, "malformed": 1, "test": 1}
    assert result.measures["todo_open"] == 1


def test_a_deleted_file_is_the_agents_doing(house: Playhouse) -> None:
    house.play([says("test"), says("submit")], files={})
    assert house.observations == ["FAIL add(1, 0) = FileNotFoundError want 1"]


class ReadOnlySandbox(FakeSandbox):
    """A sandbox in which a program made its file read-only, which only users other than root notice."""

    async def write_file(self, path: str, text: str) -> None:
        raise ValueError(f"{path!r} is not a file in the sandbox: Permission denied")


def test_a_file_made_read_only_is_the_agents_doing() -> None:
    sandbox = ReadOnlySandbox(FILES, lambda sandbox: None)
    assert asyncio.run(observe(tools.EditFile("util.py", 2, "    return a + b"), TASK.checks, sandbox)) == "bad edit"
    assert asyncio.run(sandbox.read_file("util.py")) == FILES["util.py"]


@pytest.mark.parametrize("text", ["caf\N{REPLACEMENT CHARACTER}\nx\n", "x\n" * (4 << 20)])
def test_a_file_that_was_not_read_as_it_is_takes_no_edit(text: str) -> None:
    sandbox = FakeSandbox({"a.py": text}, lambda sandbox: None)
    assert asyncio.run(observe(tools.EditFile("a.py", 2, "y"), TASK.checks, sandbox)) == "bad edit"
    assert asyncio.run(sandbox.read_file("a.py")) == text


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

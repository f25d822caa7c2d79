"""A fork gets the same results as its parent, uses the same budget, and then continues on its own."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import pytest

from command_results import ended
from etude.errors import InfrastructureError, OutOfTime, Unsupported
from etude.protocols import ExecResult
from etude.rollouts.fake import FakeSandbox, run_virtually
from etude.rollouts.sandbox import AgentTime, BoundedSandbox, RolloutLimits, SandboxCall

FILES = {"a.py": "1"}


class CountedSandbox(FakeSandbox):
    """Counts its commands, which take 40 s, and fail on request."""

    def __init__(self, files: Mapping[str, str] = FILES) -> None:
        super().__init__(files, lambda _: None)
        self.commands = 0

    async def exec(self, argv: Sequence[str], *, timeout_s: float = 5.0, **_: object) -> ExecResult:
        self.commands += 1
        return ended(
            int(argv[0] == "false"), str(self.commands), timed_out=timeout_s < 40, seconds=min(timeout_s, 40.0)
        )

    async def read_file(self, path: str) -> str | None:
        if path.startswith("/"):
            raise ValueError(f"{path} is out of the sandbox")
        return await super().read_file(path)


async def work(sandbox: BoundedSandbox) -> list[object]:
    seen: list[object] = [await sandbox.read_file("a.py")]
    with pytest.raises(ValueError, match="/etc is out of the sandbox"):
        await sandbox.read_file("/etc")
    await sandbox.write_file("a.py", "2")
    seen.append((await sandbox.exec(["false"], timeout_s=60)).stdout)
    return [*seen, await sandbox.read_file("a.py")]


T = TypeVar("T")
Script: TypeAlias = Callable[[BoundedSandbox], Awaitable[T]]


async def play(script: Script[T], real: FakeSandbox, seen: Sequence[SandboxCall] = ()) -> tuple[T, list[SandboxCall]]:
    """Run an agent with 100 s of command time; returns its result and the recorded calls."""
    agent, calls = AgentTime(RolloutLimits(commands_s=100)), list[SandboxCall]()

    async def keep(call: SandboxCall) -> None:
        calls.append(call)

    sandbox = BoundedSandbox(real, agent, seen, keep)
    return await agent.wait(script(sandbox)), calls


def test_a_fork_hears_what_its_parent_heard_and_touches_nothing() -> None:
    heard, calls = run_virtually(play(work, CountedSandbox()))
    assert [each.call[0] for each in calls] == ["read_file", "read_file", "write_file", "exec", "read_file"]
    assert [call.is_failure for call in calls] == [False, False, False, True, False]

    async def work_and_read(sandbox: BoundedSandbox) -> tuple[list[object], str | None]:
        return await work(sandbox), await sandbox.read_file("a.py")

    untouched = CountedSandbox({"a.py": "another world"})
    (again, own), taken = run_virtually(play(work_and_read, untouched, calls))
    assert again == heard == ["1", "1", "2"]
    assert (own, untouched.commands) == ("another world", 0)
    assert [call.outcome for call in taken] == ["another world"]


def test_a_fork_goes_on_in_the_middle() -> None:
    heard, calls = run_virtually(play(work, CountedSandbox()))
    copy = CountedSandbox({"a.py": "2"})
    again, taken = run_virtually(play(work, copy, calls[:3]))
    assert again == heard
    assert (copy.commands, len(taken)) == (1, 2)


async def three_commands(sandbox: BoundedSandbox) -> int:
    await sandbox.exec(["true"], timeout_s=60)
    await sandbox.exec(["true"], timeout_s=60)
    with pytest.raises(OutOfTime):
        await sandbox.exec(["true"], timeout_s=60)
    return 3


def test_time_that_the_parent_took_is_gone_for_its_forks() -> None:
    """100 s are there: two commands of 40 s, and the third is cut after 20."""
    _, calls = run_virtually(play(three_commands, CountedSandbox()))
    assert len(calls) == 2
    assert run_virtually(play(three_commands, CountedSandbox(), calls))[0] == 3


async def something_else(sandbox: BoundedSandbox) -> str | None:
    await sandbox.read_file("a.py")
    return await sandbox.read_file("b.py")


def test_a_harness_that_does_something_else_has_failed() -> None:
    _, calls = run_virtually(play(work, CountedSandbox()))
    with pytest.raises(InfrastructureError, match=r"was to do .*'read_file', '/etc'.* but did .*'b\.py'"):
        run_virtually(play(something_else, CountedSandbox(), calls))


def test_what_would_hold_an_unfinished_beginning_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"set credit\.kind = 'rollout'"):
        run_virtually(play(BoundedSandbox.snapshot, CountedSandbox()))
    with pytest.raises(Unsupported, match=r"set credit\.kind = 'rollout'"):
        run_virtually(play(BoundedSandbox.fork, CountedSandbox()))

"""A branch is told what its trunk was told, spends what that one spent, and then goes its own way."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import pytest

from etude.errors import InfrastructureError, OutOfTime, Unsupported
from etude.protocols import ExecResult
from etude.rollouts.bounds import AgentTime, BoundedSandbox, Limits
from etude.rollouts.fake import FakeSandbox, run_virtually
from etude.rollouts.replays import Note, NotedSandbox

FILES = {"a.py": "1"}


class CountedSandbox(FakeSandbox):
    """Commands take 40 s and fail if they say so; each says how many there were."""

    def __init__(self, files: Mapping[str, str] = FILES) -> None:
        super().__init__(files, lambda _: None)
        self.commands = 0

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        self.commands += 1
        return ExecResult(
            exit_code=int(argv[0] == "false"),
            stdout=str(self.commands),
            stderr="",
            timed_out=timeout_s < 40,
            truncated=False,
            seconds=min(timeout_s, 40.0),
        )

    async def read_file(self, path: str) -> str | None:
        if path.startswith("/"):
            raise ValueError(f"{path} is out of the sandbox")
        return await super().read_file(path)


async def work(sandbox: NotedSandbox) -> list[object]:
    seen: list[object] = [await sandbox.read_file("a.py")]
    with pytest.raises(ValueError, match="/etc is out of the sandbox"):
        await sandbox.read_file("/etc")
    await sandbox.write_file("a.py", "2")
    seen.append((await sandbox.exec(["false"], timeout_s=60)).stdout)
    return [*seen, await sandbox.read_file("a.py")]


T = TypeVar("T")
Script: TypeAlias = Callable[[NotedSandbox], Awaitable[T]]


async def play(script: Script[T], real: FakeSandbox, seen: Sequence[Note] = ()) -> tuple[T, list[Note]]:
    """What an agent with 100 s of commands heard, and what was noted."""
    agent, notes = AgentTime(Limits(commands_s=100)), list[Note]()

    async def keep(note: Note) -> None:
        notes.append(note)

    sandbox = NotedSandbox(BoundedSandbox(real, agent), agent, seen, keep)
    return await agent.wait(script(sandbox)), notes


def test_a_branch_hears_what_its_trunk_heard_and_touches_nothing() -> None:
    heard, notes = run_virtually(play(work, CountedSandbox()))
    assert [note.call[0] for note in notes] == ["read_file", "read_file", "write_file", "exec", "read_file"]
    assert [note.is_failure for note in notes] == [False, False, False, True, False]

    async def work_and_read(sandbox: NotedSandbox) -> tuple[list[object], str | None]:
        return await work(sandbox), await sandbox.read_file("a.py")

    untouched = CountedSandbox({"a.py": "another world"})
    (again, own), taken = run_virtually(play(work_and_read, untouched, notes))
    assert again == heard == ["1", "1", "2"]
    assert (own, untouched.commands) == ("another world", 0)
    assert [note.outcome for note in taken] == ["another world"]


def test_a_branch_goes_on_in_the_middle() -> None:
    heard, notes = run_virtually(play(work, CountedSandbox()))
    copy = CountedSandbox({"a.py": "2"})
    again, taken = run_virtually(play(work, copy, notes[:3]))
    assert again == heard
    assert (copy.commands, len(taken)) == (1, 2)


async def three_commands(sandbox: NotedSandbox) -> int:
    await sandbox.exec(["true"], timeout_s=60)
    await sandbox.exec(["true"], timeout_s=60)
    with pytest.raises(OutOfTime):
        await sandbox.exec(["true"], timeout_s=60)
    return 3


def test_time_that_the_trunk_took_is_gone_for_its_branches() -> None:
    """100 s are there: two commands of 40 s, and the third is cut after 20."""
    _, notes = run_virtually(play(three_commands, CountedSandbox()))
    assert len(notes) == 2
    assert run_virtually(play(three_commands, CountedSandbox(), notes))[0] == 3


async def something_else(sandbox: NotedSandbox) -> str | None:
    await sandbox.read_file("a.py")
    return await sandbox.read_file("b.py")


def test_a_harness_that_does_something_else_has_failed() -> None:
    _, notes = run_virtually(play(work, CountedSandbox()))
    with pytest.raises(InfrastructureError, match=r"was to do .*'read_file', '/etc'.* but did .*'b\.py'"):
        run_virtually(play(something_else, CountedSandbox(), notes))


def test_what_would_hold_an_unfinished_beginning_is_refused() -> None:
    with pytest.raises(Unsupported, match="takes no snapshots"):
        run_virtually(play(NotedSandbox.snapshot, CountedSandbox()))
    with pytest.raises(Unsupported, match="does not fork"):
        run_virtually(play(NotedSandbox.fork, CountedSandbox()))

"""Facts of processes from ``/proc``; processes may end during the reading."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from waiting import WAIT_S

T = TypeVar("T")


def children(process: int | None) -> list[int]:
    """The processes right below one."""
    result: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while it is looked at
            result += map(int, task.read_text(encoding="utf-8").split())
    return result


async def settled(look: Callable[[], T]) -> T:
    """A result that is read twice in a row: a process that is just being created has no connection yet."""
    before, now = None, look()
    while before != now:
        await asyncio.sleep(0.5)
        before, now = now, look()
    return now


async def seen(look: Callable[[], T], expected: T) -> T:
    """The result, returned at once if it is the expected one and otherwise after the timeout."""
    deadline_s = time.monotonic() + WAIT_S
    while (now := look()) != expected and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
    return now


async def until_running(process: int | None, program: str, count: int) -> list[int]:
    """The direct child processes of one process that run ``program``, once there are enough of them: each is forked
    before it executes it.
    """
    deadline_s = time.monotonic() + WAIT_S
    while True:
        result = [child for child in children(process) if program in command_line(child)]
        if len(result) >= count or time.monotonic() > deadline_s:
            return result
        await asyncio.sleep(0.02)


def opened(process: int) -> list[str]:
    """Open files of a process."""
    result: list[str] = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # it may be closed while it is looked at
            result.append(str(link.readlink()))
    return result


def owner(process: int) -> int:
    """The user of a process."""
    return Path(f"/proc/{process}").stat().st_uid


def command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def survivors(processes: list[int]) -> list[int]:
    return [process for process in processes if await outlives(process)]


async def outlives(process: int) -> bool:
    """True if a process still exists after a while."""
    deadline_s = time.monotonic() + WAIT_S
    while "(zombie)" not in state(process):
        if time.monotonic() > deadline_s:
            return True
        await asyncio.sleep(0.05)
    return False


def state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return "(zombie)"

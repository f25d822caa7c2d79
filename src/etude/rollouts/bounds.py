"""What bounds a rollout: its limits, and a sandbox no call of which can hang or take more time than there is.

Two kinds of limit, never mixed up. What the *model* may use up is its own doing: turns and tokens are the harness's to
count, the time of its commands is counted here, as the sandbox measured it. A rollout that used it up is graded as it
stands (:class:`~etude.errors.OutOfTime`): to try again until one is short would teach the model nothing but luck. What
*machines* may take is no reward and no fault of the model's: a call that hangs is given up, and the rollout is tried
again. Waiting for the model costs the model nothing.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from etude.config.rollouts import RolloutConfig
from etude.errors import InfrastructureError, OutOfTime
from etude.protocols import ExecResult, Sandbox
from etude.sandbox_spec import Image, SandboxStats

GRACE_S = 30.0
"""How much later than a command's own limit its sandbox may say so: providers have a grace of their own, a third."""
FILES_S = 120.0
"""For files to be read or written, also a whole archive of them."""
COPIES_S = 300.0
"""For a snapshot or a fork, which may copy all of a machine's memory."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long each part of a rollout may take, in seconds."""

    start_s: float = 120.0
    """Opening a session; making a world; fetching a session's turns."""
    commands_s: float = 120.0
    """All commands of the agent together: the model's own time."""
    silence_s: float = 600.0
    """Between two signs of life of a harness."""
    grading_s: float = 900.0
    """One grading, beside what its task's own runs take at most."""
    closing_s: float = 10.0
    """Giving back a sandbox, or a session that nobody reads."""

    @classmethod
    def of(cls, config: RolloutConfig) -> Self:
        """Those of a recipe."""
        return cls(
            start_s=config.start_timeout_s,
            commands_s=config.timeout_s,
            silence_s=config.silence_timeout_s,
            grading_s=config.grading_timeout_s,
        )


async def within(seconds: float, what: str, work: Awaitable[T]) -> T:
    """The result of ``work``. Raises :class:`~etude.errors.InfrastructureError` when it takes longer than it may."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise InfrastructureError(f"{what}: no end within {seconds:g} s") from error


class AgentTime:
    """The time of one agent: what its commands have used up, and how long nothing was heard of it."""

    def __init__(self, limits: Limits) -> None:
        self._left_s = limits.commands_s
        self._silence_s = limits.silence_s
        self._deadline = asyncio.timeout(None)

    async def wait(self, work: Awaitable[T]) -> T:
        """The result of ``work``. Raises :class:`~etude.errors.InfrastructureError` when it falls silent."""
        try:
            async with self._deadline:
                self.sign_of_life()
                return await work
        except TimeoutError as error:
            if not self._deadline.expired():
                raise
            raise InfrastructureError(f"the agent: no sign of life within {self._silence_s:g} s") from error

    def sign_of_life(self, then_s: float = 0.0) -> None:
        """It does something; the next sign may be later by ``then_s``."""
        self._deadline.reschedule(asyncio.get_running_loop().time() + then_s + self._silence_s)

    def grant(self, timeout_s: float) -> float:
        """How long a command may run that asks for ``timeout_s``. Raises :class:`~etude.errors.OutOfTime`."""
        if self._left_s <= 0:
            raise OutOfTime
        return min(timeout_s, self._left_s)

    def spend(self, result: ExecResult, *, asked_s: float, granted_s: float) -> None:
        """Take off what a command used. Raises :class:`~etude.errors.OutOfTime` if it was stopped for it."""
        self._left_s -= result.seconds
        if result.timed_out and granted_s < asked_s:
            raise OutOfTime


class BoundedSandbox:
    """A sandbox that answers every call in bounded time or fails; implements :class:`~etude.protocols.Sandbox`."""

    def __init__(self, sandbox: Sandbox, agent: AgentTime | None = None) -> None:
        """``sandbox`` is closed with this; in the hands of ``agent`` its time is spent."""
        self._sandbox = sandbox
        self._agent = agent

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command. Raises :class:`~etude.errors.OutOfTime` where the agent has none left."""
        granted_s = timeout_s if self._agent is None else self._agent.grant(timeout_s)
        running = self._sandbox.exec(argv, stdin=stdin, timeout_s=granted_s, environment=environment)
        result = await self._bounded(granted_s + GRACE_S, "a command", running)
        if self._agent is not None:
            self._agent.spend(result, asked_s=timeout_s, granted_s=granted_s)
        return result

    async def read_file(self, path: str) -> str | None:
        """The text of a file."""
        return await self._bounded(FILES_S, "reading a file", self._sandbox.read_file(path))

    async def write_file(self, path: str, text: str) -> None:
        """Replace a file."""
        await self._bounded(FILES_S, "writing a file", self._sandbox.write_file(path, text))

    async def export(self, paths: Sequence[str], *, limit_bytes: int = 64 << 20) -> bytes:
        """A tar of files and folders."""
        return await self._bounded(FILES_S, "an export", self._sandbox.export(paths, limit_bytes=limit_bytes))

    async def load(self, tar: bytes) -> None:
        """Unpack a tar."""
        await self._bounded(FILES_S, "an import", self._sandbox.load(tar))

    async def stats(self) -> SandboxStats:
        """What is used now."""
        return await self._bounded(FILES_S, "taking stock", self._sandbox.stats())

    async def kill_processes(self) -> None:
        """Kill what runs inside."""
        await self._bounded(FILES_S, "killing processes", self._sandbox.kill_processes())

    async def snapshot(self) -> Image:
        """The files as they are."""
        return await self._bounded(COPIES_S, "a snapshot", self._sandbox.snapshot())

    async def fork(self, count: int = 1) -> Sequence[Sandbox]:
        """Copies, each as bounded as this one."""
        copies = await self._bounded(COPIES_S, "a fork", self._sandbox.fork(count))
        return [BoundedSandbox(copy) for copy in copies]

    async def close(self) -> None:
        """Close the sandbox."""
        await self._sandbox.close()

    async def _bounded(self, seconds: float, what: str, work: Awaitable[T]) -> T:
        if self._agent is not None:
            self._agent.sign_of_life(seconds)
        answer = await within(seconds, f"{what} in a sandbox", work)
        if self._agent is not None:
            self._agent.sign_of_life()
        return answer

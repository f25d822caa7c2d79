"""An agent's sandbox with bounds: every call ends in time, the agent's time is counted, calls can be replayed.

    agent ──call──▶ replayed from the parent rollout's calls?  ── yes ─▶ its outcome, and its time spent
                        │ no
                        └─▶ bounded call in the real sandbox ──▶ time spent ──▶ recorded, where rollouts fork

There are two separate kinds of limit. The *model's* budget is its own: the harness counts turns and tokens, this module
the time of its commands as measured by the sandbox. A rollout that used up its budget is graded as it is
(:class:`~etude.errors.OutOfTime`): retries until one is short would reward luck. The time of *machines* gives no reward
and is not the model's fault: a call that hangs is abandoned, and the rollout is retried. Waits for the model do not
count.

A forked rollout repeats the parent's calls: a harness is a function of its inputs, so with the same outcomes, and the
same replies from the forked session, it reaches the parent's state. No harness needs support for forks. A harness that
makes different calls with the same outcomes has failed, and the slot is retried as a separate rollout.

Owns every time limit of a rollout (:class:`RolloutLimits`) and the record of calls. Does not decide when to fork
(:mod:`etude.rollouts.branching`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar, cast

from etude.config.rollouts import (
    CodingOptions,
    HarnessConfig,
    OpenEnvHarnessOptions,
    RolloutConfig,
    ShellOptions,
    SingleTurnOptions,
    VerifiersHarnessOptions,
)
from etude.errors import InfrastructureError, OutOfTime, Unsupported
from etude.protocols import ExecResult, Sandbox
from etude.sandbox_spec import Image, SandboxStats

GRACE_S = 30.0
"""Delay beyond a command's own limit until its sandbox reports it: providers have their own grace, a third of it."""
FILES_S = 120.0
"""Limit for a read or write of files, including a whole archive."""
COPIES_S = 300.0
"""Limit for a snapshot or a fork, which may copy all of a machine's memory."""
NO_COPY = "an agent's sandbox is not copied by its harness where rollouts fork: set credit.kind = 'rollout'"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """All time limits of a rollout, in seconds, and the number of attempts to grade it."""

    start_s: float = 120.0
    """Open a session; start a sandbox; fetch a session's turns."""
    commands_s: float = 120.0
    """All commands of the agent together: the model's own time."""
    silence_s: float = 600.0
    """Between two signs of activity of a harness."""
    grading_s: float = 900.0
    """One grading, in addition to the time limits of its task's own runs."""
    gradings: int = 2
    """Attempts to grade an agent's result: cheaper than repeating the rollout, and long rollouts are not lost."""
    closing_s: float = 10.0
    """Close a sandbox, or discard a session."""

    @classmethod
    def of(cls, config: RolloutConfig, harness: HarnessConfig | None = None) -> Self:
        """Limits of a recipe. A built-in ``harness`` may be inactive for as long as the deadlines of its operations
        allow.
        """
        return cls(
            start_s=config.start_timeout_s,
            commands_s=config.timeout_s,
            silence_s=max(config.silence_timeout_s, _longest_silence_s(config, harness)),
            grading_s=config.grading_timeout_s,
        )


def _longest_silence_s(config: RolloutConfig, harness: HarnessConfig | None) -> float:
    """Longest time in seconds between a harness's calls to the sandbox: several turns with malformed calls; a single
    turn; or all the time of a third-party environment, whose process may have to start first.
    """
    match None if harness is None else harness.options:
        case CodingOptions() as options:
            return (options.max_turns + 1) * options.turn_timeout_s
        case ShellOptions() as options:
            return (options.max_turns + 1) * options.turn_timeout_s
        case SingleTurnOptions() as options:
            return 2 * options.turn_timeout_s
        case VerifiersHarnessOptions() as options:
            return config.silence_timeout_s + options.timeout_s
        case OpenEnvHarnessOptions() as options:
            return options.wait_timeout_s + (options.max_steps + 1) * (options.turn_timeout_s + options.step_timeout_s)
        case _:
            return 0.0


async def within(seconds: float, action: str, work: Awaitable[T]) -> T:
    """The result of ``work``. Raises :class:`~etude.errors.InfrastructureError` after ``seconds``."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise InfrastructureError(f"{action}: no end within {seconds:g} s") from error


class AgentTime:
    """The time of one agent: the total of its commands, and the time since its last activity."""

    def __init__(self, limits: RolloutLimits) -> None:
        self._left_s = limits.commands_s
        self._silence_s = limits.silence_s
        self._deadline = asyncio.timeout(None)
        self.calls_s = 0.0
        """Seconds of its calls to the sandbox, measured here."""

    async def wait(self, work: Awaitable[T]) -> T:
        """The result of ``work``. Raises :class:`~etude.errors.InfrastructureError` if there is no activity for too
        long.
        """
        try:
            async with self._deadline:
                self.sign_of_life()
                return await work
        except TimeoutError as error:
            if not self._deadline.expired():
                raise
            raise InfrastructureError(f"the agent: no sign of life within {self._silence_s:g} s") from error

    def sign_of_life(self, then_s: float = 0.0) -> None:
        """Record activity; the next activity may be later by ``then_s``."""
        self._deadline.reschedule(asyncio.get_running_loop().time() + then_s + self._silence_s)

    def grant(self, timeout_s: float) -> float:
        """Permitted seconds for a command that requests ``timeout_s``. Raises :class:`~etude.errors.OutOfTime`."""
        if self._left_s <= 0:
            raise OutOfTime
        return min(timeout_s, self._left_s)

    def spend(self, result: ExecResult, *, requested_s: float, granted_s: float) -> None:
        """Subtract a command's time. Raises :class:`~etude.errors.OutOfTime` if the budget stopped it."""
        self._left_s -= result.seconds
        if result.timed_out and granted_s < requested_s:
            raise OutOfTime


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxCall:
    """One call to a sandbox and its outcome."""

    call: tuple[object, ...]
    """The method and its arguments."""
    outcome: object
    """Returned value, or the ``ValueError`` that it raised."""

    @property
    def is_failure(self) -> bool:
        """True for a command that failed."""
        return isinstance(self.outcome, ExecResult) and self.outcome.exit_code != 0

    def replay(self) -> object:
        """Return, or raise, the outcome once more."""
        if isinstance(self.outcome, ValueError):
            raise ValueError(*self.outcome.args)
        return self.outcome


class BoundedSandbox:
    """A sandbox that answers every call in bounded time or fails; implements :class:`~etude.protocols.Sandbox`."""

    def __init__(
        self,
        sandbox: Sandbox,
        agent: AgentTime | None = None,
        recorded: Sequence[SandboxCall] = (),
        on_call: Callable[[SandboxCall], Awaitable[None]] | None = None,
    ) -> None:
        """``sandbox`` is closed with this object; if an ``agent`` is given, its time is charged.

        The first calls must equal the ``recorded`` ones and get their outcomes, otherwise
        :class:`~etude.errors.InfrastructureError` is raised; later calls are passed to ``on_call``, which is awaited.
        """
        self._sandbox = sandbox
        self._agent = agent
        self._recorded = iter(recorded)
        self._on_call = on_call
        self._may_fork = bool(recorded) or on_call is not None

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command. Raises :class:`~etude.errors.OutOfTime` if the agent has no time left."""

        async def run() -> ExecResult:
            granted_s = timeout_s if self._agent is None else self._agent.grant(timeout_s)
            running = self._sandbox.exec(argv, stdin=stdin, timeout_s=granted_s, environment=environment)
            result = await self._bounded(granted_s + GRACE_S, "a command", running)
            if self._agent is not None:
                self._agent.spend(result, requested_s=timeout_s, granted_s=granted_s)
            return result

        call = ("exec", tuple(argv), stdin, timeout_s, dict(environment or {}))
        recorded = self._next_recorded(call)
        if recorded is None:
            return await self._record(call, run())
        result = cast("ExecResult", recorded.replay())
        if self._agent is not None:  # the parent's agent had no time left after this command either
            granted_s = self._agent.grant(timeout_s)
            self._agent.spend(result, requested_s=timeout_s, granted_s=granted_s)
        return result

    async def read_file(self, path: str) -> str | None:
        """The text of a file."""
        return await self._call(("read_file", path), "reading a file", lambda: self._sandbox.read_file(path))

    async def write_file(self, path: str, text: str) -> None:
        """Replace a file."""
        call = ("write_file", path, text)
        await self._call(call, "writing a file", lambda: self._sandbox.write_file(path, text))

    async def export(self, paths: Sequence[str], *, limit_bytes: int = 64 << 20) -> bytes:
        """A tar of files and folders."""
        call = ("export", tuple(paths), limit_bytes)
        return await self._call(call, "an export", lambda: self._sandbox.export(paths, limit_bytes=limit_bytes))

    async def load(self, tar: bytes) -> None:
        """Unpack a tar."""
        await self._call(("load", tar), "an import", lambda: self._sandbox.load(tar))

    async def stats(self) -> SandboxStats:
        """Resources in use now."""
        return await self._call(("stats",), "reading statistics", self._sandbox.stats)

    async def kill_processes(self) -> None:
        """Kill all processes in the sandbox."""
        await self._call(("kill_processes",), "killing processes", self._sandbox.kill_processes)

    async def snapshot(self) -> Image:
        """A snapshot of the files; refused if rollouts fork: the image would contain effects that a fork has not
        replayed yet.
        """
        if self._may_fork:
            raise Unsupported(NO_COPY)
        return await self._bounded(COPIES_S, "a snapshot", self._sandbox.snapshot())

    async def fork(self, count: int = 1) -> Sequence[Sandbox]:
        """Copies with the same limits on calls; refused like :meth:`snapshot`."""
        if self._may_fork:
            raise Unsupported(NO_COPY)
        copies = await self._bounded(COPIES_S, "a fork", self._sandbox.fork(count))
        return [BoundedSandbox(copy) for copy in copies]

    async def close(self) -> None:
        """Close the sandbox."""
        await self._sandbox.close()

    async def _call(self, call: tuple[object, ...], action: str, work: Callable[[], Awaitable[T]]) -> T:
        """Outcome of a call that is not charged to the agent's time."""
        recorded = self._next_recorded(call)
        if recorded is None:
            return await self._record(call, self._bounded(FILES_S, action, work()))
        return cast("T", recorded.replay())

    def _next_recorded(self, call: tuple[object, ...]) -> SandboxCall | None:
        """The recorded call that this one must equal; ``None`` after the last of them."""
        recorded = next(self._recorded, None)
        if recorded is None:
            return None
        if recorded.call != call:
            raise InfrastructureError(
                f"a forked rollout was to do {str(recorded.call)[:120]} as its parent did, but did {str(call)[:120]}: "
                f"its harness does not do the same again; set credit.kind = 'rollout'"
            )
        if self._agent is not None:
            self._agent.sign_of_life()
        return recorded

    async def _record(self, call: tuple[object, ...], work: Awaitable[T]) -> T:
        """Outcome of ``work``, after it was passed to ``on_call``."""
        if self._on_call is None:
            return await work
        try:
            outcome = await work
        except ValueError as error:
            await self._on_call(SandboxCall(call=call, outcome=error))
            raise
        await self._on_call(SandboxCall(call=call, outcome=outcome))
        return outcome

    async def _bounded(self, seconds: float, action: str, work: Awaitable[T]) -> T:
        if self._agent is None:
            return await within(seconds, f"{action} in a sandbox", work)
        now = asyncio.get_running_loop().time
        began_s = now()
        self._agent.sign_of_life(seconds)
        try:
            outcome = await within(seconds, f"{action} in a sandbox", work)
        finally:
            self._agent.calls_s += now() - began_s
        self._agent.sign_of_life()
        return outcome

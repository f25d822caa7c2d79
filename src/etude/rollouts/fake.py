"""Fakes of all dependencies of a rollout, without model, network or processes: for tests and simulation.

The caller supplies functions for the course of a session and the judgement of its result. Under :func:`run_virtually`
waits take no time: hours of rollouts run as fast as they are computed.
"""

import asyncio
import itertools
import math
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import NoReturn, TypeAlias, TypeVar

from etude.aio import never
from etude.clock import VirtualClock
from etude.errors import SandboxError, SessionLost, Unsupported
from etude.protocols import ExecResult, Grade, HarnessResult, Sandbox, Session
from etude.rollouts.worker import RolloutContext
from etude.sandbox_spec import Capability, Image, SandboxSpec, SandboxStats
from etude.types import Task, Turn

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next timer instead of waiting; tasks must not wait for external events."""

    def __init__(self) -> None:
        self._virtual = VirtualClock()
        super().__init__(_Jumps(self._virtual))

    def time(self) -> float:
        """The virtual time in seconds."""
        return self._virtual.now()


class _Jumps(selectors.SelectSelector):
    """A selector that advances the virtual clock instead of waiting."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Events that are ready now; without any, advance the clock by ``timeout``."""
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits, and no timer is set: nothing will ever happen again")
        if not ready:
            self._clock.advance(timeout or 0.0)
        return ready


def run_virtually(main: Coroutine[None, None, T]) -> T:
    """Run ``main`` to its end in virtual time. Raises ``RuntimeError`` if it waits for an event that cannot happen."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class LoopClock:
    """The time of the running loop, real or virtual."""

    def now(self) -> float:
        """Seconds."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Yield to other tasks for ``seconds``."""
        await asyncio.sleep(seconds)


class FakeSessions:
    """Fake gateway sessions that return the captured turns."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._turns: dict[str, list[Turn]] = {}
        self._replays: dict[str, int] = {}  # session → turns that a fork still replays

    def __len__(self) -> int:
        """Sessions that are open."""
        return len(self._turns)

    async def open(self, *, min_version: int | None = None) -> Session:
        """Start a session; the caller of :meth:`capture` sets the weight versions of its turns."""
        session_id = f"session-{next(self._numbers)}"
        self._turns[session_id] = []
        return Session(session_id=session_id, base_url="http://gateway.invalid/v1", api_key=f"key of {session_id}")

    def capture(self, session: Session, turn: Turn) -> Turn:
        """Record ``turn`` as sampled and return it; the first calls of a fork return the parent's turns."""
        turns, replays = self._turns[session.session_id], self._replays.get(session.session_id, 0)
        if replays:
            self._replays[session.session_id] = replays - 1
            return turns[len(turns) - replays]
        turns.append(turn)
        return turn

    def forget(self) -> None:
        """Lose every session, like a killed gateway."""
        self._turns.clear()

    async def fork(self, session_id: str) -> tuple[Session, int]:
        """Start a session with another one's turns. Raises :class:`~etude.errors.SessionLost`."""
        if session_id not in self._turns:
            raise SessionLost(f"no session {session_id!r}")
        session, turns = await self.open(), self._turns[session_id]
        self._turns[session.session_id] += turns
        self._replays[session.session_id] = len(turns)
        return session, len(turns)

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session. Raises :class:`~etude.errors.SessionLost` if it is not open."""
        if session_id not in self._turns:
            raise SessionLost(f"no session {session_id!r}")
        return tuple(self._turns.pop(session_id))

    async def discard(self, session_id: str) -> None:
        """End a session. Raises like :meth:`close`."""
        await self.close(session_id)

    async def lost(self, session_id: str) -> NoReturn:
        """Wait forever: a fake session is never lost."""
        await never()


OnExec: TypeAlias = Callable[[Sequence[str]], Awaitable[None]]
"""Function that a fake sandbox calls for each command."""


class FakeSandbox:
    """Fake sandbox: files in a dict; every command succeeds without output, after ``on_exec``."""

    def __init__(
        self,
        files: Mapping[str, str],
        on_close: Callable[["FakeSandbox"], None],
        on_fork: Callable[["FakeSandbox"], None] = lambda copy: None,
        on_exec: OnExec | None = None,
    ) -> None:
        self._files = dict(files)
        self._on_close = on_close
        self._on_fork = on_fork
        self._on_exec = on_exec

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Pretend to run a command."""
        if self._on_exec is not None:
            await self._on_exec(argv)
        return ExecResult(exit_code=0, stdout="", stderr="", timed_out=False, truncated=False, seconds=0.0)

    async def read_file(self, path: str) -> str | None:
        """The text of a file."""
        return self._files.get(path)

    async def write_file(self, path: str, text: str) -> None:
        """Replace a file."""
        self._files[path] = text

    async def export(self, paths: Sequence[str], *, limit_bytes: int = 64 << 20) -> bytes:
        """Refused: there are no files on any disk."""
        raise Unsupported("fake sandboxes make no archive: use local")

    async def load(self, tar: bytes) -> None:
        """Refused: there are no files on any disk."""
        raise Unsupported("fake sandboxes take no archive: use local")

    async def stats(self) -> SandboxStats:
        """Usage: only the size of the files."""
        size_bytes = sum(len(text.encode()) for text in self._files.values())
        return SandboxStats(memory_bytes=0, disk_bytes=size_bytes, processes=0, cpu_s=0, age_s=math.nan)

    async def kill_processes(self) -> None:
        """Do nothing: no process runs."""

    async def snapshot(self) -> Image:
        """Refused: there are no files on any disk."""
        raise Unsupported("fake sandboxes keep no image: use ns")

    async def fork(self, count: int = 1) -> "Sequence[FakeSandbox]":
        """Sandboxes with the same files."""
        copies = [FakeSandbox(self._files, self._on_close, self._on_fork, self._on_exec) for _ in range(count)]
        for copy in copies:
            self._on_fork(copy)
        return copies

    async def close(self) -> None:
        """Close the sandbox."""
        self._on_close(self)


class FakeSandboxes:
    """Provider of fake sandboxes; it fails while ``broken`` has a reason."""

    def __init__(self, on_exec: OnExec | None = None) -> None:
        self._on_exec = on_exec
        self._open: set[FakeSandbox] = set()
        self.broken = ""

    def __len__(self) -> int:
        """Sandboxes that are open."""
        return len(self._open)

    async def capabilities(self) -> frozenset[Capability]:
        """Only forks, of the files alone, since no process runs."""
        return frozenset({Capability.FORK})

    async def open(self, task: Task, *, gateway: str) -> FakeSandbox:
        """A sandbox with a task's files, for the protocol :class:`~etude.rollouts.worker.TaskSandboxes`."""
        return await self.create(task.files)

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FakeSandbox:
        """A sandbox with ``files``; ``spec`` is ignored. Raises :class:`~etude.errors.SandboxError` if broken."""
        if self.broken:
            raise SandboxError(self.broken)
        sandbox = FakeSandbox(files, self._open.discard, self._open.add, self._on_exec)
        self._open.add(sandbox)
        return sandbox

    async def close(self) -> None:
        """Close every sandbox."""
        self._open.clear()


class FakeHarness:
    """A harness that calls ``play``, whose result is the stop reason of the agent and part of ``printed``."""

    def __init__(self, play: Callable[[Task, Session], Awaitable[str]]) -> None:
        self._play = play

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Play one session."""
        reason = await self._play(task, session)
        return HarnessResult(reason=reason, counts={}, printed=f"the end is {reason}")


class FakeGrader:
    """A grader that calls ``judge``."""

    def __init__(self, judge: Callable[[Task], float]) -> None:
        self._judge = judge

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Judge one task."""
        value = self._judge(task)
        return Grade(value=value, parts={"judge": value})


class RolloutFakes:
    """All fake dependencies of a rollout context, in the time of the running loop."""

    def __init__(self, play: Callable[[Task, Session], Awaitable[str]], judge: Callable[[Task], float]) -> None:
        self.sessions = FakeSessions()
        self.sandboxes = FakeSandboxes()
        self.context = RolloutContext(
            sessions=self.sessions,
            sandboxes=self.sandboxes,
            harness=FakeHarness(play),
            grader=FakeGrader(judge),
            clock=LoopClock(),
        )

    @property
    def is_tidy(self) -> bool:
        """True if every session and every sandbox was closed."""
        return len(self.sessions) == len(self.sandboxes) == 0

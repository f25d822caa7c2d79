"""A rollout gone through once more, up to where another one branches off.

    trunk     harness ─▶ call 1 ─▶ call 2 ─▶ ┆ ─▶ call 3 …         calls to its sandbox, each noted with its outcome
                                             ┆ fork: sandbox, session, notes
    branch    harness ─▶ note 1 ─▶ note 2 ─▶ ┆ ─▶ call 3' …        the same calls, answered from the notes

A harness is a function of what it hears: given the outcomes that the trunk had, and by the forked session the replies,
it is where the trunk was, whatever it keeps in mind. So no harness needs to know of branches. One that does something
else with the same outcomes has failed, and is tried again as a rollout of its own.

Owns the notes. Time that the trunk's commands took is taken off the branch's agent, too: it would have had no more.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from etude.errors import InfrastructureError, Unsupported
from etude.protocols import ExecResult, Sandbox
from etude.rollouts.bounds import AgentTime
from etude.sandbox_spec import Image, SandboxStats

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One call to a sandbox and its outcome."""

    call: tuple[object, ...]
    """The method and what it was given."""
    outcome: object
    """What it returned, or the ``ValueError`` that it raised."""

    @property
    def is_failure(self) -> bool:
        """Whether it was a command that failed."""
        return isinstance(self.outcome, ExecResult) and self.outcome.exit_code != 0


class NotedSandbox:
    """A sandbox in the hands of an agent that may be branched off; implements :class:`~etude.protocols.Sandbox`.

    Its first calls must be those of ``seen`` and have their outcomes; later ones are done in ``sandbox`` and told to
    ``then``, which is waited for. Raises :class:`~etude.errors.InfrastructureError` for a call that is not the noted
    one.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        agent: AgentTime,
        seen: Sequence[Note] = (),
        then: Callable[[Note], Awaitable[None]] | None = None,
    ) -> None:
        """``sandbox`` takes its commands' time off ``agent`` by itself; what is answered from memory does so here."""
        self._sandbox = sandbox
        self._agent = agent
        self._seen = iter(seen)
        self._then = then

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command, or say how it ended."""
        call = ("exec", tuple(argv), stdin, timeout_s, dict(environment or {}))
        if (note := self._recalled(call)) is not None:
            result = cast("ExecResult", _again(note))
            granted_s = self._agent.grant(timeout_s)
            self._agent.sign_of_life()
            self._agent.spend(result, asked_s=timeout_s, granted_s=granted_s)
            return result
        return await self._do(call, self._sandbox.exec(argv, stdin=stdin, timeout_s=timeout_s, environment=environment))

    async def read_file(self, path: str) -> str | None:
        """The text of a file."""
        return await self._noted(("read_file", path), lambda: self._sandbox.read_file(path))

    async def write_file(self, path: str, text: str) -> None:
        """Replace a file."""
        await self._noted(("write_file", path, text), lambda: self._sandbox.write_file(path, text))

    async def export(self, paths: Sequence[str], *, limit_bytes: int = 64 << 20) -> bytes:
        """A tar of files and folders."""
        call = ("export", tuple(paths), limit_bytes)
        return await self._noted(call, lambda: self._sandbox.export(paths, limit_bytes=limit_bytes))

    async def load(self, tar: bytes) -> None:
        """Unpack a tar."""
        await self._noted(("load", tar), lambda: self._sandbox.load(tar))

    async def stats(self) -> SandboxStats:
        """What is used now."""
        return await self._noted(("stats",), self._sandbox.stats)

    async def kill_processes(self) -> None:
        """Kill what runs inside."""
        await self._noted(("kill_processes",), self._sandbox.kill_processes)

    async def snapshot(self) -> Image:
        """Refused: the image would hold what a branch has not done yet."""
        raise Unsupported("an agent that may be branched off takes no snapshots: set credit.branches = 1")

    async def fork(self, count: int = 1) -> Sequence[Sandbox]:
        """Refused, likewise."""
        raise Unsupported("an agent that may be branched off does not fork: set credit.branches = 1")

    async def close(self) -> None:
        """Close the sandbox."""
        await self._sandbox.close()

    async def _noted(self, call: tuple[object, ...], work: Callable[[], Awaitable[T]]) -> T:
        if (note := self._recalled(call)) is None:
            return await self._do(call, work())
        self._agent.sign_of_life()
        return cast("T", _again(note))

    async def _do(self, call: tuple[object, ...], work: Awaitable[T]) -> T:
        try:
            outcome = await work
        except ValueError as error:
            await self._tell(Note(call=call, outcome=error))
            raise
        await self._tell(Note(call=call, outcome=outcome))
        return outcome

    async def _tell(self, note: Note) -> None:
        if self._then is not None:
            await self._then(note)

    def _recalled(self, call: tuple[object, ...]) -> Note | None:
        note = next(self._seen, None)
        if note is not None and note.call != call:
            raise InfrastructureError(
                f"a branch was to do {str(note.call)[:120]} as its trunk did, but did {str(call)[:120]}: its harness "
                f"does not do the same again; set credit.branches = 1"
            )
        return note


def _again(note: Note) -> object:
    """What a noted call returned. Raises the ``ValueError`` that it raised."""
    if isinstance(note.outcome, ValueError):
        raise ValueError(*note.outcome.args)
    return note.outcome

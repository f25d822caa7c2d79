"""What runs in one namespace sandbox on behalf of its holder: commands, and étude's own jobs.

    request, pipes ──▶ launcher ──▶ process inside ──▶ how it ended

Owns pipes and deadlines: when the time of a command runs out, or whoever asked gives up, its session is killed, and
what is waited for is over in any case soon after. What a command left running goes on; what that prints is read and
thrown away. Whether the sandbox is open is :mod:`etude.sandboxes.ns.sandbox`'s.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.errors import AgentFault, SandboxError
from etude.protocols import ExecResult
from etude.sandboxes.folder_sandbox import NOT_EXECUTABLE, Command
from etude.sandboxes.inputs import in_memory
from etude.sandboxes.ns import wire
from etude.sandboxes.ns.jobs import Verdict
from etude.sandboxes.ns.link import Link
from etude.sandboxes.ns.pipes import OutputPipe
from etude.sandboxes.outputs import OUTPUT_LIMIT_BYTES

GRACE_S = 10.0
"""For a command to end once it was killed; then its sandbox is given up."""
JOB_TIMEOUT_S = 120.0
"""For files to be carried in or out."""
MAX_LISTENED = 32
"""Outputs of descendants that are read at a time; who writes to the oldest finds it broken."""
ANSWER_LIMIT_BYTES = 1 << 30
"""Of a job; what it carries has limits of its own."""
KILLED = 137
"""Exit code of a command whose time ran out."""


class Commands:
    """All that runs in one sandbox."""

    def __init__(self, link: Link, box: int, *, check_open: Callable[[], None], fail: Callable[[str], None]) -> None:
        """``check_open`` raises when the sandbox is closed; ``fail`` closes it for a reason."""
        self._link = link
        self._box = box
        self._check_open = check_open
        self._fail = fail
        self._listened: deque[OutputPipe] = deque()

    async def run(self, command: Command, *, environment: Mapping[str, str], workdir: str) -> ExecResult:
        """Run a command to its end. Raises :class:`~etude.errors.SandboxError` when the sandbox fails under it."""
        body = {
            "kind": "exec",
            "id": self._link.next_number(),
            "box": self._box,
            **wire.Command(argv=list(command.argv), environment=dict(environment), workdir=workdir),
        }
        if wire.is_too_large(body):
            return _too_long(command.argv[0])
        pipes = [await OutputPipe.open(OUTPUT_LIMIT_BYTES), await OutputPipe.open(OUTPUT_LIMIT_BYTES)]
        try:
            return await self._run(body, command, pipes)
        finally:
            self._listen_on(pipes)

    async def job(self, job: str, request: Mapping[str, Any], data: bytes = b"") -> bytes | None:
        """Do one of :data:`~etude.sandboxes.ns.jobs.JOBS` inside; ``None`` when there is no such file."""
        number = self._link.next_number()
        body = {"kind": "job", "id": number, "box": self._box, "job": job, **request}
        pipe = await OutputPipe.open(ANSWER_LIMIT_BYTES)
        try:
            ending = await self._start(body, (in_memory(data), pipe.theirs))
            pipe.hand_over()
            timed_out = await self._see_end(number, ending, JOB_TIMEOUT_S)
            end = {} if ending.cancelled() else await ending
            if end.get("agents_doing"):
                raise AgentFault(
                    f"{job} was killed or stopped by what runs in the sandbox, or by what fills its memory"
                )
            if timed_out:
                raise SandboxError(f"{job} in a sandbox took more than {JOB_TIMEOUT_S:g} s")
            self._status(end)
            pipe.finish()
            return judge(job, bytes(pipe.kept))
        finally:
            pipe.close()

    def close(self) -> None:
        """Stop reading what anybody prints."""
        for pipe in self._listened:
            pipe.close()
        self._listened.clear()

    async def _run(self, body: Mapping[str, Any], command: Command, pipes: Sequence[OutputPipe]) -> ExecResult:
        start_s = time.monotonic()
        stdin = in_memory(command.stdin.encode("utf-8", "surrogateescape"))
        ending = await self._start(body, (stdin, *(pipe.theirs for pipe in pipes)))
        for pipe in pipes:
            pipe.hand_over()
        timed_out = await self._see_end(body["id"], ending, command.timeout_s)
        status = self._status(await ending)
        for pipe in pipes:
            pipe.finish()
        stdout, stderr = pipes
        return ExecResult(
            exit_code=KILLED if timed_out else 128 - status if status < 0 else status,
            stdout=stdout.text,
            stderr=stderr.text,
            timed_out=timed_out,
            truncated=stdout.truncated or stderr.truncated,
            seconds=time.monotonic() - start_s,
        )

    async def _start(self, body: Mapping[str, Any], descriptors: Sequence[int]) -> asyncio.Future[dict[str, Any]]:
        """Ask for a command or job; its input, the first descriptor, is closed out here."""
        try:
            return await self._link.ask(body, descriptors)
        except SandboxError:
            self._check_open()  # that it has ended says more than that there is no launcher
            raise
        finally:
            os.close(descriptors[0])

    async def _see_end(self, number: int, ending: asyncio.Future[Any], timeout_s: float) -> bool:
        """Wait for the end of what runs, or kill it; true if its time ran out. It is over when this is, however."""
        try:
            await asyncio.wait({ending}, timeout=timeout_s)
            return not ending.done()
        finally:
            if not ending.done():
                await self._link.send({"kind": "kill", "id": number, "box": self._box})
                await asyncio.wait({ending}, timeout=GRACE_S)
            if not ending.done():
                self._fail(f"a command did not end within {GRACE_S:g} s of being killed")
                ending.cancel()

    def _status(self, end: Mapping[str, Any]) -> int:
        """How a command or job ended; what ended because its sandbox did has no result."""
        if end["sandbox_died"]:
            self._fail("the sandbox has died under a command")
        self._check_open()
        return int(end["status"])

    def _listen_on(self, pipes: Sequence[OutputPipe]) -> None:
        """Go on reading what descendants print."""
        for pipe in pipes:
            pipe.hand_over()
            pipe.finish()
        self._listened = deque(pipe for pipe in (*self._listened, *pipes) if pipe.is_open)
        while len(self._listened) > MAX_LISTENED:
            self._listened.popleft().close()


def judge(job: str, answer: bytes) -> bytes | None:
    """Read what a job said. Raises ``ValueError``, :class:`~etude.errors.AgentFault` or
    :class:`~etude.errors.SandboxError` when it did not do it.
    """
    verdict, payload = answer[:1], answer[1:]
    if verdict == bytes([Verdict.DONE]):
        return payload
    if verdict == bytes([Verdict.MISSING]):
        return None
    text = payload.decode("utf-8", "replace")
    if verdict == bytes([Verdict.REFUSED]):
        raise ValueError(text)
    if verdict == bytes([Verdict.FULL]):
        raise AgentFault(f"{job} in a sandbox that has no room left: {text}")
    raise SandboxError(text or f"{job} in a sandbox was killed")


def _too_long(program: str) -> ExecResult:
    """How a shell ends a command line that Linux does not take."""
    stderr = f"{program}: Argument list too long: use a file or stdin\n"
    return ExecResult(exit_code=NOT_EXECUTABLE, stdout="", stderr=stderr, timed_out=False, truncated=False, seconds=0.0)

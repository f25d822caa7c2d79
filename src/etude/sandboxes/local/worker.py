"""The process between a provider and a zygote: ``python -m etude.sandboxes.local.worker OPTIONS``.

    provider ──Request on stdin──▶ worker ──descriptors──▶ zygote ──fork──▶ command
             ◀──Answer on stdout──        ◀──the command's output─────────────┘

Owns the deadline and the output limit of one command at a time. Frames are a 4-byte big-endian length and JSON; nothing
is ever unpickled. Its first frame has the capabilities. It ends when its stdin closes, and all processes below it end
with it. Standard library alone; :mod:`etude.sandboxes.local.zygote` forks the commands.
"""

import json
import math
import os
import select
import socket
import struct
import sys
import time
from typing import TypedDict

from etude.sandboxes import isolation
from etude.sandboxes.command_io import CappedOutput, in_memory
from etude.sandboxes.local.zygote import KILL, MESSAGE_LIMIT_BYTES, ForkRequest, Invocation, Zygote, preload

LENGTH = struct.Struct(">I")
"""Header of every frame."""
REQUESTS, ANSWERS = 0, 1
"""Descriptors whose other ends belong to the provider."""
READ_BYTES = 1 << 16
"""Size of a pipe."""


class WorkerRequest(TypedDict):
    """One command to run."""

    root: str
    """Name of the sandbox's directory in the scratch directory."""
    workdir: str
    """Working folder of the command, below the root."""
    environment: dict[str, str]
    """Added to the zygote's own."""
    argv: list[str]
    stdin: str
    timeout_s: float
    output_limit: int
    """Maximum number of stored bytes of stdout, and of stderr."""


class CommandOutcome(TypedDict):
    """The result of a command: the fields of :class:`~etude.protocols.ExecResult`, and an error of the sandbox."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    seconds: float
    error: str
    """Not empty if the command was not run."""


def main() -> None:
    """Confine this process, fork the zygote, and serve requests."""
    options = json.loads(sys.argv[1])
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # event loops differ in what a new process inherits
    preload()
    scratch = os.open(options["scratch"], os.O_PATH | os.O_DIRECTORY)
    if options["run_as"] is not None:
        isolation.become_user(options["run_as"])
    namespaces = options["isolate"] and isolation.enter_namespaces()
    isolation.die_with_parent()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    zygote = os.fork()
    if zygote == 0:
        ours.close()
        Zygote(theirs, scratch, namespaces=namespaces).serve()
    theirs.close()
    try:
        CommandWorker(ours).serve()
    finally:
        ours.close()
        os.waitpid(zygote, 0)


class CommandWorker:
    """Runs commands in a zygote, one after the other."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def serve(self) -> None:
        """Send the capabilities, then answer requests until the provider disconnects."""
        _write_frame(self._receive())
        while request := _read_frame():
            _write_frame(json.dumps(self.execute(json.loads(request))).encode())

    def execute(self, request: WorkerRequest) -> CommandOutcome:
        """Run one command to its end and collect its output."""
        start = time.monotonic()
        stdout, stderr = _Output(request["output_limit"]), _Output(request["output_limit"])
        self._start(request, stdout, stderr)
        exit_code, error, timed_out = self._collect(stdout, stderr, start + request["timeout_s"])
        return CommandOutcome(
            exit_code=exit_code,
            stdout=stdout.close(),
            stderr=stderr.close(),
            timed_out=timed_out,
            truncated=stdout.truncated or stderr.truncated,
            seconds=time.monotonic() - start,
            error=error,
        )

    def _start(self, request: WorkerRequest, stdout: "_Output", stderr: "_Output") -> None:
        """Send the command to the zygote as four descriptors: the invocation, and its standard input, output and
        errors.

        The invocation and the input are files in memory, so that no process has to feed them.
        """
        cpu_s = math.ceil(request["timeout_s"]) + 1  # stops the command even if no other process can
        invocation = Invocation(request["workdir"], request["environment"], request["argv"])
        message = json.dumps(ForkRequest(root=request["root"], cpu_s=cpu_s)).encode()
        files = [in_memory(invocation.to_bytes()), in_memory(request["stdin"].encode())]
        descriptors = [*files, stdout.writer, stderr.writer]
        socket.send_fds(self._control, [message], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def _collect(self, stdout: "_Output", stderr: "_Output", deadline: float) -> tuple[int, str, bool]:
        """Read until the zygote reports the end; return exit code, error, and whether the command timed out."""
        outputs = {output.reader: output for output in (stdout, stderr)}
        poller = select.poll()
        for descriptor in (REQUESTS, self._control.fileno(), *outputs):
            poller.register(descriptor, select.POLLIN)
        timed_out = False
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 and not timed_out:
                self._control.send(KILL)
                timed_out = True
            ready = {fd for fd, _ in poller.poll(None if timed_out else math.ceil(left_s * 1000))}
            if REQUESTS in ready:
                sys.exit()  # a request before the last answer means that the provider has disconnected
            if self._control.fileno() in ready:
                ending = json.loads(self._receive())
                return ending["exit_code"], ending["error"], timed_out
            for descriptor in ready:
                if not outputs[descriptor].read():
                    poller.unregister(descriptor)

    def _receive(self) -> bytes:
        message = self._control.recv(MESSAGE_LIMIT_BYTES)
        if not message:
            sys.exit("a sandbox zygote died; its worker ends too")
        return message


class _Output:
    """One output pipe of a command."""

    def __init__(self, limit_bytes: int) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._data = CappedOutput(limit_bytes)

    @property
    def truncated(self) -> bool:
        """True once output was discarded."""
        return self._data.truncated

    def read(self) -> bool:
        """Read available output; return false if there is none."""
        try:
            chunk = os.read(self.reader, READ_BYTES)
        except BlockingIOError:
            return False
        self._data.add(chunk)
        return bool(chunk)

    def close(self) -> str:
        """All stored output; all writers are dead by now."""
        while self.read():
            pass
        os.close(self.reader)
        return self._data.text


def _read_frame() -> bytes:
    """The next frame; empty once the provider has disconnected."""
    header = _read_exactly(LENGTH.size)
    return _read_exactly(LENGTH.unpack(header)[0]) if header else b""


def _read_exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(REQUESTS, size - len(data))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


def _write_frame(data: bytes) -> None:
    left = memoryview(LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(ANSWERS, left) :]


if __name__ == "__main__":
    main()

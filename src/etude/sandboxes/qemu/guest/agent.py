"""The agent inside a virtual machine: answers étude's requests on a virtio port.

    python3 -m etude.sandboxes.qemu.guest.agent       as process 1, started by the initial RAM disk

    request      action                                                              answer
    hello        nothing                                                             kernel, python
    rest         sends nothing more, so that the machine can be copied               (its last message)
    wake         continues, in a copy with its own clock, name and random numbers
    environment  makes the environment of commands, see etude.sandboxes.qemu.guest.filesystem
    kill_all     kills all commands with their processes
    exec, kill   runs a command; kills one whose caller is gone                      its result
    stats        measures                                                            resource usage
    others       etude.sandboxes.qemu.guest.filesystem, etude.sandboxes.qemu.guest.tunnels

The modules of this folder are copied into the machine with the few others that they import, and run there on the base
system's Python, 3.11 or newer, using only the standard library. Host and agent share the protocol
(:mod:`etude.sandboxes.qemu.guest.frames`). There is one thread with one event loop, which blocks only for the next
event. States: new ──environment──▶ prepared; at any time it may rest until it is woken. If the port fails, there is no
host to serve, and the agent ends, and the machine with it.
"""

import errno
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from etude.sandboxes.command_io import CappedOutput
from etude.sandboxes.qemu.guest import system
from etude.sandboxes.qemu.guest.filesystem import ERRANDS, GROUP, ROOT, FileServer, GuestEnvironment
from etude.sandboxes.qemu.guest.frames import GuestMessage, Inbox, Outbox
from etude.sandboxes.qemu.guest.tunnels import Tunnels, addresses_of

PIPE_CHUNK_BYTES = 64 << 10
FLOOD_CHUNKS = 16
"""Maximum number of chunks that are read from one output before others have their turn."""
NOT_FOUND, NOT_RUNNABLE = 127, 126
"""Exit codes of a shell for a program that does not exist and one that cannot be run."""


class GuestCommand:
    """One command from its start to its answer."""

    def __init__(self, number: int, order: dict[str, Any], stdin: bytes, guest: GuestEnvironment) -> None:
        """Start the command. ``order`` has ``argv``, ``environment`` and ``timeout_s``; for a service also its ``root``
        and its ``user``, number and group, otherwise these are empty. Raises ``OSError``.
        """
        self.number = number
        self.started_at = time.monotonic()
        self.deadline = self.started_at + float(order["timeout_s"])
        self.timed_out = False
        self.outputs = (CappedOutput(), CappedOutput())
        self._stdin = memoryview(stdin)
        self._group = f"{GROUP}/c{number}"
        os.mkdir(self._group)  # noqa: PTH102 - a fresh copy has no code ready for more
        environment = order["environment"] if order["root"] else {**guest.environment, **order["environment"]}
        theirs, self._pipes = _pipes()
        self.process = os.fork()
        if self.process == 0:
            _become(order, environment, theirs, (self._group, guest))
        for end in theirs:
            os.close(end)
        self.handle = os.pidfd_open(self.process)

    def watch(self, selector: selectors.BaseSelector, ended: Callable[["GuestCommand"], None]) -> None:
        """Watch for input, output and the end; ``ended`` is called once, when the result is complete."""
        stdin, *outputs = self._pipes
        if self._stdin:
            selector.register(stdin, selectors.EVENT_WRITE, lambda: self._feed(selector, stdin))
        else:
            os.close(stdin)
        for pipe, output in zip(outputs, self.outputs, strict=True):
            selector.register(pipe, selectors.EVENT_READ, _OutputDrain(selector, pipe, output))
        selector.register(self.handle, selectors.EVENT_READ, lambda: self._end(selector, ended))

    def kill(self, *, timed_out: bool = False) -> None:
        """Kill it and all that it started."""
        self.timed_out |= timed_out
        self.deadline = float("inf")
        system.write(f"{self._group}/cgroup.kill", "1")

    def answer(self) -> dict[str, Any]:
        """The end of a command."""
        stdout, stderr = self.outputs
        return {
            "exit_code": self.exit_code,
            "stdout": stdout.text,
            "stderr": stderr.text,
            "timed_out": self.timed_out,
            "truncated": stdout.truncated or stderr.truncated,
            "seconds": time.monotonic() - self.started_at,
        }

    def _feed(self, selector: selectors.BaseSelector, pipe: int) -> None:
        try:
            self._stdin = self._stdin[os.write(pipe, self._stdin[:PIPE_CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = self._stdin[:0]
        if not self._stdin:
            selector.unregister(pipe)
            os.close(pipe)

    def _end(self, selector: selectors.BaseSelector, ended: Callable[["GuestCommand"], None]) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        self.exit_code = 128 - code if code < 0 else code
        selector.unregister(self.handle)
        os.close(self.handle)
        for key in list(selector.get_map().values()):
            if isinstance(key.data, _OutputDrain) and key.data.output in self.outputs:
                key.data()
        with suppress(OSError):  # something of it still runs
            os.rmdir(self._group)  # noqa: PTH106 - as above
        ended(self)


class _OutputDrain:
    """Reads one output of a command, and after its end the output of processes that it left running."""

    def __init__(self, selector: selectors.BaseSelector, pipe: int, output: CappedOutput) -> None:
        self._selector = selector
        self._pipe = pipe
        self.output = output

    def __call__(self) -> None:
        for _ in range(FLOOD_CHUNKS):
            try:
                chunk = os.read(self._pipe, PIPE_CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self._selector.unregister(self._pipe)
                os.close(self._pipe)
                return
            self.output.add(chunk)


def kill_groups() -> None:
    """Kill every command and all its descendants, those being forked included."""
    for group in GROUP.glob("c*/"):
        system.write(f"{group}/cgroup.kill", "1")


def sweep_groups() -> None:
    """Remove the control groups of commands that have ended."""
    for group in GROUP.glob("c*/"):
        with suppress(OSError):
            group.rmdir()


def _pipes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The command's and the agent's ends of standard input, output and error; the agent's never block."""
    (stdin, feed), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
    for pipe in (feed, out, err):
        os.set_blocking(pipe, False)
    return (stdin, stdout, stderr), (feed, out, err)


def _become(
    order: dict[str, Any], environment: dict[str, str], pipes: tuple[int, int, int], place: tuple[str, GuestEnvironment]
) -> NoReturn:
    """Turn a fresh child into the command."""
    code, argv = NOT_RUNNABLE, order["argv"]
    try:
        group, guest = place
        system.write(f"{group}/cgroup.procs", "0")
        system.write("/proc/self/oom_score_adj", "0")  # the agent's own is that of what is never killed
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        guest.enter(order["root"], order["user"])
        os.closerange(3, 4096)
        os.execvpe(argv[0], argv, environment)
    except FileNotFoundError:
        os.write(2, f"{argv[0]}: command not found\n".encode("utf-8", "surrogateescape"))
        code = NOT_FOUND
    except OSError as error:
        words = os.strerror(error.errno or errno.EIO)
        os.write(2, f"{argv[0]}: {words}\n".encode("utf-8", "surrogateescape"))
    finally:
        os._exit(code)


PORT_NAME = "etude"
"""Name of the virtio port that leads to the host."""
PORT_TIMEOUT_S = 60.0
CHUNK_BYTES = 256 << 10
SWEEP_EVERY = 64
"""Commands between two looks for control groups that are empty by now."""
TUNNEL_WORDS = frozenset({"data", "end", "ack", "shut"})


class GuestAgent:
    """The agent's event loop over port, commands, tunnels and file server."""

    def __init__(self, port: int) -> None:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            os.close(port)
            FileServer().serve(theirs)
            os._exit(0)
        theirs.close()
        ours.setblocking(False)
        os.set_blocking(port, False)
        self._selector = selectors.DefaultSelector()
        self._port = _Channel(port, self._selector, self._receive)
        self._file_server = _Channel(ours.detach(), self._selector, self._port.send)
        self._tunnels = Tunnels(self._selector, lambda head, body: self._port.send(GuestMessage(head, body)))
        self._guest: GuestEnvironment | None = None
        self._commands: dict[int, GuestCommand] = {}
        self._requests: dict[str, Callable[[dict[str, Any], bytes], dict[str, Any] | None]] = {
            "hello": self._hello,
            "rest": self._rest,
            "wake": self._wake,
            "environment": self._make_environment,
            "exec": self._exec,
            "kill": self._kill,
            "kill_all": self._kill_all,
            "stats": self._stats,
            "freeze": self._freeze,
        }

    def run(self) -> None:
        """Serve until the port fails."""
        while True:
            due = min((command.deadline for command in self._commands.values()), default=float("inf"))
            wait = None if due == float("inf") else max(0.0, due - time.monotonic())
            for key, _ in self._selector.select(wait):
                if self._selector.get_map().get(key.fileobj) is key:  # an earlier event may have closed it
                    key.data()
            now = time.monotonic()
            for command in [command for command in self._commands.values() if command.deadline <= now]:
                command.kill(timed_out=True)

    def _receive(self, message: GuestMessage) -> None:
        head, body = message
        do = head["do"]
        if do in TUNNEL_WORDS:
            self._tunnels.receive(head, body)
        elif do in ERRANDS:
            self._file_server.send(message)
        else:
            try:
                answer = self._requests[do](head, body)
            except (OSError, KeyError, ValueError) as error:
                answer = {"error": ["sandbox", f"{do}: {error!r}"]}
            if answer is not None:
                self._port.send(GuestMessage({"re": head["id"], **answer}))

    def _hello(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        return {"kernel": os.uname().release, "python": sys.version.split()[0]}

    def _rest(self, head: dict[str, Any], body: bytes) -> None:
        self._port.send(GuestMessage({"re": head["id"]}))
        self._port.rest()

    def _wake(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        system.set_clock(int(head["now_ns"]))  # it stood still meanwhile
        if head["is_copy"]:
            self._port.forget()
            self._tunnels.forget()
            system.reseed(body)
            socket.sethostname(head["name"])
            for command in self._commands.values():  # their callers talk to the original
                command.deadline = float("inf")
            self._commands.clear()
            if self._guest is not None:
                places, hosts = addresses_of(head["allow"])
                self._guest.rename(head["name"], hosts)
                self._tunnels.allow(places)
        self._port.wake()
        return {}

    def _make_environment(self, head: dict[str, Any], body: bytes) -> None:
        if self._guest is not None:
            raise ValueError("there is an environment already")
        self._guest = GuestEnvironment(head)
        settle = {
            "do": "settle",
            "id": head["id"],
            "owner": self._guest.owner,
            "workdir": self._guest.workdir,
        }
        self._file_server.send(GuestMessage(settle))  # who answers when it knows the environment, too

    def _exec(self, head: dict[str, Any], body: bytes) -> None:
        if self._guest is None:
            raise ValueError("there is no environment yet")
        number = int(head["id"])
        if number % SWEEP_EVERY == 0:
            sweep_groups()
        command = GuestCommand(number, head, body, self._guest)
        self._commands[number] = command
        command.watch(self._selector, self._ended)

    def _ended(self, command: GuestCommand) -> None:
        if self._commands.pop(command.number, None) is command:
            self._port.send(GuestMessage({"re": command.number, **command.answer()}))

    def _kill(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        command = self._commands.get(int(head["command"]))
        if command is not None:
            command.kill()
        return {}

    def _kill_all(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        kill_groups()
        return {}

    def _stats(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        return {"stats": self._guest.stats()} if self._guest is not None else {"stats": {}}

    def _freeze(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        if self._guest is not None:
            self._guest.freeze(frozen=bool(head["frozen"]))
        return {}


class _Channel:
    """Messages over a descriptor that does not block."""

    def __init__(
        self, descriptor: int, selector: selectors.BaseSelector, receive: Callable[[GuestMessage], None]
    ) -> None:
        self._descriptor = descriptor
        self._selector = selector
        self._receive = receive
        self._inbox, self._outbox = Inbox(), Outbox()
        self._frame = memoryview(b"")
        self._resting = self._rests = False
        self._events = selectors.EVENT_READ
        selector.register(descriptor, self._events, self._act)

    def send(self, message: GuestMessage) -> None:
        """Put a message in line, and send what goes at once."""
        self._outbox.add(message)
        self._write()

    def rest(self) -> None:
        """Send the queued messages, then nothing until ``wake``."""
        self._resting = True
        self._write()

    def wake(self) -> None:
        """Resume sending."""
        self._resting = self._rests = False
        self._write()

    def forget(self) -> None:
        """Discard the messages that were queued for another reader."""
        self._outbox, self._frame = Outbox(), memoryview(b"")

    def _act(self) -> None:
        try:
            data = os.read(self._descriptor, CHUNK_BYTES)
        except BlockingIOError:
            data = None
        if data is not None:
            if not data:
                raise SystemExit("the host is gone")
            for message in self._inbox.feed(data):
                self._receive(message)
        self._write()

    def _write(self) -> None:
        try:
            while not self._rests and (self._frame or self._outbox):
                self._frame = self._frame or memoryview(self._outbox.next_frame())
                self._frame = self._frame[os.write(self._descriptor, self._frame) :]
        except BlockingIOError:
            pass
        is_empty = not (self._frame or self._outbox)
        self._rests |= self._resting and is_empty
        events = selectors.EVENT_READ | (0 if is_empty or self._rests else selectors.EVENT_WRITE)
        if events != self._events:
            self._events = events
            self._selector.modify(self._descriptor, events, self._act)


def open_port() -> int:
    """Open the port to the host. Raises ``OSError`` when it does not appear."""
    deadline = time.monotonic() + PORT_TIMEOUT_S
    while time.monotonic() < deadline:
        for name in Path("/sys/class/virtio-ports").glob("*/name"):
            if name.read_text().strip() == PORT_NAME:
                return os.open(f"/dev/{name.parent.name}", os.O_RDWR | os.O_CLOEXEC)
        time.sleep(0.01)
    raise OSError(f"no virtio port {PORT_NAME!r} within {PORT_TIMEOUT_S} s")


def main() -> None:
    """Start as process 1."""
    system.raise_loopback()
    system.write("/proc/self/oom_score_adj", "-1000")
    system.write("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids +cpu")
    GuestAgent(open_port()).run()


if __name__ == "__main__":
    assert ROOT.is_absolute()
    main()

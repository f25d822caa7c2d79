"""The agent inside of a virtual machine: takes étude's requests from a virtio port and answers them.

    python3 -m etude.sandboxes.qemu.guest.agent       as process 1, started by the initial RAM disk

    request      what it does                                                        answer
    hello        nothing                                                             kernel, python
    rest         says no more, so that the machine can be copied                     (the last word)
    wake         goes on, in a copy with a clock, name, random numbers of its own
    world        makes the world of commands, see etude.sandboxes.qemu.guest.filesystem
    kill_all     kills every command with all that it started
    exec, kill   runs a command; kills one that nobody waits for any more            how it ended
    stats        counts                                                              what is used
    others       etude.sandboxes.qemu.guest.file_server, etude.sandboxes.qemu.guest.tunnels

The modules of this folder are copied into the machine with the few others that they import, and run there by the
base system's Python, 3.11 or newer, of which they use the standard library alone. The language that the agent speaks
(:mod:`etude.sandboxes.qemu.guest.frames`) is the host's, too. One thread, one loop; nothing in it waits but for the
next event. States: new ──world──▶ furnished; at any time it may rest until it is woken. When the port fails, there is
nobody to serve, and it ends, and the machine with it.
"""

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etude.sandboxes.qemu.guest import system
from etude.sandboxes.qemu.guest.commands import Command, kill_groups, sweep_groups
from etude.sandboxes.qemu.guest.file_server import ERRANDS, Clerk
from etude.sandboxes.qemu.guest.filesystem import WORLD, World
from etude.sandboxes.qemu.guest.frames import Inbox, Message, Outbox
from etude.sandboxes.qemu.guest.tunnels import Tunnels, addresses_of

PORT_NAME = "etude"
"""Of the virtio port that leads to the host."""
PORT_TIMEOUT_S = 60.0
CHUNK_BYTES = 256 << 10
SWEEP_EVERY = 64
"""Commands between two looks for control groups that are empty by now."""
TUNNEL_WORDS = frozenset({"data", "end", "ack", "shut"})


class Agent:
    """One loop over a port, commands, tunnels and a clerk."""

    def __init__(self, port: int) -> None:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            os.close(port)
            Clerk().serve(theirs)
            os._exit(0)
        theirs.close()
        ours.setblocking(False)
        os.set_blocking(port, False)
        self._selector = selectors.DefaultSelector()
        self._port = _Channel(port, self._selector, self._hear)
        self._clerk = _Channel(ours.detach(), self._selector, self._port.send)
        self._tunnels = Tunnels(self._selector, lambda head, body: self._port.send(Message(head, body)))
        self._world: World | None = None
        self._commands: dict[int, Command] = {}
        self._requests: dict[str, Callable[[dict[str, Any], bytes], dict[str, Any] | None]] = {
            "hello": self._hello,
            "rest": self._rest,
            "wake": self._wake,
            "world": self._make_world,
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

    def _hear(self, message: Message) -> None:
        head, body = message
        do = head["do"]
        if do in TUNNEL_WORDS:
            self._tunnels.hear(head, body)
        elif do in ERRANDS:
            self._clerk.send(message)
        else:
            try:
                answer = self._requests[do](head, body)
            except (OSError, KeyError, ValueError) as error:
                answer = {"error": ["sandbox", f"{do}: {error!r}"]}
            if answer is not None:
                self._port.send(Message({"re": head["id"], **answer}))

    def _hello(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        return {"kernel": os.uname().release, "python": sys.version.split()[0]}

    def _rest(self, head: dict[str, Any], body: bytes) -> None:
        self._port.send(Message({"re": head["id"]}))
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
            if self._world is not None:
                places, hosts = addresses_of(head["allow"])
                self._world.rename(head["name"], hosts)
                self._tunnels.allow(places)
        self._port.wake()
        return {}

    def _make_world(self, head: dict[str, Any], body: bytes) -> None:
        if self._world is not None:
            raise ValueError("there is a world already")
        self._world = World(head)
        settle = {"do": "settle", "id": head["id"], "owner": self._world.owner, "workdir": self._world.workdir}
        self._clerk.send(Message(settle))  # who answers when it knows the world, too

    def _exec(self, head: dict[str, Any], body: bytes) -> None:
        if self._world is None:
            raise ValueError("there is no world yet")
        number = int(head["id"])
        if number % SWEEP_EVERY == 0:
            sweep_groups()
        command = Command(number, head, body, self._world)
        self._commands[number] = command
        command.watch(self._selector, self._ended)

    def _ended(self, command: Command) -> None:
        if self._commands.pop(command.number, None) is command:
            self._port.send(Message({"re": command.number, **command.answer()}))

    def _kill(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        command = self._commands.get(int(head["command"]))
        if command is not None:
            command.kill()
        return {}

    def _kill_all(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        kill_groups()
        return {}

    def _stats(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        return {"stats": self._world.stats()} if self._world is not None else {"stats": {}}

    def _freeze(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        if self._world is not None:
            self._world.freeze(frozen=bool(head["frozen"]))
        return {}


class _Channel:
    """Messages over a descriptor that does not block."""

    def __init__(self, descriptor: int, selector: selectors.BaseSelector, hear: Callable[[Message], None]) -> None:
        self._descriptor = descriptor
        self._selector = selector
        self._hear = hear
        self._inbox, self._outbox = Inbox(), Outbox()
        self._frame = memoryview(b"")
        self._resting = self._rests = False
        self._events = selectors.EVENT_READ
        selector.register(descriptor, self._events, self._act)

    def send(self, message: Message) -> None:
        """Put a message in line, and send what goes at once."""
        self._outbox.add(message)
        self._write()

    def rest(self) -> None:
        """Send what is in line, then nothing until ``wake``."""
        self._resting = True
        self._write()

    def wake(self) -> None:
        """Go on."""
        self._resting = self._rests = False
        self._write()

    def forget(self) -> None:
        """Throw away what was in line for somebody else."""
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
                self._hear(message)
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
    """Open the port to the host. Raises ``OSError`` when it does not turn up."""
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
    Agent(open_port()).run()


if __name__ == "__main__":
    assert WORLD.is_absolute()
    main()

"""Messages between a provider of namespace sandboxes and its launcher: JSON and descriptors, one datagram each.

    provider ──create, exec, job, kill, stats, close──▶ launcher ──created, ended, stats, closed, died──▶ provider

Owns the form. Both ends are étude's own processes of one version, so there is no version in it. Standard library alone.
"""

import json
import socket
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

MESSAGE_LIMIT_BYTES = 200 << 10
"""Most bytes of one datagram: more than any command line that Linux takes, less than any socket's buffer."""
MAX_DESCRIPTORS = 250
"""With one datagram; Linux takes 253."""

NUMBER_BYTES = array("i").itemsize
"""Size of one descriptor on the wire."""


class Options(TypedDict):
    """The options of a launcher."""

    folder: str
    """For what it makes: a private folder that its provider removes."""
    skeleton: str
    """The tree that makes the machine's own programs a base system, see :mod:`etude.sandboxes.images.machine_base`."""


class Grants(TypedDict):
    """The privileges and features that a launcher found on its machine."""

    error: str
    """Reason that there can be no sandbox at all; empty otherwise."""
    maps_range: bool
    """True if sandboxes have 65,536 users; else only the one that commands run as."""
    controllers: list[str]
    """Controllers of control groups."""


class CreateOrder(TypedDict):
    """Request for a sandbox; the provider has validated everything in it."""

    box: int
    """Its number."""
    root: str
    """The root folder of a base system; empty for the machine's own programs."""
    layers: list[str]
    """Lowest first."""
    system: dict[str, str]
    """Folders of the machine's programs, beside ``/usr``: place inside, which the skeleton has → folder of the
    machine.
    """
    shown: dict[str, str]
    """Place inside → folder or file of the machine."""
    places: list[list[Any]]
    """The fields of :class:`~etude.sandboxes.ns.root.AllowedPlace`."""
    hosts: str
    workdir: str
    user: list[Any]
    """Number, group and home of the image's user."""
    roots: list[str]
    """Places inside that are roots of services."""
    as_root: bool
    memory_bytes: int
    disk_bytes: int
    processes: int
    cpus: float


class ExecOrder(TypedDict):
    """Request for a command."""

    argv: list[str]
    environment: dict[str, str]
    workdir: str
    """In its root."""
    root: str
    """Place inside that is a service's root; empty for the sandbox's own."""
    user: list[int]
    """Number and group of a service's user; empty for that of the commands."""


class LauncherMessage(NamedTuple):
    """A datagram as it was received."""

    body: dict[str, Any]
    descriptors: list[int]


def send(connection: socket.socket, body: object, descriptors: Sequence[int] = ()) -> None:
    """Send a datagram. Raises ``BlockingIOError`` when a non-blocking socket has no room."""
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogateescape")
    if len(data) > MESSAGE_LIMIT_BYTES:
        raise ValueError(f"a message of {len(data)} bytes, at most {MESSAGE_LIMIT_BYTES}")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


class MessageReceiver:
    """Receives the datagrams of one socket, into preallocated memory."""

    def __init__(self, connection: socket.socket, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> None:
        """``limit_bytes`` is what a message may have at most."""
        self._connection = connection
        self._memory = bytearray(limit_bytes + 1)

    def receive(self) -> LauncherMessage | None:
        """The next one; ``None`` when the other end is gone. No program that is executed inherits the descriptors."""
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * NUMBER_BYTES)
        size, ancillary, _, _ = self._connection.recvmsg_into([self._memory], room, socket.MSG_CMSG_CLOEXEC)
        if not size:
            return None
        descriptors = array("i")
        for level, kind, packed in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(packed[: len(packed) - len(packed) % NUMBER_BYTES])
        text = self._memory[:size].decode("utf-8", "surrogateescape")
        return LauncherMessage(json.loads(text), descriptors.tolist())


def is_too_large(body: object) -> bool:
    """True if a message is too large for a datagram."""
    return len(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogateescape")) > MESSAGE_LIMIT_BYTES

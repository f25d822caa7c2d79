"""Messages between a provider of namespace sandboxes and its launcher: JSON and descriptors, one datagram each.

    provider ──create, exec, job, kill, stats, close──▶ launcher ──created, ended, stats, closed, died──▶ provider

Owns the format. Both ends belong to the same version of étude, so messages have no version. Standard library alone.
"""

import json
import socket
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

MESSAGE_LIMIT_BYTES = 200 << 10
"""Largest datagram in bytes: more than any command line that Linux accepts, less than any socket's buffer."""
MAX_DESCRIPTORS = 250
"""Most descriptors in one datagram; Linux allows 253."""

NUMBER_BYTES = array("i").itemsize
"""Size of one descriptor in a message."""


class Options(TypedDict):
    """The options of a launcher."""

    folder: str
    """A private folder for the launcher's files; its provider removes it."""
    skeleton: str
    """The tree around the machine's programs that makes them a base system, see
    :mod:`etude.sandboxes.images.machine_base`.
    """


class Grants(TypedDict):
    """The privileges and features that a launcher found on its machine."""

    error: str
    """Reason why no sandbox can be made at all; empty otherwise."""
    maps_range: bool
    """True if sandboxes have 65,536 users; otherwise only the one that runs commands."""
    controllers: list[str]
    """Available cgroup controllers."""


class CreateOrder(TypedDict):
    """Request for a sandbox; the provider has validated everything in it."""

    box: int
    """Its number."""
    root: str
    """The root folder of a base system; empty for the machine's own programs."""
    layers: list[str]
    """Lowest first."""
    system: dict[str, str]
    """Folders of the machine's programs besides ``/usr``: path inside, which exists in the skeleton → folder of the
    machine.
    """
    shown: dict[str, str]
    """Path inside → folder or file of the machine."""
    places: list[list[Any]]
    """The fields of :class:`~etude.sandboxes.ns.root.AllowedPlace`."""
    hosts: str
    workdir: str
    user: list[Any]
    """Number, group and home of the image's user."""
    roots: list[str]
    """Paths inside that are roots of services."""
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
    """Path in its root."""
    root: str
    """Path inside of a service's root; empty for the sandbox's own."""
    user: list[int]
    """Number and group of a service's user; empty for the user of commands."""


class LauncherMessage(NamedTuple):
    """A received datagram."""

    body: dict[str, Any]
    descriptors: list[int]


def send(connection: socket.socket, body: object, descriptors: Sequence[int] = ()) -> None:
    """Send a datagram. Raises ``BlockingIOError`` if a non-blocking socket has no room."""
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogateescape")
    if len(data) > MESSAGE_LIMIT_BYTES:
        raise ValueError(f"a message of {len(data)} bytes, at most {MESSAGE_LIMIT_BYTES}")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


class MessageReceiver:
    """Receives the datagrams of one socket, into preallocated memory."""

    def __init__(self, connection: socket.socket, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> None:
        """``limit_bytes`` is the largest accepted message."""
        self._connection = connection
        self._memory = bytearray(limit_bytes + 1)

    def receive(self) -> LauncherMessage | None:
        """The next datagram; ``None`` once the other end is closed. The descriptors are not inherited by executed
        programs.
        """
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

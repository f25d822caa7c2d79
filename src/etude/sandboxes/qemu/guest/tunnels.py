"""Network of commands inside a virtual machine: a listener for each allowed place, and tunnels to the host.

The machine has no network. For every allowed ``host:port`` the agent listens on the loopback address to which ``host``
resolves inside, and forwards the data of commands to étude, which makes the connection outside. A tunnel may be ahead
of its other end by a window, so a slow reader delays only its own connection. Owns the sockets inside.
"""

import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from etude.sandboxes.qemu.guest import system

CHUNK_BYTES = 32 << 10
WINDOW_BYTES = 256 << 10
"""Maximum number of bytes sent through a tunnel and not yet read at its other end."""
MAX_TUNNELS = 200
"""At a time; a connection beyond them is closed at once."""
BACKLOG = 32

Send = Callable[[dict[str, Any], bytes], None]


class Tunnels:
    """Listeners for the allowed places, and the connections to them."""

    def __init__(self, selector: selectors.BaseSelector, send: Send) -> None:
        self._selector = selector
        self._send = send
        self._open: dict[int, _Tunnel] = {}
        self._listeners: list[socket.socket] = []
        self._made = 0

    def allow(self, places: Mapping[str, str]) -> None:
        """Listen for ``host:port`` (key) at an address (value). Raises ``OSError``."""
        if not places:
            return
        outside = {address for address in places.values() if not address.startswith("127.")}
        system.raise_loopback(tuple(sorted(outside)))
        for place, address in places.items():
            listener = socket.create_server((address, int(place.rpartition(":")[2])), backlog=BACKLOG)
            listener.setblocking(False)
            self._listeners.append(listener)
            self._selector.register(listener, selectors.EVENT_READ, _Accept(self, listener, place))

    def accept(self, connection: socket.socket, place: str) -> None:
        """Open a tunnel for a new connection."""
        if len(self._open) >= MAX_TUNNELS:
            connection.close()
            return
        connection.setblocking(False)
        self._made += 1
        self._open[self._made] = _Tunnel(self._made, connection, self._selector, self._send)
        self._send({"do": "open", "tunnel": self._made, "place": place}, b"")

    def receive(self, head: dict[str, Any], body: bytes) -> None:
        """Handle a message of the host about a tunnel; those about a closed tunnel are ignored."""
        tunnel = self._open.get(head["tunnel"])
        if tunnel is None:
            return
        if head["do"] == "shut" or not tunnel.take(head["do"], body, int(head.get("bytes", 0))):
            self._drop(tunnel)

    def forget(self) -> None:
        """Close every connection and listener: this machine is a copy, the other ends belong to the original."""
        for tunnel in list(self._open.values()):
            self._drop(tunnel)
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()

    def _drop(self, tunnel: "_Tunnel") -> None:
        self._open.pop(tunnel.number, None)
        tunnel.close()


class _Accept:
    """Callback of a listener for each new connection."""

    def __init__(self, tunnels: Tunnels, listener: socket.socket, place: str) -> None:
        self._tunnels, self._listener, self._place = tunnels, listener, place

    def __call__(self) -> None:
        with suppress(OSError):  # the other end has already disconnected
            self._tunnels.accept(self._listener.accept()[0], self._place)


class _Tunnel:
    """One connection of a command, and the data in transit to it."""

    def __init__(self, number: int, connection: socket.socket, selector: selectors.BaseSelector, send: Send) -> None:
        self.number = number
        self._connection = connection
        self._selector = selector
        self._send = send
        self._ahead_bytes = 0
        self._waiting = bytearray()
        self._reading, self._ends = True, False
        self._events = 0
        self._watch()

    def take(self, do: str, body: bytes, count: int) -> bool:
        """Handle ``data``, ``end`` or ``ack`` from the host; false if the connection is broken."""
        if do == "ack":
            self._ahead_bytes -= count
        elif do == "end":
            self._ends = True
        else:
            self._waiting += body
        return self._write() and self._watch()

    def close(self) -> None:
        """Close the connection inside."""
        if self._events:
            self._selector.unregister(self._connection)
            self._events = 0
        self._connection.close()

    def __call__(self) -> None:
        """Read and write as far as the connection is ready."""
        if self._reading and self._ahead_bytes < WINDOW_BYTES:
            self._read()
        if self._write():
            self._watch()
        else:
            self.close()

    def _read(self) -> None:
        try:
            data = self._connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._reading = bool(data)
        self._ahead_bytes += len(data)
        self._send({"do": "data" if data else "end", "tunnel": self.number}, data)

    def _write(self) -> bool:
        try:
            if self._waiting:
                count = self._connection.send(self._waiting)
                del self._waiting[:count]
                self._send({"do": "ack", "tunnel": self.number, "bytes": count}, b"")
            if self._ends and not self._waiting:
                self._connection.shutdown(socket.SHUT_WR)
                self._ends = False
        except BlockingIOError:
            pass
        except OSError:
            self._send({"do": "shut", "tunnel": self.number}, b"")
            self._waiting.clear()
            return False
        return True

    def _watch(self) -> bool:
        """Be woken for what can be done now; true."""
        events = selectors.EVENT_READ if self._reading and self._ahead_bytes < WINDOW_BYTES else 0
        events |= selectors.EVENT_WRITE if self._waiting else 0
        if events != self._events:
            if self._events:
                self._selector.unregister(self._connection)
            if events:
                self._selector.register(self._connection, events, self)
            self._events = events
        return True


def addresses_of(places: Sequence[str]) -> tuple[dict[str, str], str]:
    """The addresses of each ``host:port`` inside, and the lines of ``/etc/hosts`` that lead there."""
    program: dict[str, str] = {}
    hosts: dict[str, str] = {"localhost": "127.0.0.1"}
    for place in places:
        host = place.rpartition(":")[0]
        if host not in hosts:
            hosts[host] = host if _is_address(host) else f"127.1.0.{len(hosts)}"
        program[place] = hosts[host]
    return program, "".join(f"{address} {host}\n" for host, address in hosts.items() if address != host)


def _is_address(host: str) -> bool:
    try:
        socket.inet_aton(host)
    except OSError:
        return False
    return host.count(".") == 3

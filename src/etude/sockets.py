"""Sockets of calls to other machines: the kernel finds out within seconds that a machine, or the link to it, is gone.

    gone ──PROBE_S of silence──▶ probes ──GONE_S──▶ the call fails ──▶ made again, elsewhere or over a new connection

A process that dies resets its connections, but a machine that loses its power says nothing, and neither does a link
that is cut. Left to itself TCP waits for an answer for ever, and sends what was lost again after pauses that double: a
link that is back after half a minute is used half a minute later. The kernel of the other side answers probes however
busy its processes are, so a slow answer is never taken for a lost one.
"""

import socket
import sys
from typing import Any

import aiohttp

PROBE_S, PROBES = 1, 3
"""Silence after which the other side is asked whether it is there, again after as long, and how often."""
GONE_S = 4
"""Longest time in which the other side may take neither data nor probes: a dozen of the longest round trips."""
CONNECT_TRIES = 1
"""Repetitions, after 1 s, of the packet that opens a connection; 2 s later it has failed."""


def alert_connector() -> aiohttp.TCPConnector:
    """A connector without a limit whose connections fail soon after the other machine, or the way to it, is gone."""
    return aiohttp.TCPConnector(limit=0, socket_factory=_alert_socket)


def make_alert(connection: socket.socket) -> None:
    """Let a connection fail soon after the other machine, or the way to it, is gone; on Linux."""
    if sys.platform == "linux":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, PROBE_S),
            (socket.TCP_KEEPINTVL, PROBE_S),
            (socket.TCP_KEEPCNT, PROBES),
            (socket.TCP_USER_TIMEOUT, 1000 * GONE_S),
            (socket.TCP_SYNCNT, CONNECT_TRIES),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _alert_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for an address as ``getaddrinfo`` gives it."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    make_alert(made)
    return made

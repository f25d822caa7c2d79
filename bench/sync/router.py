"""The process that carries packets between sites: one network namespace and one tunnel device per site.

    site's kernel ──▶ tunnel device ──▶ read ─▶ Link.send ─▶ wait for the arrival ─▶ write ──▶ tunnel device ──▶ …

It makes the namespaces, hands their descriptors to whoever started it, and forwards until the control socket, its
standard input, closes; over that it is told to cut a site off and to heal it, and answers each message with a report.
Namespaces have no names and devices live as long as their descriptors, so nothing outlives the processes involved,
however they die. When a packet shall arrive is decided in ``links.py``; the rest of the world talks to
:class:`bench.sync.wan.Wan`.

Needs root, or a system that lets anybody make user namespaces. Linux only; the standard library alone.
"""

import ctypes
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, final

from bench.sync.links import Link, LinkShape, Traffic
from etude.sandboxes.isolation import CLONE_NEWNET, CLONE_NEWUSER, LIBC, die_with_parent

if TYPE_CHECKING:
    from etude.types import Json  # with it comes numpy, and numpy's threads keep us from making a user namespace

FIRST_ADDRESS = IPv4Address("10.77.0.1")
"""Address of the first site; the others follow."""
NETMASK = IPv4Address("255.255.0.0")
DEVICE = "wan"
"""The name of the tunnel device in every site."""
COALESCE_S = 0.0005
"""Arrivals this close together are delivered together: sleeping for each of them would cost more than moving them."""
BURST = 64
"""Packets read from one site before the others get their turn."""
PRIORITY = -10
"""Requested, not required: on a busy machine a delayed router makes links worse than specified."""
MOST_MESSAGE_BYTES = 1 << 16
"""Size limit of the control socket's messages."""
REPORT, CUT, HEAL = "report", "cut", "heal"
"""Messages to the router; the last two are followed by a site."""

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU = 0x8916, 0x891C, 0x8922
IPV4, DESTINATION_AT, HEADER_BYTES = 4, 16, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLink:
    """The shape of both directions between two sites."""

    sites: tuple[str, str]
    link: LinkShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPlan:
    """All that a router has to know."""

    sites: tuple[str, ...]
    link: LinkShape
    """Shape of every direction between two sites that are not in ``pairs``."""
    pairs: tuple[PairLink, ...] = ()
    mtu: int
    """Largest packet, in bytes."""
    seed: int

    def to_json(self) -> str:
        """The settings as a process argument."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "RouterPlan":
        """The inverse of :meth:`to_json`."""
        tree = json.loads(text)
        pairs = tuple(
            PairLink(sites=tuple(pair["sites"]), link=LinkShape(**pair["link"])) for pair in tree.pop("pairs")
        )
        return cls(**{**tree, "sites": tuple(tree["sites"]), "link": LinkShape(**tree["link"]), "pairs": pairs})

    def shape(self, one: str, other: str) -> LinkShape:
        """Shape of either direction between two sites."""
        return next((pair.link for pair in self.pairs if set(pair.sites) == {one, other}), self.link)


def site_address(index: int) -> str:
    """The IP address of a site by its place among the sites."""
    return str(FIRST_ADDRESS + index)


@final
class Router:
    """Forwards between tunnel devices; every ordered pair of sites has a link of its own."""

    def __init__(self, plan: RouterPlan, devices: Mapping[str, int]) -> None:
        self._devices = dict(devices)
        self._sites = {device: site for site, device in devices.items()}
        self._by_address = {(FIRST_ADDRESS + index).packed: site for index, site in enumerate(plan.sites)}
        self._mtu = plan.mtu
        self._links = {
            (source, target): Link(plan.shape(source, target), f"{plan.seed} {source} {target}")
            for source in plan.sites
            for target in plan.sites
            if source != target
        }
        self._flying: list[tuple[float, int, int, bytes]] = []
        self._sent = 0
        self._delivered = 0
        self._late_s = 0.0
        self._latest_s = 0.0

    def run(self, control: socket.socket) -> None:
        """Forward packets, and do and answer what messages on ``control`` say, until its other end closes."""
        sources = [*self._devices.values(), control.fileno()]
        while True:
            readable, _, _ = select.select(sources, (), (), self._pause_s())
            for source in readable:
                if source != control.fileno():
                    self._take(source)
                elif message := control.recv(MOST_MESSAGE_BYTES):
                    self._obey(message.decode())
                    control.send(json.dumps(self._report()).encode())
                else:
                    return
            self._deliver()

    def _obey(self, message: str) -> None:
        """Cut all links of a site, or heal them: ``cut SITE``, ``heal SITE``; anything else asks for the report."""
        order, _, site = message.partition(" ")
        for ends, link in self._links.items():
            if site in ends and order == CUT:
                link.cut()
            elif site in ends and order == HEAL:
                link.heal()

    def _pause_s(self) -> float | None:
        """Time until the next delivery; ``None`` if no packet is in flight."""
        if not self._flying:
            return None
        return max(COALESCE_S, self._flying[0][0] - time.monotonic())

    def _take(self, device: int) -> None:
        """Send a site's pending packets into its links."""
        source = self._sites[device]
        for _ in range(BURST):
            try:
                packet = os.read(device, self._mtu)
            except BlockingIOError:
                return
            target = self._target(packet)
            if target is None or target == source:
                continue
            arrival_s = self._links[source, target].send(len(packet), time.monotonic())
            if arrival_s is not None:
                self._sent += 1
                heapq.heappush(self._flying, (arrival_s, self._sent, self._devices[target], packet))

    def _target(self, packet: bytes) -> str | None:
        """The destination site of a packet; ``None`` for packets that are not forwarded, such as IPv6 and multicast."""
        if len(packet) < HEADER_BYTES or packet[0] >> 4 != IPV4:
            return None
        return self._by_address.get(packet[DESTINATION_AT:HEADER_BYTES])

    def _deliver(self) -> None:
        """Hand over what has arrived."""
        while self._flying:
            late_s = time.monotonic() - self._flying[0][0]
            if late_s < 0:
                return
            _, _, device, packet = heapq.heappop(self._flying)
            os.write(device, packet)
            self._delivered += 1
            self._late_s += late_s
            self._latest_s = max(self._latest_s, late_s)

    def _report(self) -> "dict[str, Json]":
        traffic: list[Json] = [
            {"source": source, "target": target, **asdict(link.traffic)}
            for (source, target), link in self._links.items()
        ]
        return {
            "traffic": traffic,
            "cpu_s": time.process_time(),
            "mean_late_s": self._late_s / max(1, self._delivered),
            "latest_s": self._latest_s,
        }


def parse_traffic(report: "Mapping[str, Json]") -> dict[tuple[str, str], Traffic]:
    """(source, target) → what went that way, from a router's report."""
    rows = report["traffic"]
    assert isinstance(rows, list)
    result: dict[tuple[str, str], Traffic] = {}
    for row in rows:
        assert isinstance(row, dict)
        counts = {field.name: int(str(row[field.name])) for field in fields(Traffic)}
        result[str(row["source"]), str(row["target"])] = Traffic(**counts)
    return result


# ── system calls ────────────────────────────────────────────────────────────────────────────────────────────────────


def enter_namespace(descriptor: int) -> None:
    """Move this process into a namespace. Raises ``OSError``."""
    if LIBC.setns(descriptor, 0) != 0:
        _raise_errno("setns")


def _own_users() -> int | None:
    """Get the right to make network namespaces; the descriptor of the user namespace this took, if it took one."""
    if LIBC.unshare(CLONE_NEWNET) == 0:
        return None
    user, group = os.geteuid(), os.getegid()
    if LIBC.unshare(CLONE_NEWUSER) != 0:
        _raise_errno("unshare")
    Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="utf-8")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="utf-8")
    return os.open("/proc/self/ns/user", os.O_RDONLY)


def _open_site(index: int, plan: RouterPlan) -> tuple[int, int]:
    """Make a namespace with a loopback and a tunnel device in it, and stay there: (namespace, device)."""
    if LIBC.unshare(CLONE_NEWNET) != 0:
        _raise_errno("unshare")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inet:
        _set_address(inet, SIOCSIFADDR, FIRST_ADDRESS + index)
        _set_address(inet, SIOCSIFNETMASK, NETMASK)
        fcntl.ioctl(inet, SIOCSIFMTU, struct.pack("16si20x", DEVICE.encode(), plan.mtu))
        for name in ("lo", DEVICE):
            flags = struct.unpack("16xH22x", fcntl.ioctl(inet, SIOCGIFFLAGS, struct.pack("16s24x", name.encode())))[0]
            fcntl.ioctl(inet, SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), flags | IFF_UP))
    return os.open("/proc/self/ns/net", os.O_RDONLY), device


def _set_address(inet: socket.socket, request: int, address: IPv4Address) -> None:
    """Set an address of the tunnel device: a ``struct ifreq`` that holds a ``struct sockaddr_in``."""
    place = struct.pack("HH4s8x", socket.AF_INET, 0, address.packed)
    fcntl.ioctl(inet, request, struct.pack("16s16s8x", DEVICE.encode(), place))


def _raise_errno(call: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{call}: {os.strerror(number)}")


def main(plan: RouterPlan, control: socket.socket) -> None:
    """Create the sites, send their namespaces (the users' first, if there is one), then forward.

    If they cannot be created, the message has the reason and no descriptors.
    """
    die_with_parent()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    try:
        users = _own_users()
        opened = [_open_site(index, plan) for index in range(len(plan.sites))]
    except OSError as error:
        control.send(str(error).encode())
        return
    namespaces = [] if users is None else [users]
    namespaces += [namespace for namespace, _ in opened]
    socket.send_fds(control, [b"ready"], namespaces)
    for namespace in namespaces:
        os.close(namespace)
    devices = {site: device for site, (_, device) in zip(plan.sites, opened, strict=True)}
    Router(plan, devices).run(control)


if __name__ == "__main__":
    main(RouterPlan.parse(sys.argv[1]), socket.socket(fileno=0))

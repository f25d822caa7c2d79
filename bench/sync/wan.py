"""Sites far apart on one machine: network namespaces joined by links with delay, loss and a limited rate.

    with Wan(("trainer", "region-a", "region-b")) as wan:
        server = wan.popen("trainer", ["python", "-m", "http.server", "--bind", wan.address("trainer")])
        ...
        wan.traffic("trainer", "region-a").size_bytes
        wan.cut("region-b")

Processes of one site share a loopback and an address; everything between sites passes the links, one for each ordered
pair, as if each pair had a line of its own, of its own shape if it is given one. A site can be cut off and healed. The
links are emulated in a process (``router.py``) because the kernel's own emulator, netem, is missing in many kernels
and needs root in the rest. This file owns the sites and the processes in them; when packets arrive is ``links.py``'s.

Accuracy: packets arrive up to half a millisecond late, more when the machine is busy: :class:`RouterState` says how
late. Losses strike packets of up to 9,000 bytes, not of 1,500 as on most long-distance lines: an equal share of lost
packets is six times fewer losses per byte, which flatters senders that slow down at each loss (not BBR).
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self, TypeAlias, final

from bench import programs
from bench.sync.links import LinkShape, Traffic
from bench.sync.router import (
    CUT,
    HEAL,
    MOST_MESSAGE_BYTES,
    REPORT,
    PairLink,
    RouterPlan,
    enter_namespace,
    parse_traffic,
    site_address,
)
from etude.errors import InfrastructureError, UserError
from etude.sandboxes.isolation import die_with_parent

if TYPE_CHECKING:
    from etude.types import Json  # with it comes numpy, and numpy's threads may not enter a user namespace

START_S = 20.0
"""Maximum time until the router has created the sites, or answers."""
STOP_S = 60.0
"""Maximum time until processes end after a stop signal."""

Stream: TypeAlias = int | IO[bytes] | None
"""Standard input or output of a process, as in :mod:`subprocess`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WanShape:
    """Shape of a link between two sites; the same in both directions."""

    rtt_s: float = 0.08
    """There and back, half of it each way, on an idle link."""
    loss: float = 0.001
    """Share of packets lost, in each direction."""
    bits_per_s: float = 200e6
    """In each direction, IP headers included."""
    mtu: int = 9000
    """Largest packet, in bytes."""
    seed: int = 0
    """Decides which packets are lost."""

    @property
    def queue_bytes(self) -> int:
        """Maximum bytes that wait to be sent: one bandwidth-delay product."""
        return max(16 * self.mtu, int(self.rtt_s * self.bits_per_s / 8))

    @property
    def link(self) -> LinkShape:
        """One direction."""
        return LinkShape(
            delay_s=self.rtt_s / 2, bits_per_s=self.bits_per_s, loss=self.loss, queue_bytes=self.queue_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """State of the emulation."""

    cpu_s: float
    """Processor time it has taken so far."""
    mean_late_s: float
    """Mean delay of packets beyond the link's own."""
    latest_s: float
    """And at worst."""


@final
class Wan:
    """Sites and the links between them, from entering to leaving; then processes and namespaces are gone.

    Raises :class:`~etude.errors.UserError` on entering when the system does not let us make network namespaces or
    tunnel devices. Enter it in a thread that outlives it: when that thread ends, so do the processes in the sites.
    """

    def __init__(
        self,
        sites: Sequence[str],
        shape: WanShape | None = None,
        pairs: Mapping[tuple[str, str], WanShape] | None = None,
    ) -> None:
        """``pairs`` gives some pairs of sites, in either order, another shape than ``shape``."""
        self.sites = tuple(sites)
        self.shape = shape or WanShape()
        self.pairs = dict(pairs or {})
        if len(set(self.sites)) != len(self.sites) or not self.sites:
            raise ValueError(f"sites {self.sites} must have names of their own")
        for (one, other), other_shape in self.pairs.items():
            if one == other or not {one, other} <= set(self.sites) or (other, one) in self.pairs:
                raise ValueError(f"the pair {one!r}, {other!r} must be two of the sites {self.sites}, named once")
            if (other_shape.mtu, other_shape.seed) != (self.shape.mtu, self.shape.seed):
                raise ValueError(f"the pair {one!r}, {other!r} must have the mtu and the seed of all others")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._users: int | None = None
        self._networks: dict[str, int] = {}
        self._control: socket.socket | None = None
        self._router: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, site: str) -> str:
        """The IP address of a site; processes of any site reach it. Raises ``ValueError`` for an unknown site."""
        return site_address(self.sites.index(site))

    def popen(
        self,
        site: str,
        command: Sequence[str],
        *,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process in a site, in a session of its own. It dies with this process and with the ``Wan``."""
        descriptors = [self._networks[site]] if self._users is None else [self._users, self._networks[site]]
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, ",".join(map(str, descriptors)), *command],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**programs.environment(), **(environment or {})},
            pass_fds=descriptors,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def traffic(self, source: str, target: str) -> Traffic:
        """Traffic from one site to another so far."""
        return parse_traffic(self._report())[source, target]

    def cut(self, site: str) -> None:
        """Drop all packets to and from a site until :meth:`heal`, without notice. Raises ``ValueError`` for an unknown
        site.
        """
        self._order(CUT, site)

    def heal(self, site: str) -> None:
        """Connect a site again. Raises ``ValueError`` for an unknown site."""
        self._order(HEAL, site)

    def router(self) -> RouterState:
        """State of the emulation."""
        report = self._report()
        cpu_s, mean_late_s, latest_s = (float(str(report[name])) for name in ("cpu_s", "mean_late_s", "latest_s"))
        return RouterState(cpu_s=cpu_s, mean_late_s=mean_late_s, latest_s=latest_s)

    def close(self) -> None:
        """Kill what runs in the sites and let go of them; calling it twice is harmless."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(STOP_S)
        self._processes.clear()
        if self._control is not None:
            self._control.close()
        if self._router is not None:
            self._end_router(self._router)
        for namespace in (*self._networks.values(), *([] if self._users is None else [self._users])):
            os.close(namespace)
        self._networks.clear()
        self._control = self._router = self._users = None

    def _start(self) -> None:
        plan = RouterPlan(
            sites=self.sites,
            link=self.shape.link,
            pairs=tuple(PairLink(sites=sites, link=shape.link) for sites, shape in self.pairs.items()),
            mtu=self.shape.mtu,
            seed=self.shape.seed,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        ours.settimeout(START_S)
        with theirs:
            self._router = subprocess.Popen(
                [sys.executable, "-m", "bench.sync.router", plan.to_json()],
                stdin=theirs.fileno(),
                env=programs.environment(),
                start_new_session=True,
            )
        message, namespaces, _, _ = socket.recv_fds(ours, MOST_MESSAGE_BYTES, len(self.sites) + 1)
        if not namespaces:
            raise UserError(
                f"cannot make network namespaces for emulated long-distance links ({message.decode() or 'no answer'}): "
                f"run as root, or allow user namespaces (sysctl user.max_user_namespaces) and read and write access "
                f"to /dev/net/tun"
            )
        if len(namespaces) > len(self.sites):
            self._users = namespaces.pop(0)
        self._networks = dict(zip(self.sites, namespaces, strict=True))

    def _order(self, order: str, site: str) -> None:
        if site not in self.sites:
            raise ValueError(f"no site {site!r}, only {self.sites}")
        self._report(f"{order} {site}")

    def _report(self, message: str = REPORT) -> "Mapping[str, Json]":
        assert self._control is not None, "enter it first"
        try:
            self._control.send(message.encode())
            answer = self._control.recv(MOST_MESSAGE_BYTES)
        except OSError as error:
            raise InfrastructureError(f"the router of the emulated links does not answer: {error}") from error
        if not answer:
            raise InfrastructureError("the router of the emulated links died; its last words are on standard error")
        report: Mapping[str, Json] = json.loads(answer)
        return report

    @staticmethod
    def _end_router(router: subprocess.Popen[bytes]) -> None:
        """Wait for its end: it exits once the control socket is closed."""
        try:
            router.wait(STOP_S)
        except subprocess.TimeoutExpired:
            router.kill()
            router.wait()


def _enter_and_run(descriptors: str, command: list[str]) -> None:
    """Become ``command`` inside a site: what :meth:`Wan.popen` starts."""
    for descriptor in map(int, descriptors.split(",")):
        enter_namespace(descriptor)
        os.close(descriptor)
    die_with_parent()
    os.execvp(command[0], command)


if __name__ == "__main__":
    _enter_and_run(sys.argv[1], sys.argv[2:])

"""Sandboxes on many machines: one provider over all their servers.

    create ──▶ HostTable.choose ──▶ RemoteSandboxes of that host ──HTTPS──▶ `etude sandboxes serve`
                  ▲
    polls ────────┤  every host reports its capacity every two seconds
    directories ──┘  hosts join and leave

Each host has its own connections, leases and heartbeats (:mod:`etude.sandboxes.remote.client`). A sandbox, its forks
and sandboxes from its snapshots stay on one host. Owns the polling of hosts and the decision to give up a host;
:mod:`etude.sandboxes.remote.placement` chooses the host.

States of a host: unheard ──a report──▶ open ──no answer──▶ silent ──``gone_s`` of it──▶ given up; a report opens it. A
silent host gets no sandboxes. When it is given up or restarted, or leaves, its sandboxes are lost: pending and later
calls are errors of the sandbox, so their work is retried on another host. Waits for capacity with a deadline, also on a
host that joins meanwhile. On close every sandbox is closed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, final

from etude.aio import supervised
from etude.errors import ConfigError, EtudeError, InfrastructureError, SandboxError, SandboxesBusy, Unsupported
from etude.protocols import Sandbox
from etude.sandbox_spec import Capability, SandboxSpec
from etude.sandboxes.remote.client import RemoteSandboxes
from etude.sandboxes.remote.connection import usual_connections
from etude.sandboxes.remote.placement import HostReport, HostTable
from etude.sandboxes.remote.principals import SNAPSHOT

FIRST_LOOK_S = 60.0
"""Time for hosts to answer before the first sandbox is placed. Some first measure their capabilities; slower hosts join
later.
"""
FIRST_LOOK_POLL_S = 0.02
"""Interval between checks whether they have answered."""
WAITS_PER_LOOK = 4
"""Checks of the table by a request that waits for capacity, per polling interval."""
FindHosts: TypeAlias = Callable[[], Awaitable[Collection[str]]]
"""Reads the URLs of all hosts in one directory. Raises :class:`~etude.errors.InfrastructureError` while it is
unavailable.
"""
MAX_BUSY = 16
"""Hosts that turn out to be full before one request fails: other clients may always be faster."""
TRIES = 3
"""Failures to make one sandbox, on different hosts if possible, before the caller gets the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Polling intervals of hosts, and deadlines of waiting for them."""

    look_s: float = 2.0
    """Interval between two polls of a host."""
    answer_s: float = 4.0
    """Timeout of a poll."""
    gone_s: float = 10.0
    """Silence after which a host's sandboxes are given up. A host that was only disconnected closes them itself when
    their leases end.
    """
    find_s: float = 1.0
    """Interval between two reads of a directory."""
    room_s: float = 60.0
    """Total wait for capacity on a host; time spent in requests does not count, as a burst may queue many before this
    one.
    """


USUAL_TIMES = HostTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLoad:
    """Sandboxes of this process, and those that its hosts have room for: what a scaler of hosts compares."""

    demand: int = 0
    """Sandboxes that are open, those of a warm pool included, or requested."""
    capacity: int = 0
    """Sandboxes that are open or being made, and those that the hosts could still take, by their last reports. Several
    clients of the same hosts count the same free room.
    """


class SandboxHost(Protocol):
    """One host, as :class:`~etude.sandboxes.remote.client.RemoteSandboxes` has it."""

    def __len__(self) -> int:
        """Open sandboxes of this client."""
        ...

    async def capabilities(self) -> frozenset[Capability]:
        """The capabilities of its provider."""
        ...

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> Sandbox:
        """A fresh sandbox there."""
        ...

    async def report(self, timeout_s: float) -> HostReport:
        """Its capacity. Raises :class:`~etude.errors.SandboxError` if there is no answer in time."""
        ...

    async def announce(self, spec: SandboxSpec, count: int) -> None:
        """Announce how many sandboxes will be needed soon."""
        ...

    async def give_up(self, reason: str) -> None:
        """Fail all sandboxes and calls with the reason, until :meth:`take_up`."""
        ...

    def take_up(self) -> None:
        """Use it again."""
        ...

    def has_snapshot(self, digest: str) -> bool:
        """True if it stores an image as a snapshot of one of its sandboxes."""
        ...

    async def close(self) -> None:
        """Close every sandbox."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _PolledHost:
    """One host, and the results of its polls."""

    client: SandboxHost
    look: asyncio.Task[None] | None = None
    """Its polling, once that has begun."""
    is_polled: bool = False
    """True after the first poll, whatever its result."""
    rejection: ConfigError | None = None
    """Its answer if it rejects the key, or uses another version."""
    capabilities: frozenset[Capability] | None = None
    """``None`` until they are known."""


@final
class HostedSandboxes:
    """Makes sandboxes on the best of several hosts; implements :class:`~etude.protocols.SandboxProvider`."""

    def __init__(
        self,
        urls: Sequence[str],
        key: str,
        *,
        find: Sequence[FindHosts] = (),
        connections: int = 0,
        times: HostTimes = USUAL_TIMES,
        connect: Callable[[str], SandboxHost] | None = None,
    ) -> None:
        """The hosts are ``urls`` and those in the directories that ``find`` reads. ``connections`` is the limit per
        host; 0: as many as the open-file limit allows. ``connect`` makes the client of a host by name; the default uses
        HTTP.

        Raises :class:`~etude.errors.ConfigError` for an invalid or duplicate URL, without any place to find hosts, and
        without a key.
        """
        names = [url.rstrip("/") for url in urls]
        if not (names or find) or len(set(names)) < len(names):
            raise ConfigError(f"sandboxes at {list(urls)}: expected at least one host, and none of them twice")
        self._connect = connect or (
            lambda name: RemoteSandboxes(name, key, connections=connections or usual_connections(len(self._names)))
        )
        self._find = find
        self._times = times
        self._table = HostTable()
        self._hosts: dict[str, _PolledHost] = {}
        self._names = frozenset[str]()
        """All hosts."""
        self._fixed = frozenset(names)
        """Hosts that are in no directory."""
        self._directories: dict[int, frozenset[str]] = {}
        """Number of a directory → its hosts; missing until it was read or unavailable."""
        self._finding: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._agreed: frozenset[Capability] | None = None
        self._waiting = self._making = 0
        """Sandboxes requested that wait for room, and that are being made on a host."""
        self._is_open = self._closed = False
        self._use(self._fixed)

    async def capabilities(self) -> frozenset[Capability]:
        """The common capabilities of all hosts that answered at first. A host with fewer gets no sandboxes."""
        return await self._open()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> Sandbox:
        """A fresh sandbox on the best host; for a snapshot image, on the host that stores it.

        Raises :class:`~etude.errors.SandboxesBusy` if no host has capacity in time, :class:`~etude.errors.SandboxError`
        if several hosts failed or a snapshot's host is gone, :class:`~etude.errors.ConfigError` for an image that no
        host has; also raises the errors of a host's provider.
        """
        await self._open()
        spec = spec or SandboxSpec()
        if spec.image.digest.startswith(SNAPSHOT):
            for name, host in self._hosts.items():
                if host.client.has_snapshot(spec.image.digest):
                    return await self._make(name, files, spec)
            raise SandboxError(f"{spec.image.digest} is gone, with the host that kept it: make it anew")
        return await self._place(files, spec)

    async def announce(self, spec: SandboxSpec, count: int) -> None:
        """Announce ``count`` sandboxes of a specification: hosts with a pool prepare them.

        This is a hint: a host that misses it makes them on request.
        """
        await self._open()
        shares = self._table.share(spec.image.digest, count, _now())
        await asyncio.gather(*(_announce(self._hosts[name].client, spec, share) for name, share in shares.items()))

    def load(self) -> SandboxLoad:
        """The sandboxes of this process, and the room for them on all hosts, now."""
        made = sum(len(host.client) for host in self._hosts.values()) + self._making
        return SandboxLoad(demand=made + self._waiting, capacity=made + self._table.room(_now()))

    def faults(self) -> Mapping[str, str]:
        """The hosts that currently get no sandboxes, by URL, with the reason."""
        return self._table.obstacles("", _now())

    async def close(self) -> None:
        """Close every sandbox; calling it twice is harmless."""
        self._closed = True
        tasks = [*self._finding, *(host.look for host in self._hosts.values() if host.look is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._leaving, return_exceptions=True)
        for name in filter(self._table.is_silent, self._hosts):  # else each sandbox waits for a timeout
            await self._give_up(name, f"the sandbox provider is closed, and host {name} gave no answer")
        await asyncio.gather(*(host.client.close() for host in self._hosts.values()))

    async def _place(self, files: Mapping[str, str], spec: SandboxSpec) -> Sandbox:
        """Make a sandbox on the best host; if it fails, on the next best."""
        image, tried, failures, busy, left_s = spec.image.digest, set[str](), 0, 0, self._times.room_s
        while True:
            asked_s = _now()
            name = await self._choose(image, tried, asked_s + left_s)
            left_s -= _now() - asked_s
            try:
                sandbox = await self._make(name, files, spec)
            except SandboxesBusy:
                self._table.refused(name)
                busy += 1
                if busy == MAX_BUSY:
                    raise
            except Unsupported:
                raise
            except ConfigError as error:
                if not image:
                    raise
                self._table.has_no_image(name, image, _now())
                if self._table.is_nowhere(image, _now()):
                    raise ConfigError(f"{name}: {error}") from error
            except SandboxError as error:
                self._table.failed(name, _now())
                tried.add(name)
                failures += 1
                if failures == TRIES:
                    raise SandboxError(f"{name}: {error}") from error
            else:
                self._table.made(name)
                return sandbox

    async def _make(self, name: str, files: Mapping[str, str], spec: SandboxSpec) -> Sandbox:
        self._making += 1
        try:
            return await self._hosts[name].client.create(files, spec)
        finally:
            self._making -= 1

    async def _choose(self, image: str, tried: set[str], deadline_s: float) -> str:
        """The next host for a sandbox, once one has capacity; if all were tried, one of those again after a while.
        Raises :class:`~etude.errors.SandboxesBusy` at the deadline.
        """
        while _now() <= deadline_s:
            if self._closed:
                raise SandboxError("the sandbox provider is closed")
            name = self._table.choose(image, _now(), without=tried)
            if name is not None:
                return name
            if self._table.is_nowhere(image, _now()):
                raise ConfigError(f"no host of sandboxes has image {image}: add it there with `etude images add`")
            self._waiting += 1
            try:
                await asyncio.sleep(self._times.look_s / WAITS_PER_LOOK)
            finally:
                self._waiting -= 1
            tried.clear()
        raise SandboxesBusy(
            f"no host of sandboxes had room within {self._times.room_s:g} s: {self._table.explain(image, _now())}"
        )

    async def _open(self) -> frozenset[Capability]:
        """Start to poll hosts, and wait for the first reports; return the common capabilities.

        Raises :class:`~etude.errors.ConfigError` if a host that the recipe names rejects the client, or all do;
        :class:`~etude.errors.SandboxError` if none answers.
        """
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        if not self._is_open:
            self._is_open = True
            for name, host in self._hosts.items():
                self._start_looking(name, host)
            self._finding = [
                asyncio.create_task(supervised("finding hosts of sandboxes", partial(self._follow, number, find)))
                for number, find in enumerate(self._find)
            ]
        for task in [*self._finding, *(host.look for host in self._hosts.values())]:
            if task is not None and task.done():
                task.result()  # raises: without it this host is never polled, or none is found
        if self._agreed is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK_S):
                    while not self._has_looked():
                        await asyncio.sleep(FIRST_LOOK_POLL_S)
            shared = {name: host.capabilities for name, host in self._hosts.items() if host.capabilities is not None}
            for name, host in self._hosts.items():
                # The address of a host that died may be that of another run's host by now.
                if host.rejection is not None and (name in self._fixed or not shared):
                    raise ConfigError(f"{name}: {host.rejection}") from host.rejection
            if not shared:
                raise SandboxError(f"no host of sandboxes answers: {self._table.explain('', _now())}")
            self._agreed = self._table.agree(shared, _now())
        return self._agreed

    def _has_looked(self) -> bool:
        """True once every directory was read and every host polled; hosts of a directory may still start, so one must
        have answered.
        """
        hosts = self._hosts.values()
        if len(self._directories) < len(self._find) or not all(host.is_polled for host in hosts):
            return False
        return not self._find or any(host.capabilities is not None for host in hosts)

    async def _follow(self, number: int, find: FindHosts) -> None:
        """Read a directory for ever; its hosts stay while it is unavailable."""
        while True:
            try:
                self._directories[number] = frozenset(url.rstrip("/") for url in await find())
            except InfrastructureError:
                self._directories.setdefault(number, frozenset())
            self._use(self._fixed.union(*self._directories.values()))
            await asyncio.sleep(self._times.find_s)

    def _use(self, names: frozenset[str]) -> None:
        """Replace the set of hosts: those that join are polled from now on, those that left are given up."""
        left, joined = self._names - names, names - self._names
        if not left and not joined:
            return
        self._names = names
        self._table.follow(names)
        for name in left:
            leaving = asyncio.create_task(_leave(name, self._hosts.pop(name)))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        for name in joined:
            host = self._hosts[name] = _PolledHost(client=self._connect(name))
            if self._is_open:
                self._start_looking(name, host)

    def _start_looking(self, name: str, host: _PolledHost) -> None:
        host.look = asyncio.create_task(supervised(f"looking at {name}", partial(self._look_at, name, host)))

    async def _look_at(self, name: str, host: _PolledHost) -> None:
        """Poll a host for ever; give it up when it is silent for too long, use it again when it answers."""
        heard_s = _now()
        while True:
            try:
                await self._look(name, host)
                heard_s = _now()
            except (EtudeError, ValueError) as error:
                self._table.record_silence(name, str(error))
                if isinstance(error, ConfigError):
                    host.rejection = error
                if _now() - heard_s >= self._times.gone_s:
                    await self._give_up(name, f"host {name} gave no answer for {self._times.gone_s:g} s: {error}")
            host.is_polled = True
            await asyncio.sleep(self._times.look_s)

    async def _look(self, name: str, host: _PolledHost) -> None:
        """Poll a host's capacity; if it is new or restarted, its capabilities too."""
        report = await host.client.report(self._times.answer_s)
        if self._table.is_anew(name, report):
            await self._give_up(name, f"host {name} was started anew: what was there is gone")
        host.client.take_up()
        if host.capabilities is None:
            host.capabilities = await host.client.capabilities()
            if self._agreed is not None:
                self._table.agree({name: host.capabilities}, _now())
        self._table.record_report(name, report, _now())
        host.rejection = None

    async def _give_up(self, name: str, reason: str) -> None:
        self._hosts[name].capabilities = None
        await self._hosts[name].client.give_up(reason)


async def _announce(client: SandboxHost, spec: SandboxSpec, count: int) -> None:
    with suppress(EtudeError, ValueError):
        await client.announce(spec, count)


async def _leave(name: str, host: _PolledHost) -> None:
    """Give up a host that has left."""
    if host.look is not None:
        host.look.cancel()
        await asyncio.gather(host.look, return_exceptions=True)
    await host.client.give_up(f"host {name} has left")
    await host.client.close()


def _now() -> float:
    return asyncio.get_running_loop().time()

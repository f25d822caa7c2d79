"""Sandboxes on many machines: one provider over all their servers.

    create ──▶ HostTable.choose ──▶ RemoteSandboxes of that host ──HTTPS──▶ `etude sandboxes serve`
                  ▲
    polls ────────┘  every host reports its capacity every two seconds

Each host has its own connections, leases and heartbeats (:mod:`etude.sandboxes.remote.client`). A sandbox, its forks
and sandboxes from its snapshots stay on one host. Owns the polling of hosts and the decision to give up a host;
:mod:`etude.sandboxes.remote.placement` chooses the host.

States of a host: unheard ──a report──▶ open ──no answer──▶ silent ──``gone_s`` of it──▶ given up; a report opens it. A
silent host gets no sandboxes. When it is given up or restarted, its sandboxes are lost: pending and later calls are
errors of the sandbox, so their work is retried on another host. Waits for capacity with a deadline. On close every
sandbox is closed.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final

from etude.aio import supervised
from etude.errors import ConfigError, EtudeError, SandboxError, SandboxesBusy, Unsupported
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
WAITS_PER_LOOK = 4
"""Checks of the table by a request that waits for capacity, per polling interval."""
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
    room_s: float = 60.0
    """Total wait for capacity on a host; time spent in requests does not count, as a burst may queue many before this
    one.
    """


USUAL_TIMES = HostTimes()


class SandboxHost(Protocol):
    """One host, as :class:`~etude.sandboxes.remote.client.RemoteSandboxes` has it."""

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


@final
class HostedSandboxes:
    """Makes sandboxes on the best of several hosts; implements :class:`~etude.protocols.SandboxProvider`."""

    def __init__(
        self,
        urls: Sequence[str],
        key: str,
        *,
        connections: int = 0,
        times: HostTimes = USUAL_TIMES,
        connect: Callable[[str], SandboxHost] | None = None,
    ) -> None:
        """``connections`` is the limit per host; 0: as many as the open-file limit allows. ``connect`` makes the client
        of a host by name; the default uses HTTP.

        Raises :class:`~etude.errors.ConfigError` for an invalid or duplicate URL, and without a key.
        """
        names = [url.rstrip("/") for url in urls]
        try:
            self._table = HostTable(names)
        except ValueError as error:
            raise ConfigError(f"sandboxes at {list(urls)}: {error}") from error
        each = connections or usual_connections(len(names))
        connect = connect or (lambda name: RemoteSandboxes(name, key, connections=each))
        self._hosts = {name: connect(name) for name in names}
        self._times = times
        self._polled = {name: asyncio.Event() for name in names}
        """Set after the first poll of a host, whatever its result."""
        self._config_errors: dict[str, ConfigError] = {}
        """Hosts that reject the key, or use another version."""
        self._capabilities: dict[str, frozenset[Capability]] = {}
        self._looks: list[asyncio.Task[None]] = []
        self._agreed: frozenset[Capability] | None = None
        self._closed = False

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
            for host in self._hosts.values():
                if host.has_snapshot(spec.image.digest):
                    return await host.create(files, spec)
            raise SandboxError(f"{spec.image.digest} is gone, with the host that kept it: make it anew")
        return await self._place(files, spec)

    async def announce(self, spec: SandboxSpec, count: int) -> None:
        """Announce ``count`` sandboxes of a specification: hosts with a pool prepare them.

        This is a hint: a host that misses it makes them on request.
        """
        await self._open()
        shares = self._table.share(spec.image.digest, count, _now())
        await asyncio.gather(*(self._announce(name, spec, share) for name, share in shares.items()))

    def faults(self) -> Mapping[str, str]:
        """The hosts that currently get no sandboxes, by URL, with the reason."""
        return self._table.obstacles("", _now())

    async def close(self) -> None:
        """Close every sandbox; calling it twice is harmless."""
        self._closed = True
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)
        for name in filter(self._table.is_silent, self._hosts):  # else each sandbox waits for a timeout
            await self._give_up(name, f"the sandbox provider is closed, and host {name} gave no answer")
        await asyncio.gather(*(host.close() for host in self._hosts.values()))

    async def _announce(self, name: str, spec: SandboxSpec, count: int) -> None:
        with suppress(EtudeError, ValueError):
            await self._hosts[name].announce(spec, count)

    async def _place(self, files: Mapping[str, str], spec: SandboxSpec) -> Sandbox:
        """Make a sandbox on the best host; if it fails, on the next best."""
        image, tried, failures, busy, left_s = spec.image.digest, set[str](), 0, 0, self._times.room_s
        while True:
            asked_s = _now()
            name = await self._choose(image, tried, asked_s + left_s)
            left_s -= _now() - asked_s
            try:
                sandbox = await self._hosts[name].create(files, spec)
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
            await asyncio.sleep(self._times.look_s / WAITS_PER_LOOK)
            tried.clear()
        raise SandboxesBusy(
            f"no host of sandboxes had room within {self._times.room_s:g} s: {self._table.explain(image, _now())}"
        )

    async def _open(self) -> frozenset[Capability]:
        """Start to poll hosts, and wait for the first reports; return the common capabilities.

        Raises :class:`~etude.errors.ConfigError` if a host rejects the client, :class:`~etude.errors.SandboxError` if
        none answers.
        """
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        if not self._looks:
            self._looks = [
                asyncio.create_task(supervised(f"looking at {name}", partial(self._look_at, name)))
                for name in self._hosts
            ]
        for look in self._looks:
            if look.done():
                look.result()  # raises: without it this host is never polled
        if self._agreed is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK_S):
                    await asyncio.gather(*(polled.wait() for polled in self._polled.values()))
            for name, error in self._config_errors.items():
                raise ConfigError(f"{name}: {error}") from error
            if not self._capabilities:
                raise SandboxError(f"no host of sandboxes answers: {self._table.explain('', _now())}")
            self._agreed = self._table.agree(self._capabilities, _now())
        return self._agreed

    async def _look_at(self, name: str) -> None:
        """Poll a host for ever; give it up when it is silent for too long, use it again when it answers."""
        heard_s = _now()
        while True:
            try:
                await self._look(name)
                heard_s = _now()
            except (EtudeError, ValueError) as error:
                self._table.record_silence(name, str(error))
                if isinstance(error, ConfigError):
                    self._config_errors[name] = error
                if _now() - heard_s >= self._times.gone_s:
                    await self._give_up(name, f"host {name} gave no answer for {self._times.gone_s:g} s: {error}")
            self._polled[name].set()
            await asyncio.sleep(self._times.look_s)

    async def _look(self, name: str) -> None:
        """Poll a host's capacity; if it is new or restarted, its capabilities too."""
        host = self._hosts[name]
        report = await host.report(self._times.answer_s)
        if self._table.is_anew(name, report):
            await self._give_up(name, f"host {name} was started anew: what was there is gone")
        host.take_up()
        if name not in self._capabilities:
            self._capabilities[name] = await host.capabilities()
            if self._agreed is not None:
                self._table.agree({name: self._capabilities[name]}, _now())
        self._table.record_report(name, report, _now())
        self._config_errors.pop(name, None)

    async def _give_up(self, name: str, reason: str) -> None:
        self._capabilities.pop(name, None)
        await self._hosts[name].give_up(reason)


def _now() -> float:
    return asyncio.get_running_loop().time()

"""Sandboxes on many machines: one provider over the servers of all of them.

    create ──▶ HostTable.choose ──▶ RemoteSandboxes of that host ──HTTPS──▶ `etude sandboxes serve`
                  ▲
    looks ────────┘  every host says every two seconds what room it has

Each host has connections, leases and heartbeats of its own (:mod:`etude.sandboxes.remote.client`). A sandbox, its forks
and what is made from its snapshots stay on one host. Owns who is looked at and when a host is given up; which host is
chosen is :mod:`etude.sandboxes.remote.placement`'s.

States of a host: unheard ──a report──▶ open ──no answer──▶ silent ──``gone_s`` of it──▶ given up; a report opens it.
A silent host gets no sandbox. When it is given up, or was started anew, its sandboxes are lost: calls under way and
later ones are errors of the sandbox, so what was at work in them is tried again, elsewhere. Waits for room with a
deadline. On close every sandbox is closed.
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
"""Time in which hosts may be heard of, or not answer, before the first sandbox is asked for. Some try at first what
they are capable of; those that take longer come later.
"""
WAITS_PER_LOOK = 4
"""Looks at the table of who waits for room, in the time of one look at a host."""
MAX_BUSY = 16
"""Hosts that had no place after all, before one sandbox is given up: other clients may always be faster."""
TRIES = 3
"""Failures to make one sandbox, on different hosts where there are as many, before the error is the caller's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Times between looks at hosts, and deadlines of waiting for them."""

    look_s: float = 2.0
    """Time between two looks at a host."""
    answer_s: float = 4.0
    """For its answer."""
    gone_s: float = 10.0
    """Silence after which a host's sandboxes are given up. One that was only cut off closes them by itself, when their
    leases are over.
    """
    room_s: float = 60.0
    """For room on a host, in all; what requests take does not count, of which a burst has many before one's own."""


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
        """Its room. Raises :class:`~etude.errors.SandboxError` if there is no answer in time."""
        ...

    async def announce(self, spec: SandboxSpec, count: int) -> None:
        """Announce how many sandboxes will be needed soon."""
        ...

    async def give_up(self, reason: str) -> None:
        """Fail every sandbox and every call, with the reason, until :meth:`take_up`."""
        ...

    def take_up(self) -> None:
        """Use it again."""
        ...

    def has_snapshot(self, digest: str) -> bool:
        """Say whether it keeps an image that one of its sandboxes was made into."""
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
        """``connections`` to each host at a time; 0: as many as this process has files for. ``connect`` makes the
        client of a host, by its name; by default it speaks HTTP.

        Raises :class:`~etude.errors.ConfigError` for a URL that is none or comes twice, and without a key.
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
        self._heard = {name: asyncio.Event() for name in names}
        """Set when a host was looked at for the first time, whatever came of it."""
        self._config_errors: dict[str, ConfigError] = {}
        """Hosts that do not know our key, or speak another version."""
        self._capabilities: dict[str, frozenset[Capability]] = {}
        self._looks: list[asyncio.Task[None]] = []
        self._agreed: frozenset[Capability] | None = None
        self._closed = False

    async def capabilities(self) -> frozenset[Capability]:
        """The capabilities that all hosts had which answered at first. A host with less gets no sandboxes."""
        return await self._open()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> Sandbox:
        """A fresh sandbox on the best host; on the one that keeps it, for an image that is a snapshot.

        Raises :class:`~etude.errors.SandboxesBusy` if no host has room in time, :class:`~etude.errors.SandboxError`
        when several could not make it or the host of a snapshot is gone, :class:`~etude.errors.ConfigError` for an
        image that no host has, and what a host's provider refuses.
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
        """Say that ``count`` sandboxes of a specification will be asked for soon: hosts with a pool make them ready.

        It is a hint: a host that does not hear it makes them when they are asked for.
        """
        await self._open()
        shares = self._table.share(spec.image.digest, count, _now())
        await asyncio.gather(*(self._announce(name, spec, share) for name, share in shares.items()))

    def faults(self) -> Mapping[str, str]:
        """The hosts that get no sandbox now, and why, by their URLs."""
        return self._table.obstacles("", _now())

    async def close(self) -> None:
        """Close every sandbox; calling it twice is harmless."""
        self._closed = True
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)
        for name in filter(self._table.is_silent, self._hosts):  # who would be waited for once more for each sandbox
            await self._give_up(name, f"the sandbox provider is closed, and host {name} gave no answer")
        await asyncio.gather(*(host.close() for host in self._hosts.values()))

    async def _announce(self, name: str, spec: SandboxSpec, count: int) -> None:
        with suppress(EtudeError, ValueError):
            await self._hosts[name].announce(spec, count)

    async def _place(self, files: Mapping[str, str], spec: SandboxSpec) -> Sandbox:
        """Have a sandbox made by the best host; if it fails, by the next best."""
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
        """The next host for a sandbox, once there is one; if there is no other, after a while one of those that were
        tried. Raises :class:`~etude.errors.SandboxesBusy` at the deadline.
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
        """Begin to look at hosts, and wait for the first of their reports; returns what they all are capable of.

        Raises :class:`~etude.errors.ConfigError` if one of them refuses us, :class:`~etude.errors.SandboxError` if none
        answers.
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
                look.result()  # raises: without it nothing is known of that host
        if self._agreed is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK_S):
                    await asyncio.gather(*(heard.wait() for heard in self._heard.values()))
            for name, error in self._config_errors.items():
                raise ConfigError(f"{name}: {error}") from error
            if not self._capabilities:
                raise SandboxError(f"no host of sandboxes answers: {self._table.explain('', _now())}")
            self._agreed = self._table.agree(self._capabilities, _now())
        return self._agreed

    async def _look_at(self, name: str) -> None:
        """Look at a host for ever; give it up when it is silent for too long, use it again when it is back."""
        heard_s = _now()
        while True:
            try:
                await self._look(name)
                heard_s = _now()
            except (EtudeError, ValueError) as error:
                self._table.silent(name, str(error))
                if isinstance(error, ConfigError):
                    self._config_errors[name] = error
                if _now() - heard_s >= self._times.gone_s:
                    await self._give_up(name, f"host {name} gave no answer for {self._times.gone_s:g} s: {error}")
            self._heard[name].set()
            await asyncio.sleep(self._times.look_s)

    async def _look(self, name: str) -> None:
        """Ask a host for its room; one that is new, or was started anew, for its capabilities, too."""
        host = self._hosts[name]
        report = await host.report(self._times.answer_s)
        if self._table.is_anew(name, report):
            await self._give_up(name, f"host {name} was started anew: what was there is gone")
        host.take_up()
        if name not in self._capabilities:
            self._capabilities[name] = await host.capabilities()
            if self._agreed is not None:
                self._table.agree({name: self._capabilities[name]}, _now())
        self._table.heard(name, report, _now())
        self._config_errors.pop(name, None)

    async def _give_up(self, name: str, reason: str) -> None:
        self._capabilities.pop(name, None)
        await self._hosts[name].give_up(reason)


def _now() -> float:
    return asyncio.get_running_loop().time()

"""Sandboxes on other machines: the client of :mod:`etude.sandboxes.remote.server`, or of another server that
speaks :mod:`etude.sandboxes.remote.wire`.

    trainer's side: RemoteSandboxes ──HTTPS, one key──▶ server in the user's own network ──▶ clones of their services

Owns deadlines and heartbeats; validates every size and text from the server. Requests to create, fork and close are
retried after a lost connection (:mod:`etude.sandboxes.remote.connection`), since their names make repetition harmless.
A command is not retried, so a connection lost during a command is an error of the sandbox. For several servers see
:mod:`etude.sandboxes.remote.hosts`.

States of a provider: new ──first call──▶ open ──close──▶ closed. While it is open and holds sandboxes, their leases are
renewed in pages, over a connection that commands do not use. If that fails for too long, the server closes the
sandboxes, and using them is an error. The next heartbeat reports those that the server has lost.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from etude.errors import ConfigError, EtudeError, SandboxError
from etude.protocols import ExecResult
from etude.sandbox_spec import Capability, Image, SandboxSpec, SandboxStats
from etude.sandboxes.images.archives import EXPORT_LIMIT_BYTES, read_archive
from etude.sandboxes.remote import wire
from etude.sandboxes.remote.connection import CALL_TIMEOUT_S, ServerConnection, usual_connections
from etude.sandboxes.remote.placement import HostReport

CREATE_TIMEOUT_S = 600.0
"""Timeout for a sandbox, a fork or a snapshot: the first sandbox of an image may need a virtual machine to start."""
CLOSE_TIMEOUT_S = 30.0
"""Timeout for closing a sandbox; after that, the server closes it when its lease ends."""
GRACE_S = 60.0
"""Time after a command's own deadline within which its end may be reported."""
ATTEMPTS = 3
"""Attempts of a request that may be repeated."""
HEARTBEATS_PER_LEASE = 3
"""So that two heartbeats may be lost."""
MIN_HEARTBEAT_S = 0.05
"""Shortest heartbeat interval, whatever the server's lease."""
LEASES_PER_PAGE = 2_000
"""Leases renewed in one request; this takes some milliseconds on each side."""
CLOSED_AT_ONCE = 128
"""Concurrent closes when all sandboxes are closed: as many as a server's queue of new connections holds."""
CONTROL_CONNECTIONS = 8
"""Connections for leases and server requests, besides those of sandboxes."""

M = TypeVar("M", bound=wire.WireMessage)


class RemoteSandboxes:
    """Makes sandboxes on a server; implements :class:`~etude.protocols.SandboxProvider`."""

    def __init__(self, url: str, key: str, *, connections: int = 0) -> None:
        """``url`` is the server's, without the version; at most ``connections`` sandbox calls run concurrently, 0 for
        as many as this process's open-file limit allows.

        Raises :class:`~etude.errors.ConfigError` for an invalid URL, or without a key.
        """
        if not url.startswith(("http://", "https://")) or not key:
            raise ConfigError(f"sandboxes at {url!r}: expected an http(s) URL and a key")
        place = f"{url.rstrip('/')}/v{wire.VERSION}"
        self._server = ServerConnection(place, key, connections or usual_connections(1))
        self._control = ServerConnection(place, key, CONTROL_CONNECTIONS)
        self._capabilities: frozenset[Capability] | None = None
        self._sandboxes: dict[str, RemoteSandbox] = {}
        self._heart: asyncio.Task[None] | None = None
        self._drops: set[asyncio.Task[None]] = set()
        self._snapshots: set[str] = set()
        self._closed = False

    def __len__(self) -> int:
        """Sandboxes that are open."""
        return len(self._sandboxes)

    async def capabilities(self) -> frozenset[Capability]:
        """The capabilities of the server's provider, as far as this client knows their names."""
        if self._capabilities is None:
            capabilities = await self._control.ask(wire.CapabilitiesReply, "GET", "capabilities", attempts=ATTEMPTS)
            if capabilities.version != wire.VERSION:
                raise SandboxError(f"the server speaks version {capabilities.version}, this client {wire.VERSION}")
            self._capabilities = wire.known_capabilities(capabilities.capabilities)
        return self._capabilities

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> "RemoteSandbox":
        """A fresh sandbox that holds ``files``; layers and mounts are paths on the server's machine.

        Raises :class:`~etude.errors.SandboxError` if the server cannot be reached or cannot make it, and what its
        provider raises: ``ValueError`` for a bad path, :class:`~etude.errors.Unsupported`.
        """
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        name, spec = uuid.uuid4().hex, spec or SandboxSpec()
        body = wire.write_message(wire.CreateRequest(files=dict(files), spec=spec))
        try:
            lease = await self._server.ask(
                wire.LeaseReply, "PUT", f"sandboxes/{name}", body, timeout_s=CREATE_TIMEOUT_S, attempts=ATTEMPTS
            )
        except BaseException:
            self.drop_soon(name)  # it may have been made
            raise
        return self.hold(name, lease.lease_s)

    async def report(self, timeout_s: float) -> HostReport:
        """The server's report of its capacity. Raises :class:`~etude.errors.SandboxError` if there is no answer in
        time.
        """
        return (await self._control.ask(wire.HostReply, "GET", "host", timeout_s=timeout_s)).report

    async def announce(self, spec: SandboxSpec, count: int) -> None:
        """Announce to the server how many sandboxes of a specification will be needed soon."""
        body = wire.write_message(wire.BurstRequest(spec=spec, count=count))
        await self._control.ask(wire.Done, "POST", "announce", body, attempts=ATTEMPTS)

    async def drain(self) -> HostReport:
        """Make the server accept no new sandboxes, and stop after its last one; for its operator."""
        return (await self._control.ask(wire.HostReply, "POST", "drain", attempts=ATTEMPTS)).report

    async def give_up(self, reason: str) -> None:
        """Fail all sandboxes and pending calls with the reason, and all later calls until :meth:`take_up`.

        The server is not notified: its remaining sandboxes end with their leases.
        """
        self._capabilities = None
        self._snapshots.clear()
        while self._sandboxes:
            self._sandboxes.popitem()[1].lose(reason)
        await self._server.cut(reason)

    def take_up(self) -> None:
        """Use the server again."""
        self._server.resume()

    async def close(self) -> None:
        """Close every sandbox; calling it twice is harmless."""
        self._closed = True
        while self._sandboxes:
            page = list(self._sandboxes.values())[:CLOSED_AT_ONCE]
            await asyncio.gather(*(sandbox.close() for sandbox in page))
        await asyncio.gather(*self._drops)
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait({self._heart})
        await self._server.close()
        await self._control.close()

    def hold(self, name: str, lease_s: float) -> "RemoteSandbox":
        """Register a sandbox that the server made; its lease is renewed from now on."""
        sandbox = self._sandboxes[name] = RemoteSandbox(self, self._server, name, lease_s)
        if self._heart is None or self._heart.done():
            self._heart = asyncio.create_task(self._beat())
        return sandbox

    def keep_snapshot(self, digest: str) -> None:
        """Record an image that only this server has."""
        self._snapshots.add(digest)

    def has_snapshot(self, digest: str) -> bool:
        """True if the server stores an image as a snapshot of one of its sandboxes."""
        return digest in self._snapshots

    def drop_soon(self, name: str) -> None:
        """:meth:`drop` a sandbox in the background: its caller already gets an error."""
        drop = asyncio.create_task(self.drop(name))
        self._drops.add(drop)
        drop.add_done_callback(self._drops.discard)

    async def drop(self, name: str) -> None:
        """Ask the server to close a sandbox; if it is unreachable, it does so when the lease ends."""
        self._sandboxes.pop(name, None)
        with suppress(EtudeError, ValueError):
            await self._server.ask(
                wire.Done, "DELETE", f"sandboxes/{name}", timeout_s=CLOSE_TIMEOUT_S, attempts=ATTEMPTS
            )

    async def _beat(self) -> None:
        """Renew the leases of all sandboxes for as long as there are any."""
        while self._sandboxes:
            shortest_s = min(sandbox.lease_s for sandbox in self._sandboxes.values())
            wait_s = max(MIN_HEARTBEAT_S, shortest_s / HEARTBEATS_PER_LEASE)
            await asyncio.sleep(wait_s)
            names = list(self._sandboxes)
            pages = [names[start : start + LEASES_PER_PAGE] for start in range(0, len(names), LEASES_PER_PAGE)]
            await asyncio.gather(*(self._renew(page, wait_s) for page in pages))

    async def _renew(self, names: list[str], timeout_s: float) -> None:
        """Renew a page of leases, and mark the sandboxes that the server no longer has as lost."""
        body = wire.write_message(wire.SandboxNames(names=names))
        with suppress(EtudeError, ValueError):  # the next renewal may succeed; if none does, calls will fail
            lost = await self._control.ask(wire.SandboxNames, "POST", "leases", body, timeout_s=timeout_s)
            for name in lost.names:
                if sandbox := self._sandboxes.pop(name, None):
                    sandbox.lose(f"sandbox {name} is closed, or its lease or time to live is over")


class RemoteSandbox:
    """One sandbox of a server; implements :class:`~etude.protocols.Sandbox`."""

    def __init__(self, provider: RemoteSandboxes, server: ServerConnection, name: str, lease_s: float) -> None:
        self._provider = provider
        self._server = server
        self._name = name
        self.lease_s = lease_s
        """Time for which the server keeps it without a request."""
        self._closed = False
        self._loss = ""
        """Reason for which it was lost, although not closed here; empty while it exists."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command; cancelling this call ends it. A connection lost meanwhile is an error of the sandbox."""
        order = wire.ExecRequest(argv=list(argv), stdin=stdin, timeout_s=timeout_s, environment=dict(environment or {}))
        wait_s = timeout_s + GRACE_S if timeout_s > 0 else GRACE_S
        return (await self._request(wire.ExecReply, "exec", order, timeout_s=wait_s)).result

    async def read_file(self, path: str) -> str | None:
        """The text of a file, or ``None`` if there is none; ``ValueError`` if it is not a regular file."""
        return (await self._request(wire.FileText, "read", wire.PathOnly(path=path))).text

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file and its parent folders; ``ValueError`` if the path cannot be a regular file."""
        await self._request(wire.Done, "write", wire.FileText(path=path, text=text))

    async def export(self, paths: Sequence[str], *, limit_bytes: int = EXPORT_LIMIT_BYTES) -> bytes:
        """A tar of files and whole folders; ``ValueError`` beyond the limit.

        An archive that cannot be unpacked safely is an error of the sandbox.
        """
        self._check_open()
        body = wire.write_message(wire.ExportRequest(paths=list(paths), limit_bytes=limit_bytes))
        tar = await self._server.fetch(
            "POST",
            f"sandboxes/{self._name}/export",
            body,
            limit_bytes=limit_bytes + wire.TAR_SLACK_BYTES,
            timeout_s=CALL_TIMEOUT_S,
        )
        try:
            read_archive(tar)
        except ValueError as error:
            raise SandboxError(f"the server sent no archive that can be used: {error}") from error
        return tar

    async def load(self, tar: bytes) -> None:
        """Unpack a tar into the working folder; if it is invalid, unpack nothing and raise ``ValueError``."""
        self._check_open()
        path = f"sandboxes/{self._name}/load"
        await self._server.ask(wire.Done, "POST", path, tar)

    async def stats(self) -> SandboxStats:
        """Current usage, as measured by the server's provider."""
        return (await self._request(wire.Use, "stats")).stats()

    async def kill_processes(self) -> None:
        """Have the server kill all processes inside."""
        await self._request(wire.Done, "kill", attempts=ATTEMPTS)

    async def snapshot(self) -> Image:
        """The current files, as an image that the server stores; no other provider has it."""
        image = (await self._request(wire.ImageReply, "snapshot", timeout_s=CREATE_TIMEOUT_S)).image
        self._provider.keep_snapshot(image.digest)
        return image

    async def fork(self, count: int = 1) -> "Sequence[RemoteSandbox]":
        """Independent copies; all of them, or none and an error."""
        self._check_open()
        if not 0 < count <= wire.MAX_FORKS:
            raise ValueError(f"fork({count}): expected 1 to {wire.MAX_FORKS}")
        names = [uuid.uuid4().hex for _ in range(count)]
        try:
            await self._request(
                wire.Done, "fork", wire.SandboxNames(names=names), timeout_s=CREATE_TIMEOUT_S, attempts=ATTEMPTS
            )
        except BaseException:
            for name in names:
                self._provider.drop_soon(name)
            raise
        return [self._provider.hold(name, self.lease_s) for name in names]

    async def close(self) -> None:
        """Have the server kill all processes and remove the sandbox; calling it twice is harmless."""
        if not self._closed:
            self._closed = True
            if not self._loss:
                await self._provider.drop(self._name)

    def lose(self, reason: str) -> None:
        """Mark the sandbox as lost on the server: every later call fails with the reason."""
        self._loss = reason

    async def _request(
        self,
        kind: type[M],
        action: str,
        message: wire.WireMessage | None = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        attempts: int = 1,
    ) -> M:
        self._check_open()
        body = wire.write_message(message or wire.Done())
        path = f"sandboxes/{self._name}/{action}"
        return await self._server.ask(kind, "POST", path, body, timeout_s=timeout_s, attempts=attempts)

    def _check_open(self) -> None:
        if self._closed or self._loss:
            raise SandboxError(self._loss or "the sandbox is closed")

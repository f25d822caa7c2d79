"""Sandboxes on other machines: the client of :mod:`etude.sandboxes.remote.server`, or of another server that
speaks :mod:`etude.sandboxes.remote.wire`.

    trainer's side: RemoteSandboxes ──HTTPS, one key──▶ server in the user's own network ──▶ clones of their services

Owns connections, deadlines and heartbeats; believes no size and no word of the server's without looking. Creating,
forking and closing are asked again after a lost connection, since their names make that harmless; a command is not, so
a lost connection under one is an error of the sandbox.

States of a provider: new ──first call──▶ open ──close──▶ closed. While it is open and holds sandboxes, their leases are
renewed; when that fails for too long, the server closes them, and using them is an error.
"""

import asyncio
import io
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import aiohttp

from etude.errors import ConfigError, EtudeError, SandboxError
from etude.protocols import ExecResult
from etude.sandbox_spec import Capability, Image, SandboxSpec, SandboxStats
from etude.sandboxes.images.archives import EXPORT_LIMIT_BYTES, read_archive
from etude.sandboxes.remote import wire

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 120.0
"""For a file, an archive, a count."""
CREATE_TIMEOUT_S = 600.0
"""For a sandbox, a fork or a snapshot: the first of an image may need a virtual machine to start."""
CLOSE_TIMEOUT_S = 30.0
"""For a sandbox to close; one that does not is the server's to close when its lease is over."""
GRACE_S = 60.0
"""Time after a command's own deadline within which its end may be reported."""
ATTEMPTS = 3
"""Tries of a request that may be repeated."""
RETRY_S = 0.5
"""Between them."""
HEARTBEATS_PER_LEASE = 3
"""So that two may be lost."""
MIN_HEARTBEAT_S = 0.05
"""Whatever lease the server speaks of."""
CONNECTIONS = 256
"""To the server at a time; more calls wait for one of them to end."""

M = TypeVar("M", bound=wire.WireMessage)


class RemoteSandboxes:
    """Makes sandboxes on a server; implements :class:`~etude.protocols.SandboxProvider`."""

    def __init__(self, url: str, key: str) -> None:
        """``url`` is the server's, without the version. Raises :class:`~etude.errors.ConfigError` if it is none."""
        if not url.startswith(("http://", "https://")) or not key:
            raise ConfigError(f"sandboxes at {url!r}: expected an http(s) URL and a key")
        self._server = _ServerConnection(f"{url.rstrip('/')}/v{wire.VERSION}", key)
        self._capabilities: frozenset[Capability] | None = None
        self._sandboxes: dict[str, RemoteSandbox] = {}
        self._heart: asyncio.Task[None] | None = None
        self._closed = False

    async def capabilities(self) -> frozenset[Capability]:
        """The capabilities of the server's provider, as far as this client knows their names."""
        if self._capabilities is None:
            capabilities = await self._server.ask(wire.CapabilitiesReply, "GET", "capabilities", attempts=ATTEMPTS)
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
            await self.drop(name)  # it may have been made
            raise
        return self.hold(name, lease.lease_s)

    async def close(self) -> None:
        """Close every sandbox; calling it twice is harmless."""
        self._closed = True
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes.values())))
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait({self._heart})
        await self._server.close()

    def hold(self, name: str, lease_s: float) -> "RemoteSandbox":
        """A sandbox that the server made; its lease is renewed from now on."""
        sandbox = self._sandboxes[name] = RemoteSandbox(self, self._server, name, lease_s)
        if self._heart is None or self._heart.done():
            self._heart = asyncio.create_task(self._beat())
        return sandbox

    async def drop(self, name: str) -> None:
        """Let the server close a sandbox; when it cannot be told, it will do so when the lease is over."""
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
            names = list(self._sandboxes)[: wire.MAX_NAMES]
            with suppress(EtudeError, ValueError):  # the next one may get through; if none does, calls will say so
                body = wire.write_message(wire.SandboxNames(names=names))
                await self._server.ask(wire.SandboxNames, "POST", "leases", body, timeout_s=wait_s)


class RemoteSandbox:
    """One sandbox of a server; implements :class:`~etude.protocols.Sandbox`."""

    def __init__(self, provider: RemoteSandboxes, server: "_ServerConnection", name: str, lease_s: float) -> None:
        self._provider = provider
        self._server = server
        self._name = name
        self.lease_s = lease_s
        """For how long the server keeps it without hearing of us."""
        self._closed = False

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command; giving it up ends it. A connection that is lost under it is an error of the sandbox."""
        order = wire.ExecRequest(argv=list(argv), stdin=stdin, timeout_s=timeout_s, environment=dict(environment or {}))
        wait_s = timeout_s + GRACE_S if timeout_s > 0 else GRACE_S
        return (await self._ask(wire.ExecReply, "exec", order, timeout_s=wait_s)).result

    async def read_file(self, path: str) -> str | None:
        """The text of a file, or ``None`` if there is none; ``ValueError`` if it is no plain file."""
        return (await self._ask(wire.FileText, "read", wire.PathOnly(path=path))).text

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file and the folders above it; ``ValueError`` for a path that is no plain file's."""
        await self._ask(wire.Done, "write", wire.FileText(path=path, text=text))

    async def export(self, paths: Sequence[str], *, limit_bytes: int = EXPORT_LIMIT_BYTES) -> bytes:
        """A tar of files and whole folders; ``ValueError`` beyond the limit.

        One that could not be unpacked safely is an error of the sandbox.
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
        """Unpack a tar into the working folder, or nothing of it and ``ValueError``."""
        self._check_open()
        path = f"sandboxes/{self._name}/load"
        await self._server.ask(wire.Done, "POST", path, tar)

    async def stats(self) -> SandboxStats:
        """Usage now, as the server's provider counts it."""
        return (await self._ask(wire.Use, "stats")).stats()

    async def kill_processes(self) -> None:
        """Have the server kill what runs inside."""
        await self._ask(wire.Done, "kill", attempts=ATTEMPTS)

    async def snapshot(self) -> Image:
        """The files as they are, as an image that the server keeps; no other provider knows it."""
        return (await self._ask(wire.ImageReply, "snapshot", timeout_s=CREATE_TIMEOUT_S)).image

    async def fork(self, count: int = 1) -> "Sequence[RemoteSandbox]":
        """Independent copies; all of them, or none and an error."""
        self._check_open()
        if not 0 < count <= wire.MAX_FORKS:
            raise ValueError(f"fork({count}): expected 1 to {wire.MAX_FORKS}")
        names = [uuid.uuid4().hex for _ in range(count)]
        try:
            await self._ask(
                wire.Done, "fork", wire.SandboxNames(names=names), timeout_s=CREATE_TIMEOUT_S, attempts=ATTEMPTS
            )
        except BaseException:
            for name in names:
                await self._provider.drop(name)
            raise
        return [self._provider.hold(name, self.lease_s) for name in names]

    async def close(self) -> None:
        """Have the server kill what still runs and remove everything; calling it twice is harmless."""
        if not self._closed:
            self._closed = True
            await self._provider.drop(self._name)

    async def _ask(
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
        if self._closed:
            raise SandboxError("the sandbox is closed")


class _ServerConnection:
    """The other end: asks it things, and believes nothing that it did not read."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key
        self._http: aiohttp.ClientSession | None = None

    async def ask(
        self,
        kind: type[M],
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        attempts: int = 1,
    ) -> M:
        """Ask the server and read its JSON. Raises what it refuses with, or :class:`~etude.errors.SandboxError`."""
        answer = await self.fetch(
            method, path, body, limit_bytes=wire.JSON_LIMIT_BYTES, timeout_s=timeout_s, attempts=attempts
        )
        try:
            return wire.read_message(kind, answer)
        except ValueError as error:
            raise SandboxError(f"the server of {self._url} answered {error}") from error

    async def fetch(
        self, method: str, path: str, body: bytes, *, limit_bytes: int, timeout_s: float, attempts: int = 1
    ) -> bytes:
        """Ask the server; returns the bytes of its answer, at most ``limit_bytes``. Raises as :meth:`ask` does."""
        for attempt in range(1, attempts + 1):
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._request(method, path, body, limit_bytes)
            except (aiohttp.ClientError, OSError) as error:
                if isinstance(error, TimeoutError):
                    raise SandboxError(f"the server of {self._url} gave no answer within {timeout_s:g} s") from None
                if attempt == attempts:
                    raise SandboxError(f"the server of {self._url} cannot be reached: {error}") from error
                await asyncio.sleep(RETRY_S * attempt)
        raise AssertionError("no attempt was made")

    async def _request(self, method: str, path: str, body: bytes, limit_bytes: int) -> bytes:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=CONNECTIONS)
            headers = {"Authorization": f"Bearer {self._key}"}
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            self._http = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
        is_tar = path.endswith("/load")
        headers = {"Content-Type": "application/x-tar" if is_tar else "application/json"}
        async with self._http.request(
            method, f"{self._url}/{path}", data=io.BytesIO(body), headers=headers, allow_redirects=False
        ) as response:
            answer = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                answer += chunk
                if len(answer) > limit_bytes:
                    response.close()
                    raise SandboxError(f"the server of {self._url} sent more than {limit_bytes} bytes: not read")
        if response.status == 200:
            return bytes(answer)
        try:
            reply = wire.read_message(wire.ErrorReply, bytes(answer))
        except ValueError:
            raise SandboxError(f"the server of {self._url} answered {response.status} {response.reason}") from None
        raise reply.error()

    async def close(self) -> None:
        """Hang up."""
        if self._http is not None:
            await self._http.close()

"""The reference server of remote sandboxes: offers any provider of this machine to clients with a key.

    client ──HTTP──▶ this server ──▶ provider ──▶ sandboxes, in the network they are meant for

Owns sizes and concurrency limits. The operator defines each client's permissions, and leases ensure that nothing
outlives a lost client (both :mod:`etude.sandboxes.remote.principals`). Messages: :mod:`etude.sandboxes.remote.wire`.
The caller provides listening and encryption; its runner must cancel the handlers of disconnected clients
(``AppRunner(…, handler_cancellation=True)``), which is how a client cancels a command.

States: new ──start-up of the app──▶ open ──drain──▶ draining ──clean-up──▶ closed. Consumes requests; waits for
the provider, which enforces the deadlines of commands, and for bodies with a deadline. A sandbox is made in its own
task, which a repeated request finds. While it drains it accepts no new sandboxes or forks, and serves the existing
ones. On clean-up every sandbox is closed.
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from aiohttp import web

from etude.errors import ConfigError, EtudeError, SandboxError, SandboxesBusy
from etude.gauges import CONTENT_TYPE, gauge_page
from etude.protocols import Sandbox, SandboxProvider
from etude.sandbox_spec import Image, SandboxLimits, SandboxSpec
from etude.sandboxes.memory_pressure import MachineMemory
from etude.sandboxes.remote import wire
from etude.sandboxes.remote.placement import HostReport
from etude.sandboxes.remote.principals import SNAPSHOT, RegisteredSandbox, SandboxClient, SandboxRegistry
from etude.sandboxes.warm_pool import GAUGE, SandboxPool

PREFIX = f"/v{wire.VERSION}"
REQUESTS_EACH = 2
"""Concurrent requests per sandbox that clients may have."""
DRAIN_LOOK_S = 0.1
"""Interval between checks whether the last sandbox has ended."""
SWEEPS_PER_LEASE = 8
"""Checks of leases during one lease."""
BODY_TIMEOUT_S = 300.0
"""Timeout for a client to send a whole request."""
TAR = "application/x-tar"
Answer: TypeAlias = wire.WireMessage | bytes
"""JSON, or a tar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits for all clients together or each of them."""

    snapshots: int = 64
    """Snapshots stored per key, as long as the server runs."""
    requests: int | None = None
    """Concurrent requests of all keys; further ones get an error that calls for a retry. Default: two for each sandbox
    that clients may have. Renewals of leases, reports and removals are always admitted.
    """
    sandboxes: int | None = None
    """Open sandboxes of all keys; ``None``: only each key's quota applies."""
    reserve_bytes: int = 512 << 20
    """Memory of the machine that is never offered to new sandboxes."""
    stalled: float = 0.1
    """Share of time in which some task waits for memory (PSI, "some") above which no memory is offered."""
    lease_s: float = 60.0
    """Time after which a sandbox without requests is closed."""
    ttl_s: float = 24 * 3600.0
    """Longest time to live of a sandbox."""
    tar_bytes: int = 256 << 20
    """Most bytes of one export or load."""


class SandboxServer:
    """Serves the clients of one provider, which the caller closes."""

    def __init__(
        self,
        provider: SandboxProvider,
        clients: Mapping[str, SandboxClient],
        *,
        limits: ServerLimits | None = None,
        memory: Callable[[], MachineMemory] = GAUGE.read,
    ) -> None:
        """``clients`` by name; ``memory`` reads the machine's free memory.

        Raises :class:`~etude.errors.ConfigError` without any client.
        """
        if not clients:
            raise ConfigError("a server of sandboxes without keys would serve no client: name at least one")
        self._provider = provider
        self._clients = MappingProxyType(dict(clients))
        self._names = MappingProxyType({client.digest: name for name, client in clients.items()})
        self._limits = limits or ServerLimits()
        quotas = {name: client.quota for name, client in clients.items()}
        self._registry = SandboxRegistry(lease_s=self._limits.lease_s, quotas=quotas, most=self._limits.sandboxes)
        self._most_requests = self._limits.requests or REQUESTS_EACH * sum(each.sandboxes for each in quotas.values())
        self._memory = memory
        self._incarnation = uuid.uuid4().hex
        self.draining = asyncio.Event()
        """Set, by an operator or by the owner, when no new sandboxes and forks are accepted any more."""
        self._sandboxes: dict[RegisteredSandbox, asyncio.Task[Sandbox]] = {}
        self._ttls_s: dict[RegisteredSandbox, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._snapshots: dict[str, dict[str, Image]] = {name: {} for name in clients}
        self._in_flight = 0

    def __len__(self) -> int:
        """Sandboxes that are open or being made."""
        return len(self._sandboxes)

    def app(self) -> web.Application:
        """The routes; leases are enforced while the app runs, and at its end every sandbox is closed."""
        app = web.Application(client_max_size=max(self._limits.tar_bytes + wire.TAR_SLACK_BYTES, wire.JSON_LIMIT_BYTES))
        place = f"{PREFIX}/sandboxes/{{name:[0-9a-f]{{32}}}}"
        app.router.add_get(f"{PREFIX}/capabilities", self._route(self._capabilities))
        app.router.add_get(f"{PREFIX}/host", self._route(self._report, is_urgent=True))
        app.router.add_get("/metrics", _metrics_of(self._report, self._names))
        app.router.add_post(f"{PREFIX}/leases", self._route(self._renew, is_urgent=True))
        app.router.add_post(f"{PREFIX}/announce", self._route(self._announce))
        app.router.add_post(f"{PREFIX}/drain", self._route(self._drain, is_urgent=True))
        app.router.add_put(place, self._route(self._create))
        app.router.add_delete(place, self._route(self._delete, is_urgent=True))
        actions = {"exec": _exec, "read": _read, "write": _write, "load": _load, "stats": _stats, "kill": _kill}
        for action, act in actions.items():
            app.router.add_post(f"{place}/{action}", self._route(self._use(act)))
        for action, owned in {"export": self._export, "snapshot": self._snapshot, "fork": self._fork}.items():
            app.router.add_post(f"{place}/{action}", self._route(owned))
        app.cleanup_ctx.append(self._watch)
        return app

    async def drained(self) -> None:
        """Wait until the server is draining and its last sandbox has ended."""
        await self.draining.wait()
        while self._sandboxes or self._closing:
            await asyncio.sleep(DRAIN_LOOK_S)

    def _route(
        self, handle: "Callable[[RegisteredSandbox, bytes], Awaitable[Answer]]", *, is_urgent: bool = False
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Authenticate a request, parse its body, and report errors to the client; urgent requests are admitted
        regardless of the number in progress.
        """

        async def answer(request: web.Request) -> web.Response:
            try:
                registered = RegisteredSandbox(_client(request, self._names), request.match_info.get("name", ""))
                if self._in_flight >= self._most_requests and not is_urgent:
                    raise SandboxesBusy(f"{self._in_flight} requests are in flight: try again later")
                self._in_flight += 1
                try:
                    return _response(await handle(registered, await _body(request)))
                finally:
                    self._in_flight -= 1
            except _UnknownKeyError as error:
                return _refuse(wire.ErrorReply(fault=wire.ErrorKind.KEY, message=str(error)))
            except (EtudeError, ValueError) as error:
                return _refuse(wire.ErrorReply.of(error))

        return answer

    async def _capabilities(self, registered: RegisteredSandbox, body: bytes) -> Answer:
        granted = await self._provider.capabilities()
        return wire.CapabilitiesReply(version=wire.VERSION, capabilities=sorted(map(str, granted)))

    async def _report(self, registered: RegisteredSandbox, body: bytes) -> wire.HostReply:
        memory = self._memory()
        is_short = memory.stalled >= self._limits.stalled
        free_bytes = 0 if is_short else max(0, int(memory.available_bytes) - self._limits.reserve_bytes)
        report = HostReport(
            incarnation=self._incarnation,
            free_bytes=free_bytes,
            places=self._registry.places(registered.holder),
            sandboxes=len(self),
            is_draining=self.draining.is_set(),
        )
        return wire.HostReply(report=report)

    async def _announce(self, registered: RegisteredSandbox, body: bytes) -> Answer:
        order = wire.read_message(wire.BurstRequest, body)
        if isinstance(self._provider, SandboxPool) and not self.draining.is_set():
            spec = self._resolve(registered, order.spec)
            self._provider.announce(spec, min(order.count, self._registry.places(registered.holder)))
        return wire.Done()

    async def _drain(self, registered: RegisteredSandbox, body: bytes) -> Answer:
        if not self._clients[registered.holder].is_operator:
            raise ConfigError(
                f"key {registered.holder!r} may not drain this server: write operator = true for it in the clients file"
            )
        self.draining.set()
        return await self._report(registered, body)

    def _resolve(self, registered: RegisteredSandbox, requested: SandboxSpec) -> SandboxSpec:
        """A specification within this client's permissions. Raises the error for the client otherwise."""
        client = self._clients[registered.holder]
        spec = client.permissions.resolve(requested, self._snapshots[registered.holder])
        client.quota.check(spec.limits, registered.holder)
        if spec.ttl_s > self._limits.ttl_s:
            raise ValueError(f"ttl_s={spec.ttl_s:g}: sandboxes live for {self._limits.ttl_s:g} s at most here")
        return spec

    async def _renew(self, registered: RegisteredSandbox, body: bytes) -> Answer:
        names = wire.read_message(wire.SandboxNames, body).names
        lost = self._registry.renew([RegisteredSandbox(registered.holder, name) for name in names], time.monotonic())
        return wire.SandboxNames(names=[each.name for each in lost])

    async def _create(self, registered: RegisteredSandbox, body: bytes) -> Answer:
        order = wire.read_message(wire.CreateRequest, body)
        if registered not in self._sandboxes:
            spec = self._resolve(registered, order.spec)

            async def create() -> Sequence[Sandbox]:
                return [await self._provider.create(order.files, spec)]

            self._make([registered], spec.limits, spec.ttl_s, create)
        await self._made([registered])
        return wire.LeaseReply(lease_s=self._limits.lease_s)

    async def _delete(self, registered: RegisteredSandbox, body: bytes) -> Answer:
        await asyncio.shield(self._close(registered))
        return wire.Done()

    def _use(
        self, act: "Callable[[Sandbox, bytes], Awaitable[Answer]]"
    ) -> "Callable[[RegisteredSandbox, bytes], Awaitable[Answer]]":
        async def use(registered: RegisteredSandbox, body: bytes) -> Answer:
            return await self._with(registered, lambda sandbox: act(sandbox, body))

        return use

    async def _with(self, registered: RegisteredSandbox, act: "Callable[[Sandbox], Awaitable[Answer]]") -> Answer:
        """Call ``act`` with a registered sandbox, which is kept meanwhile."""
        if not self._registry.begin(registered, time.monotonic()):
            raise SandboxError(f"sandbox {registered.name} is closed, or its lease or time to live is over")
        try:
            (sandbox,) = await self._made([registered])
            return await act(sandbox)
        finally:
            self._registry.end(registered, time.monotonic())

    async def _export(self, registered: RegisteredSandbox, body: bytes) -> Answer:
        choice = wire.read_message(wire.ExportRequest, body)
        limit_bytes = min(choice.limit_bytes, self._limits.tar_bytes)
        return await self._with(registered, lambda sandbox: sandbox.export(choice.paths, limit_bytes=limit_bytes))

    async def _snapshot(self, registered: RegisteredSandbox, body: bytes) -> Answer:
        snapshots = self._snapshots[registered.holder]

        async def keep(sandbox: Sandbox) -> Answer:
            if len(snapshots) >= self._limits.snapshots:
                raise SandboxError(
                    f"{len(snapshots)} snapshots of this key are kept, which is the limit of this server"
                )
            image = await sandbox.snapshot()
            name = f"{SNAPSHOT}{uuid.uuid4().hex}"
            snapshots[name] = image
            return wire.ImageReply(image=Image(digest=name, environment=image.environment, workdir=image.workdir))

        return await self._with(registered, keep)

    async def _fork(self, registered: RegisteredSandbox, body: bytes) -> Answer:
        names = wire.read_message(wire.SandboxNames, body).names
        if not 0 < len(set(names)) == len(names) <= wire.MAX_FORKS:
            raise ValueError(f"fork({len(names)}): expected 1 to {wire.MAX_FORKS} different names")
        forks = [RegisteredSandbox(registered.holder, name) for name in names]

        async def fork(sandbox: Sandbox) -> Answer:
            if not all(each in self._sandboxes for each in forks):
                limits = self._registry.limits(registered)
                self._make(forks, limits, self._ttls_s[registered], lambda: sandbox.fork(len(forks)))
            await self._made(forks)
            return wire.Done()

        return await self._with(registered, fork)

    def _make(
        self,
        sandboxes: Sequence[RegisteredSandbox],
        limits: SandboxLimits,
        ttl_s: float,
        make: "Callable[[], Coroutine[None, None, Sequence[Sandbox]]]",
    ) -> None:
        """Register new sandboxes, which are made whether their client waits or not; ``make`` is called if they are
        admitted.
        """
        if self.draining.is_set():
            raise SandboxesBusy("this server is being drained, and takes no new sandboxes: use another one")
        self._registry.take(sandboxes, limits, ttl_s, time.monotonic())
        batch = asyncio.create_task(make())
        for index, registered in enumerate(sandboxes):
            self._sandboxes[registered] = asyncio.create_task(_one(batch, index))
            self._ttls_s[registered] = ttl_s

    async def _made(self, sandboxes: Sequence[RegisteredSandbox]) -> Sequence[Sandbox]:
        """Sandboxes that were requested together, once they are made; if one fails, all are unregistered.

        A waiting request keeps them meanwhile: making one may take longer than a lease.
        """
        pending = {registered: self._sandboxes[registered] for registered in sandboxes}
        for registered in sandboxes:
            self._registry.begin(registered, time.monotonic())
        try:
            return [await asyncio.shield(task) for task in pending.values()]
        except (EtudeError, ValueError):
            # A repeated request may have made a new one, which stays.
            for registered, _ in pending.items() & self._sandboxes.items():
                self._close(registered)
            raise
        finally:
            for registered, _ in pending.items() & self._sandboxes.items():
                self._registry.end(registered, time.monotonic())

    def _close(self, registered: RegisteredSandbox) -> "asyncio.Task[None]":
        """Unregister a sandbox, registered or not, and close it once it is made."""
        self._registry.drop(registered)
        self._ttls_s.pop(registered, None)
        closing = asyncio.create_task(_end(self._sandboxes.pop(registered, None)))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def _watch(self, app: web.Application) -> AsyncIterator[None]:
        async def sweep() -> None:
            while True:
                await asyncio.sleep(self._limits.lease_s / SWEEPS_PER_LEASE)
                for registered in self._registry.due(time.monotonic()):
                    self._close(registered)

        sweeping = asyncio.create_task(sweep())
        yield
        sweeping.cancel()
        for registered in list(self._sandboxes):
            self._close(registered)
        await asyncio.gather(sweeping, *self._closing, return_exceptions=True)


def _metrics_of(
    report: Callable[[RegisteredSandbox, bytes], Awaitable[wire.HostReply]], names: Mapping[str, str]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The handler of ``/metrics``, for a Prometheus that has a client's key."""

    async def show(request: web.Request) -> web.Response:
        try:
            host = (await report(RegisteredSandbox(_client(request, names), ""), b"")).report
        except _UnknownKeyError as error:
            return _refuse(wire.ErrorReply(fault=wire.ErrorKind.KEY, message=str(error)))
        values = {
            "etude_host_sandboxes": host.sandboxes,
            "etude_host_free_bytes": host.free_bytes,
            "etude_host_draining": host.is_draining,
        }
        return web.Response(body=gauge_page(values), headers={"Content-Type": CONTENT_TYPE})

    return show


class _UnknownKeyError(Exception):
    """A request without a valid key."""


def _client(request: web.Request, names: Mapping[str, str]) -> str:
    """The client with this key; only digests are compared, so timing reveals nothing about keys."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    client = names.get(hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest())
    if scheme.lower() != "bearer" or client is None:
        raise _UnknownKeyError("this key is not known here: send Authorization: Bearer KEY")
    return client


async def _exec(sandbox: Sandbox, body: bytes) -> Answer:
    order = wire.read_message(wire.ExecRequest, body)
    result = await sandbox.exec(order.argv, stdin=order.stdin, timeout_s=order.timeout_s, environment=order.environment)
    return wire.ExecReply(result=result)


async def _read(sandbox: Sandbox, body: bytes) -> Answer:
    path = wire.read_message(wire.PathOnly, body).path
    return wire.FileText(path=path, text=await sandbox.read_file(path))


async def _write(sandbox: Sandbox, body: bytes) -> Answer:
    file = wire.read_message(wire.FileText, body)
    if file.text is None:
        raise ValueError(f"{file.path!r} has no text to write")
    await sandbox.write_file(file.path, file.text)
    return wire.Done()


async def _load(sandbox: Sandbox, body: bytes) -> Answer:
    await sandbox.load(body)
    return wire.Done()


async def _stats(sandbox: Sandbox, body: bytes) -> Answer:
    return wire.Use.of(await sandbox.stats())


async def _kill(sandbox: Sandbox, body: bytes) -> Answer:
    await sandbox.kill_processes()
    return wire.Done()


async def _one(batch: "asyncio.Task[Sequence[Sandbox]]", index: int) -> Sandbox:
    return (await asyncio.shield(batch))[index]


async def _end(making: "asyncio.Task[Sandbox] | None") -> None:
    """Close a sandbox in any state; if making or closing fails, its provider cleans up."""
    if making is not None:
        await asyncio.wait({making})
        if not making.cancelled() and making.exception() is None:
            await making.result().close()


async def _body(request: web.Request) -> bytes:
    """The whole body. ``ValueError`` if it is too large, :class:`~etude.errors.SandboxError` if it is too slow."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise ValueError(f"the request is too large: {error.text}") from None
    except TimeoutError:
        raise SandboxError(f"the request did not arrive within {BODY_TIMEOUT_S:g} s") from None
    if request.content_type != TAR and len(body) > wire.JSON_LIMIT_BYTES:
        raise ValueError(f"the request has {len(body)} bytes, at most {wire.JSON_LIMIT_BYTES} are read as JSON")
    return body


def _response(answer: Answer) -> web.Response:
    if isinstance(answer, bytes):
        return web.Response(body=answer, content_type=TAR)
    return web.Response(body=wire.write_message(answer), content_type="application/json")


def _refuse(reply: wire.ErrorReply) -> web.Response:
    return web.Response(body=wire.write_message(reply), content_type="application/json", status=reply.status)

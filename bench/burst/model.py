"""Modelled hosts of sandboxes, in the time of the running loop.

    HostedSandboxes of a client ──▶ HostConnection ──▶ Machine: SandboxRegistry, SandboxPool ──▶ modelled starts
                                                          └── images, read once each ──▶ ImageStore

What decides is the code of production: a client's table of hosts, and a host's registry and pool. What takes time is
modelled: a request (the client's own processor time, then the way), a start (drawn from those that were measured), an
image (the store's streams and rate). A machine that is down answers nothing, as after a power cut: its client waits for
its own deadlines.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import final

from etude.aio import never
from etude.errors import EtudeError, SandboxError
from etude.protocols import Sandbox
from etude.rollouts.fake import FakeSandbox, FakeSandboxes
from etude.sandbox_spec import Capability, SandboxSpec
from etude.sandboxes.memory_pressure import MachineMemory
from etude.sandboxes.remote.placement import SANDBOX_BYTES, HostReport
from etude.sandboxes.remote.principals import RegisteredSandbox, SandboxRegistry, usual_quota
from etude.sandboxes.warm_pool import SandboxPool, WarmPoolLimits

WAY_S = 0.001
"""A round trip within a region."""
LEASE_S = 60.0
"""Leases of a modelled machine; its clients are never so long silent, so none is renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineModel:
    """State shared by all machines."""

    places: int
    """Sandboxes that one may have."""
    cores: int
    """Starts at a time."""
    starts_s: Sequence[float]
    """Measured durations of starts, ``cores`` at a time."""
    memory_bytes: float
    """Memory for sandboxes, each of which takes ``SANDBOX_BYTES``."""


@final
class ImageStore:
    """A store that machines read images from: some at a time, each at a rate."""

    def __init__(self, *, streams: int, read_s: float) -> None:
        """``read_s`` is the time for one image in one stream."""
        self._streams = asyncio.Semaphore(streams)
        self._read_s = read_s
        self.reads = 0
        """Images that were read."""

    async def read(self) -> None:
        """Read an image, once a stream is free."""
        async with self._streams:
            self.reads += 1
            await asyncio.sleep(self._read_s)


@final
class Machine:
    """One host."""

    def __init__(self, model: MachineModel, store: ImageStore, clients: Sequence[str], seed: str) -> None:
        self._model = model
        self._store = store
        self._clients = clients
        self._random = Random(seed)
        self._incarnations = count(1)
        self._names = count()
        self._ending: set[asyncio.Task[None]] = set()
        self.is_up = False
        self.start()

    def start(self) -> None:
        """Come up, with nothing."""
        self.is_up = True
        self._incarnation = str(next(self._incarnations))
        self._images: dict[str, asyncio.Task[None]] = {}
        self._registered: dict[Sandbox, RegisteredSandbox] = {}
        limits = WarmPoolLimits(live=self._model.places, starting=self._model.cores, reserve_bytes=0)
        self._pool = SandboxPool(_Provider(self), limits, memory=self._memory)
        quotas = {client: usual_quota(self._model.memory_bytes) for client in self._clients}
        self._registry = SandboxRegistry(lease_s=LEASE_S, quotas=quotas, most=limits.ordinary)

    def stop(self) -> None:
        """Go down, and lose everything."""
        self.is_up, self._incarnation = False, ""
        for reading in self._images.values():
            reading.cancel()
        ending = asyncio.create_task(self._pool.close())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Cancel all work in progress."""
        self.stop()
        await asyncio.gather(*self._ending)

    def report(self, client: str) -> HostReport:
        """Its room for a client."""
        return HostReport(
            incarnation=self._incarnation,
            free_bytes=int(self._memory().available_bytes),
            places=self._registry.places(client),
            sandboxes=len(self._registry),
            is_draining=False,
        )

    async def create(self, client: str, spec: SandboxSpec) -> Sandbox:
        """Create a sandbox. Raises a client's error; if the machine goes down, the client gets no answer."""
        incarnation = self._incarnation
        await self.answer(incarnation)
        registry, registered = self._registry, RegisteredSandbox(client, str(next(self._names)))
        registry.take([registered], spec.limits, spec.ttl_s, asyncio.get_running_loop().time())
        try:
            sandbox = await self._pool.create({}, spec)
            await self.answer(incarnation)
        except BaseException as error:
            registry.drop(registered)
            if isinstance(error, EtudeError):
                await self.answer(incarnation)
            raise
        self._registered[sandbox] = registered
        return sandbox

    async def remove(self, sandbox: Sandbox) -> None:
        """Close a sandbox."""
        self._registry.drop(self._registered.pop(sandbox))
        await sandbox.close()

    @property
    def incarnation(self) -> str:
        """Changes whenever it comes up; empty while it is down."""
        return self._incarnation

    async def answer(self, incarnation: str) -> None:
        """Answer, unless it is another one than was asked, or down."""
        if not self.is_up or incarnation != self._incarnation:
            await never()

    async def prepare(self, spec: SandboxSpec) -> None:
        """Read the image, unless it is there, and start a sandbox."""
        digest = spec.image.digest
        if digest not in self._images:
            self._images[digest] = asyncio.create_task(self._store.read())
        await asyncio.shield(self._images[digest])
        await asyncio.sleep(self._random.choice(self._model.starts_s))

    def _memory(self) -> MachineMemory:
        return MachineMemory(available_bytes=self._model.memory_bytes - len(self._registry) * SANDBOX_BYTES)


@final
class _Provider:
    """The provider beneath a machine's pool."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._made = FakeSandboxes()

    async def capabilities(self) -> frozenset[Capability]:
        return await self._made.capabilities()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FakeSandbox:
        await self._machine.prepare(spec or SandboxSpec())
        return await self._made.create(files, spec)

    async def close(self) -> None:
        await self._made.close()


@final
@dataclass(slots=True)
class ClientProcessor:
    """The one core of a client, which makes one request after the other."""

    name: str
    request_s: float
    _free_s: float = field(default=0.0, init=False)

    async def request(self) -> None:
        """Take the time for a request, after those before it."""
        now = asyncio.get_running_loop().time()
        self._free_s = max(now, self._free_s) + self.request_s
        await asyncio.sleep(self._free_s - now + WAY_S)


@final
class HostConnection:
    """A client's way to one machine; implements :class:`~etude.sandboxes.remote.hosts.SandboxHost`."""

    def __init__(self, machine: Machine, client: ClientProcessor, sandboxes: "dict[Sandbox, ModelledUse]") -> None:
        """``sandboxes`` is where each that is made is put down."""
        self._machine = machine
        self._client = client
        self._sandboxes = sandboxes
        self._fault = ""
        self._calls: set[asyncio.Future[Sandbox | None]] = set()

    def __len__(self) -> int:
        """Sandboxes of this client on the machine."""
        return sum(use.connection is self for use in self._sandboxes.values())

    async def capabilities(self) -> frozenset[Capability]:
        """The same for all machines."""
        return frozenset({Capability.FORK})

    async def report(self, timeout_s: float) -> HostReport:
        """The machine's room, if it is up."""
        await asyncio.sleep(WAY_S)
        if not self._machine.is_up:
            await asyncio.sleep(timeout_s)
            raise SandboxError(f"no answer within {timeout_s:g} s")
        return self._machine.report(self._client.name)

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> Sandbox:
        """Have a sandbox made."""
        await self._client.request()
        incarnation = self._machine.incarnation
        sandbox = await self.call(self._machine.create(self._client.name, spec or SandboxSpec()))
        assert sandbox is not None, "a machine makes a sandbox or raises"
        self._sandboxes[sandbox] = ModelledUse(self, self._machine, incarnation)
        return sandbox

    async def call(self, work: Coroutine[None, None, Sandbox | None]) -> Sandbox | None:
        """Wait for an answer. Raises :class:`~etude.errors.SandboxError` when the machine is given up first."""
        if self._fault:
            work.close()
            raise SandboxError(self._fault)
        call = asyncio.ensure_future(work)
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if self._fault and call.cancelled():
                raise SandboxError(self._fault) from None
            raise
        finally:
            self._calls.discard(call)

    async def announce(self, spec: SandboxSpec, count: int) -> None:
        """Do nothing: a burst is not announced."""

    async def give_up(self, reason: str) -> None:
        """Fail every call in progress, and all later ones until :meth:`take_up`."""
        self._fault = reason
        for call in list(self._calls):
            call.cancel()

    def take_up(self) -> None:
        """Use the machine again."""
        self._fault = ""

    def has_snapshot(self, digest: str) -> bool:
        """Report that it has none."""
        return False

    async def close(self) -> None:
        """Do nothing: sandboxes are their users' to close."""


@final
@dataclass(frozen=True, slots=True)
class ModelledUse:
    """A sandbox as its user has it."""

    connection: HostConnection
    _machine: Machine
    _incarnation: str

    async def run(self, seconds: float) -> None:
        """Run commands for so long. Raises :class:`~etude.errors.SandboxError` once its machine is given up."""
        await self.connection.call(self._run(seconds))

    async def close(self, sandbox: Sandbox) -> None:
        """Close it, unless it is gone."""
        if self._machine.incarnation == self._incarnation:
            await self._machine.remove(sandbox)

    async def _run(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._machine.answer(self._incarnation)

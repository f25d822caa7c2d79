"""A warm pool of sandboxes: whoever asks is given one that already runs, and nobody one that somebody had.

    claimant("rollouts") ─create─▶ SandboxPool ──▶ Keeper ──▶ any provider
    claimant("grading", priority=-1) ──┘              └── decides: etude.sandboxes.pool.leases

Owns the faces of the pool: itself a provider of sandboxes, one more face per kind of holder, and the sandbox that a
holder sees, whose every call is a sign of life. Making and removing is :mod:`etude.sandboxes.pool.lifecycle`'s.

A sandbox is made without files and given them when it is leased. Its time to live begins with its lease.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import final

from etude.errors import SandboxError
from etude.protocols import Clock, ExecResult, Sandbox, SandboxProvider
from etude.sandbox_spec import Capability, Image, SandboxSpec, SandboxStats
from etude.sandboxes.endings import close_all
from etude.sandboxes.pool.inventory import Memory
from etude.sandboxes.pool.lease_requests import Claim, ClaimState, Want
from etude.sandboxes.pool.leases import LeaseCounters
from etude.sandboxes.pool.lifecycle import Keeper
from etude.sandboxes.pool.pressure import MemoryGauge
from etude.sandboxes.pool.slots import Key, PoolLimits, SlotState

DEFAULT_SPEC = SandboxSpec()
DEFAULT_LIMITS = PoolLimits()
GAUGE = MemoryGauge()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """What a pool has and what happened in it, as plain numbers for metrics."""

    starting: int
    warm: int
    leased: int
    draining: int
    waiting: int
    waiting_urgent: int
    """Of those that wait."""
    available_bytes: float
    """What the machine has left."""
    promised_bytes: float
    """Of that, what living sandboxes are expected to take."""
    stalled: float
    """Share of time in which something waits for memory; ``nan`` where the kernel does not tell."""
    counters: LeaseCounters
    trouble: str
    """The last one with the provider; empty without any."""


@final
class SandboxPool:
    """Keeps sandboxes of ``provider`` warm; implements :class:`~etude.protocols.SandboxProvider`."""

    def __init__(
        self,
        provider: SandboxProvider,
        limits: PoolLimits = DEFAULT_LIMITS,
        *,
        clock: Clock,
        memory: Callable[[], Memory] = GAUGE.read,
    ) -> None:
        """``memory`` reads what the machine has left. The pool closes ``provider`` when it is closed."""
        self._clock = clock
        self._keeper = Keeper(provider, limits, clock, memory)
        self._own = Claimant(self._keeper, clock, "pool", 0, limits.wait_s)
        self._limits = limits

    async def capabilities(self) -> frozenset[Capability]:
        """What its provider holds to."""
        return await self._keeper.capabilities()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> "PooledSandbox":
        """A sandbox of an ordinary claim; see :meth:`Claimant.create`."""
        return await self._own.create(files, spec)

    def claimant(self, holder: str, *, priority: int = 0, wait_s: float | None = None) -> "Claimant":
        """A provider for one kind of holder. Of those who wait the lower ``priority`` is served first, and one below 0
        may use the reserved places; ``wait_s`` is how long to wait (default: the pool's).
        """
        return Claimant(self._keeper, self._clock, holder, priority, wait_s or self._limits.wait_s)

    def announce(self, spec: SandboxSpec, count: int, *, within_s: float = 300.0) -> None:
        """So many will be asked for soon: begin to make them now, as far as limits allow."""
        self._keeper.leases.stock.announce(Key.of(spec), count, self._clock.now(), within_s)

    def snapshot(self) -> PoolSnapshot:
        """What there is now."""
        leases, memory = self._keeper.leases, self._keeper.memory
        return PoolSnapshot(
            starting=leases.slots.count(SlotState.STARTING),
            warm=leases.slots.count(SlotState.WARM),
            leased=leases.slots.count(SlotState.LEASED),
            draining=leases.slots.count(SlotState.DRAINING),
            waiting=len(leases.line),
            waiting_urgent=leases.line.length(urgent=True),
            available_bytes=memory.available_bytes,
            promised_bytes=leases.slots.promised_bytes,
            stalled=memory.stalled,
            counters=LeaseCounters(**asdict(leases.counters)),
            trouble=self._keeper.trouble,
        )

    async def close(self) -> None:
        """Take every sandbox from its holder, remove all and close the provider; calling it twice is harmless."""
        await self._keeper.close()


@final
class Claimant:
    """One kind of holder's way to a pool; implements :class:`~etude.protocols.SandboxProvider`."""

    def __init__(self, keeper: Keeper, clock: Clock, holder: str, priority: int, wait_s: float) -> None:
        self._keeper = keeper
        self._clock = clock
        self._holder = holder
        self._priority = priority
        self._wait_s = wait_s
        self._open: set[PooledSandbox] = set()

    async def capabilities(self) -> frozenset[Capability]:
        """What the pool's provider holds to."""
        return await self._keeper.capabilities()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> "PooledSandbox":
        """A sandbox that nobody had before, with ``files``.

        Raises :class:`~etude.sandboxes.pool.lifecycle.SandboxesBusy` when too many wait already or none became free in
        time, and like the pool's provider.
        """
        key = Key.of(spec or DEFAULT_SPEC)
        want = Want(key=key, holder=self._holder, priority=self._priority, wait_s=self._wait_s)
        claim, inner = await self._keeper.lease(want)
        sandbox = PooledSandbox(self, claim, inner)
        self._open.add(sandbox)
        try:
            for path, text in files.items():
                await sandbox.write_file(path, text)
        except BaseException:
            await close_all([sandbox])
            raise
        return sandbox

    async def close(self) -> None:
        """Close the sandboxes that were created here, not the pool."""
        for sandbox in list(self._open):
            await sandbox.close()

    def beat(self, claim: Claim, quiet_s: float = 0.0) -> None:
        """The holder lives, and may be quiet for ``quiet_s`` more than usual.

        Raises :class:`~etude.errors.SandboxError` with the reason if it holds the sandbox no more.
        """
        if not self._keeper.leases.beat(claim, self._clock.now(), quiet_s):
            raise SandboxError(f"the sandbox was taken away: {claim.reason or 'its time to live is over'}")

    async def fork(self, claim: Claim, sandbox: Sandbox, count: int) -> Sequence["PooledSandbox"]:
        """Copies, of the same holder. Raises like :meth:`create`, without waiting."""
        copies = [PooledSandbox(self, copy, one) for copy, one in await self._keeper.fork(claim, sandbox, count)]
        self._open.update(copies)
        return copies

    async def release(self, sandbox: "PooledSandbox", claim: Claim) -> None:
        """The holder is done."""
        self._open.discard(sandbox)
        await self._keeper.release(claim)


@final
class PooledSandbox:
    """A leased sandbox; implements :class:`~etude.protocols.Sandbox`. Every call is a sign of life."""

    def __init__(self, claimant: Claimant, claim: Claim, sandbox: Sandbox) -> None:
        self._claimant = claimant
        self._claim = claim
        self._sandbox = sandbox
        self._closed = False

    def beat(self) -> None:
        """Give a sign of life: for holders that are busy elsewhere for longer than a pool's ``silence_s``.

        Raises :class:`~etude.errors.SandboxError` with the reason if it was taken away.
        """
        if self._closed:
            raise SandboxError("the sandbox is closed")
        self._claimant.beat(self._claim)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command; its holder is not silent while it runs."""
        self.beat()
        self._claimant.beat(self._claim, max(timeout_s, 0.0))
        result = await self._sandbox.exec(argv, stdin=stdin, timeout_s=timeout_s, environment=environment)
        if self._claim.state is ClaimState.GRANTED:
            self._claimant.beat(self._claim)
        return result

    async def read_file(self, path: str) -> str | None:
        """The text of a file, or ``None``."""
        self.beat()
        return await self._sandbox.read_file(path)

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file."""
        self.beat()
        await self._sandbox.write_file(path, text)

    async def export(self, paths: Sequence[str], *, limit_bytes: int = 64 << 20) -> bytes:
        """A tar of files and folders."""
        self.beat()
        return await self._sandbox.export(paths, limit_bytes=limit_bytes)

    async def load(self, tar: bytes) -> None:
        """Unpack a tar."""
        self.beat()
        await self._sandbox.load(tar)

    async def stats(self) -> SandboxStats:
        """What is used now. Its age counts from its start, which was before its lease."""
        self.beat()
        return await self._sandbox.stats()

    async def kill_processes(self) -> None:
        """Kill what runs inside."""
        self.beat()
        await self._sandbox.kill_processes()

    async def snapshot(self) -> Image:
        """The files as an image."""
        self.beat()
        return await self._sandbox.snapshot()

    async def fork(self, count: int = 1) -> Sequence["PooledSandbox"]:
        """Independent copies, each with a lease of its own. They are made at once, without waiting in line: a holder
        that waits holds a sandbox meanwhile. Raises :class:`~etude.sandboxes.pool.lifecycle.SandboxesBusy` without
        room.
        """
        self.beat()
        if count < 1:
            raise ValueError(f"count={count}: expected at least 1 fork")
        return await self._claimant.fork(self._claim, self._sandbox, count)

    async def close(self) -> None:
        """Give it back to be removed, and wait for that; calling it twice is harmless."""
        if not self._closed:
            self._closed = True
            await self._claimant.release(self, self._claim)

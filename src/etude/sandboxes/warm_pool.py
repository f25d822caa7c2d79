"""A bounded pool of warm sandboxes, each leased once.

    create ──▶ queue, by priority and arrival ──▶ lease ──close, time to live, death──▶ removed
    refill ──▶ provider.create ──▶ warm ones of the same spec ──▲   └── too old, in the way, memory short ──▶ removed

Owns the queue of requests, the capacity, and every sandbox from its start to its removal. A sandbox starts without
files and gets them when it is leased; its time to live begins with its lease. :class:`_Planner` makes all decisions
synchronously; tasks of the pool execute them (start, remove) and call it again. Every wait has a deadline.
"""

import asyncio
import itertools
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypeVar, final

from etude.backoff import Backoff
from etude.errors import EtudeError, InfrastructureError, SandboxError, SandboxesBusy, Unsupported
from etude.protocols import ExecResult, Sandbox, SandboxProvider
from etude.sandbox_spec import Capability, Image, SandboxSpec, SandboxStats
from etude.sandboxes.lifecycle import close_all
from etude.sandboxes.memory_pressure import MachineMemory, MemoryGauge

TICK_S = 0.25
"""Interval for checks of the machine's memory and of expired waits."""
DEMAND_S = 300.0
"""A spec that was not requested for this long keeps no warm sandboxes."""
CHECK_S = 2.0
"""Deadline of the liveness check of a warm sandbox before its lease."""
FRESH_S = 5.0
"""A sandbox that became ready this recently is leased without a liveness check."""
CANCEL_S = 5.0
"""Deadline for a provider to end a cancelled start or removal."""
RETRIES = Backoff(first_s=0.1, longest_s=30.0)
"""Delays after failed starts."""
CLOSED = "the pool of sandboxes is closed"
DEFAULT_SPEC = SandboxSpec()
GAUGE = MemoryGauge()


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPoolLimits:
    """Limits of a pool; the defaults suit a small machine that runs nothing else."""

    live: int = 256
    """Sandboxes in any state, including those being removed, which still use memory and processes."""
    reserved: int = 4
    """Sandboxes of these reserved for urgent requests, at most ``live`` − 1. Graders are urgent: rollouts that wait for
    their grades hold sandboxes, so without a reserve they could deadlock.
    """
    warm: int = 16
    """Ready sandboxes that are not yet leased."""
    starting: int = 2
    """Concurrent starts. A start takes a core and far more memory than an idle sandbox."""
    waiting: int = 4096
    """Maximum number of queued requests; further ones are rejected."""
    wait_s: float = 600.0
    """Deadline of a request."""
    rest_s: float = 600.0
    """Longest time that a sandbox stays warm: its own time to live runs meanwhile."""
    start_s: float = 120.0
    """Deadline of a start."""
    close_s: float = 30.0
    """Deadline of a removal, which is then retried."""
    tries: int = 3
    """Consecutive failed starts before waiting requests get the error, and attempts of a removal."""
    reserve_bytes: int = 1 << 30
    """Memory of the machine that sandboxes never use."""
    start_bytes: int = 256 << 20
    """Free memory required for a start."""
    stalled: float = 0.1
    """Share of time in which some task waits for memory (PSI, "some") above which nothing is started."""

    def __post_init__(self) -> None:
        for name in ("live", "starting", "waiting", "tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a pool needs at least 1")
        for name in ("reserved", "warm", "reserve_bytes", "start_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 0")
        for name in ("wait_s", "rest_s", "start_s", "close_s", "stalled"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a finite number above 0")

    @property
    def ordinary(self) -> int:
        """Sandboxes that non-urgent requests may use."""
        return self.live - min(self.reserved, self.live - 1)


@dataclass(slots=True)
class WarmPoolStats:
    """Current sandboxes by state, and counts of events since the start; for metrics."""

    starting: int = 0
    warm: int = 0
    leased: int = 0
    removing: int = 0
    waiting: int = 0
    leases: int = 0
    warm_leases: int = 0
    """Leases of a sandbox that was already warm."""
    start_failures: int = 0
    deaths: int = 0
    """Warm sandboxes found dead when they were to be leased."""
    unclosed: int = 0
    """Number of sandboxes whose removal failed in every attempt."""
    trouble: str = ""
    """The provider's last error."""


@dataclass(slots=True, eq=False)
class _LeaseRequest:
    """One call that waits for a sandbox; ordered by priority, then arrival."""

    order: tuple[int, int]
    key: str
    granted: asyncio.Future[tuple[Sandbox, float]]
    """The sandbox, and the time at which it was ready."""

    @property
    def urgent(self) -> bool:
        """True if it may use the reserved capacity."""
        return self.order[0] < 0

    def __lt__(self, other: "_LeaseRequest") -> bool:
        return self.order < other.order


@dataclass(slots=True)
class _Inventory:
    """The sandboxes of one spec that are not leased yet."""

    spec: SandboxSpec
    key: str
    """Identifies specs that mean the same."""
    warm: deque[tuple[Sandbox, float]] = field(default_factory=deque)
    """Each with the time at which it became ready, the oldest first."""
    starting: int = 0
    failures: int = 0
    """Consecutive failed starts."""
    retry_at: float = -math.inf
    asked_at: float = -math.inf
    announced: int = 0
    """Sandboxes that will be requested soon, all at once."""


@final
class _Planner:
    """The decisions of a pool: which request gets which sandbox, which sandboxes to start and to remove. No I/O."""

    def __init__(
        self,
        limits: WarmPoolLimits,
        start: Callable[[_Inventory], None],
        remove: Callable[[Sandbox], object],
    ) -> None:
        """``start`` and ``remove`` begin to execute a decision."""
        self.queue: list[_LeaseRequest] = []
        self.inventories: dict[str, _Inventory] = {}
        self.leases: set[PooledSandbox] = set()
        self.lending: Counter[bool] = Counter()
        """Urgent → forks being made, and sandboxes granted but not yet leased."""
        self.removing = 0
        self._limits = limits
        self._start = start
        self._remove = remove

    def step(self, now: float, memory: MachineMemory) -> None:
        """Grant warm sandboxes, start requested ones, then expected ones; remove those that are old or in the way."""
        served = self._serve(now, memory)
        self._retire(now, memory)
        if served:
            self._refill(now, memory)

    def _serve(self, now: float, memory: MachineMemory) -> bool:
        """Grant or start for each request in turn. Return False when one finds no capacity: no later request overtakes
        it.
        """
        covered: Counter[str] = Counter()
        ordinary_room = self.ordinary_room()
        for request in sorted(self.queue):
            if not request.urgent:
                if ordinary_room <= 0:
                    return False
                ordinary_room -= 1
            inventory = self.inventories[request.key]
            if inventory.warm:
                self.queue.remove(request)
                inventory.announced = max(0, inventory.announced - 1)
                self.lending[request.urgent] += 1
                request.granted.set_result(inventory.warm.pop())  # the newest: the others age and are removed
            elif covered[request.key] < inventory.starting:
                covered[request.key] += 1
            elif now >= inventory.retry_at:
                if not self._may_start(memory):
                    self._make_room()
                    return False
                self._start(inventory)
                covered[request.key] += 1
        return True

    def _refill(self, now: float, memory: MachineMemory) -> None:
        """Start ahead of requests: as many as were announced; otherwise recently requested specs share the warm
        capacity.
        """
        recent = sorted(self.inventories.values(), key=lambda inventory: -inventory.asked_at)[: self._limits.warm]
        waiting = Counter(request.key for request in self.queue)
        for inventory in recent:
            idle = len(inventory.warm) + inventory.starting - waiting[inventory.key]
            for _ in range(max(self._limits.warm // len(recent), inventory.announced) - idle):
                full = self.places() >= self._limits.ordinary or now < inventory.retry_at
                if full or not self._may_start(memory):
                    return
                self._start(inventory)

    def _retire(self, now: float, memory: MachineMemory) -> None:
        """Remove sandboxes that were warm for too long or whose spec is unused, and the oldest one when memory is
        short.
        """
        for key, inventory in [*self.inventories.items()]:
            unused = now - inventory.asked_at >= DEMAND_S
            while inventory.warm and (unused or now - inventory.warm[0][1] >= self._limits.rest_s):
                self._remove(inventory.warm.popleft()[0])
            if unused and not inventory.starting and all(request.key != key for request in self.queue):
                del self.inventories[key]
        if memory.available_bytes < self._limits.reserve_bytes or memory.stalled >= self._limits.stalled:
            self._make_room()

    def _make_room(self) -> None:
        """Remove the oldest warm sandbox, one at a time, unless only a start in progress blocks the request."""
        warm = [inventory for inventory in self.inventories.values() if inventory.warm]
        if warm and not self.removing and self.starting_count() < self._limits.starting:
            self._remove(min(warm, key=lambda inventory: inventory.warm[0][1]).warm.popleft()[0])

    def _may_start(self, memory: MachineMemory) -> bool:
        """True if there are capacity and memory for one more. An empty pool may start one on any machine."""
        starting, places = self.starting_count(), self.places()
        free_bytes = memory.available_bytes - self._limits.reserve_bytes - starting * self._limits.start_bytes
        fits = free_bytes >= self._limits.start_bytes and not memory.stalled >= self._limits.stalled
        return starting < self._limits.starting and places < self._limits.live and (fits or not places)

    def starting_count(self) -> int:
        return sum(inventory.starting for inventory in self.inventories.values())

    def places(self) -> int:
        warm = sum(len(inventory.warm) for inventory in self.inventories.values())
        return self.starting_count() + warm + len(self.leases) + self.lending.total() + self.removing

    def ordinary_room(self) -> int:
        """The number of leases that non-urgent requests may still get."""
        in_use = self.lending[False] + sum(not lease.urgent for lease in self.leases)
        return self._limits.ordinary - in_use

    def inventory(self, spec: SandboxSpec, now: float) -> _Inventory:
        """The inventory of a spec that is requested now."""
        key = _key(spec)
        inventory = self.inventories.setdefault(key, _Inventory(spec, key))
        inventory.asked_at = now
        return inventory

    def fail(self, requests: Sequence[_LeaseRequest], error: SandboxError) -> None:
        """Fail some waiting requests with an error."""
        for request in list(requests):
            self.queue.remove(request)
            if not request.granted.done():
                request.granted.set_exception(error)


@final
class SandboxPool:
    """Keeps sandboxes of ``provider`` warm; implements :class:`~etude.protocols.SandboxProvider`."""

    def __init__(
        self,
        provider: SandboxProvider,
        limits: WarmPoolLimits | None = None,
        *,
        memory: Callable[[], MachineMemory] = GAUGE.read,
    ) -> None:
        """``memory`` reads the machine's free memory. The pool closes ``provider`` when it is closed."""
        self._provider = provider
        self._limits = limits or WarmPoolLimits()
        self._memory = memory
        self._stats = WarmPoolStats()
        self._numbers = itertools.count()
        self._plan = _Planner(self._limits, self._start, self._remove)
        self._starts: set[asyncio.Future[Sandbox]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    async def capabilities(self) -> frozenset[Capability]:
        """The provider's capabilities."""
        return await self._provider.capabilities()

    async def create(
        self, files: Mapping[str, str], spec: SandboxSpec | None = None, *, priority: int = 0
    ) -> "PooledSandbox":
        """A sandbox that was never leased before, with ``files``. Of the waiting requests, lower ``priority`` is served
        first; below 0, a request may use the reserved capacity.

        Raises :class:`SandboxesBusy` if too many requests wait already or the deadline passes; also raises the
        provider's errors.
        """
        lease = await self._lease(spec or DEFAULT_SPEC, priority)
        try:
            for path, text in files.items():
                await lease.write_file(path, text)
        except BaseException:
            await close_all([lease])
            raise
        return lease

    def announce(self, spec: SandboxSpec, count: int) -> None:
        """Prepare ``count`` sandboxes of a specification, as far as capacity allows, for use soon.

        Unused ones are removed like all that are warm for too long.
        """
        if self._closed:
            raise SandboxError(CLOSED)
        self._keep_watch()
        inventory = self._plan.inventory(spec, _now())
        inventory.announced = max(inventory.announced, count)
        self._step()

    def urgent(self) -> "UrgentSandboxes":
        """A view of this pool whose requests go first, for graders."""
        return UrgentSandboxes(self)

    def stats(self) -> WarmPoolStats:
        """A copy of the current figures."""
        return replace(
            self._stats,
            starting=self._plan.starting_count(),
            warm=sum(len(inventory.warm) for inventory in self._plan.inventories.values()),
            leased=len(self._plan.leases),
            removing=self._plan.removing,
            waiting=len(self._plan.queue),
        )

    async def close(self) -> None:
        """Fail waiting requests, remove every sandbox and close the provider; calling it twice is harmless."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        self._plan.fail(self._plan.queue, SandboxError(CLOSED))
        for start in self._starts:
            start.cancel()
        for lease in list(self._plan.leases):
            self.end(lease, CLOSED)
        for inventory in self._plan.inventories.values():
            while inventory.warm:
                self._remove(inventory.warm.popleft()[0])
        while self._tasks or self._plan.lending.total():  # the end of a start may lead to a removal
            await asyncio.wait(self._tasks, timeout=TICK_S) if self._tasks else await asyncio.sleep(TICK_S)
        await self._provider.close()

    async def fork(self, lease: "PooledSandbox", count: int) -> Sequence["PooledSandbox"]:
        """Copies of a leased sandbox, each with its own lease, made without waiting, since a waiting holder would keep
        a sandbox meanwhile. Raises :class:`SandboxesBusy` without capacity, and the sandbox's errors.
        """
        room = self._limits.live - self._plan.places()
        if not lease.urgent:
            room = min(room, self._plan.ordinary_room())
        if room < count:
            raise SandboxesBusy(f"no room for {count} copies of a sandbox: raise sandboxes.pool_size")
        self._plan.lending[lease.urgent] += count
        try:
            copies = await lease.inner.fork(count)
        finally:
            self._plan.lending[lease.urgent] -= count
        if self._closed:
            for copy in copies:
                self._remove(copy)
            raise SandboxError(CLOSED)
        return [self._hold(copy, lease.spec, urgent=lease.urgent) for copy in copies]

    def end(self, lease: "PooledSandbox", reason: str) -> None:
        """End a lease, and thereby its sandbox."""
        if lease in self._plan.leases:
            self._plan.leases.discard(lease)
            lease.end(reason, self._remove(lease.inner))

    def _keep_watch(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        elif self._watcher.done() and not self._watcher.cancelled():
            self._watcher.result()  # raises: without the watcher no deadline is enforced

    async def _lease(self, spec: SandboxSpec, priority: int) -> "PooledSandbox":
        self._keep_watch()
        deadline_s = _now() + self._limits.wait_s
        for _ in range(self._limits.tries):
            if self._closed:
                raise SandboxError(CLOSED)
            if len(self._plan.queue) >= self._limits.waiting:
                raise SandboxesBusy(f"{len(self._plan.queue)} requests for sandboxes wait already, as many as may")
            sandbox = await self._wait(spec, priority, deadline_s)
            if sandbox is not None:
                return self._hold(sandbox, spec, urgent=priority < 0)
        raise SandboxError(f"{self._limits.tries} warm sandboxes in a row had died: {self._stats.trouble}")

    async def _wait(self, spec: SandboxSpec, priority: int, deadline_s: float) -> Sandbox | None:
        """The next sandbox of a spec in turn; ``None`` if that sandbox had died while warm."""
        inventory = self._plan.inventory(spec, _now())
        asked_at = inventory.asked_at
        request = _LeaseRequest(
            (priority, next(self._numbers)), inventory.key, asyncio.get_running_loop().create_future()
        )
        self._plan.queue.append(request)
        try:
            self._step()
            async with asyncio.timeout_at(deadline_s):
                sandbox, ready_at = await request.granted
        except BaseException as error:
            if request in self._plan.queue:
                self._plan.queue.remove(request)
            elif (granted := _result(request.granted)) is not None:  # too late for the caller
                self._plan.lending[request.urgent] -= 1
                self._remove(granted[0])
            if isinstance(error, TimeoutError):
                words = f"no sandbox became free within {self._limits.wait_s:g} s: raise sandboxes.pool_size"
                raise SandboxesBusy(words) from None
            raise
        trouble = "its caller gave up"
        try:
            trouble = await _find_trouble(sandbox) if _now() - ready_at >= FRESH_S else ""
        finally:
            self._plan.lending[request.urgent] -= 1
            if trouble or self._closed:
                self._remove(sandbox)
        if self._closed:
            raise SandboxError(CLOSED)
        if trouble:
            self._stats.trouble = trouble
            self._stats.deaths += 1
            return None
        self._stats.leases += 1
        self._stats.warm_leases += ready_at < asked_at
        return sandbox

    def _hold(self, sandbox: Sandbox, spec: SandboxSpec, *, urgent: bool) -> "PooledSandbox":
        lease = PooledSandbox(self, sandbox, spec, urgent=urgent)
        self._plan.leases.add(lease)
        return lease

    def _step(self) -> None:
        if not self._closed:
            self._plan.step(_now(), self._memory())

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, inventory: _Inventory) -> None:
        inventory.starting += 1
        self._spawn(self._make(inventory))

    async def _make(self, inventory: _Inventory) -> None:
        """Make a sandbox whose lifetime covers the holder's time and the warm time before."""
        limits, spec = self._limits, inventory.spec
        lasting = replace(spec, ttl_s=spec.ttl_s + limits.rest_s + limits.start_s)
        start = asyncio.ensure_future(self._provider.create({}, lasting))
        self._starts.add(start)
        await asyncio.wait({start}, timeout=limits.start_s)
        if not start.done():
            start.cancel()
            await asyncio.wait({start}, timeout=CANCEL_S)
        self._starts.discard(start)
        inventory.starting -= 1
        sandbox = _result(start)
        if sandbox is None:
            error = start.exception() if start.done() and not start.cancelled() else None
            self._start_failed(inventory, error)
        elif self._closed:
            self._remove(sandbox)
        else:
            inventory.failures, inventory.retry_at = 0, -math.inf
            inventory.warm.append((sandbox, _now()))
        self._step()

    def _start_failed(self, inventory: _Inventory, error: BaseException | None) -> None:
        """Wait longer after each failure; fail waiting requests after repeated failures, or if they cannot succeed."""
        self._stats.start_failures += 1
        self._stats.trouble = _words(error) if error else f"no sandbox started within {self._limits.start_s:g} s"
        inventory.failures += 1
        inventory.retry_at = _now() + RETRIES.delay_s(inventory.failures)
        permanent = error is not None and (
            isinstance(error, Unsupported) or not isinstance(error, InfrastructureError | OSError)
        )
        if permanent or inventory.failures % self._limits.tries == 0:
            failure = (Unsupported if permanent else SandboxError)(self._stats.trouble)
            failure.__cause__ = error
            waiting = [request for request in self._plan.queue if request.key == inventory.key]
            self._plan.fail(waiting, failure)

    def _remove(self, sandbox: Sandbox) -> asyncio.Task[None]:
        self._plan.removing += 1
        return self._spawn(self._close(sandbox))

    async def _close(self, sandbox: Sandbox) -> None:
        """Close a sandbox, or count it as unclosed after the last attempt."""
        for attempt in range(self._limits.tries):
            if attempt:
                await asyncio.sleep(TICK_S)
            closing = asyncio.ensure_future(sandbox.close())
            await asyncio.wait({closing}, timeout=self._limits.close_s)
            if not closing.done():
                closing.cancel()
                await asyncio.wait({closing}, timeout=CANCEL_S)
                self._stats.trouble = f"a sandbox did not close within {self._limits.close_s:g} s"
            elif (error := closing.exception()) is None:
                break
            else:
                self._stats.trouble = f"a sandbox did not close: {_words(error)}"
        else:
            self._stats.unclosed += 1
        self._plan.removing -= 1
        self._step()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._step()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@final
class UrgentSandboxes:
    """A pool's priority view for graders; a :class:`~etude.protocols.SandboxProvider`."""

    def __init__(self, pool: SandboxPool) -> None:
        """The caller owns ``pool`` and closes it."""
        self._pool = pool

    async def capabilities(self) -> frozenset[Capability]:
        """The pool's capabilities."""
        return await self._pool.capabilities()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> "PooledSandbox":
        """A sandbox, ahead of all non-urgent requests; see :meth:`SandboxPool.create`."""
        return await self._pool.create(files, spec, priority=-1)

    async def close(self) -> None:
        """Do nothing: the pool closes its sandboxes."""


@final
class PooledSandbox:
    """A lease of a pool's sandbox; implements :class:`~etude.protocols.Sandbox`. It ends with ``close``, with its
    spec's time to live, or with the pool.
    """

    def __init__(self, pool: SandboxPool, inner: Sandbox, spec: SandboxSpec, *, urgent: bool) -> None:
        self._pool = pool
        self.inner = inner
        self.spec = spec
        self.urgent = urgent
        self._ended = ""
        self._removal: asyncio.Task[None] | None = None
        reason = f"its time to live of {spec.ttl_s:g} s is over"
        self._ttl = asyncio.get_running_loop().call_later(spec.ttl_s, pool.end, self, reason)

    def end(self, reason: str, removal: asyncio.Task[None]) -> None:
        """Reject every later call; called once, by the pool."""
        self._ended, self._removal = reason, removal
        self._ttl.cancel()

    def _open(self) -> Sandbox:
        if self._ended:
            raise SandboxError(f"the sandbox was closed: {self._ended}")
        return self.inner

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command."""
        return await self._open().exec(argv, stdin=stdin, timeout_s=timeout_s, environment=environment)

    async def read_file(self, path: str) -> str | None:
        """The text of a file, or ``None``."""
        return await self._open().read_file(path)

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file."""
        await self._open().write_file(path, text)

    async def export(self, paths: Sequence[str], *, limit_bytes: int = 64 << 20) -> bytes:
        """A tar of files and folders."""
        return await self._open().export(paths, limit_bytes=limit_bytes)

    async def load(self, tar: bytes) -> None:
        """Unpack a tar."""
        await self._open().load(tar)

    async def stats(self) -> SandboxStats:
        """Current usage. The age counts from the start, which was before the lease."""
        return await self._open().stats()

    async def kill_processes(self) -> None:
        """Kill every process inside."""
        await self._open().kill_processes()

    async def snapshot(self) -> Image:
        """The files as an image."""
        return await self._open().snapshot()

    async def fork(self, count: int = 1) -> Sequence["PooledSandbox"]:
        """Independent copies, each with its own lease; see :meth:`SandboxPool.fork`."""
        self._open()
        if count < 1:
            raise ValueError(f"count={count}: expected at least 1 fork")
        return await self._pool.fork(self, count)

    async def close(self) -> None:
        """End the lease, and wait until the sandbox is removed; calling it twice is harmless."""
        self._pool.end(self, "its holder is done")
        if self._removal is not None:
            await asyncio.shield(self._removal)


T = TypeVar("T")


def _result(future: asyncio.Future[T]) -> T | None:
    """The result of a future, if it has one."""
    return future.result() if future.done() and not future.cancelled() and future.exception() is None else None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}"


def _key(spec: SandboxSpec) -> str:
    """The same text for specs that mean the same; mappings may be in any order."""
    image = spec.image
    return json.dumps(
        [
            [image.digest, image.base, list(map(str, image.layers)), dict(image.environment), image.workdir],
            [astuple(image.user), image.entrypoint, list(map(astuple, image.healthchecks))],
            [astuple(service) for service in image.services],
            [astuple(spec.limits), spec.allow, spec.names, spec.user, spec.ttl_s],
            [{inside: str(path) for inside, path in spec.mounts.items()}, dict(spec.environment)],
        ],
        sort_keys=True,
    )


async def _find_trouble(sandbox: Sandbox) -> str:
    """The error of a dead sandbox; empty for one that is alive, or too slow to answer."""
    try:
        async with asyncio.timeout(CHECK_S):
            await sandbox.stats()
    except (TimeoutError, OSError, Unsupported):
        return ""
    except SandboxError as error:
        return str(error)
    return ""

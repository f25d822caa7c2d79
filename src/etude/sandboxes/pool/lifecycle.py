"""The engine room of a warm pool: makes, watches and removes the sandboxes that :class:`Leases` decides on.

    lease ──▶ Leases ──due──▶ start: provider.create ──▶ warm
                       ├────▶ remove: sandbox.close          tried again, then counted as unclosed
                       └────▶ settled: whoever waits

Owns tasks, futures and the sandboxes themselves; decides nothing. Consumes claims; produces sandboxes; waits for the
provider, each call with a deadline; woken by claims, by what the provider finished, and by a tick that looks at
deadlines, memory and a few sandboxes each time; on shutdown fails whoever waits and removes everything.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, final

from etude.errors import EtudeError, InfrastructureError, SandboxError, Unsupported
from etude.protocols import Clock, Sandbox, SandboxProvider
from etude.sandbox_spec import Capability
from etude.sandboxes.pool.inventory import Memory
from etude.sandboxes.pool.lease_requests import Claim, ClaimState, Want
from etude.sandboxes.pool.leases import Leases
from etude.sandboxes.pool.slots import PoolLimits, Slot, SlotState

TICK_S = 0.25
"""How late a deadline, a pause or a change of memory may be noticed."""
MEMORY_AGE_S = 0.1
"""How old a reading of the machine's memory may be."""
MEASURED = 4
"""Sandboxes that are measured in a tick, of each thousand and at least."""
MEASURE_S = 2.0
"""A sandbox that cannot say what it uses in this time is not waited for."""
FRESH_S = 5.0
"""A sandbox that was seen alive so recently is handed out without another look."""
CANCEL_S = 5.0
"""For a provider to end what it was told to give up."""
CLOSED = "the pool of sandboxes is closed"


class SandboxesBusy(SandboxError):
    """A pool has as much to do as it takes; ask again after ``retry_after_s``."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(f"{reason}: try again in {retry_after_s:.0f} s, or raise the pool's limits")
        self.retry_after_s = retry_after_s


@final
class Keeper:
    """Does what ``leases`` decides."""

    def __init__(
        self, provider: SandboxProvider, limits: PoolLimits, clock: Clock, memory: Callable[[], Memory]
    ) -> None:
        """``memory`` reads what the machine has left."""
        self.leases = Leases(limits)
        self.trouble = ""
        """The last one with the provider."""
        self._provider = provider
        self._limits = limits
        self._clock = clock
        self._read_memory = memory
        self._memory = Memory(available_bytes=math.inf)
        self._memory_at = -math.inf
        self._sandboxes: dict[Slot, Sandbox] = {}
        self._seen_at: dict[Slot, float] = {}
        self._waiters: dict[Claim, asyncio.Future[None]] = {}
        self._making: set[asyncio.Future[Sandbox]] = set()
        self._removals: dict[Slot, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._measured = 0

    @property
    def memory(self) -> Memory:
        """What the machine has left, as of a moment ago."""
        if self._clock.now() - self._memory_at >= MEMORY_AGE_S:
            self._memory, self._memory_at = self._read_memory(), self._clock.now()
        return self._memory

    async def capabilities(self) -> frozenset[Capability]:
        """What the provider holds to."""
        return await self._provider.capabilities()

    async def lease(self, want: Want) -> tuple[Claim, Sandbox]:
        """Wait for a sandbox. Raises :class:`SandboxesBusy` when the line is full or ``wait_s`` is over, and
        :class:`~etude.errors.SandboxError` or its kind ``Unsupported`` when none can be made.
        """
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        elif self._watcher.done() and not self._watcher.cancelled():
            self._watcher.result()  # raises: without it no deadline is kept
        ends_s = self._clock.now() + want.wait_s
        for _ in range(self._limits.tries):
            claim = self.leases.ask(want, self._clock.now())
            sandbox = await self._settle(claim)
            if sandbox is not None:
                return claim, sandbox
            want = replace(want, wait_s=max(ends_s - self._clock.now(), TICK_S))
        raise SandboxError(f"{self._limits.tries} warm sandboxes in a row were found dead: {self.trouble}")

    async def release(self, claim: Claim) -> None:
        """The holder is done; returns once the sandbox is removed, or has been given up."""
        self.leases.leave(claim, self._clock.now())
        self.step()
        removal = None if claim.slot is None else self._removals.get(claim.slot)
        if removal is not None:
            await asyncio.shield(removal)

    async def fork(self, claim: Claim, sandbox: Sandbox, count: int) -> Sequence[tuple[Claim, Sandbox]]:
        """Copies of a sandbox that ``claim`` holds, leased to the same holder. Raises :class:`SandboxesBusy` at once
        where there are not that many places, and as the sandbox does.
        """
        copies = self.leases.fork(claim, count, self._clock.now())
        if not copies:
            raise SandboxesBusy(f"no room for {count} copies of a sandbox", self.leases.retry_after_s())
        made: Sequence[Sandbox] = ()
        try:
            made = await sandbox.fork(count)
        finally:
            for copy, one in zip(copies, made, strict=False):
                assert copy.slot is not None, "a granted claim has a slot"
                if copy.state is ClaimState.GRANTED:
                    self._sandboxes[copy.slot], self._seen_at[copy.slot] = one, self._clock.now()
                else:  # its lease ended before it was made
                    self._spawn(self._close(one))
            for copy in copies[len(made) :]:
                self.leases.leave(copy, self._clock.now())
            self.step()
        return tuple(zip(copies, made, strict=True))

    def step(self, cause: BaseException | None = None) -> None:
        """Have decided and done what there is; ``cause`` is why the provider could not make something."""
        decisions = self.leases.due(self._clock.now(), self.memory)
        for slot in decisions.start:
            self._spawn(self._start(slot))
        for slot in decisions.remove:
            self._removals[slot] = self._spawn(self._remove(slot))
        for claim in decisions.settled:
            waiter = self._waiters.get(claim)
            if waiter is None or waiter.done():
                continue
            if claim.state is ClaimState.GRANTED:
                waiter.set_result(None)
            else:
                error = _why(claim)
                error.__cause__ = cause
                waiter.set_exception(error)

    async def close(self) -> None:
        """Fail whoever waits, remove everything and close the provider."""
        self.leases.shut(CLOSED, self._clock.now())
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        for making in self._making:
            making.cancel()
        self.step()
        while self._tasks:  # a start that ends leads to a removal
            await asyncio.wait(self._tasks)
        await self._provider.close()

    async def _settle(self, claim: Claim) -> Sandbox | None:
        """The sandbox that a claim is granted in the end, or ``None`` if that one is dead; raises why it is not."""
        if claim.state is ClaimState.REFUSED:
            raise _why(claim)
        waiter = self._waiters[claim] = asyncio.get_running_loop().create_future()
        try:
            self.step()
            await waiter
            if claim.slot is None or claim.slot not in self._sandboxes:
                raise _why(claim)  # it was lost in the meantime
            sandbox = self._sandboxes[claim.slot]
            lives = self._clock.now() - self._seen_at[claim.slot] < FRESH_S or await self._lives(claim.slot, sandbox)
        except BaseException:
            self.leases.leave(claim, self._clock.now())
            self.step()
            raise
        finally:
            del self._waiters[claim]
        return sandbox if lives else None

    async def _lives(self, slot: Slot, sandbox: Sandbox) -> bool:
        """Whether a sandbox that may have waited long is still there."""
        try:
            async with asyncio.timeout(MEASURE_S):
                stats = await sandbox.stats()
        except (TimeoutError, OSError, Unsupported):
            return True  # that says nothing of the sandbox
        except SandboxError as error:
            self.trouble = str(error)
            self.leases.died(slot, self.trouble, self._clock.now())
            self.step()
            return False
        if slot in self._sandboxes:
            self._seen_at[slot] = self._clock.now()
            self.leases.stock.measure(slot, self.leases.slots, stats.memory_bytes)
        return True

    async def _start(self, slot: Slot) -> None:
        """Have a sandbox made; it lives for its holder's time and what it may wait before."""
        spec = slot.key.spec
        making = asyncio.ensure_future(
            self._provider.create({}, replace(spec, ttl_s=spec.ttl_s + self._limits.rest_s + self._limits.start_s))
        )
        self._making.add(making)
        done, _ = await asyncio.wait({making}, timeout=self._limits.start_s)
        if not done:
            making.cancel()
            await asyncio.wait({making}, timeout=CANCEL_S)
        self._making.discard(making)
        if making.done() and not making.cancelled() and making.exception() is None:
            self._sandboxes[slot], self._seen_at[slot] = making.result(), self._clock.now()
            self.leases.started(slot, self._clock.now())
            self.step()
            return
        error = making.exception() if making.done() and not making.cancelled() else None
        self.trouble = f"no sandbox started within {self._limits.start_s:g} s" if error is None else _words(error)
        permanent = error is not None and not _may_pass(error)
        self.leases.failed(slot, self.trouble, self._clock.now(), permanent=permanent)
        self.step(error)

    async def _remove(self, slot: Slot) -> None:
        self._seen_at.pop(slot, None)
        sandbox = self._sandboxes.pop(slot, None)
        closed = sandbox is None or await self._close(sandbox)
        self.leases.gone(slot, self._clock.now(), closed=closed)
        del self._removals[slot]
        self.step()

    async def _close(self, sandbox: Sandbox) -> bool:
        """Whether a sandbox could be closed, at the last try."""
        for _ in range(self._limits.tries):
            closing = asyncio.ensure_future(sandbox.close())
            done, _ = await asyncio.wait({closing}, timeout=self._limits.close_s)
            if not done:
                closing.cancel()
                await asyncio.wait({closing}, timeout=CANCEL_S)
                self.trouble = f"a sandbox did not close within {self._limits.close_s:g} s"
            elif (error := closing.exception()) is None:
                return True
            else:
                self.trouble = f"a sandbox did not close: {_words(error)}"
            await self._clock.sleep(TICK_S)
        return False

    async def _watch(self) -> None:
        """Look at deadlines, memory and some sandboxes, for ever."""
        while True:
            next_s = self.leases.next_time()
            left_s = math.inf if next_s is None else next_s - self._clock.now()
            await self._clock.sleep(min(max(left_s, 0.0), TICK_S))
            slots = self.leases.slots
            alive = (*slots.all(SlotState.WARM), *slots.all(SlotState.LEASED))
            for _ in range(min(len(alive), MEASURED * (1 + len(alive) // 1000))):
                self._measured += 1
                slot = alive[self._measured % len(alive)]
                if (sandbox := self._sandboxes.get(slot)) is not None:
                    await self._lives(slot, sandbox)
            self.step()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _why(claim: Claim) -> SandboxError:
    """The error of a claim that got nothing."""
    if claim.state in (ClaimState.REFUSED, ClaimState.EXPIRED) and not claim.permanent:
        return SandboxesBusy(claim.reason, claim.retry_after_s)
    kind = Unsupported if claim.permanent and claim.reason != CLOSED else SandboxError
    return kind(claim.reason)


def _words(error: BaseException) -> str:
    """What went wrong; an error of another kind than ours is named."""
    return str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}"


def _may_pass(error: BaseException) -> bool:
    """Whether what went wrong may be different next time."""
    return isinstance(error, InfrastructureError | OSError) and not isinstance(error, Unsupported)

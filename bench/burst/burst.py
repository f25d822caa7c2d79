"""A burst in virtual time: many sandboxes asked for at once, each used for a while, until none is wanted any more.

    requests ──▶ Schedule of each client ──▶ HostedSandboxes, HostTable ──▶ modelled machines ──▶ first command, use
                    ▲                                                             │
                    └──── failed by infrastructure: back off, again ──────────────┘  machines that go down meanwhile

Clients are rollouts processes of a run: each has a share of the requests, a schedule and a table of hosts of its own,
and none knows of the others. Two bursts of one seed are the same.
"""

import asyncio
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import final

from bench.burst.model import ClientProcessor, HostConnection, ImageStore, Machine, MachineModel, ModelledUse
from etude.config.rollouts import RolloutConfig
from etude.errors import InfrastructureError
from etude.ledger.ledger import OpenSlot
from etude.protocols import Sandbox
from etude.rollouts.fake import run_virtually
from etude.rollouts.schedule import Place, Schedule, SlotPhase, place_of
from etude.sandbox_spec import Image, SandboxSpec
from etude.sandboxes.remote.hosts import HostedSandboxes
from etude.types import Case, FunctionChecks, Split, Task

COMMAND_S = 0.005
"""Time of the first command, from its machine's view."""
TASK = Task(
    task_id="burst",
    family="burst",
    template="burst",
    split=Split.TRAIN,
    prompt="",
    files={},
    checks=FunctionChecks(path="a.py", function="f", visible=(), hidden=(Case(arguments=(), expected=None),)),
)
"""All requests are of one task: only its sandboxes matter."""
PROGRESS_S = 5.0
"""Virtual time between two lines of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPlan:
    """Requests, images, and faults of a burst."""

    requests: int
    machines: int
    machine: MachineModel
    clients: int = 4
    """Rollouts processes that share the requests."""
    request_s: float
    """Processor time of a client for one request."""
    images: int = 200
    """Number of different images; the n-th is requested in proportion to 1/n."""
    group_size: int = 8
    """Requests of one group, which have one image."""
    use_s: float = 90.0
    """Mean time for which a sandbox is used, between half of it and one and a half."""
    read_s: float = 1.0
    """Time in which a machine reads an image."""
    streams: int = 100
    """Images that the store gives out at a time."""
    failing: float = 0.0
    """Share of the machines that go down within ``FAILING_S``, for ``DOWN_S``."""
    seed: int = 0


FAILING_S, DOWN_S = 60.0, 45.0
"""Time within which machines fail, and for which each is down."""


@dataclass(slots=True)
class BurstResult:
    """Results of a burst."""

    queue_times_s: list[float] = field(default_factory=list)
    """From the asking to the end of the first command, of each request that was served."""
    served: int = 0
    """Requests whose sandbox was used to the end."""
    lost: int = 0
    """Requests whose attempts were used up."""
    failed: int = 0
    """Attempts that ended otherwise."""
    most_running: int = 0
    reads: int = 0
    """Images that machines read."""
    fewest_reads: int = 0
    """The fewest with which all could have run at once."""
    seconds: float = 0.0
    """Virtual time."""
    wall_s: float = 0.0
    """Time that it took to compute."""


def play_burst(plan: BurstPlan) -> BurstResult:
    """Play a burst in virtual time."""
    began_s = time.monotonic()
    result = run_virtually(_Burst(plan).play())
    result.wall_s = time.monotonic() - began_s
    return result


@final
class _Burst:
    """One burst in progress."""

    def __init__(self, plan: BurstPlan) -> None:
        self._plan = plan
        self._random = Random(plan.seed)
        self._result = BurstResult()
        self._uses: dict[Sandbox, ModelledUse] = {}
        self._running = 0
        self._first: set[Place] = set()  # requests whose first command has ended once

    async def play(self) -> BurstResult:
        """Send all requests at once, and wait until the last sandbox is released."""
        plan, loop = self._plan, asyncio.get_running_loop()
        store = ImageStore(streams=plan.streams, read_s=plan.read_s)
        clients = [ClientProcessor(f"client-{number}", plan.request_s) for number in range(plan.clients)]
        names = [client.name for client in clients]
        machines = {
            f"http://host-{number}": Machine(plan.machine, store, names, f"{plan.seed} {number}")
            for number in range(plan.machines)
        }
        images = self._draw_images()
        beside = [asyncio.create_task(self._fail(list(machines.values()))), asyncio.create_task(self._tell())]
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(clients):
                group.create_task(self._ask(client, machines, images, range(number, plan.requests, plan.clients)))
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        self._result.seconds, self._result.reads = loop.time(), store.reads
        for machine in machines.values():
            await machine.close()
        return self._result

    def _draw_images(self) -> list[str]:
        """The image of each group."""
        plan = self._plan
        groups = -(-plan.requests // plan.group_size)
        weights = [1 / (number + 1) for number in range(plan.images)]
        drawn = self._random.choices(range(plan.images), weights, k=groups)
        counts = [0] * plan.images
        for image in drawn:
            counts[image] += plan.group_size
        self._result.fewest_reads = sum(-(-count // plan.machine.places) for count in counts)
        return [f"sha256:{image}" for image in drawn]

    async def _ask(
        self, client: ClientProcessor, machines: dict[str, Machine], images: Sequence[str], numbers: range
    ) -> None:
        """Act as one client: fill its slots as the schedule decides, until none is left."""
        clock, changed = asyncio.get_running_loop(), asyncio.Event()
        provider = HostedSandboxes(
            list(machines), "a key", connect=lambda name: HostConnection(machines[name], client, self._uses)
        )
        config = RolloutConfig()
        schedule = Schedule(
            concurrency=len(numbers), max_attempts=config.max_attempts, outage_s=config.max_outage_s, worked=True
        )
        for number in numbers:
            group, place = divmod(number, self._plan.group_size)
            schedule.add(OpenSlot(task=TASK, group_index=group, slot=place, attempt=0))
        await provider.capabilities()
        began_s = clock.time()
        attempts = set[asyncio.Task[None]]()
        while len(schedule):
            for slot in schedule.due(clock.time()):
                image = images[slot.group_index]
                attempt = asyncio.create_task(self._attempt(slot, schedule, provider, image, began_s, changed))
                attempts.add(attempt)
                attempt.add_done_callback(attempts.discard)
            next_s = schedule.next_time()
            try:
                async with asyncio.timeout_at(next_s):
                    await changed.wait()
            except TimeoutError:
                pass
            changed.clear()
        await asyncio.gather(*attempts)
        await provider.close()

    async def _attempt(
        self,
        slot: OpenSlot,
        schedule: Schedule,
        provider: HostedSandboxes,
        image: str,
        began_s: float,
        changed: asyncio.Event,
    ) -> None:
        """Have a sandbox, run a first command in it, use it, close it."""
        loop, result, use_s = asyncio.get_running_loop(), self._result, self._plan.use_s
        try:
            sandbox = await provider.create({}, SandboxSpec(image=Image(digest=image)))
            use = self._uses.pop(sandbox)
            await use.run(COMMAND_S)
            if place_of(slot) not in self._first:
                self._first.add(place_of(slot))
                result.queue_times_s.append(loop.time() - began_s)
            self._running += 1
            result.most_running = max(result.most_running, self._running)
            try:
                await use.run(self._random.uniform(0.5 * use_s, 1.5 * use_s))
            finally:
                self._running -= 1
            await use.close(sandbox)
        except InfrastructureError:
            result.failed += 1
            result.lost += schedule.failed(slot, due=slot.attempt + 1, now=loop.time()) is SlotPhase.LOST
        else:
            result.served += 1
            schedule.graded(slot)
        changed.set()

    async def _fail(self, machines: Sequence[Machine]) -> None:
        """Let some machines go down, each for a while."""
        failing = self._random.sample(machines, math.ceil(self._plan.failing * len(machines)))
        moments = sorted((self._random.uniform(0.0, FAILING_S), number) for number in range(len(failing)))
        async with asyncio.TaskGroup() as group:
            for at_s, number in moments:
                group.create_task(_go_down(failing[number], at_s))

    async def _tell(self) -> None:
        """Print progress on stderr."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            text = f"{asyncio.get_running_loop().time():.0f} s: {self._running} running, {self._result.served} done"
            sys.stderr.write(f"\r{text}, {self._result.failed} attempts failed  ")


async def _go_down(machine: Machine, at_s: float) -> None:
    await asyncio.sleep(at_s)
    machine.stop()
    await asyncio.sleep(DOWN_S)
    machine.start()

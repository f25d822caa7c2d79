"""Microseconds of one choice of each table that a burst goes through, at the size of a cluster.

    Router      2,048 engines in four regions: the first call of a session, a later one, with one engine far less busy
    HostTable   2,000 hosts: a sandbox with an image that is known, without one, a new image
    Schedule    100,000 slots: one that starts and ends, a probe while machines are down, a group that is dropped

Processor time of this thread, in the fastest of some rounds: what is slower is other work on the machine, of this
system or of others that share its cores.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, repeat

from bench.burst.burst import TASK
from etude.gateway.routing.router import EngineEntry, Router
from etude.ledger.ledger import OpenSlot
from etude.protocols import EngineHealth
from etude.rollouts.breaker import STREAK
from etude.rollouts.schedule import Schedule
from etude.sandboxes.remote.placement import SANDBOX_BYTES, HostReport, HostTable

ENGINES, HOSTS, SLOTS = 2_048, 2_000, 100_000
REGIONS = 4
GROUP = 8
"""Slots of a group."""
CALLS = 12
"""Calls that each engine has."""
PLACES = 100
"""Sandboxes of a host."""
BATCH, PROBES = 500, 100
"""Choices that are timed together, and probes of one outage that are."""


def measure_choices(*, rounds: int, scale: float = 1.0) -> Mapping[str, float]:
    """Choice → microseconds in the fastest of ``rounds``; ``scale`` shrinks all tables."""
    engines, hosts, slots = (max(GROUP, round(scale * size)) for size in (ENGINES, HOSTS, SLOTS))
    figures: dict[str, float] = {}
    for _ in range(rounds):
        for case, us in (*_router(engines), *_host_table(hosts), *_schedule(slots)):
            figures[case] = min(us, figures.get(case, us))
    return figures


def _router(engines: int) -> Iterator[tuple[str, float]]:
    router, names = Router(), [f"http://engine-{number}" for number in range(engines)]
    router.announce(1, "digest", 0.0)
    for number, name in enumerate(names):
        router.add(EngineEntry(name=name, url=name, region=f"region-{number % REGIONS}"), 0.0)
        router.report(name, EngineHealth(version=1, digest="digest", running=CALLS, waiting=0), 0.0)
    router.choose("a session")  # points of the ring are sorted once
    sessions = (f"session-{number}" for number in count())

    def first() -> None:
        for _ in range(BATCH):
            router.choose(next(sessions))

    def later() -> None:
        for _ in range(BATCH):
            router.choose("session-0")

    def calls() -> None:
        for _ in range(BATCH):
            router.began(names[0])
            router.ended(names[0])

    yield f"engine of a new session, of {engines}", _timed_us(BATCH, first)
    yield f"engine of a session that has one, of {engines}", _timed_us(BATCH, later)
    yield "call that begins, or ends", _timed_us(2 * BATCH, calls)
    router.report(names[engines // 2], EngineHealth(version=1, digest="digest", running=0, waiting=0), 1.0)
    yield f"engine of a new session, one of {engines} idle", _timed_us(BATCH, first)


def _host_table(hosts: int) -> Iterator[tuple[str, float]]:
    table, report = HostTable([f"http://host-{number}" for number in range(hosts)]), _full_room()

    def place(images: Iterator[str]) -> float:
        for number in range(hosts):
            table.record_report(f"http://host-{number}", report, 0.0)
        return _timed_us(BATCH, lambda: [table.choose(next(images), 0.0) for _ in range(BATCH)])

    place(repeat("image"))
    yield f"host of a known image, of {hosts}", place(repeat("image"))
    yield f"host of no image, of {hosts}", place(repeat(""))
    yield f"host of a new image, of {hosts}", place(f"image {number}" for number in count())


def _full_room() -> HostReport:
    """The report of a host without any sandbox."""
    return HostReport(incarnation="1", free_bytes=PLACES * SANDBOX_BYTES, places=PLACES, sandboxes=0, is_draining=False)


def _schedule(slots: int) -> Iterator[tuple[str, float]]:
    schedule = Schedule(concurrency=slots, max_attempts=4, outage_s=0.0, worked=True)
    every = [OpenSlot(task=TASK, group_index=n // GROUP, slot=n % GROUP, attempt=0) for n in range(slots)]
    yield f"slot that is added, of {slots}", _timed_us(slots, lambda: [schedule.add(slot) for slot in every])
    started: list[OpenSlot] = []
    yield f"slot that starts, of {slots}", _timed_us(slots, lambda: started.extend(schedule.due(0.0)))
    half = slots // 2
    yield f"slot that is graded, of {slots}", _timed_us(half, lambda: _grade(schedule, started[:half]))
    groups = {slot.group_index for slot in started[half : half + slots // 8 // GROUP * GROUP]}
    dropped_us = _timed_us(len(groups), lambda: [schedule.abandon(group) for group in groups])
    yield f"group of {GROUP} that is dropped, of {slots}", dropped_us
    for slot in started[-STREAK:]:
        schedule.failed(slot, due=1, now=0.0)
    for number in range(half):
        schedule.add(OpenSlot(task=TASK, group_index=slots + number, slot=0, attempt=0))
    yield f"probe that starts, or fails, of {slots}", _timed_us(2 * PROBES, lambda: _probe(schedule))


def _grade(schedule: Schedule, slots: Sequence[OpenSlot]) -> None:
    for slot in slots:
        schedule.graded(slot)


def _probe(schedule: Schedule) -> None:
    """Start probes, each of which fails."""
    for _ in range(PROBES):
        now = schedule.breaker.until_s
        (probe,) = schedule.due(now)
        schedule.failed(probe, due=1, now=now)


def _timed_us(number: int, act: Callable[[], object]) -> float:
    """Microseconds of one of a number of choices that ``act`` makes."""
    began_s = time.thread_time()
    act()
    return (time.thread_time() - began_s) / number * 1e6

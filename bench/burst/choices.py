"""Microseconds of one decision of each table that a burst goes through, at the size of a cluster.

    Router      2,048 engines in four regions: the first call of a session, a later one, with one engine far less busy
    HostTable   2,000 hosts: a sandbox with an image that is known, without one, a new image
    Schedule    100,000 slots: one that starts and ends, a probe while machines are down, a group that is dropped

Processor time of this thread, so that other work on the machine counts less; the median of rounds.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

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
BATCH, NEW_IMAGES, PROBES = 500, 500, 100
"""Decisions that are timed together; likewise, of new images; probes of one outage."""


def measure_choices(*, rounds: int, scale: float = 1.0) -> Mapping[str, float]:
    """Decision → microseconds; ``scale`` shrinks all tables."""
    engines, hosts, slots = (max(GROUP, round(scale * size)) for size in (ENGINES, HOSTS, SLOTS))
    return {**_router(engines, rounds), **_host_table(hosts, rounds), **_schedule(slots, rounds)}


def _router(engines: int, rounds: int) -> Mapping[str, float]:
    router, names = Router(), [f"http://engine-{number}" for number in range(engines)]
    router.announce(1, "digest", 0.0)
    for number, name in enumerate(names):
        router.add(EngineEntry(name=name, url=name, region=f"region-{number % REGIONS}"), 0.0)
        router.report(name, EngineHealth(version=1, digest="digest", running=CALLS, waiting=0), 0.0)
    router.choose("a session")  # points of the ring are sorted once
    sessions = (f"session-{number}" for number in range(10**9))
    idle = f"http://engine-{engines // 2}"

    def first(count: int) -> None:
        for _ in range(count):
            router.choose(next(sessions))

    def later(count: int) -> None:
        for _ in range(count):
            router.choose("session-0")

    def calls(count: int) -> None:
        for _ in range(count):
            router.began(names[0])
            router.ended(names[0])

    figures = {
        f"engine of a new session, of {engines}": _median_us(first, rounds),
        f"engine of a session that has one, of {engines}": _median_us(later, rounds),
        "a call that begins and ends": _median_us(calls, rounds),
    }
    router.report(idle, EngineHealth(version=1, digest="digest", running=0, waiting=0), 1.0)
    figures[f"engine of a new session, one of {engines} idle"] = _median_us(first, rounds)
    return figures


def _host_table(hosts: int, rounds: int) -> Mapping[str, float]:
    table = HostTable([f"http://host-{number}" for number in range(hosts)])
    images = (f"image {number}" for number in range(10**9))

    def hear() -> None:
        for number in range(hosts):
            report = HostReport(
                incarnation="1", free_bytes=PLACES * SANDBOX_BYTES, places=PLACES, sandboxes=0, is_draining=False
            )
            table.heard(f"http://host-{number}", report, 0.0)

    def place(image: Callable[[], str]) -> Callable[[int], None]:
        def choose(count: int) -> None:
            for _ in range(count):
                assert table.choose(image(), 0.0) is not None

        return choose

    figures = {}
    for case, image, count in (
        ("host of a known image", lambda: "image", BATCH),
        ("host of no image", str, BATCH),
        ("host of a new image", lambda: next(images), NEW_IMAGES),
    ):
        hear()
        table.choose("image", 0.0)
        figures[f"{case}, of {hosts}"] = _median_us(place(image), rounds, count)
    return figures


def _schedule(slots: int, rounds: int) -> Mapping[str, float]:
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        for case, us in _schedule_once(slots).items():
            figures.setdefault(f"{case}, of {slots}", []).append(us)
    return {case: statistics.median(each) for case, each in figures.items()}


def _schedule_once(slots: int) -> Mapping[str, float]:
    schedule = Schedule(concurrency=slots, max_attempts=4, outage_s=0.0, worked=True)
    every = [OpenSlot(task=TASK, group_index=n // GROUP, slot=n % GROUP, attempt=0) for n in range(slots)]
    figures = {"slot that is added": _timed_us(slots, lambda: [schedule.add(slot) for slot in every])}
    started: list[OpenSlot] = []
    figures["slot that starts"] = _timed_us(slots, lambda: started.extend(schedule.due(0.0)))
    half = slots // 2
    figures["slot that is graded"] = _timed_us(half, lambda: _grade(schedule, started[:half]))
    groups = {slot.group_index for slot in started[half : half + slots // 8 // GROUP * GROUP]}
    figures["group that is dropped"] = _timed_us(len(groups), lambda: [schedule.abandon(group) for group in groups])
    for slot in started[-STREAK:]:
        schedule.failed(slot, due=1, now=0.0)
    for number in range(half):
        schedule.add(OpenSlot(task=TASK, group_index=slots + number, slot=0, attempt=0))
    figures["probe that starts, or fails"] = _timed_us(2 * PROBES, lambda: _probe(schedule))
    return figures


def _grade(schedule: Schedule, slots: Sequence[OpenSlot]) -> None:
    for slot in slots:
        schedule.graded(slot)


def _probe(schedule: Schedule) -> None:
    """Start probes, each of which fails."""
    for _ in range(PROBES):
        now = schedule.breaker.until_s
        (probe,) = schedule.due(now)
        schedule.failed(probe, due=1, now=now)


def _median_us(act: Callable[[int], None], rounds: int, count: int = BATCH) -> float:
    return statistics.median(_timed_us(count, lambda: act(count)) for _ in range(rounds))


def _timed_us(count: int, act: Callable[[], object]) -> float:
    """Microseconds of one of ``count`` decisions that ``act`` takes."""
    began_s = time.thread_time()
    act()
    return (time.thread_time() - began_s) / count * 1e6

"""What is measured in `bench sandbox`, one function each; what it means is :mod:`bench.sandbox.bench`'s.

Owns the order of things: all are asked in turn, so that a machine that slows down slows down all of them.
"""

import asyncio
import math
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from bench import usage
from bench.sandbox.contestants import COMMAND_TIMEOUT_S, SPEC, Contestant
from bench.sandbox.leaks import Remainder, Remains
from bench.sandbox.programs import Launch
from etude.errors import InfrastructureError
from etude.protocols import Sandbox, SandboxProvider
from etude.sandbox_spec import Capability, SandboxSpec
from etude.sandboxes.memory_pressure import MemoryGauge
from etude.sandboxes.warm_pool import SandboxPool, WarmPoolLimits
from etude.types import Json

TRUE = ("/usr/bin/true",)
COMMANDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"true": TRUE, "python3 -c 1": ("/usr/bin/python3", "-c", "1")}
)
"""Commands that are started, by case; all are programs of the machine itself."""
DAEMONS = ("/bin/sh", "-c", "trap '' TERM; sleep 600 & setsid sleep 600 > /dev/null 2>&1 & echo x > left")
"""Command of each cycle: leaves two daemons and a file, which the removal has to end and delete."""
AT_ONCE = (1, 2)
"""Launchers of the rates; crowds and cycles have the most."""
WARM_UP = 3
"""Cycles after which whatever stays from cycle to cycle is there."""
SETTLE_S = 5.0
"""For the machine to finish removing what has no user any more."""
SIZE_STEP_BYTES = 64 << 20
"""Machines whose memory differs by so much are booted apart."""
FORKS = 5
"""Forks of each booted machine."""


class Rate(NamedTuple):
    """Results of one contestant over some time."""

    per_s: float
    cpu_s: float
    """Processor seconds of a start: of all processes below the bench, and of the bench itself."""


@dataclass(slots=True)
class Figures:
    """Measurements, in the order of the rounds."""

    starts: dict[tuple[str, str], list[Launch]] = field(default_factory=dict)
    """Contestant and case → a start a round."""
    rates: dict[tuple[str, int], list[Rate]] = field(default_factory=dict)
    """Contestant and launchers → a rate a round."""
    others: list[dict[str, Json]] = field(default_factory=list)
    """Rows that only some contestants have."""
    missing: dict[str, str] = field(default_factory=dict)
    """Contestant → why it has no starts and rates, or no more of them."""
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    """Contestant and measurement → why it has no other figures."""
    alive: int | None = None
    leaked: int | None = None
    boots_s: list[float] = field(default_factory=list)
    """A machine's cold boot to the end of its first command."""
    forks_s: list[float] = field(default_factory=list)
    """A fork of it to the end of its first command: the median of some, an entry a boot."""


async def race_starts(figures: Figures, contestants: Mapping[str, Contestant], rounds: int) -> None:
    """All start every command once a round, in an order that rotates. The first round is not counted."""
    names = list(contestants)
    for turn in range(rounds + 1):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            for case, argv in COMMANDS.items():
                if name in figures.missing:
                    continue
                try:
                    (launch,) = await contestants[name].launch(argv)
                except (InfrastructureError, OSError) as error:
                    figures.missing[name] = str(error)
                    continue
                if turn:
                    figures.starts.setdefault((name, case), []).append(launch)


async def race_rates(figures: Figures, contestants: Mapping[str, Contestant], rounds: int, seconds: float) -> None:
    """All start as much as can be for ``seconds``, with one launcher and with two."""
    for _ in range(rounds):
        for at_once in AT_ONCE:
            for name in [name for name in contestants if name not in figures.missing]:
                began_s, before_s = time.perf_counter(), _cpu_s()
                try:
                    launches = await contestants[name].launch(TRUE, seconds=seconds, at_once=at_once)
                except (InfrastructureError, OSError) as error:
                    figures.missing[name] = str(error)
                    continue
                per_s = len(launches) / (time.perf_counter() - began_s)
                rate = Rate(per_s, (_cpu_s() - before_s) / len(launches))
                figures.rates.setdefault((name, at_once), []).append(rate)


async def measure_live(figures: Figures, name: str, provider: SandboxProvider, rounds: int) -> None:
    """Time of a further command in a running sandbox."""
    sandbox = await provider.create({}, SPEC)
    try:
        times_s = [await _time(sandbox) for _ in range(rounds + 1)][1:]
    finally:
        await sandbox.close()
    figures.others.append({"contestant": name, "case": "exec in a live one", **spread("ran", times_s)})


async def measure_pool(
    figures: Figures, name: str, make: Callable[[Path], SandboxProvider], folder: Path, rounds: int
) -> None:
    """Time from the request to the end of the first command, if a pool has a sandbox ready."""
    pool = SandboxPool(make(folder), WarmPoolLimits(warm=1))
    times_s: list[float] = []
    try:
        for _ in range(rounds + 1):
            times_s.append(await _first_command(pool, SPEC))
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                while not pool.stats().warm:
                    await asyncio.sleep(0.01)
    finally:
        await pool.close()
    figures.others.append({"contestant": name, "case": "true, from a warm pool", **spread("ran", times_s[1:])})


async def measure_crowd(figures: Figures, name: str, provider: SandboxProvider, count: int) -> None:
    """Start many sandboxes at once. Counts those that answer while all of them exist."""
    gauge = MemoryGauge()
    before = gauge.read().available_bytes
    began_s = time.perf_counter()
    crowd: list[Sandbox] = []
    try:
        await _spread_out(count, lambda: _join(crowd, provider))
        started_s, taken = time.perf_counter() - began_s, before - gauge.read().available_bytes
        stats = [await sandbox.stats() for sandbox in crowd[:: max(1, count // 50)]]
        times_s: list[float] = []
        waiting = list(crowd)
        await _spread_out(count, lambda: _answer(waiting, times_s))
    finally:
        began_s = time.perf_counter()
        closing = list(crowd)
        await _spread_out(len(crowd), lambda: closing.pop().close())
    figures.alive = len(times_s)
    figures.others.append(
        {
            "contestant": name,
            "case": f"{count} alive",
            "per_s": round(count / started_s, 1),
            "mb_each": round(taken / count / 1e6, 2),
            "mb_own": round(statistics.mean(stat.memory_bytes for stat in stats) / 1e6, 2),
            **spread("ran", times_s),
            "clean_ms": round((time.perf_counter() - began_s) / count * 1e3, 2),
        }
    )


async def measure_cycles(
    figures: Figures,
    name: str,
    make: Callable[[Path], SandboxProvider],
    folder: Path,
    cycles: int,
    settle_s: float = SETTLE_S,
) -> None:
    """Resources that exist after many sandboxes but not after a few, and those left by the closed provider."""
    with Remainder(folder) as remainder:
        empty = remainder.count()
        provider = make(folder)
        began_s = time.perf_counter()
        try:
            await _spread_out(WARM_UP, lambda: _cycle(provider))
            await asyncio.sleep(min(settle_s, 1.0))
            few = remainder.count()
            began_s = time.perf_counter()
            await _spread_out(cycles, lambda: _cycle(provider))
            took_s = time.perf_counter() - began_s
            grown = (await _settled(remainder, few.total, settle_s)).beyond(few)
        finally:
            await provider.close()
        left = (await _settled(remainder, empty.total, settle_s)).beyond(empty)
    figures.leaked = grown.total + left.total
    figures.others.append(
        {
            "contestant": name,
            "case": f"{cycles} cycles with daemons",
            "per_s": round(cycles / took_s, 1),
            "grown": {**asdict(grown)},
            "left": {**asdict(left)},
        }
    )


async def measure_machines(
    figures: Figures, name: str, make: Callable[[Path], SandboxProvider], folder: Path, boots: int
) -> None:
    """Cold boots, each of a machine of a size that none had before, forks of each, and of one that lives.

    A boot counts until the first command has ended, with all that the provider does to fork from it later.
    """
    provider = make(folder)
    live_s: list[float] = []
    try:
        claims = await provider.capabilities()  # whatever is found out once is found out now
        for number in range(1, boots + 1):
            size_bytes = SPEC.limits.memory_bytes + number * SIZE_STEP_BYTES
            spec = replace(SPEC, limits=replace(SPEC.limits, memory_bytes=size_bytes))
            figures.boots_s.append(await _first_command(provider, spec))
            figures.forks_s.append(statistics.median([await _first_command(provider, spec) for _ in range(FORKS)]))
            if Capability.LIVE_FORK in claims:
                live_s.append(await _fork_live(provider, spec))
    finally:
        await provider.close()
    for case, times_s in (
        ("cold boot to first command", figures.boots_s),
        ("fork to first command", figures.forks_s),
        ("fork of a live one to first command", live_s),
    ):
        if times_s:
            figures.others.append({"contestant": name, "case": case, **spread("ran", times_s)})


async def _join(crowd: list[Sandbox], provider: SandboxProvider) -> None:
    crowd.append(await provider.create({}, SPEC))


async def _answer(waiting: list[Sandbox], times_s: list[float]) -> None:
    times_s.append(await _time(waiting.pop()))


async def _cycle(provider: SandboxProvider) -> None:
    sandbox = await provider.create({"file": "x"}, SPEC)
    try:
        await sandbox.exec(DAEMONS, timeout_s=COMMAND_TIMEOUT_S)
    finally:
        await sandbox.close()


async def _first_command(provider: SandboxProvider, spec: SandboxSpec) -> float:
    began_s = time.perf_counter()
    sandbox = await provider.create({}, spec)
    try:
        await _time(sandbox)
        return time.perf_counter() - began_s
    finally:
        await sandbox.close()


async def _fork_live(provider: SandboxProvider, spec: SandboxSpec) -> float:
    sandbox = await provider.create({}, spec)
    copies: Sequence[Sandbox] = ()
    try:
        began_s = time.perf_counter()
        copies = await sandbox.fork()
        await _time(copies[0])
        return time.perf_counter() - began_s
    finally:
        for one in (*copies, sandbox):
            await one.close()


async def _time(sandbox: Sandbox) -> float:
    """Seconds for a command that does nothing. Raises when it does not run."""
    began_s = time.perf_counter()
    result = await sandbox.exec(TRUE, timeout_s=COMMAND_TIMEOUT_S)
    if result.exit_code:
        raise InfrastructureError(f"{TRUE[0]} ended with {result.exit_code}: {result.stderr.strip()}")
    return time.perf_counter() - began_s


async def _spread_out(count: int, work: Callable[[], Awaitable[None]]) -> None:
    """Do something ``count`` times, as many at once as the fastest rate has launchers."""
    left = iter(range(count))

    async def one_after_the_other() -> None:
        for _ in left:
            await work()

    async with asyncio.TaskGroup() as group:
        for _ in range(max(AT_ONCE)):
            group.create_task(one_after_the_other())


async def _settled(remainder: Remainder, expected: int, settle_s: float) -> Remains:
    """Resources that exist once they are no more than expected, or after a timeout."""
    ends_s = time.perf_counter() + settle_s
    while (remains := remainder.count()).total > expected and time.perf_counter() < ends_s:
        await asyncio.sleep(0.1)
    return remains


def _cpu_s() -> float:
    """Processor seconds of this process and all below it so far; one contestant runs at a time."""
    return usage.cpu_s(usage.family(os.getpid()))


def spread(name: str, times_s: Sequence[float]) -> dict[str, Json]:
    """Median, 90th percentile and minimum of some times, in milliseconds."""
    in_order = sorted(times_s)
    return {
        f"{name}_ms": round(statistics.median(in_order) * 1e3, 2),
        f"{name}_p90_ms": round(in_order[math.ceil(0.9 * len(in_order)) - 1] * 1e3, 2),
        f"{name}_min_ms": round(in_order[0] * 1e3, 2),
    }

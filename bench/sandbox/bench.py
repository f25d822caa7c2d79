"""`bench sandbox`: what a sandbox costs to start, to keep and to remove, beside other people's.

    starts      all in turn: overlay, command, removal                           start_vs_bwrap_overlay,
                                                                                      ns start + exec vs crun
    rates       all in turn: starts a second, one and two at a time              starts_vs_podman
    live        another command in a sandbox that runs already                        (ours alone)
    pool        a first command where a warm pool has a sandbox ready                 (``ns`` alone)
    crowd       a thousand of ``ns`` at once, each of which answers                   alive
    cycles      thousands of ``ns``, each with two daemons, then counted: what stays  leaked
    machines    a real machine's cold boot, and forks of it                           vm_fork_vs_cold_boot

A figure is the median over rounds, a ratio the median of the rounds' ratios. All are in memory where the machine lets
us, see its ``/usr`` and have an overlay of their own. Who cannot run is a row with the reason. CPU time is what a start
costs on a machine that is busy with others, too; of processes that leave their parents, as podman's do, it knows
nothing.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from bench.options import add_contestants, names
from bench.report import Goal, envelope, heading, so_far
from bench.sandbox.contestants import (
    CONTESTANTS,
    NS,
    PROVIDERS,
    QEMU,
    Contestant,
    ProgramContestant,
    ProviderContestant,
    unbooted_provider,
)
from bench.sandbox.measures import (
    AT_ONCE,
    COMMANDS,
    Figures,
    Rate,
    measure_crowd,
    measure_cycles,
    measure_live,
    measure_machines,
    measure_pool,
    race_rates,
    race_starts,
    spread,
)
from bench.sandbox.programs import PROGRAMS, Launch, Launcher
from bench.tables import draw, page, results_of
from etude.errors import EtudeError, UserError
from etude.protocols import SandboxProvider
from etude.types import Json

MEMORY = Path("/dev/shm")
BWRAP, BWRAP_AT_BEST, CRUN, PODMAN = "bwrap+overlay", "bwrap+syscalls", "crun+exec", "podman"
LIVE, POOL, CROWD, CYCLES, MACHINES = "live", "pool", "crowd", "cycles", "machines"
"""Cases that only our providers support."""
JUDGED = "true"
"""The command whose start is judged."""
FORK_GOAL_MS = 300.0
"""Maximum time from a fork to the first command; printed beside the ratio."""

Case = TypeVar("Case")
Figure = TypeVar("Figure")

START_EXEC_VS_CRUN = Goal(
    "ns start + exec vs crun", "at least", 2.0, "Median time until a sandbox has run `true`, crun's over ours."
)
START_VS_BWRAP = Goal(
    "start_vs_bwrap_overlay",
    "at most",
    0.5,
    "Median time until a sandbox has run `true` and is removed, over that of bubblewrap with an overlay.",
)
STARTS_VS_PODMAN = Goal(
    "starts_vs_podman",
    "at least",
    5.0,
    "Sandboxes started per second, over podman's; the worst of one and two at a time.",
)
ALIVE = Goal("alive", "at least", 1000.0, "Sandboxes that exist at once and all answer.")
LEAKED = Goal(
    "leaked",
    "at most",
    0.0,
    "Processes, mounts, control groups and folders that are left after thousands of sandboxes.",
)
FORK_VS_BOOT = Goal(
    "vm_fork_vs_cold_boot",
    "at least",
    20.0,
    "Median time to boot a virtual machine, over the time to fork one, both until a command has run.",
)
_COLUMNS = ("contestant", "ran_ms", "ran_p90_ms", "ran_min_ms", "whole_ms", "clean_ms", "per_s", "cpu_ms", "mb_each",
            "mb_own")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """Options of the measurement."""

    contestants: tuple[str, ...] = CONTESTANTS
    rounds: int = 20
    """Rounds of starts; rates have a quarter of them."""
    seconds: float = 3.0
    """Duration of a rate measurement."""
    alive: int = 1000
    """Sandboxes of ``ns`` at once."""
    cycles: int = 10_000
    """Sandboxes of ``ns`` that come and go."""
    boots: int = 3
    """Cold boots of a machine."""

    def __post_init__(self) -> None:
        if unknown := sorted({*self.contestants} - {*CONTESTANTS}):
            raise UserError(f"bench sandbox: no contestant {unknown[0]!r}; there are {', '.join(CONTESTANTS)}")
        for name in ("rounds", "alive", "cycles", "boots"):
            if getattr(self, name) < 1:
                raise UserError(f"bench sandbox: {name} is {getattr(self, name)}; expected at least 1")


def sandbox_options(
    contestants: tuple[str, ...] | None = None, *, quick: bool = False, cycles: int | None = None
) -> SandboxOptions:
    """Options of a call; ``None`` stands for all contestants, or all except virtual machines if ``quick``.

    A quick call checks that everything runs, not its speed. Raises :class:`~etude.errors.UserError` for invalid
    options.
    """
    chosen = SandboxOptions(contestants=contestants or CONTESTANTS)
    if quick:
        named = contestants or tuple(name for name in CONTESTANTS if name != QEMU)
        chosen = SandboxOptions(contestants=named, rounds=2, seconds=0.2, alive=20, cycles=50, boots=1)
    return chosen if cycles is None else replace(chosen, cycles=cycles)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_contestants(parser)
    parser.add_argument("--cycles", type=int, help="of start and kill, before looking for leaks")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    chosen = names(options.contestants)
    return bench_sandbox(sandbox_options(chosen, quick=options.quick, cycles=options.cycles))


def bench_sandbox(options: SandboxOptions | None = None) -> dict[str, Json]:
    """Measure and return the bench object; contestants that cannot run, or fail, are rows with the reason."""
    chosen = options or SandboxOptions()
    began_s = time.monotonic()
    parent = MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="etude-bench-", dir=parent) as scratch:
        Path(scratch).chmod(0o711)  # sandboxes of other users must get to theirs
        figures = Figures()
        with so_far() as measured:
            asyncio.run(_measure(chosen, Path(scratch), figures))
    return envelope(
        "sandbox",
        time.monotonic() - began_s,
        {"rounds": chosen.rounds, "results": list(rows_of(figures, chosen)), "goals": judged(figures)},
        interrupted=measured.interrupted,
    )


def table(result: dict[str, Json]) -> str:
    """Tables of starts, rates and the rest, then leaks, goals and missing contestants."""
    rows = results_of(result)
    measured = [row for row in rows if not row.get("missing")]
    notes = [f"{row['case']}: {name} {row[name]}" for row in measured for name in ("grown", "left") if name in row]
    return page(result, draw(heading(result), measured, _COLUMNS, under="case"), notes=notes)


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def _measure(options: SandboxOptions, scratch: Path, figures: Figures) -> None:
    if NS in options.contestants:
        (scratch / "cycles").mkdir()
        cycles = measure_cycles(figures, NS, PROVIDERS[NS], scratch / "cycles", options.cycles)
        await _try(figures, NS, CYCLES, cycles)
        (scratch / "pool").mkdir()
        pool = measure_pool(figures, NS, PROVIDERS[NS], scratch / "pool", options.rounds)
        await _try(figures, NS, POOL, pool)
    async with AsyncExitStack() as stack:
        providers = {
            name: provider
            for name in PROVIDERS
            if name in options.contestants and (provider := _open(stack, figures, name, scratch)) is not None
        }
        contestants: dict[str, Contestant] = {
            name: ProviderContestant(name, provider) for name, provider in providers.items()
        }
        contestants |= _programs(stack, figures, options.contestants, scratch)
        sys.stderr.write("starts and rates\n")
        await race_starts(figures, contestants, options.rounds)
        await race_rates(figures, contestants, max(1, options.rounds // 4), options.seconds)
        for name, provider in providers.items():
            await _try(figures, name, LIVE, measure_live(figures, name, provider, options.rounds))
            if name == NS:
                await _try(figures, name, CROWD, measure_crowd(figures, name, provider, options.alive))
            if name == QEMU:
                (scratch / "machines").mkdir()
                boots = measure_machines(figures, name, unbooted_provider, scratch / "machines", options.boots)
                await _try(figures, name, MACHINES, boots)


def _open(stack: AsyncExitStack, figures: Figures, name: str, scratch: Path) -> SandboxProvider | None:
    """A provider of ours with a folder of its own, unless it cannot run here."""
    (scratch / name).mkdir()
    try:
        provider = PROVIDERS[name](scratch / name)
    except EtudeError as error:
        figures.missing[name] = str(error)
        return None
    stack.push_async_callback(provider.close)
    return provider


def _programs(stack: AsyncExitStack, figures: Figures, names: Sequence[str], scratch: Path) -> Mapping[str, Contestant]:
    """Programs that can run here, all started by the same launcher."""
    named = [name for name in names if name in PROGRAMS]
    figures.missing |= {name: reason for name in named if (reason := PROGRAMS[name].missing) is not None}
    able = [name for name in named if name not in figures.missing]
    if not able:
        return {}
    (scratch / "programs").mkdir()
    launcher = stack.enter_context(Launcher(scratch / "programs"))
    return {name: ProgramContestant(name, launcher) for name in able}


async def _try(figures: Figures, name: str, what: str, measurement: Awaitable[None]) -> None:
    """Measure something of a contestant, or note why that cannot be."""
    sys.stderr.write(f"{what} of {name}\n")
    try:
        await measurement
    except* (EtudeError, OSError) as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        figures.failed[name, what] = str(first)


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def rows_of(figures: Figures, options: SandboxOptions) -> Iterator[Json]:
    """Rows that all contestants have, then those that only some have, then missing contestants."""
    for (name, case), launches in figures.starts.items():
        clean_s = [launch.whole_s - launch.ran_s for launch in launches]
        yield {
            "contestant": name,
            "case": case,
            **spread("ran", [launch.ran_s for launch in launches]),
            **spread("whole", [launch.whole_s for launch in launches]),
            "clean_ms": round(statistics.median(clean_s) * 1e3, 2),
        }
    for (name, at_once), rates in figures.rates.items():
        case = "starts, one at a time" if at_once == 1 else f"starts, {at_once} at a time"
        per_s, cpu_s = (statistics.median(figure) for figure in zip(*rates, strict=True))
        yield {"contestant": name, "case": case, "per_s": round(per_s, 1), "cpu_ms": round(cpu_s * 1e3, 1)}
    yield from figures.others
    for name in options.contestants:
        if reason := figures.missing.get(name):
            yield {"contestant": name, "case": "starts and rates", "missing": reason}
    for (name, what), reason in figures.failed.items():
        yield {"contestant": name, "case": what, "missing": reason}


def judged(figures: Figures) -> dict[str, Json]:
    """A start with its removal, beside bubblewrap's; starts a second beside podman's; and what ours alone can do."""
    starts = {
        (theirs, case): _ratios(figures.starts, (NS, case), (theirs, case), _whole_ratio)
        for theirs in (BWRAP, BWRAP_AT_BEST)
        for case in COMMANDS
    }
    rates = {
        f"{at_once} at a time": _ratios(figures.rates, (NS, at_once), (PODMAN, at_once), _rate_ratio)
        for at_once in AT_ONCE
    }
    against_crun = {case: _ratios(figures.starts, (CRUN, case), (NS, case), _ran_ratio) for case in COMMANDS}
    forks = [boot_s / fork_s for boot_s, fork_s in zip(figures.boots_s, figures.forks_s, strict=False)]
    fork_ms = round(statistics.median(figures.forks_s) * 1e3, 1) if figures.forks_s else None
    why_starts = _why(figures, NS) or _why(figures, BWRAP)
    why_crun = _why(figures, NS) or _why(figures, CRUN)
    why_rates = _why(figures, NS) or _why(figures, PODMAN)
    ratio = statistics.median(forks) if forks else None
    return {
        START_EXEC_VS_CRUN.name: START_EXEC_VS_CRUN.judge(against_crun[JUDGED], why_crun)
        | {
            "case": f"{JUDGED}, without removal",
            "each": {case: round(r, 3) for case, r in _measured(against_crun).items()},
        },
        START_VS_BWRAP.name: START_VS_BWRAP.judge(starts[BWRAP, JUDGED], why_starts)
        | {"case": f"{JUDGED}, with removal", "each": _rounded(starts)},
        STARTS_VS_PODMAN.name: STARTS_VS_PODMAN.judge_worst(_measured(rates), why_rates),
        ALIVE.name: ALIVE.judge(figures.alive, _why(figures, NS, CROWD)),
        LEAKED.name: LEAKED.judge(figures.leaked, _why(figures, NS, CYCLES)),
        FORK_VS_BOOT.name: FORK_VS_BOOT.judge(ratio, _why(figures, QEMU, MACHINES))
        | {"fork_ms": fork_ms, "fork_goal_ms": FORK_GOAL_MS},
    }


def _why(figures: Figures, name: str, what: str = "") -> str | None:
    """Why a contestant has no figure."""
    return figures.failed.get((name, what)) or figures.missing.get(name)


def _ratios(
    rounds: Mapping[Case, Sequence[Figure]], ours: Case, theirs: Case, ratio: Callable[[Figure, Figure], float]
) -> float | None:
    """The median over rounds of a ratio between ours and another contestant's."""
    if ours not in rounds or theirs not in rounds:
        return None
    return statistics.median(map(ratio, rounds[ours], rounds[theirs]))


def _ran_ratio(theirs: Launch, ours: Launch) -> float:
    return theirs.ran_s / ours.ran_s


def _whole_ratio(ours: Launch, theirs: Launch) -> float:
    return ours.whole_s / theirs.whole_s


def _rate_ratio(ours: Rate, theirs: Rate) -> float:
    return ours.per_s / theirs.per_s


def _measured(ratios: Mapping[str, float | None]) -> dict[str, float]:
    return {case: ratio for case, ratio in ratios.items() if ratio is not None}


def _rounded(ratios: Mapping[tuple[str, str], float | None]) -> dict[str, Json]:
    return {f"{theirs}, {case}": round(ratio, 3) for (theirs, case), ratio in ratios.items() if ratio is not None}

"""`bench simulation`: seeded faults in virtual time, over the code of production.

    planted bug, seed by seed ──▶ the first seed that finds it: one must
    seed ──▶ scenario ──▶ run under fire ──▶ violations: there must be none

A seed draws a tiny run, its machines and what goes wrong in it (:mod:`bench.simulation.scenario`); all of it happens in
virtual time over dispatcher, runner, schedule, breaker, admission, ledger, leases, regions, pools and routers as they
are. Everything is judged while it runs and at its end (:mod:`bench.simulation.invariants`). A seed that fails is played
again by ``--seed``, event by event the same. ``python -m bench faults`` plays real processes: slower, with less luck at
reaching a rare order of events, and without a model in between.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.report import Goal, envelope, heading, so_far
from bench.simulation.planted import PLANTED, planted
from bench.simulation.run import MEMORY, Outcome, empty_ledger, play
from bench.simulation.scenario import draw
from bench.tables import draw as draw_table
from bench.tables import page, results_of
from etude.errors import UserError
from etude.types import Json

SEEDS = 1000
QUICK_SEEDS = 20
PLANT_SEEDS = 100
"""Seeds that are tried with a planted bug before it counts as not found."""
PROGRESS_S = 10.0
"""Between two lines of progress."""
MOST_LISTED = 20
"""Failing seeds whose violations are listed."""
VIOLATIONS = Goal("violations", "at most", 0, "Violations of the rules of a run, over all seeds.")
DETECTED = Goal("planted_found", "at least", len(PLANTED), "Planted bugs that a seed finds.")
_COLUMNS = ("case", "injected", "runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """The seeds to play."""

    seeds: int = SEEDS
    first: int = 0
    plants: bool = True
    """True to also search for planted bugs."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    parser.add_argument("--seeds", type=int, help=f"how many (default: {SEEDS})")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one alone, and tell what happened")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds, no planted bugs")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    if options.seed is not None:
        return bench_simulation(SimulationOptions(seeds=1, first=options.seed, plants=False), verbose=True)
    seeds = options.seeds if options.seeds is not None else QUICK_SEEDS if options.quick else SEEDS
    return bench_simulation(SimulationOptions(seeds=seeds, first=options.first, plants=not options.quick))


def bench_simulation(options: SimulationOptions, *, verbose: bool = False) -> dict[str, Json]:
    """Play all seeds and return the bench object; ``verbose``: each event of a run goes to stderr.

    Raises :class:`~etude.errors.UserError` for seeds that cannot be.
    """
    if options.seeds < 1 or options.first < 0:
        raise UserError(f"bench simulation: --seeds {options.seeds} --first {options.first}: 1 and 0 at least")
    began_s, tally, first_seeds = time.monotonic(), Tally(), dict[str, Json]()
    seeds_s = 0.0
    with _scratch() as (folder, ledger), so_far() as measured:
        for name in PLANTED if options.plants else ():
            first_seeds[name] = first_seed(name, folder, ledger)
            sys.stderr.write(f"planted: {name}: found by seed {first_seeds[name]}\n")
        seeds_began_s = time.monotonic()
        for seed in range(options.first, options.first + options.seeds):
            outcome = play(draw(seed), folder, ledger)
            tally.add(outcome)
            seeds_s = time.monotonic() - seeds_began_s
            if verbose:
                sys.stderr.write(described(outcome))
            tally.write_progress(options.seeds, seeds_s)
    figures = summary(tally, options, first_seeds, seeds_s)
    return envelope("simulation", time.monotonic() - began_s, figures, interrupted=measured.interrupted)


class Tally:
    """The outcomes of seeds, counted."""

    def __init__(self) -> None:
        self.seeds = 0
        self.injected = Counter[str]()
        self.runs = Counter[str]()
        """Kind of fault → seeds in which it came."""
        self.failing: list[Outcome] = []
        self.restarts = 0
        self.virtual_s = 0.0
        self._written_s = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one."""
        kinds = Counter(words.partition(" ")[0] for _, words in outcome.injected)
        self.seeds += 1
        self.injected += kinds
        self.runs.update(kinds.keys())
        self.restarts += outcome.restarts
        self.virtual_s += outcome.seconds
        if outcome.violations:
            self.failing.append(outcome)
            sys.stderr.write(f"seed {outcome.seed}: {outcome.violations[0].rule}: {outcome.violations[0].what}\n")

    def write_progress(self, seeds: int, elapsed_s: float) -> None:
        """Write progress, now and then."""
        if elapsed_s - self._written_s >= PROGRESS_S:
            self._written_s = elapsed_s
            rate = 60 * self.seeds / elapsed_s
            sys.stderr.write(f"{self.seeds} of {seeds} seeds, {rate:.0f} a minute, {len(self.failing)} failing\n")


def first_seed(name: str, folder: Path, ledger: Path) -> int | None:
    """The first seed that finds a planted bug; ``None`` where it takes more than may be tried."""
    for seed in range(PLANT_SEEDS):
        with planted(name):
            outcome = play(draw(seed), folder, ledger)
        if outcome.violations:
            return seed
    return None


def summary(
    tally: Tally, options: SimulationOptions, first_seeds: Mapping[str, Json], seeds_s: float
) -> dict[str, Json]:
    """The figures of the bench object."""
    violations = sum(len(outcome.violations) for outcome in tally.failing)
    detected = sum(seed is not None for seed in first_seeds.values())
    goals: dict[str, Json] = {VIOLATIONS.name: VIOLATIONS.judge(float(violations) if tally.seeds else None)}
    if options.plants:
        goals[DETECTED.name] = DETECTED.judge(float(detected) if first_seeds else None)
    return {
        "first": options.first,
        "seeds": tally.seeds,
        "violations": violations,
        "failing": [outcome.seed for outcome in tally.failing],
        "findings": [
            f"seed {outcome.seed}: {violation.rule}: {violation.what}"
            for outcome in tally.failing[:MOST_LISTED]
            for violation in outcome.violations
        ],
        "planted": dict(first_seeds),
        "planted_found": detected,
        "seeds_per_minute": round(60 * tally.seeds / seeds_s, 1) if seeds_s else None,
        "injected": tally.injected.total(),
        "restarts": tally.restarts,
        "virtual_s": round(tally.virtual_s),
        "results": [
            {"contestant": "etude", "case": kind, "injected": count, "runs": tally.runs[kind]}
            for kind, count in sorted(tally.injected.items())
        ],
        "goals": goals,
    }


def table(result: dict[str, Json]) -> str:
    """Faults by their kind, then findings, planted bugs and goals."""
    planted_bugs, findings = result["planted"], result["findings"]
    assert isinstance(planted_bugs, dict) and isinstance(findings, list)
    title = heading(result, f"{result['seeds']} seeds from {result['first']}", f"{result['seeds_per_minute']} a minute")
    notes = [f"planted: {name}: seed {seed}" for name, seed in planted_bugs.items()]
    notes += [f"finding: {finding}" for finding in findings]
    return page(result, draw_table(title, results_of(result), _COLUMNS), notes=notes)


def described(outcome: Outcome) -> str:
    """Record of a run, for people."""
    lines: Sequence[str] = (
        draw(outcome.seed).described,
        *(f"{at_s:8.3f} s  {words}" for at_s, words in outcome.injected),
        *(f"violation: {violation.rule}: {violation.what}" for violation in outcome.violations),
        f"{outcome.seconds:8.3f} s  the end, after {outcome.restarts} restarts; events {outcome.digest}",
    )
    return "".join(f"{line}\n" for line in lines)


@contextmanager
def _scratch() -> Iterator[tuple[Path, Path]]:
    """A folder in memory with an empty ledger; what production logs about faults is left out meanwhile."""
    memory = MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else None
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="etude-simulation-", dir=memory) as name:
            yield Path(name), empty_ledger(Path(name))
    finally:
        logging.disable(before)

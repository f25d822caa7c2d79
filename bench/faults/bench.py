"""`bench faults`: a thousand things that go wrong, and whether anything is lost, doubled or wrongly scored.

    seed ──▶ plan ──▶ one tiny mid-trained start ──copied──▶ run under fire ──▶ audit ──▶ rows and goals
                                                     └─────────── next ◀──────────┘

Short runs of real processes, each wronged some 25 times at points of its progress, each resumed until it is done, each
judged by what it left. Every run's verdict is written down when it is over, so that a campaign that was stopped goes on
where it was. Goals: ``lost``, ``double_trained``, ``infra_scored_zero`` and ``unbounded_waits`` are 0.

Every other run keeps its ledger in a PostgreSQL of the campaign's own, where that is installed, and is at a URL, so
that its machine can be lost with all that its disk had. Some run on a fleet, where there can be one: two regions, each
of machines that are lost, cut off and left without a supervisor.

Not among the faults: bytes changed inside the committed frames of SQLite's log. Its checksums end the log there, as
after a loss of power, and no reader can tell that there was more.
"""

import argparse
import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import orjson

from bench.faults.audit import NEVER, Finding, Wrong, audit
from bench.faults.chaos_run import Bounds, ChaosRun, FaultRecord, RunLog
from bench.faults.database import Database, programs
from bench.faults.evidence import read_evidence
from bench.faults.fleet_run import PLAN, FleetInjector, FleetSupervisors, begin_run
from bench.faults.injector import Injector, Site
from bench.faults.link import Link
from bench.faults.machine import Machine, compile_preload, missing
from bench.faults.schedule import Extent, FaultSchedule, Kind, Place, RunSize, plan
from bench.faults.supervisor import Supervisor
from bench.faults.verdicts import CAMPAIGN, Verdict, VerdictStore
from bench.fleet import machines
from bench.fleet.audit import audit_at_home
from bench.programs import environment
from bench.report import envelope, so_far
from bench.tables import results_page
from bench.tiny_recipe import GROUP_SIZE, tiny_recipe
from etude.config.loading import dump_toml, parse_config
from etude.config.recipe import RunConfig
from etude.errors import DamagedError, InfrastructureError, UserError
from etude.run.folder import RunFolder, start_from
from etude.run.keys import RUN_KEY_VARIABLE
from etude.run.launchers.fork_server import THREADING
from etude.run.machine_info import source_commit
from etude.run.process_name import ENGINE, GATEWAY
from etude.run.working_folder import MODEL, RECIPE_FILES, WORK_VARIABLE, keep, working_path
from etude.types import Json

GROUPS = 2
"""Groups per step: small batches, so that many steps and claims are in progress while faults happen."""
ROLLOUTS_PER_FAULT, ROLLOUTS_PER_FLEET_FAULT = 4, 16
"""A run grades this many for each of its faults: enough to get on between two of them; a fleet's take longer to get
over.
"""
FAULTS = 1000
QUICK_FAULTS = 50
"""Number of faults in a quick campaign: every kind at least once."""
PER_RUN, PER_FLEET_RUN = 25, 10
"""Faults of one run: the start of its processes is paid for by many."""
FLEET_BOUNDS = Bounds(still_s=600.0)
"""A fleet has twice the processes, and deadlines for long distances."""
SILENT_S = 10.0
"""Longest silence of its processes: much more than a step takes, and less than a process is frozen for."""
FLEET_SILENT_S = 60.0
"""On a fleet, which no fault is about: its many processes share the cores of one machine."""
START_S = 600.0
"""Time limit of either part; some seconds on an idle machine."""
MEMORY = Path("/dev/shm")
LINKS = (ENGINE, GATEWAY)
"""Processes behind a link."""
_COLUMNS = ("case", "injected", "runs", "recovered", "went_on", "restarted", "resumed", "median_s", "longest_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """Size of a campaign, and the folder that stores it."""

    faults: int = FAULTS
    seed: int = 0
    kinds: tuple[Kind, ...] = tuple(Kind)
    """Kinds of faults that may happen."""
    out: Path | None = None
    """Keeps what happens, the verdicts of runs, and those in which something was wrong; ``None`` keeps nothing."""

    def __post_init__(self) -> None:
        if self.faults < 1 or self.seed < 0:
            raise UserError(
                f"bench faults: {self.faults} faults, seed {self.seed}: expected one or more, and 0 or more"
            )

    @property
    def extent(self) -> Extent:
        """The size of the plan."""
        return Extent(
            faults=self.faults,
            size=run_size(min(PER_RUN, self.faults), ROLLOUTS_PER_FAULT),
            fleet_size=None
            if fleets_missing() is not None
            else run_size(min(PER_FLEET_RUN, self.faults), ROLLOUTS_PER_FLEET_FAULT),
            server=programs() is not None,
            only=frozenset(self.kinds),
        )

    @property
    def described(self) -> dict[str, Json]:
        """Properties that identify the campaign."""
        return {"faults": self.faults, "seed": self.seed, "kinds": [kind.value for kind in self.kinds]}


def fault_options(
    faults: int | None = None,
    *,
    seed: int = 0,
    kinds: Sequence[str] = (),
    out: Path | None = None,
    quick: bool = False,
) -> FaultOptions:
    """Options of a call; a campaign is stored in ``runs`` unless ``out`` is given. Raises for invalid options."""
    chosen = faults if faults is not None else QUICK_FAULTS if quick else FAULTS
    if unknown := sorted(set(kinds) - set(Kind)):
        raise UserError(f"bench faults: --kinds {unknown[0]}: expected some of {', '.join(Kind)}")
    only = tuple(kind for kind in Kind if kind in (kinds or Kind))
    name = f"bench-faults-s{seed}-{chosen}{'-some' if kinds else ''}"
    return FaultOptions(faults=chosen, seed=seed, kinds=only, out=out or Path("runs") / name)


def options_of(folder: Path) -> FaultOptions:
    """The options of a campaign that is kept in a folder. Raises :class:`~etude.errors.UserError` for another one."""
    try:
        described = orjson.loads((folder / CAMPAIGN).read_bytes())
        return fault_options(described["faults"], seed=described["seed"], kinds=described["kinds"], out=folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--resume {folder}: no campaign can be read there: {error}") from error


def fleets_missing() -> str | None:
    """Why no run can be on a fleet here; ``None`` where it can."""
    return machines.missing()


def run_size(faults: int, rollouts_per_fault: int) -> RunSize:
    """The size of a run with that many faults."""
    return RunSize(faults=faults, rollouts=steps_of(faults, rollouts_per_fault) * GROUPS * GROUP_SIZE)


def steps_of(faults: int, rollouts_per_fault: int = ROLLOUTS_PER_FAULT) -> int:
    """Optimiser steps of a run with that many faults."""
    return max(3, -(-faults * rollouts_per_fault // (GROUPS * GROUP_SIZE)))


def recipe(seed: int, steps: int, ledger: str = "", *, ranks: int = 1, silent_s: float = SILENT_S) -> RunConfig:
    """The smallest run that has everything that can be lost, with deadlines that a campaign can wait for.

    ``ledger`` is the URL of its ledger's server; empty: it is a file. ``ranks`` train together; a process may be silent
    for ``silent_s``.
    """
    tree = tiny_recipe(
        "faults",
        parallel={"dp": ranks},
        rollouts={"groups_per_step": GROUPS, "timeout_s": 8.0},
        harness={"options": {"max_turns": 4, "turn_timeout_s": 6.0}},
        gateway={"engine_timeout_s": 5.0},
        trainer={"steps": steps, "checkpoint_steps": 1 + seed % 3},
        # Something to learn before any success.
        effort={"weight": 0.1, "prices": {"call_tokens": 1.0, "final_tokens": 1.0}},
        ledger={"url": ledger},
    )
    return parse_config({**tree, "seed": seed, "heartbeat_timeout_s": silent_s}, source="bench faults")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    parser.add_argument("--faults", type=int, help="how many (default: 1000, or 50 with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="of what goes wrong and when")
    parser.add_argument("--kinds", nargs="+", default=[], metavar="KIND", help="what may happen (default: all)")
    parser.add_argument("--out", type=Path, help="keeps what happens (default: runs/bench-faults-…)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with the campaign that is kept there")
    parser.add_argument("--quick", action="store_true", help="see that it runs, in minutes")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    if options.resume is not None:
        if options.faults is not None or options.seed or options.kinds or options.out is not None or options.quick:
            raise UserError("bench faults: --resume goes alone: a campaign keeps its faults, seed, kinds and place")
        return bench_faults(options_of(options.resume))
    kinds, quick = options.kinds, options.quick
    return bench_faults(fault_options(options.faults, seed=options.seed, kinds=kinds, out=options.out, quick=quick))


def bench_faults(options: FaultOptions | None = None) -> dict[str, Json]:
    """Run the campaign, or the rest of it, and return the bench object; progress is printed on stderr.

    Raises :class:`~etude.errors.UserError` if faults cannot be injected here, or ``out`` has another campaign.
    """
    chosen = options or FaultOptions()
    if (reason := missing()) is not None:
        raise UserError(f"bench faults: {reason}")
    began_s = time.monotonic()
    if not chosen.extent.kinds:
        raise UserError(f"bench faults: nothing of --kinds can happen here: {fleets_missing() or 'no PostgreSQL'}")
    schedules = plan(chosen.seed, chosen.extent)
    with tempfile.TemporaryDirectory(prefix="etude-faults-", dir=_memory()) as scratch:
        verdicts: list[Verdict] = []
        with Campaign(Path(scratch), chosen) as campaign, so_far() as measured:
            for schedule in schedules:
                verdicts.append(campaign.verdict(schedule))
                sys.stderr.write(progress_line(verdicts, len(schedules)))
            noted = campaign.noted
    figures = summary(verdicts, chosen, noted)
    return envelope("faults", time.monotonic() - began_s, figures, interrupted=measured.interrupted)


def table(result: dict[str, Json]) -> str:
    """Kinds of fault and how they were got over, then the errors that runs ended with, findings and goals."""
    endings, findings = result["endings"], result["findings"]
    assert isinstance(endings, dict) and isinstance(findings, list)
    notes = [f"endings: {times} × {text}" for text, times in endings.items()]
    notes += [f"findings: {finding}" for finding in findings]
    played = f"{result['injected']} of {result['planned']} faults, {result['noted']} with those of runs begun again"
    return results_page(result, _COLUMNS, f"seed {result['seed']}", played, notes=notes)


class Campaign:
    """Has runs go through their faults, from one start that all share; entered for as long as it has a server."""

    def __init__(self, scratch: Path, options: FaultOptions) -> None:
        """Raises :class:`~etude.errors.UserError` when ``options.out`` holds another campaign."""
        self._scratch = scratch
        self._options = options
        self._commit = source_commit()
        self._store = VerdictStore(options.out or scratch / "verdicts", options.described)
        self._library: Path | None = None
        self._model: RunFolder | None = None
        self._database: Database | None = None
        self._servers = ExitStack()
        self._key = secrets.token_hex(32)
        self._work, self._url = scratch / "work", scratch / "place"
        scratch.chmod(0o711)  # the server has a user of its own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.close()
        self._store.close()

    @property
    def noted(self) -> int:
        """Faults that were got over so far, those of runs that were stopped included."""
        return self._store.noted

    def verdict(self, schedule: FaultSchedule) -> Verdict:
        """The verdict of a run: from the store, or computed now."""
        if (stored := self._store.find(schedule.number)) is not None:
            return stored
        return (self._on_fleet if schedule.place is Place.FLEET else self._here)(schedule)

    def _here(self, schedule: FaultSchedule) -> Verdict:
        """A run on this machine."""
        database = self._served() if schedule.place is Place.URL else None
        folder = self._fresh(schedule, "" if database is None else database.url)
        log = self._scratch / "supervisor.log"
        log.write_bytes(b"")
        with ExitStack() as stack:
            links = {str(name): stack.enter_context(Link()) for name in LINKS}
            machine = Machine(folder.path, Path(folder.store), self._scratch / "page", self._preload())
            stack.callback(machine.close)
            variables = {WORK_VARIABLE: str(self._work), RUN_KEY_VARIABLE: self._key}
            site = Site(machine=machine, links=links, database=database)
            supervisor = Supervisor(folder, log, {**machine.environment, **variables})
            injector = Injector(folder, site, supervisor)
            chaos_run = ChaosRun(schedule, folder, supervisor, injector, on_recovery=self._note(schedule))
            run_log = chaos_run.run()
        if run_log.finished:
            try:
                run_log.findings += audit(read_evidence(folder, chaos_run.snapshot))
            except (DamagedError, InfrastructureError) as error:
                run_log.findings.append(Finding(Wrong.LOST, f"what the run left cannot be read: {error}"))
        verdict = self._judge(schedule, run_log, folder, log)
        shutil.rmtree(folder.path)
        shutil.rmtree(self._url, ignore_errors=True)
        return verdict

    def _on_fleet(self, schedule: FaultSchedule) -> Verdict:
        """A run on a fleet of its own. Not in memory: each of its machines has another one."""
        with tempfile.TemporaryDirectory(prefix="etude-fleet-") as place:
            scratch = Path(place)
            with machines.Fleet(PLAN, scratch) as fleet:
                seed, steps = 1 + schedule.number, self._steps(schedule)
                config = recipe(seed, steps, fleet.ledger, ranks=PLAN.trainer_nodes, silent_s=FLEET_SILENT_S)
                (scratch / "recipe.toml").write_text(dump_toml(config), encoding="utf-8")
                folder = begin_run(fleet, self._start(scratch / "start"), scratch / "recipe.toml", scratch)
                supervisors = FleetSupervisors(fleet, scratch)
                injector = FleetInjector(fleet, supervisors)
                note = self._note(schedule)
                run_log = ChaosRun(schedule, folder, supervisors, injector, FLEET_BOUNDS, note).run()
                if run_log.finished:
                    for wrong, findings in audit_at_home(fleet, scratch).items():
                        run_log.findings += [Finding(Wrong(wrong), what) for what in findings]
                return self._judge(schedule, run_log, folder, *scratch.glob("*.log"), *scratch.glob("disks/*/logs/*"))

    def _note(self, schedule: FaultSchedule) -> Callable[[FaultRecord], None]:
        return lambda record: self._store.note(schedule.number, record)

    def _judge(self, schedule: FaultSchedule, run_log: RunLog, folder: RunFolder, *logs: Path) -> Verdict:
        verdict = Verdict.of(schedule.number, len(schedule.faults), run_log, self._commit)
        self._store.put(verdict, folder, logs)
        return verdict

    def _preload(self) -> Path:
        self._library = self._library or compile_preload(self._scratch)
        return self._library

    def _served(self) -> Database:
        """The server, started when it is first needed."""
        if self._database is None:
            installed = programs()
            assert installed is not None, "no ledger is on a server where there is none"
            self._database = self._servers.enter_context(Database(installed, self._scratch / "postgres"))
        return self._database

    def _steps(self, schedule: FaultSchedule) -> int:
        """Optimiser steps of a run."""
        return self._options.extent.size_of(schedule.place).rollouts // (GROUPS * GROUP_SIZE)

    def _start(self, copy: Path | None = None) -> RunFolder:
        """The common start of all runs; or a ``copy`` of it, in a place that other machines see."""
        self._model = self._model or midtrained(self._scratch / "start", self._options.seed)
        return self._model if copy is None else RunFolder(shutil.copytree(self._model.path, copy))

    def _fresh(self, schedule: FaultSchedule, ledger: str) -> RunFolder:
        """A run that has mid-training behind it; every one has a seed, and so tasks, of its own. One whose ledger is on
        a server is at a URL.
        """
        config = recipe(1 + schedule.number, self._steps(schedule), ledger)
        url = str(self._url) if ledger else ""
        path = working_path(url, self._work) if url else self._scratch / "run"
        folder = RunFolder.create(path, config, at=url)
        start_from(self._start(), folder)
        keep(folder, *RECIPE_FILES, *MODEL)
        return folder


def midtrained(path: Path, seed: int) -> RunFolder:
    """The start that all runs of a campaign share. Raises :class:`~etude.errors.InfrastructureError`."""
    folder = RunFolder.create(path, recipe(seed, 1))
    variables = {**THREADING, **environment()}
    for process in ("midtrain", "parity"):  # the second one compiles what runs under fire shall find compiled
        command = [sys.executable, "-m", "etude", process, "--run", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False, env=variables)
        if done.returncode:
            raise InfrastructureError(f"bench faults: {process} ended with {done.returncode}: {done.stderr[-500:]}")
    return folder


# ── what came of it ─────────────────────────────────────────────────────────────────────────────────────────────────


def summary(verdicts: Sequence[Verdict], options: FaultOptions, noted: int = 0) -> dict[str, Json]:
    """The figures of the bench object; ``noted`` faults were got over, those of runs that were stopped included."""
    findings = [(verdict.run, finding) for verdict in verdicts for finding in verdict.findings]
    counts = Counter(finding.wrong for _, finding in findings)
    unfinished = [f"run {verdict.run} did not end" for verdict in verdicts if not verdict.finished]
    return {
        "seed": options.seed,
        "planned": sum(verdict.planned for verdict in verdicts),
        "injected": sum(len(verdict.faults) for verdict in verdicts),
        "noted": noted,
        "commits": list(dict.fromkeys(verdict.commit for verdict in verdicts)),
        "left_out": [kind.value for kind in options.kinds if kind not in options.extent.kinds],
        "runs": len(verdicts),
        "resumes": sum(verdict.resumes for verdict in verdicts),
        "run_seconds": round(sum(verdict.seconds for verdict in verdicts), 1),
        "results": list(rows_of(verdicts)),
        "endings": dict(Counter(_stripped(ending) for verdict in verdicts for ending in verdict.endings).most_common()),
        "findings": [*(f"run {run}: {finding.wrong}: {finding.what}" for run, finding in findings), *unfinished],
        "goals": {goal.name: goal.judge(float(counts[Wrong(goal.name)])) for goal in NEVER},
    }


def rows_of(verdicts: Sequence[Verdict]) -> Iterator[dict[str, Json]]:
    """One row for each kind of fault that came."""
    for kind in Kind:
        got = [fault for verdict in verdicts for fault in verdict.faults if fault.kind == kind]
        if not got:
            continue
        seconds = [fault.seconds for fault in got if fault.seconds is not None]
        how = Counter(fault.how for fault in got)
        yield {
            "contestant": "etude",
            "case": kind.value,
            "injected": len(got),
            "runs": sum(any(fault.kind == kind for fault in verdict.faults) for verdict in verdicts),
            "recovered": len(got) - how[""],
            "went_on": how["went on"],
            "restarted": how["restarted"],
            "resumed": how["resumed"],
            "median_s": round(statistics.median(seconds), 2) if seconds else None,
            "longest_s": round(max(seconds), 2) if seconds else None,
        }


def progress_line(verdicts: Sequence[Verdict], runs: int) -> str:
    """Progress line after each run."""
    last = verdicts[-1]
    faults = sum(len(verdict.faults) for verdict in verdicts)
    findings = sum(len(verdict.findings) for verdict in verdicts)
    return (
        f"run {len(verdicts)} of {runs}: {len(last.faults)} faults in {last.seconds:.0f} s, {last.resumes} resumes; "
        f"so far {faults} faults, {findings} findings\n"
    )


def _stripped(ending: str) -> str:
    """An error without what differs each time: digests, numbers, paths."""
    return re.sub(r"/\S+/|\b[0-9a-f]{12,}\b|\d+(\.\d+)?", "…", ending)[:120]


def _memory() -> Path | None:
    """Folder of runs: in memory if possible; no fault here is a loss of power to real disks."""
    return MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else None

"""The whole loop, on this machine or on a fleet: `etude run`.

    mid-train ──▶ parity gate ──▶ engines + gateways + trainer + rollouts, all at once ──▶ report

This process computes nothing itself. It starts the other processes, restarts those that die, shows progress and writes
the report.
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import orjson

from etude.clock import date_utc
from etude.config.fleet import FleetConfig
from etude.config.recipe import RunConfig
from etude.dashboard.page import render_page
from etude.dashboard.report import build_report
from etude.dashboard.run_metrics import RunMetrics
from etude.errors import EtudeError, InfrastructureError, RunFolderError
from etude.fleet.specs import ProcessSpec
from etude.fsync import write_whole
from etude.ledger.ledger import Ledger
from etude.run.event_copies import EventDownloads
from etude.run.events import open_events
from etude.run.fleet_changes import change_fleet
from etude.run.fleet_plan import is_gated, is_gated_early, plan_loop, plan_phase
from etude.run.fleet_scaler import FleetScaler
from etude.run.folder import RunFolder, exclusive, make_key
from etude.run.judging import check_judge
from etude.run.live_notices import LiveNotices
from etude.run.machine_info import describe_machine, source_commit
from etude.run.phase_folders import PhaseFolders, check_complete, phases_of
from etude.run.placement import RunPlacement, desired_of, place_here, place_on, remember_fleet
from etude.run.process_name import ProcessName
from etude.run.processes import PREDECESSOR_S
from etude.run.progress_display import ProgressDisplay
from etude.run.run_url import EVENTS, open_place
from etude.run.sinks import SinksProcess, check_log
from etude.run.store_outages import StoreOutages
from etude.run.suite_trials import check_suites
from etude.run.supervision import Supervisor
from etude.run.weight_log import open_log
from etude.run.working_folder import RECIPE_FILES, REPORTS, keep
from etude.telemetry.events import MemoryUsed, PhaseStarted, RunStarted
from etude.telemetry.log import EventLog, EventReader
from etude.types import Json

SUPERVISOR = ProcessName(command="supervisor")
"""The name of this process."""
POLL_S = 0.1
"""Interval at which the processes are checked."""
LEDGER_S = 5.0
"""Longest time to retry the ledger at startup, while a person is waiting."""
MEMORY_S = 2.0
"""Interval at which the processes' memory is summed."""


def run_local(
    folder: RunFolder, out: TextIO = sys.stdout, fleet: FleetConfig | None = None, page: str = ""
) -> dict[str, Json]:
    """Run the remaining part of a recipe; returns the report, which is also written to the run folder. Progress goes to
    ``out``, with the URL of the run's ``page``.

    Raises ``KeyboardInterrupt`` on Ctrl-C, or the error that ended the run, after every process has stopped. The folder
    can then be resumed, and contains the report of the work so far.
    """
    config, resumed = folder.config(), any(folder.events.glob(f"{SUPERVISOR}.jsonl"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusive(folder, str(SUPERVISOR)))
        make_key(folder)
        placement = place_here(folder, config) if fleet is None else place_on(fleet, folder)
        if fleet is not None:
            remember_fleet(folder, fleet)
        if not placement.launcher.look():  # processes that already run, on other machines, keep their endpoints
            folder.endpoints.reserve(config, wait_s=PREDECESSOR_S if resumed else 0.0)
        _check_ledger(folder, config)
        check_judge(config)
        check_suites(config)
        check_log(config)
        events = stack.enter_context(open_events(folder, SUPERVISOR, lossy=True))
        events.write(RunStarted(resumed=resumed))
        keep(folder, *RECIPE_FILES)
        sinks = stack.enter_context(SinksProcess(folder, config))  # closed after the report is written
        try:
            display = ProgressDisplay(folder.events, config, out, page, sinks.check)
            with _event_downloads(folder), display as progress:
                _play(folder, config, placement, events, progress)
        finally:
            report = write_report(folder, config)
            keep_report(folder, out)
    return report


def _event_downloads(folder: RunFolder) -> contextlib.AbstractContextManager[object]:
    """Download the events of processes on other machines while the context is open, if the run has a URL."""
    return EventDownloads(open_place(folder.url, EVENTS), folder.events) if folder.url else contextlib.nullcontext()


def keep_report(folder: RunFolder, out: TextIO) -> None:
    """Upload the report to the run's URL, if any. If that is unavailable, print that the report is only local."""
    try:
        keep(folder, *REPORTS)
    except InfrastructureError as error:
        print(f"the report is in {folder.path} only: {error}", file=out)


def _play(
    folder: RunFolder, config: RunConfig, placement: RunPlacement, events: EventLog, progress: ProgressDisplay
) -> None:
    """Run the phases one after another, then the asynchronous loop to its end."""
    lineage, run, fleet = PhaseFolders(folder), placement.run_words(folder), placement.fleet
    before = replace(placement, state=None)  # phases are not part of the fleet's desired state
    loop = placement.own_specs(plan_loop(config, fleet, run))
    with StoreOutages(folder.store, config.rollouts.max_outage_s, events, progress.update) as outages:
        is_fresh = open_log(folder, outages).latest() is None
    gate = plan_phase("parity", config, fleet, run) if is_gated(config) else ()
    if is_fresh:
        *earlier, last = lineage.pending(config) or phases_of(config)[-1:]
        for phase in earlier:
            events.write(PhaseStarted(phase=phase))
            _keep_alive(plan_phase(phase, config, fleet, run), folder, config, before, events, progress)
        events.write(PhaseStarted(phase=last))
        specs = plan_phase(last, config, fleet, run)
        if is_gated_early(config):
            specs, gate = (*specs, *gate), ()
        _keep_alive(specs, folder, config, before, events, progress)
    check_complete(lineage, config)
    is_taken_over = not placement.launcher.look().keys().isdisjoint(spec.name for spec in loop)
    if gate and not is_taken_over:  # running processes have already passed the gate
        _keep_alive(gate, folder, config, before, events, progress)
    with contextlib.ExitStack() as stack:
        if placement.state is not None:  # only now: a region's processes read the results of the phases
            placement.state.own.declare(desired_of(folder, fleet))
            stack.enter_context(placement.state).start()
        _keep_alive(loop, folder, config, placement, events, progress)


def _check_ledger(folder: RunFolder, config: RunConfig) -> None:
    """Check now, rather than after mid-training, that the ledger can be opened."""
    hasty = config.ledger.model_copy(update={"retry_timeout_s": min(config.ledger.retry_timeout_s, LEDGER_S)})
    Ledger.open(folder.ledger, hasty).close()


def write_report(folder: RunFolder, config: RunConfig) -> dict[str, Json]:
    """Fold the run's events into ``report.json`` and ``report.html``."""
    run = RunMetrics()
    for logged in EventReader(folder.events).new():
        run.add(logged)
    report = build_report(run, config, machine=describe_machine(), date=date_utc(), commit=source_commit())
    write_whole(folder.report_json, orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    write_whole(folder.report_html, render_page(report).encode())
    return report


def _keep_alive(
    specs: Sequence[ProcessSpec],
    folder: RunFolder,
    config: RunConfig,
    placement: RunPlacement,
    events: EventLog,
    progress: ProgressDisplay,
) -> None:
    """Run processes until all finite ones are done; then stop the others."""
    supervisor = Supervisor(
        specs,
        placement,
        folder,
        events,
        progress.notice,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
    )
    memory_s, live = time.monotonic(), LiveNotices(folder, config)
    scaler = FleetScaler(placement.fleet, partial(change_fleet, folder), progress.notice)
    try:
        while not supervisor.check():
            progress.update()
            if placement.state is not None:
                scaler.look(progress.metrics, supervisor.fleet)
            for line in live.lines():
                progress.notice(line)
            if time.monotonic() - memory_s >= MEMORY_S:
                memory_s = time.monotonic()
                events.write(MemoryUsed(size_bytes=supervisor.memory_bytes))
            time.sleep(POLL_S)
    finally:
        supervisor.stop()


def create_default(config: RunConfig) -> RunFolder:
    """Create a new run in its default folder, which no other process gets. Raises as :meth:`RunFolder.create` does."""
    while True:
        place = default_out(config)
        try:
            place.mkdir(parents=True, mode=0o700)
            break
        except FileExistsError:
            continue  # another process took that name meanwhile
        except OSError as error:
            raise RunFolderError(f"cannot create {place}: {error.strerror}; choose a folder with --out") from error
    try:
        return RunFolder.create(place, config)
    except EtudeError:
        with contextlib.suppress(OSError):
            place.rmdir()  # empty: the recipe was refused
        raise


def default_out(config: RunConfig) -> Path:
    """The default run folder, ``runs/<name>-s<seed>``, with a number appended if it exists; :func:`create_default`
    may have to take the next one.
    """
    first = Path("runs") / f"{config.name}-s{config.seed}"
    candidates = (first if n == 1 else first.with_name(f"{first.name}-{n}") for n in range(1, 10_000))
    return next(path for path in candidates if not path.exists())

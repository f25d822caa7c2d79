"""The supervisor of a region other than home: runs its engines, gateways and relays by home's desired state.

    consumes   desired state at the run's URL; the run's recipe; process statuses of a launcher
    produces   observed state in the region's store
    waits for  the first desired state, which `etude run --fleet` writes after the phases before the loop
    on stop    the region's processes are stopped; if this process dies they continue, and its successor adopts them

A region that is cut off continues with its last state: no placement needs a call across regions.
"""

import time
from collections.abc import Callable

from etude.errors import ConfigError, RunFolderError
from etude.run.events import open_events
from etude.run.folder import RunFolder, exclusive
from etude.run.placement import fleet_of, place_on
from etude.run.process_name import ProcessName
from etude.run.supervision import Supervisor
from etude.run.working_folder import open_run_folder

POLL_S = 0.2
"""Interval at which the processes are checked."""
HOME_S = 2.0
"""Interval at which home is polled for a run that has not been placed yet."""


def keep_region(run: str, region: str, notify: Callable[[str], None]) -> None:
    """Supervise a region of the run at a URL, forever.

    Raises :class:`~etude.errors.ConfigError` for home or an empty region.
    """
    name = ProcessName(command="supervisor", region=region)
    folder = _placed_run(run, name, notify)
    fleet = fleet_of(folder)
    assert fleet is not None, "it was waited for"
    if region == fleet.home:
        raise ConfigError(f"--region {region} is home, whose processes `etude run --fleet` supervises")
    config, placement = folder.config(), place_on(fleet, folder, region=region)
    assert placement.state is not None, "it is on a fleet"
    with (
        exclusive(folder, str(name)),
        open_events(folder, name, lossy=True) as events,
        placement.state as state,
    ):
        state.start()
        while (desired := state.changed()) is None:
            time.sleep(POLL_S)
        supervisor = Supervisor(
            placement.specs_of(desired),
            placement,
            folder,
            events,
            notify,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )
        try:
            while True:
                supervisor.check()
                time.sleep(POLL_S)
        finally:
            supervisor.stop()


def _placed_run(run: str, name: ProcessName, notify: Callable[[str], None]) -> RunFolder:
    """The working folder of a run, once home has placed it on a fleet; while home is unavailable, the existing local
    one.
    """
    is_told = False
    while True:
        folder = None
        try:
            folder = open_run_folder(run, process=name)
            reason = "it has no fleet yet"
        except RunFolderError as error:
            reason = str(error)
        if folder is not None and fleet_of(folder) is not None:
            return folder
        if not is_told:
            notify(f"waiting for `etude run --at {run} --fleet FLEET` at home: {reason}")
            is_told = True
        time.sleep(HOME_S)

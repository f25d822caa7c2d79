"""The supervisor of one region that is not home: it keeps engines, gateways and relays there, and asks home nothing.

    consumes   the run's recipe, the fleet, what a launcher sees
    on stop    the region's processes are stopped; where this dies they go on, and its successor takes them over

A region that is cut off goes on with what it has: nobody calls anybody across regions to place something.
"""

import time
from collections.abc import Callable

from etude.config.fleet import FleetConfig
from etude.errors import ConfigError
from etude.run.events import open_events
from etude.run.fleet_plan import plan_loop
from etude.run.folder import RunFolder, exclusive
from etude.run.placement import place_on
from etude.run.process_name import ProcessName
from etude.run.supervision import Supervisor

POLL_S = 0.2
"""Interval at which the processes are looked at."""


def keep_region(folder: RunFolder, fleet: FleetConfig, region: str, notify: Callable[[str], None]) -> None:
    """Supervise a region for ever. Raises :class:`~etude.errors.ConfigError` for home, or for no region at all."""
    if region == fleet.home:
        raise ConfigError(f"--region {region} is home, whose processes `etude run --fleet` supervises")
    config, placement = folder.config(), place_on(fleet, folder, region=region)
    specs = [spec for spec in plan_loop(config, fleet, placement.run_words(folder)) if spec.region == region]
    name = ProcessName(command="supervisor", region=region)
    with exclusive(folder, str(name)), open_events(folder, config, name, lossy=True) as events:
        supervisor = Supervisor(
            specs,
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

"""Changes of the fleet of a live run: by a user (`etude fleet apply`) or by :mod:`etude.run.fleet_scaler`.

produces   a new desired state, which each region's supervisor follows within seconds
"""

from etude.config.fleet import FleetConfig
from etude.fleet.state import Desired
from etude.run.folder import FLEET_FILE, RunFolder
from etude.run.placement import desired_of, fleet_objects, remember_fleet
from etude.run.working_folder import keep


def change_fleet(folder: RunFolder, fleet: FleetConfig) -> tuple[int, Desired]:
    """Declare ``fleet`` as the desired state and save it with the run; returns the generation and the desired state.

    Raises :class:`~etude.errors.ConfigError` as :func:`~etude.run.fleet_plan.plan_loop` does.
    """
    desired = desired_of(folder, fleet)
    save_fleet(folder, fleet)
    return fleet_objects(folder).declare(desired), desired


def save_fleet(folder: RunFolder, fleet: FleetConfig) -> None:
    """Save a fleet in the run folder, and at the run's URL, if any."""
    remember_fleet(folder, fleet)
    keep(folder, FLEET_FILE)

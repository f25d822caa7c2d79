"""The machines of one run, the launcher that places its processes there, and the state of its fleet.

:mod:`etude.run.fleet_plan` decides which processes there are; :mod:`etude.run.supervision` keeps them running.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import tomli_w

from etude.config.fleet import LAUNCHERS, RENDERED, FleetConfig
from etude.config.loading import load_fleet
from etude.config.recipe import RunConfig
from etude.config.section import Section
from etude.errors import ConfigError, RunFolderError
from etude.fleet.launcher import LaunchContext, ProcessLauncher
from etude.fleet.specs import ProcessSpec
from etude.fleet.state import Desired, lasting_changes
from etude.fsync import write_whole
from etude.objects import ObjectStore
from etude.run.fleet_plan import one_machine, plan_loop
from etude.run.fleet_state import FLEET_FOLDER, FleetObjects, FleetState
from etude.run.folder import FLEET_FILE, RunFolder
from etude.run.gpus import count_gpus, divide_gpus, phase_gpus, with_gpus
from etude.run.keys import KeyRole
from etude.run.launchers.local import LocalLauncher


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlacement:
    """The fleet of a run, its launcher, and the fleet state that this supervisor follows."""

    fleet: FleetConfig
    launcher: ProcessLauncher
    region: str
    """Region of this supervisor."""
    state: FleetState | None = None
    """``None`` on one machine without a fleet."""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Process → its GPUs, if this supervisor divides them."""

    def run_words(self, folder: RunFolder) -> str:
        """The path or URL with which a process opens the run."""
        return str(folder.path.absolute()) if self.state is None else words_of(folder)

    def own_specs(self, specs: Sequence[ProcessSpec]) -> tuple[ProcessSpec, ...]:
        """The ``specs`` that this launcher places: those of all regions if it spans regions, else those of
        this region.
        """
        own = [spec for spec in specs if self.launcher.spans_regions or spec.region == self.region]
        return with_gpus(own, self.gpus)

    def specs_of(self, desired: Desired) -> tuple[ProcessSpec, ...]:
        """The specs of a newer desired state. Raises :class:`~etude.errors.ConfigError` if the change needs a restart
        of the supervisor.
        """
        if changed := lasting_changes(self.fleet, desired.fleet):
            raise ConfigError(f"{', '.join(changed)} of the fleet changed: start the supervisor of {self.region} again")
        return self.own_specs(desired.specs)


def place_here(folder: RunFolder, config: RunConfig) -> RunPlacement:
    """Place all processes on this machine. Raises :class:`~etude.errors.ConfigError` if it has too few GPUs."""
    fleet = one_machine(config)
    launcher = LocalLauncher(Section(), LaunchContext(run="", folder=folder.path))
    count = count_gpus(config)
    shares = divide_gpus(config, count)
    shares |= phase_gpus(config, shares, count)
    return RunPlacement(fleet=fleet, region=fleet.home, launcher=launcher, gpus=shares)


def place_on(fleet: FleetConfig, folder: RunFolder, *, region: str = "") -> RunPlacement:
    """Place processes on a fleet: those of ``region`` (default: home), and of all regions that the launcher reaches.

    Raises :class:`~etude.errors.ConfigError` for a launcher that cannot be created, or that starts processes itself
    from files.
    """
    if fleet.launcher in RENDERED:
        raise ConfigError(
            f"launcher = {fleet.launcher!r}: it starts and keeps processes itself, from files: create the run with "
            f"`etude fleet create FLEET RECIPE --ledger URL`, and the files with `etude fleet render FLEET RECIPE`"
        )
    if region and region not in fleet.regions_by_name:
        raise ConfigError(f"--region {region}: the fleet has {', '.join(fleet.regions_by_name)}")
    context = LaunchContext(run=run_id(folder.url or str(folder.path.absolute())), folder=folder.path)
    try:
        launcher = cast("ProcessLauncher", LAUNCHERS.make(fleet.launcher, fleet.options, context))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    state = open_state(folder, "" if region == fleet.home else region)
    return RunPlacement(fleet=fleet, region=region or fleet.home, launcher=launcher, state=state)


def desired_of(folder: RunFolder, fleet: FleetConfig) -> Desired:
    """The desired state of a run on a fleet. Raises :class:`~etude.errors.ConfigError` as :func:`plan_loop` does."""
    return Desired(fleet=fleet, specs=plan_loop(folder.config(), fleet, words_of(folder)))


def words_of(folder: RunFolder) -> str:
    """The path or URL with which a process on a fleet opens the run: its URL, if it has one, since each machine has its
    own working folder; else its folder.
    """
    return folder.url or str(folder.path.absolute())


def fleet_of(folder: RunFolder) -> FleetConfig | None:
    """The fleet that a run was last placed on; ``None`` for a run on one machine."""
    file = folder.path / FLEET_FILE
    return load_fleet(file) if file.is_file() else None


def remember_fleet(folder: RunFolder, fleet: FleetConfig) -> None:
    """Save a fleet in the run folder, so that ``--resume`` finds it."""
    write_whole(folder.path / FLEET_FILE, tomli_w.dumps(fleet.model_dump(mode="json")).encode())


def check_change(folder: RunFolder, fleet: FleetConfig) -> None:
    """Raise :class:`~etude.errors.ConfigError` if a live run on a fleet cannot change to ``fleet``."""
    before = fleet_of(folder)
    if before is None:
        raise ConfigError(f"{folder.name} is on one machine: place it with `etude run --resume {folder.name} --fleet`")
    if changed := lasting_changes(before, fleet):
        raise ConfigError(
            f"{', '.join(changed)} of the fleet cannot change while the run lives, since its processes got them when "
            f"they started: stop the run, then `etude run --resume {folder.name} --fleet FLEET`"
        )


def region_store(folder: RunFolder, region: str) -> str:
    """The URL of a region's store; an empty ``region`` is home, whose store is at the URL of the run.

    Raises :class:`~etude.errors.RunFolderError` for a region that the fleet does not have.
    """
    if not region:
        return folder.url or str(folder.path.absolute())
    fleet = fleet_of(folder)
    if fleet is None or region not in fleet.regions_by_name:
        names = "none" if fleet is None else ", ".join(fleet.regions_by_name)
        raise RunFolderError(f"{folder.name} has no region {region!r}, only {names}: correct --region")
    return fleet.regions_by_name[region].store.rstrip("/")


def open_state(folder: RunFolder, region: str = "") -> FleetState:
    """The state of a run's fleet, as the supervisor of ``region`` follows it; empty for home."""
    return FleetState(fleet_objects(folder, region), fleet_objects(folder) if region else None)


def fleet_objects(folder: RunFolder, region: str = "") -> FleetObjects:
    """The state of a run's fleet in the store of ``region``; empty for home."""
    objects = ObjectStore(f"{region_store(folder, region)}/{FLEET_FOLDER}")
    return FleetObjects(objects, folder.key(KeyRole.FLEET))


def run_id(place: str) -> str:
    """A short name for a run by its folder or URL, in lower-case letters, digits and hyphens: ``fix-7-1a2b3c4d``."""
    words = re.sub(r"[^a-z0-9]+", "-", place.rstrip("/").rpartition("/")[2].lower()).strip("-")[:32]
    return f"{words or 'run'}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"

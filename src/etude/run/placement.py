"""The machines of one run, the launcher that places its processes there, and those that are drained.

Which processes there are is :mod:`etude.run.fleet_plan`'s; what becomes of them :mod:`etude.run.supervision`'s.
"""

import hashlib
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, final

import tomli_w

from etude.config.fleet import LAUNCHERS, RENDERED, FleetConfig
from etude.config.loading import load_fleet
from etude.config.recipe import RunConfig
from etude.config.section import Section
from etude.errors import ConfigError
from etude.fleet.launcher import LaunchContext, ProcessLauncher
from etude.fleet.specs import ProcessSpec
from etude.objects import Objects, ObjectStore
from etude.run.fleet_plan import one_machine
from etude.run.folder import RunFolder
from etude.run.launchers.local import LocalLauncher

FLEET_FOLDER = "fleet"
"""Folder of a run with the desired state that people set."""
FLEET_FILE = "fleet.toml"
"""File of a run with the fleet that it was last placed on."""
DRAINED_POLL_S = 2.0
"""Interval at which a supervisor asks what is drained."""


@final
class Drained:
    """Names of processes that are not to run until further notice: their machine is wanted for something else."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._names: frozenset[str] = frozenset()
        self._read_s = -math.inf

    def add(self, name: str) -> None:
        """Let a process end, and not be placed again."""
        self._objects.put_if_absent(f"drained/{name}", b"")

    def remove(self, name: str) -> None:
        """Let it be placed again."""
        self._objects.delete(f"drained/{name}")

    def names(self) -> frozenset[str]:
        """All that are drained, as of a moment ago."""
        now_s = time.monotonic()
        if now_s - self._read_s >= DRAINED_POLL_S:
            self._read_s = now_s
            self._names = frozenset(key.removeprefix("drained/") for key in self._objects.list("drained"))
        return self._names


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlacement:
    """The fleet of a run, its launcher, and what is drained."""

    fleet: FleetConfig
    launcher: ProcessLauncher
    region: str
    """Region of this supervisor."""
    drained: Drained | None = None

    def drained_names(self) -> frozenset[str]:
        """Names of processes that are not to run."""
        return frozenset() if self.drained is None else self.drained.names()

    def run_words(self, folder: RunFolder) -> str:
        """The words by which a process opens the run: on a fleet its URL, if it has one, since each machine has a
        working folder of its own; else its folder.
        """
        return folder.url if folder.url and self.drained is not None else str(folder.path.absolute())

    def own_specs(self, specs: Sequence[ProcessSpec]) -> tuple[ProcessSpec, ...]:
        """Those of ``specs`` that this launcher is to place: of all regions that it reaches, or of this one alone."""
        return tuple(spec for spec in specs if self.launcher.spans_regions or spec.region == self.region)


def place_here(folder: RunFolder, config: RunConfig) -> RunPlacement:
    """Place all processes on this machine."""
    fleet = one_machine(config)
    return RunPlacement(
        fleet=fleet, region=fleet.home, launcher=LocalLauncher(Section(), LaunchContext(run="", folder=folder.path))
    )


def place_on(fleet: FleetConfig, folder: RunFolder, *, region: str = "") -> RunPlacement:
    """Place processes on a fleet: those of ``region`` (default: home), and of all regions that the launcher reaches.

    Raises :class:`~etude.errors.ConfigError` for a launcher that cannot be made, or keeps processes by itself.
    """
    if fleet.launcher in RENDERED:
        raise ConfigError(
            f"launcher = {fleet.launcher!r}: it starts and keeps processes itself, from files; write them with "
            f"`etude fleet render FLEET RECIPE`"
        )
    if region and region not in fleet.regions_by_name:
        raise ConfigError(f"--region {region}: the fleet has {', '.join(fleet.regions_by_name)}")
    context = LaunchContext(run=run_id(folder.url or str(folder.path.absolute())), folder=folder.path)
    try:
        launcher = cast("ProcessLauncher", LAUNCHERS.make(fleet.launcher, fleet.options, context))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return RunPlacement(fleet=fleet, region=region or fleet.home, launcher=launcher, drained=drained_of(folder))


def fleet_of(folder: RunFolder) -> FleetConfig | None:
    """The fleet that a run was last placed on; ``None`` for this machine alone."""
    file = folder.path / FLEET_FILE
    return load_fleet(file) if file.is_file() else None


def remember_fleet(folder: RunFolder, fleet: FleetConfig) -> None:
    """Keep a fleet with its run, so that ``--resume`` finds it."""
    (folder.path / FLEET_FILE).write_text(tomli_w.dumps(fleet.model_dump(mode="json")), encoding="utf-8")


def drained_of(folder: RunFolder) -> Drained:
    """The drained processes of a run."""
    return Drained(ObjectStore(f"{folder.url or folder.path.absolute()}/{FLEET_FOLDER}"))


def run_id(place: str) -> str:
    """A short name for a run by its folder or URL, of small letters, digits and hyphens: ``fix-7-1a2b3c4d``."""
    words = re.sub(r"[^a-z0-9]+", "-", place.rstrip("/").rpartition("/")[2].lower()).strip("-")[:32]
    return f"{words or 'run'}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"

"""A run on a fleet under fire: its supervisors, and the faults that only a fleet has.

    home     home-2, home-3      ledger, the run's store │ trainer on two machines, rollouts, gateway, engine
    east     east-2, east-3      the region's store      │ relays, gateway, engine                20 ms away

Machines are network namespaces, the link between the regions is emulated, stores speak S3 (:mod:`bench.fleet`): what is
lost or cut off notices nothing, and others have to notice. Supervisors run on the first machine of a region, which is
never lost. Time and records are :mod:`bench.faults.chaos_run`'s.

    python -m bench.faults.fleet_run START URL CONFIG      begin a run from a start; on a machine of home
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import final

import tomli_w

from bench.faults.injector import Damage, picked
from bench.faults.schedule import Fault, Kind
from bench.fleet.machines import Fleet, living, processes, store_url
from bench.fleet.namespaces import kill_all
from bench.fleet.plan import EAST, HOME, FleetPlan, Region
from etude.config.loading import load_recipe
from etude.errors import InfrastructureError
from etude.objects import ObjectStore
from etude.run.folder import LOG_ID, RunFolder
from etude.run.working_folder import MODEL, RECIPE_FILES, create_run, keep, working_path

FAR = Region(name=EAST.name, rtt_s=EAST.rtt_s, machines=3)
PLAN = FleetPlan(regions=(FAR,), faults=(), steps=0, home_machines=3, trainer_nodes=2)
START_S = 600.0
"""Maximum time until the first state of a run is at its URL."""
REGION_S = 1.0
"""Until the supervisor of a region that ended is started again."""


@final
class FleetSupervisors:
    """The supervisors of home and of the far region; a :class:`~bench.faults.chaos_run.RunSupervisor`."""

    def __init__(self, fleet: Fleet, scratch: Path) -> None:
        self._fleet = fleet
        self._scratch = scratch
        self._fleet_file = scratch / "fleet.toml"
        self._fleet_file.write_text(tomli_w.dumps(fleet_tree()), encoding="utf-8")
        self._printed = 0
        self._is_away = False
        self._ended_s = 0.0
        self.resumes = -1
        """Number of restarts of home's supervisor."""
        self.resume()
        self._region = self._start_region()

    @property
    def log(self) -> Path:
        """Output of home's, all incarnations."""
        return self._scratch / f"supervisor-{HOME}.log"

    @property
    def status(self) -> int | None:
        """Exit status of home's supervisor; ``None`` while it runs, or cannot be reached because of a fault."""
        return None if self._is_away else self._home.poll()

    @property
    def output(self) -> str:
        """Output of the current incarnation at home."""
        return self.log.read_bytes()[self._printed :].decode(errors="replace")

    @property
    def starts(self) -> int:
        """Processes that all incarnations of both have started."""
        disks = self._scratch / "disks"
        files = (*disks.glob(f"{HOME}/*/events/supervisor.jsonl"), *disks.glob(f"{FAR.name}/*/events/supervisor@*"))
        return sum(file.read_bytes().count(b'"ProcessStarted"') for file in files)

    def resume(self) -> None:
        """Start home's next incarnation."""
        self.resumes += 1
        self._printed = self.log.stat().st_size if self.log.exists() else 0
        where = ["--fleet", str(self._fleet_file)] if not self.resumes else []
        command = [sys.executable, "-m", "etude", "run", "--resume", self._fleet.url, *where]
        self._home = self._fleet.start(HOME, command, self.log)

    def kill(self) -> list[int]:
        """``kill -9`` of home's supervisor; its processes continue, so none is left over."""
        self._home.kill()
        self._home.wait()
        return []

    @contextmanager
    def away(self, *, at_home: bool) -> Iterator[None]:
        """Let one of the two be gone meanwhile."""
        if at_home:
            self._is_away = True
            self.kill()
        else:
            self._region.kill()
            self._region.wait()
        yield
        if at_home:
            self.resume()
            self._is_away = False

    def keep_region(self) -> None:
        """Start the far region's supervisor again, once it has been gone for a while."""
        if self._region.poll() is None:
            self._ended_s = time.monotonic()
        elif time.monotonic() - self._ended_s > REGION_S:
            self._region = self._start_region()

    def stop_all(self) -> None:
        """Stop both; all else ends with the fleet."""
        kill_all([self._home.pid, self._region.pid])
        self._home.wait()
        self._region.wait()

    def _start_region(self) -> subprocess.Popen[bytes]:
        command = ["fleet", "run", "--run", self._fleet.url, "--region", FAR.name]
        log = self._scratch / f"supervisor-{FAR.name}.log"
        return self._fleet.start(FAR.name, [sys.executable, "-m", "etude", *command], log)


@final
class FleetInjector:
    """Lets a fleet's faults happen; a :class:`~bench.faults.chaos_run.FaultInjector`."""

    def __init__(self, fleet: Fleet, supervisors: FleetSupervisors) -> None:
        self._fleet = fleet
        self._supervisors = supervisors

    def begin(self, fault: Fault) -> AbstractContextManager[None]:
        """A fault; entering it raises :class:`~bench.faults.injector.NoVictim` while it cannot happen."""
        match fault.kind:
            case Kind.CUT_REGION:
                return self._cut()
            case Kind.KILL_RELAY:
                return self._relay_killed(fault.pick)
            case Kind.LOSE_ENGINE_MACHINE:
                return self._machine_lost(HOME if fault.pick < 0.5 else FAR.name, "serve", fault.pick * 2 % 1.0)
            case Kind.LOSE_TRAINER_NODE:
                return self._machine_lost(HOME, "train", fault.pick)
            case Kind.LOSE_SUPERVISOR:
                return self._supervisors.away(at_home=fault.pick < 0.5)
        raise AssertionError(f"{fault.kind} does not happen to a fleet")

    def damage(self, fault: Fault) -> Damage | None:
        """No fault of a fleet is one of files."""
        raise AssertionError(f"{fault.kind} does not happen to a fleet")

    def keep_up(self) -> None:
        """Keep the far region's supervisor."""
        self._supervisors.keep_region()

    @contextmanager
    def _cut(self) -> Iterator[None]:
        self._fleet.cut(FAR.name)
        yield
        self._fleet.heal(FAR.name)

    @contextmanager
    def _relay_killed(self, pick: float) -> Iterator[None]:
        sites = living(self._fleet, FAR.name)
        kill_all([picked([pid for site in sites for pid in processes(self._fleet, site, "relay")], pick)])
        yield

    @contextmanager
    def _machine_lost(self, region: str, word: str, pick: float) -> Iterator[None]:
        """Lose a machine that runs a command, but never the first one of a region."""
        others = [site for site in living(self._fleet, region) if site != region]
        site = picked([each for each in others if processes(self._fleet, each, word)], pick)
        self._fleet.kill_machine(site)
        yield
        self._fleet.revive(site, is_empty=region != HOME)


def fleet_tree() -> dict[str, object]:
    """The fleet as ``fleet.toml`` has it: an engine at home and one far away."""
    regions = [{"name": name, "store": store_url(name), "engines": 1} for name in (HOME, FAR.name)]
    trainer = {"nodes": PLAN.trainer_nodes}
    return {"launcher": "bench.fleet.launcher:MachineLauncher", "home": HOME, "trainer": trainer, "regions": regions}


def begin_run(fleet: Fleet, start: RunFolder, recipe: Path, scratch: Path) -> RunFolder:
    """Put a run with a ``start`` behind it at the fleet's URL; returns home's working folder.

    Raises :class:`~etude.errors.InfrastructureError`.
    """
    log = scratch / "begin.log"
    command = [sys.executable, "-m", "bench.faults.fleet_run", str(start.path), fleet.url, str(recipe)]
    process = fleet.start(HOME, command, log)
    with suppress(subprocess.TimeoutExpired):
        process.wait(START_S)
    if process.poll() != 0:
        process.kill()
        raise InfrastructureError(f"bench faults: a run could not be put at {fleet.url}: {log.read_text()[-500:]}")
    return RunFolder(working_path(fleet.url, Path(fleet.machines[HOME].work)))


if __name__ == "__main__":
    start, begun = RunFolder.open(Path(sys.argv[1])), create_run(sys.argv[2], load_recipe(Path(sys.argv[3])))
    shutil.copytree(start.model, begun.model)
    shutil.copy(start.path / LOG_ID, begun.path)
    versions, place = ObjectStore(start.store), ObjectStore(begun.store)
    for key in versions.list(""):
        place.put_if_absent(key, versions.get(key) or b"")
    keep(begun, *RECIPE_FILES, *MODEL)

"""The demo's machines: network namespaces with long-distance links, a store in each region, PostgreSQL at home.

    with Fleet(plan, scratch) as fleet:
        fleet.start("home", ["etude", "run", ...], log)

Machines have a disk each, but those of home share theirs: the nodes of one trainer write a checkpoint together. The
database is reached by a socket in the file system, which all namespaces share; only processes at home know its place.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, final

from bench.faults.database import Database, programs
from bench.fleet import store
from bench.fleet.launcher import MACHINES_VARIABLE, Machine, write_machines
from bench.fleet.namespaces import enter_command, is_alive, kill_all, processes_in
from bench.fleet.plan import HOME, FleetPlan
from bench.sync.wan import Wan, WanShape
from etude.errors import InfrastructureError, UserError
from etude.objects import BUCKETS_VARIABLE
from etude.run.keys import RUN_KEY_VARIABLE

RUN = "run"
"""Name of the run in each store."""
BOOT = (
    *("unshare", "--mount", "bash", "-c"),
    'mkdir -p /tmp/ray; mount -t tmpfs -o size=1g tmpfs /tmp/ray; mount -t tmpfs -o size=1g tmpfs /dev/shm; exec "$@"',
    "machine",
)
"""Commands before the first process of a machine, its agent: it has its own shared memory and Ray sockets."""
STORE_S = 180.0
"""Longest time until a store answers."""


def missing() -> str | None:
    """Why the demo cannot be run here; ``None`` where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux, for network namespaces that processes of a run enter: use sudo, or a container"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "it needs /dev/net/tun, for links between namespaces: modprobe tun, or give it to the container"
    if programs() is None:
        return "it needs PostgreSQL and psycopg, for the ledger: apt-get install postgresql"
    return None


@final
class Fleet:
    """The machines of a plan, from entering to leaving; then all that ran on them is gone."""

    def __init__(self, plan: FleetPlan, scratch: Path, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        """``variables`` are for all processes. Raises :class:`~etude.errors.UserError` where there cannot be any."""
        if (reason := missing()) is not None:
            raise UserError(f"bench fleet: {reason}")
        self.plan = plan
        self._scratch = scratch
        self._variables = variables
        self._wan = Wan(plan.sites, WanShape(), plan.shapes)
        self._stack = ExitStack()
        self._key = secrets.token_hex(32)
        self.machines: dict[str, Machine] = {}

    def __enter__(self) -> Self:
        installed = programs()
        assert installed is not None, "missing() was asked"
        self._scratch.chmod(0o711)  # the database has a user of its own
        with ExitStack() as stack:
            stack.enter_context(self._wan)
            self._database = stack.enter_context(Database(installed, self._scratch / "postgres"))
            booting = {site: self._boot(site) for site in self.plan.sites}
            self.machines = {site: self._machine(site, init) for site, init in booting.items()}
            write_machines(self.machines_file, self.machines)
            self._start_stores()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """The URL of the run."""
        return store_url(HOME)

    @property
    def ledger(self) -> str:
        """The URL of the ledger's server."""
        return self._database.url

    @property
    def machines_file(self) -> Path:
        """File from which the launcher reads the machines."""
        return self._scratch / "machines.json"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of all processes on the machines, wherever they are."""
        regions = self.plan.all_regions
        places = " ".join(
            f"{bucket_of(each.name)}=http://{self._wan.address(each.name)}:{store.PORT}" for each in regions
        )
        return {
            MACHINES_VARIABLE: str(self.machines_file),
            BUCKETS_VARIABLE: places,
            RUN_KEY_VARIABLE: self._key,
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "GLOO_SOCKET_IFNAME": "wan",
            "TP_SOCKET_IFNAME": "wan",
            "OMP_NUM_THREADS": "1",
            **self._variables,
        }

    def start(self, site: str, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process on a machine; it dies with this process and with the fleet."""
        with log.open("ab") as output:
            environment = {**self.environment, **self.machines[site].environment}
            inside = enter_command(self.machines[site].init, command)
            return self._wan.popen(site, inside, stdout=output, stderr=output, environment=environment)

    def running(self, site: str) -> dict[int, list[str]]:
        """Process id → command line of what runs on a machine."""
        return processes_in(self.machines[site].init)

    def lives(self, site: str) -> bool:
        """True until a machine is killed."""
        return is_alive(self.machines[site].init)

    def kill_machine(self, site: str) -> None:
        """Take the power off a machine: all that runs there is gone at once, and it does not come back."""
        kill_all([self.machines[site].init, *self.running(site)])

    def revive(self, site: str, *, is_empty: bool) -> None:
        """Have another machine in the place of one that was killed: with its disk, or with an empty one."""
        if is_empty:
            shutil.rmtree(self.machines[site].work)
        self.machines[site] = self._machine(site, self._boot(site))
        write_machines(self.machines_file, self.machines)

    def cut(self, region: str) -> None:
        """Let nothing through to or from a region."""
        for site in self._sites(region):
            self._wan.cut(site)

    def heal(self, region: str) -> None:
        """Connect a region again."""
        for site in self._sites(region):
            self._wan.heal(site)

    def sent(self, region: str) -> Mapping[str, Mapping[str, int]]:
        """Bytes that a region's store has sent and received so far (:mod:`bench.fleet.store`)."""
        counts: Mapping[str, Mapping[str, int]] = json.loads(self._counts(region).read_text(encoding="utf-8"))
        return counts

    def traffic_bytes(self, region: str) -> int:
        """Bytes that went from home's first machine to a region's machines, everything included."""
        return sum(self._wan.traffic(HOME, site).size_bytes for site in self._sites(region))

    def _sites(self, region: str) -> list[str]:
        return [site for site, name in self.plan.region_of.items() if name == region]

    def _boot(self, site: str) -> subprocess.Popen[bytes]:
        """Start the first process of a machine."""
        place = self._place(site)
        Path(place.work).mkdir(parents=True, exist_ok=True)
        Path(place.socket).unlink(missing_ok=True)
        agent = [sys.executable, "-m", "bench.fleet.agent", place.socket, place.work]
        with (self._scratch / f"agent-{site}.log").open("ab") as log:
            environment = {**self.environment, **place.environment}
            return self._wan.popen(site, [*BOOT, *agent], stdout=log, stderr=log, environment=environment)

    def _place(self, site: str, init: int = 0) -> Machine:
        """A machine, before it has a first process, or with that."""
        region = self.plan.region_of[site]
        work = str(self._scratch / "disks" / (HOME if region == HOME else site))
        socket = str(self._scratch / f"agent-{site}")
        address = self._wan.address(site)
        return Machine(name=site, region=region, init=init, address=address, work=work, socket=socket)

    def _machine(self, site: str, agent: subprocess.Popen[bytes]) -> Machine:
        """A machine whose agent is up."""
        place = self._place(site, agent.pid)
        deadline_s = time.monotonic() + STORE_S
        while not Path(place.socket).exists():
            if agent.poll() is not None or time.monotonic() > deadline_s:
                last = (self._scratch / f"agent-{site}.log").read_text(encoding="utf-8")[-300:]
                raise InfrastructureError(f"bench fleet: the machine {site} does not start: {last}")
            time.sleep(0.02)
        return place

    def _start_stores(self) -> None:
        """Start the store of each region, all at once."""
        starting: dict[str, subprocess.Popen[bytes]] = {}
        for region in (self.plan.home.name, *(each.name for each in self.plan.regions)):
            command = [sys.executable, "-m", "bench.fleet.store", self._wan.address(region), bucket_of(region)]
            starting[region] = self.start(region, [*command, str(self._counts(region))], self._store_log(region))
        deadline_s = time.monotonic() + STORE_S
        while starting:
            region, process = next(iter(starting.items()))
            if "ready" in self._store_log(region).read_text(encoding="utf-8"):
                del starting[region]
            elif process.poll() is not None or time.monotonic() > deadline_s:
                last = self._store_log(region).read_text(encoding="utf-8")[-300:]
                raise InfrastructureError(f"bench fleet: the store of {region} does not start: {last}")
            else:
                time.sleep(0.1)

    def _store_log(self, region: str) -> Path:
        return self._scratch / f"store-{region}.log"

    def _counts(self, region: str) -> Path:
        return self._scratch / f"store-{region}.json"


def living(fleet: Fleet, region: str) -> list[str]:
    """The machines of a region that live."""
    return [site for site, name in fleet.plan.region_of.items() if name == region and fleet.lives(site)]


def processes(fleet: Fleet, site: str, word: str) -> list[int]:
    """Processes of étude's on a machine whose command is ``word``."""
    own = {pid: words for pid, words in fleet.running(site).items() if "etude" in words}
    return sorted(pid for pid, words in own.items() if word in words[words.index("etude") :][:3])


def store_url(region: str) -> str:
    """The URL of the run in a region's store."""
    return f"s3://{bucket_of(region)}/{RUN}"


def bucket_of(region: str) -> str:
    """The bucket of a region's store; a name has at least three characters."""
    return f"runs-{region}"

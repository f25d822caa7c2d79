"""A Ray cluster in each region of the demo: a head on its first machine, a node on each other one.

Ray places processes by what they need: an engine takes two of a node's processors, and where a region has several
machines its head has fewer, so that an engine never shares a machine with the head, which no cluster outlives.
"""

import importlib.util
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.fleet.machines import Fleet
from bench.fleet.plan import HOME, Region
from etude.errors import InfrastructureError

RAY = Path(sys.executable).with_name("ray")
PORT = 6379
TRIES = 5
"""Times that a node is started: it gives up after half a minute, which a busy machine may take."""
UP = "Ray runtime started"
"""Text that a node prints once it is up."""
AT_ONCE = 2
"""Clusters that are started at a time: a node gives up that has no core for half a minute."""
POLL_S = 0.2
"""Polling interval for starting nodes."""
RESOURCES: Mapping[str, float] = {"serve": 2.0, "gateway": 0.1, "relay": 0.1, "rollouts": 0.1, "train": 2.0}
"""Command → processors of a node that a process takes."""
ROOMY_CPUS, HEAD_CPUS, NODE_CPUS = 8, 1, 2
"""Processors of home's head and of a region's only machine; of another head, without room for an engine; of nodes."""
HEALTH_CHECKS: Mapping[str, str] = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_enable_autoscaler_v2": "0",
}
"""Time until a head considers a node lost: 4 s instead of 19."""
NO_SPARES: Mapping[str, str] = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
"""No workers before there are actors for them: by default a node has one ready for each of its processors."""
LEAN = ("--disable-usage-stats", "--include-log-monitor", "false")
LEAN_HEAD = ("--no-monitor", "--include-dashboard", "false")
"""Options that disable log transfer to drivers, autoscaler and dashboard, which take half of a node's start."""


def missing() -> str | None:
    """Why there can be no cluster here; ``None`` where there can."""
    is_there = importlib.util.find_spec("ray") is not None and RAY.is_file()
    return None if is_there else "it needs Ray to place processes: pip install -e '.[ray]', or --launcher machines"


def environment() -> dict[str, str]:
    """Variables of nodes, of supervisors and so of all processes: who has no token is refused."""
    return {**HEALTH_CHECKS, **NO_SPARES, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def start_nodes(fleet: Fleet, scratch: Path) -> None:
    """Start the clusters of all regions, :data:`AT_ONCE` of them at a time, all by this thread: what another one starts
    would end with it.

    Raises :class:`~etude.errors.InfrastructureError`.
    """
    waiting = [_starting(fleet, region, scratch) for region in fleet.plan.all_regions]
    while waiting:
        waiting = [cluster for cluster in waiting[:AT_ONCE] if next(cluster, None) is not None] + waiting[AT_ONCE:]
        time.sleep(POLL_S)


def _starting(fleet: Fleet, region: Region, scratch: Path) -> Iterator[str]:
    """Start the head of a region, then its other nodes; gives the name of the one that is waited for."""
    for site in region.sites:
        log = scratch / f"ray-{site}.log"
        for _ in range(TRIES):
            node = _start(fleet, region, site, log)
            while not (is_up := UP in log.read_text(encoding="utf-8", errors="replace")) and node.poll() is None:
                yield site
            if is_up:
                break
        else:
            last = log.read_text(encoding="utf-8", errors="replace")[-300:]
            raise InfrastructureError(f"bench fleet: Ray does not start on {site}: {last}")


def cpus_of(region: Region, site: str) -> int:
    """Number of processors of a machine, as reported to Ray."""
    if site != region.sites[0]:
        return NODE_CPUS
    return ROOMY_CPUS if region.machines == 1 or region.name == HOME else HEAD_CPUS


def _start(fleet: Fleet, region: Region, site: str, log: Path) -> subprocess.Popen[bytes]:
    role = ["--head", "--port", str(PORT), *LEAN_HEAD]
    if site != region.sites[0]:
        role = ["--address", f"{fleet.machines[region.sites[0]].address}:{PORT}"]
    size = ["--num-cpus", str(cpus_of(region, site)), "--object-store-memory", "80000000"]
    where = ["--node-ip-address", fleet.machines[site].address]
    return fleet.start(site, [str(RAY), "start", *role, *where, *size, *LEAN, "--block"], log)

"""A Ray cluster in each region of the demo: a head on its first machine, a node on each other one.

Ray places processes by what they need: an engine takes two of a node's processors, and where a region has several
machines its head has fewer, so that an engine never shares a machine with the head, which no cluster outlives.
"""

import importlib.util
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from bench.fleet.machines import Fleet
from bench.fleet.plan import HOME, Region
from etude.errors import InfrastructureError

RAY = Path(sys.executable).with_name("ray")
PORT = 6379
START_S = 300.0
"""Longest time until a node is up."""
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
"""How soon a head takes a node for lost: 4 s instead of 19."""


def missing() -> str | None:
    """Why there can be no cluster here; ``None`` where there can."""
    is_there = importlib.util.find_spec("ray") is not None and RAY.is_file()
    return None if is_there else "it needs Ray to place processes: pip install -e '.[ray]', or --launcher machines"


def environment() -> dict[str, str]:
    """Variables of nodes, of supervisors and so of all processes: who has no token is refused."""
    return {**HEALTH_CHECKS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def start_nodes(fleet: Fleet, scratch: Path) -> None:
    """Start the clusters of all regions. Raises :class:`~etude.errors.InfrastructureError`."""
    heads = {region.name: _start(fleet, region, region.sites[0], scratch) for region in fleet.plan.all_regions}
    for region in fleet.plan.all_regions:
        _await_up(heads[region.name], scratch / f"ray-{region.sites[0]}.log")
    for region in fleet.plan.all_regions:
        nodes = {site: _start(fleet, region, site, scratch) for site in region.sites[1:]}
        for site, node in nodes.items():
            _await_up(node, scratch / f"ray-{site}.log")


def cpus_of(region: Region, site: str) -> int:
    """Processors of a machine, as Ray is told."""
    if site != region.sites[0]:
        return NODE_CPUS
    return ROOMY_CPUS if region.machines == 1 or region.name == HOME else HEAD_CPUS


def _start(fleet: Fleet, region: Region, site: str, scratch: Path) -> subprocess.Popen[bytes]:
    head = fleet.machines[region.sites[0]].address
    role = ["--head", "--port", str(PORT), "--include-dashboard", "false"]
    if site != region.sites[0]:
        role = ["--address", f"{head}:{PORT}"]
    size = ["--num-cpus", str(cpus_of(region, site)), "--object-store-memory", "80000000"]
    where = ["--node-ip-address", fleet.machines[site].address]
    command = [str(RAY), "start", *role, *where, *size, "--disable-usage-stats", "--block"]
    return fleet.start(site, command, scratch / f"ray-{site}.log")


def _await_up(node: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while "Ray runtime started" not in (text := log.read_text(encoding="utf-8", errors="replace")):
        if node.poll() is not None or time.monotonic() > deadline_s:
            raise InfrastructureError(f"bench fleet: Ray does not start: {text[-300:]}")
        time.sleep(0.2)

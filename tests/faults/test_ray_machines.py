"""Three machines in two regions, as network namespaces with a Ray node each: a lost machine's process moves."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_clusters import machines, ray_is_missing

MISSING = ray_is_missing() or ("" if os.geteuid() == 0 and shutil.which("ip") else "root and iproute2")
LOST_S = 60.0
"""Beyond what Ray's health checks, as set here, and the start of an actor take on a busy machine."""
PROGRAM = """
import json, pathlib, sys, time
from etude.config.fleet import RayOptions
from etude.fleet.launcher import LaunchContext
from etude.fleet.specs import GroupMember, ProcessSpec, Resources
from etude.run.launchers.ray import RayLauncher

launcher = RayLauncher(
    RayOptions(address="auto", region_label="region"), LaunchContext(run="test", folder=pathlib.Path(sys.argv[1]))
)
tiny, sleep = Resources(cpus=0.1), ("sleep", "600")
launcher.place(ProcessSpec(name="gateway", command=sleep, region="home", resources=tiny))
for rank, name in enumerate(("train", "train-1")):
    group = GroupMember(name="train", rank=rank, size=2, port=29400)
    launcher.place(ProcessSpec(name=name, command=sleep, region="eu", resources=tiny, group=group))
launcher.place(ProcessSpec(name="serve@eu", command=sleep, region="eu", resources=tiny))
while True:
    print(json.dumps({name: [status.host, status.pid if status.is_running else 0]
                      for name, status in launcher.look().items()}), flush=True)
    time.sleep(0.5)
"""


@pytest.mark.heavy("root and Ray", missing=bool(MISSING))
@pytest.mark.timeout(600)
def test_a_lost_machines_process_runs_elsewhere_in_its_region(tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with (
        machines({"home": "home", "eu-a": "eu", "eu-b": "eu"}) as cluster,
        cluster.popen("home", program, stdout=subprocess.PIPE) as driver,
    ):
        try:
            views = looks(driver)
            seen = next(view for view in views if len(view) == 4 and all(pid for _, pid in view.values()))
            hosts = {name: host for name, (host, _) in seen.items()}
            in_region = {cluster.addresses["eu-a"], cluster.addresses["eu-b"]}
            assert hosts["gateway"] == cluster.addresses["home"]
            assert {hosts["train"], hosts["train-1"]} == in_region, "each member has a machine of its own"
            assert hosts["serve@eu"] in in_region
            cluster.kill(next(name for name, address in cluster.addresses.items() if address == hosts["serve@eu"]))
            lost_s = time.monotonic()
            for view in views:
                host, pid = view.get("serve@eu", ("", 0))
                if pid and host in in_region - {hosts["serve@eu"]}:
                    break
                assert time.monotonic() - lost_s < LOST_S, view
            (tmp_path / "elsewhere_after_s").write_text(f"{time.monotonic() - lost_s:.1f}\n")
        finally:
            driver.kill()


def looks(driver: subprocess.Popen[bytes]) -> Iterator[dict[str, tuple[str, int]]]:
    """Yield, repeatedly, process → (host, process id), with id 0 for a process that is down; skips Ray's own lines."""
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith(b"{"):
            yield json.loads(line)
    raise AssertionError(f"the driver ended with {driver.wait()}")

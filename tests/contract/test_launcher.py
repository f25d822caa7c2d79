"""Contract of every launcher that runs processes: ``local``, and ``ray`` on a cluster of one machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from etude.config.fleet import RayOptions
from etude.config.section import Section
from etude.fleet.launcher import LaunchContext, ProcessLauncher
from etude.fleet.specs import GroupMember, ProcessSpec, ProcessStatus, Resources
from etude.run.launchers.local import LocalLauncher
from ray_clusters import ray_cluster, ray_is_missing
from waiting import wait_until as wait_until_within

TINY = Resources(cpus=0.01)
WAIT_S = 120.0
"""Ray starts an interpreter for each actor, which takes its time on a machine that has much to do."""
NewLauncher: TypeAlias = Callable[[], ProcessLauncher]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of only this machine, in the region ``eu``."""
    with ray_cluster(labels="region=eu") as address:
        yield address


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.heavy("Ray", missing=bool(ray_is_missing())))])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcessLauncher]:
    if request.param == "local":
        made: ProcessLauncher = LocalLauncher(Section(), LaunchContext(run="test", folder=tmp_path))
    else:
        options = RayOptions(address=request.getfixturevalue("cluster"), region_label="region")
        from etude.run.launchers.ray import RayLauncher  # Ray reads its token when it is imported

        made = RayLauncher(options, LaunchContext(run=tmp_path.name, folder=tmp_path))
    try:
        yield made
    finally:
        made.remove(*made.look(), grace_s=0.0)


def spec(name: str, script: str = "sleep 600", group: GroupMember | None = None) -> ProcessSpec:
    return ProcessSpec(name=name, command=("bash", "-c", script), region="eu", resources=TINY, group=group)


def wait_until(met: Callable[[], bool]) -> None:
    wait_until_within(met, every_s=0.05, timeout_s=WAIT_S)


def running(launcher: ProcessLauncher, name: str) -> ProcessStatus:
    wait_until(lambda: name in launcher.look() and launcher.look()[name].is_running)
    return launcher.look()[name]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_place_twice_is_once(launcher: ProcessLauncher) -> None:
    launcher.place(spec("serve-1@eu"))
    first = running(launcher, "serve-1@eu")
    launcher.place(spec("serve-1@eu"))
    second = running(launcher, "serve-1@eu")
    assert (first.incarnation, first.pid) == (second.incarnation, second.pid)
    assert list(launcher.look()) == ["serve-1@eu"]


def test_the_end_of_a_process_is_seen_and_it_can_be_placed_again(launcher: ProcessLauncher) -> None:
    launcher.place(spec("gateway", "echo 'etude: no room'; echo noise; exit 4"))
    wait_until(lambda: launcher.look().get("gateway", ProcessStatus(incarnation="")).exit_status is not None)
    ended = launcher.look()["gateway"]
    assert (ended.exit_status, ended.last_line) == (4, "no room")
    assert Path(ended.log).read_text() == "etude: no room\nnoise\n"
    launcher.place(spec("gateway", "echo 'etude: no room'; echo noise; exit 4"))
    wait_until(lambda: launcher.look()["gateway"].incarnation not in ("", ended.incarnation))


def test_a_killed_process_ended_by_its_signal(launcher: ProcessLauncher) -> None:
    launcher.place(spec("rollouts"))
    os.kill(running(launcher, "rollouts").pid, signal.SIGKILL)
    wait_until(lambda: launcher.look()["rollouts"].exit_status == -signal.SIGKILL)


def test_remove_kills_the_process_group_within_its_grace(launcher: ProcessLauncher, tmp_path: Path) -> None:
    child = tmp_path / "child"
    launcher.place(spec("serve", f"trap '' TERM; sleep 600 & echo $! > {child}; wait; wait; sleep 600"))
    status = running(launcher, "serve")
    wait_until(lambda: child.exists() and bool(child.read_text()))
    started_s = time.monotonic()
    launcher.remove("serve", "never-there", grace_s=0.5)
    assert time.monotonic() - started_s < 10.0
    wait_until(lambda: is_gone(status.pid) and is_gone(int(child.read_text())))
    assert launcher.look() == {}


def test_what_ends_by_itself_within_its_grace_is_not_killed(launcher: ProcessLauncher, tmp_path: Path) -> None:
    trap = f"trap 'echo done > {tmp_path}/done; exit 0' TERM; echo up > {tmp_path}/up; while :; do sleep 0.05; done"
    launcher.place(spec("serve", trap))
    wait_until((tmp_path / "up").exists)
    launcher.remove("serve", grace_s=20.0)
    assert (tmp_path / "done").exists()


def test_secrets_and_places_in_a_group_are_in_the_environment(
    launcher: ProcessLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_RUN_KEY", "secret")
    group = GroupMember(name="train", rank=0, size=1, port=29_400)
    script = f"echo $ETUDE_RUN_KEY $PET_NNODES $PET_NODE_RANK $PET_RDZV_ENDPOINT > {tmp_path}/out; sleep 600"
    launcher.place(
        ProcessSpec(
            name="train", command=("bash", "-c", script), region="eu", resources=TINY, group=group,
            secrets=("ETUDE_RUN_KEY", "ABSENT"),
        )
    )  # fmt: skip
    wait_until(lambda: (tmp_path / "out").exists() and bool((tmp_path / "out").read_text()))
    key, nodes, rank, endpoint = (tmp_path / "out").read_text().split()
    assert (key, nodes, rank) == ("secret", "1", "0")
    assert endpoint.endswith(":29400")


def test_a_process_dies_with_the_supervisor_that_holds_it(tmp_path: Path) -> None:
    program = f"""
import pathlib, time
from etude.config.section import Section
from etude.fleet.launcher import LaunchContext
from etude.fleet.specs import ProcessSpec
from etude.run.launchers.local import LocalLauncher
launcher = LocalLauncher(Section(), LaunchContext(run="test", folder=pathlib.Path({str(tmp_path)!r})))
launcher.place(ProcessSpec(name="serve", command=("sleep", "600"), region="home"))
print(launcher.look()["serve"].pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        supervisor.kill()
    wait_until(lambda: is_gone(pid))


@pytest.mark.heavy("Ray", missing=bool(ray_is_missing()))
def test_a_process_outlives_the_supervisor_and_not_its_actor(cluster: str, tmp_path: Path) -> None:
    """Another supervisor sees the process; if its actor dies, Ray starts both again."""
    from etude.run.launchers.ray import RayLauncher

    launcher = RayLauncher(
        RayOptions(address=cluster, region_label="region"), LaunchContext(run=tmp_path.name, folder=tmp_path)
    )
    program = f"""
import pathlib
from etude.config.fleet import RayOptions
from etude.fleet.launcher import LaunchContext
from etude.fleet.specs import ProcessSpec, Resources
from etude.run.launchers.ray import RayLauncher
context = LaunchContext(run={tmp_path.name!r}, folder=pathlib.Path({str(tmp_path)!r}))
launcher = RayLauncher(RayOptions(address={cluster!r}, region_label="region"), context)
launcher.place(ProcessSpec(name="serve@eu", command=("sleep", "600"), region="eu", resources=Resources(cpus=0.01)))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    try:
        first = running(launcher, "serve@eu")
        actor = int(Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(actor, signal.SIGKILL)
        wait_until(lambda: is_gone(first.pid))
        wait_until(lambda: launcher.look()["serve@eu"].is_running)
        assert launcher.look()["serve@eu"].incarnation != first.incarnation
        launcher.place(ProcessSpec(name="waits@us", command=("true",), region="us", resources=TINY))
        assert launcher.look()["waits@us"].is_pending, "no machine has that region"
    finally:
        launcher.remove("serve@eu", "waits@us", grace_s=0.0)
    assert launcher.look() == {}

"""The demo's launcher: processes start on live machines, and the members of a group on different ones."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from bench import programs
from bench.fleet.launcher import MACHINES_VARIABLE, Machine, MachineLauncher, write_machines
from etude.config.section import Section
from etude.fleet.launcher import LaunchContext, LauncherUnavailable
from etude.fleet.specs import GroupMember, ProcessSpec
from etude.run.region_stores import ADDRESS_VARIABLE
from waiting import wait_until

pytestmark = pytest.mark.heavy("root", missing=os.geteuid() != 0)
WRITE = "echo $ETUDE_ADDRESS $PET_RDZV_ENDPOINT > {file}; sleep 600"


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Machine → its agent: two of the region ``eu``, one of another."""
    with ExitStack() as stack:
        agents, rows = {}, {}
        for name in ("eu", "eu-2", "us"):
            place = Machine(name=name, region=name[:2], init=0, address=name, work=str(tmp_path / name),
                            socket=str(tmp_path / f"{name}.sock"))  # fmt: skip
            command = [sys.executable, "-m", "bench.fleet.agent", place.socket, place.work]
            variables = {**programs.environment(), **place.environment}
            agents[name] = stack.enter_context(subprocess.Popen(command, env=variables))
            rows[name] = replace(place, init=agents[name].pid)
        write_machines(tmp_path / "machines.json", rows)
        monkeypatch.setenv(MACHINES_VARIABLE, str(tmp_path / "machines.json"))
        monkeypatch.setenv(ADDRESS_VARIABLE, "eu")
        wait_until(lambda: all(Path(row.socket).exists() for row in rows.values()), timeout_s=100)
        yield agents
        for agent in agents.values():
            agent.kill()


def spec(name: str, file: Path, group: GroupMember | None = None) -> ProcessSpec:
    return ProcessSpec(name=name, command=("bash", "-c", WRITE.format(file=file)), region="eu", group=group)


def launcher(folder: Path) -> MachineLauncher:
    return MachineLauncher(Section(), LaunchContext(run="test", folder=folder))


def test_processes_go_to_machines_of_their_region_that_live_and_outlive_supervisors(
    machines: dict[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    first = launcher(tmp_path)
    members = [GroupMember(name="train", rank=rank, size=2, port=29_400) for rank in range(2)]
    specs = [spec("train" + "-1" * member.rank, tmp_path / f"out-{member.rank}", member) for member in members]
    for each in specs:
        first.place(each)
    hosts = {name: status.host for name, status in first.look().items()}
    assert sorted(hosts.values()) == ["eu", "eu-2"]
    outs = [tmp_path / f"out-{member.rank}" for member in members]
    wait_until(lambda: all(out.exists() and bool(out.read_text()) for out in outs))
    assert [out.read_text().split() for out in outs] == [
        [hosts[each.name], f"{hosts['train']}:29400"] for each in specs
    ]  # fmt: skip
    successor = launcher(tmp_path)
    successor.place(specs[0])
    assert {name: status.incarnation for name, status in successor.look().items()} == {
        name: status.incarnation for name, status in first.look().items()
    }
    machines[hosts["train"]].kill()
    machines[hosts["train"]].wait()
    assert [*successor.look()] == ["train-1"]
    successor.place(specs[0])
    assert successor.look()["train"].host == hosts["train-1"]
    successor.remove("train", "train-1", grace_s=0.0)
    assert not successor.look()
    machines[hosts["train-1"]].kill()
    machines[hosts["train-1"]].wait()
    with pytest.raises(LauncherUnavailable):
        successor.place(specs[0])

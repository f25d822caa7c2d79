"""The demo's launcher: a process goes to a machine that lives, members of a group to machines of their own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.fleet.launcher import MACHINES_VARIABLE, Machine, MachineLauncher, write_machines
from etude.config.section import Section
from etude.fleet.launcher import LaunchContext
from etude.fleet.specs import GroupMember, ProcessSpec
from waiting import wait_until

pytestmark = pytest.mark.heavy("root", missing=os.geteuid() != 0)
WRITE = "echo $ETUDE_ADDRESS $PET_RDZV_ENDPOINT > {file}; sleep 600"


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Machine → its first process: two of the region ``eu``, one of another."""
    with ExitStack() as stack:
        inits = {name: stack.enter_context(subprocess.Popen(("sleep", "600"))) for name in ("eu", "eu-2", "us")}
        rows = {
            name: Machine(name=name, region=name[:2], init=init.pid, address=name, work=str(tmp_path / name))
            for name, init in inits.items()
        }
        write_machines(tmp_path / "machines.json", rows)
        monkeypatch.setenv(MACHINES_VARIABLE, str(tmp_path / "machines.json"))
        yield inits
        for init in inits.values():
            init.kill()


def spec(name: str, file: Path, group: GroupMember | None = None) -> ProcessSpec:
    return ProcessSpec(name=name, command=("bash", "-c", WRITE.format(file=file)), region="eu", group=group)


def test_processes_go_to_machines_of_their_region_that_live(
    machines: dict[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    launcher = MachineLauncher(Section(), LaunchContext(run="test", folder=tmp_path))
    members = [GroupMember(name="train", rank=rank, size=2, port=29_400) for rank in range(2)]
    specs = [spec(f"train-{member.rank}", tmp_path / f"out-{member.rank}", member) for member in members]
    try:
        for each in specs:
            launcher.place(each)
        hosts = {name: status.host for name, status in launcher.look().items()}
        assert sorted(hosts.values()) == ["eu", "eu-2"]
        outs = [tmp_path / f"out-{member.rank}" for member in members]
        wait_until(lambda: all(out.exists() and bool(out.read_text()) for out in outs))
        assert [out.read_text().split() for out in outs] == [
            [hosts[f"train-{member.rank}"], f"{hosts['train-0']}:29400"] for member in members
        ]
        machines[hosts["train-0"]].kill()  # which its processes do not notice here, other than on a real machine
        machines[hosts["train-0"]].wait()
        launcher.remove("train-0", "train-1", grace_s=0.0)
        launcher.place(specs[0])
        assert launcher.look()["train-0"].host == hosts["train-1"]
    finally:
        launcher.remove(*launcher.look(), grace_s=0.0)

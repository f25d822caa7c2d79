"""Control groups on machines of both versions: where they are, and what is written there."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etude.sandboxes.ns.cgroups import (
    TRIAL,
    Cgroups,
    Hierarchy,
    find_hierarchies,
    launcher_name,
    limit_text,
    writable,
)

HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices
39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
HYBRID_GROUPS = "8:pids:/\n4:memory:/service/one\n1:cpu,cpuacct:/\n0::/\n"
UNIFIED = "25 20 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def test_controllers_of_version_1_are_found_under_our_own_groups() -> None:
    assert find_hierarchies(HYBRID, HYBRID_GROUPS) == [
        Hierarchy(1, Path("/sys/fs/cgroup/cpu,cpuacct"), ("cpu", "cpuacct")),
        Hierarchy(1, Path("/sys/fs/cgroup/memory/service/one"), ("memory",)),
        Hierarchy(1, Path("/sys/fs/cgroup/pids"), ("pids",)),
    ]


def test_a_machine_of_version_2_has_all_in_one() -> None:
    expected = [Hierarchy(2, Path("/sys/fs/cgroup/user.slice/x.scope"), ("memory", "pids", "cpu", "cpuacct"))]
    assert find_hierarchies(UNIFIED, "0::/user.slice/x.scope\n") == expected


def test_a_mount_that_shows_a_part_is_not_left() -> None:
    shown = "25 20 0:22 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    assert find_hierarchies(shown, "0::/docker/abc/inner\n")[0].folder == Path("/sys/fs/cgroup/inner")


def test_no_controllers_no_hierarchies() -> None:
    assert find_hierarchies("22 27 0:21 / /proc rw - proc proc rw\n", "") == []


@pytest.mark.parametrize(
    ("version", "controller", "limit", "text"),
    [
        (1, "memory", 1 << 30, "1073741824"),
        (1, "cpu", 1.5, "150000"),
        (2, "cpu", 0.5, "50000 100000"),
        (2, "cpu", 1e-9, "1000 100000"),
        (2, "pids", 129, "129"),
    ],
)
def test_limits_are_written_as_the_kernel_reads_them(version: int, controller: str, limit: float, text: str) -> None:
    assert limit_text(version, controller, limit) == text


def test_a_tree_that_cannot_be_written_or_lends_nothing_is_left_out(tmp_path: Path) -> None:
    here = Hierarchy(1, tmp_path, ("memory",))
    missing = Hierarchy(1, tmp_path / "none", ("pids",))
    assert writable([here, missing], "trial") == []  # a folder without the kernel's files
    assert list(tmp_path.iterdir()) == []


def test_groups_of_the_living_and_of_strangers_are_not_swept(tmp_path: Path) -> None:
    own = launcher_name(1)
    others = {own, "etude-1-1-0", "somebody-else"}  # the second in another namespace of processes
    for name in others:
        (tmp_path / name / "000001").mkdir(parents=True)
    groups = Cgroups([Hierarchy(1, tmp_path, ())], "etude-new")
    assert {path.name for path in tmp_path.iterdir()} == others | {"etude-new"}
    groups.close()
    assert {path.name for path in tmp_path.iterdir()} == others


@pytest.fixture
def hierarchy() -> Hierarchy:
    """A real hierarchy in which groups can be made."""
    texts = (Path("/proc/self", name).read_text() for name in ("mountinfo", "cgroup"))
    by_controller = writable(find_hierarchies(*texts), launcher_name(os.getpid()))
    if not by_controller:
        pytest.skip("no control groups can be made here")
    return by_controller[-1]


def test_launchers_that_start_at_once_sweep_the_dead(hierarchy: Hierarchy) -> None:
    family, _, _ = launcher_name(1).rsplit("-", 2)
    dead = [hierarchy.folder / f"{family}-{2**22 + number}-1" for number in range(100)]  # beyond the kernel's numbers
    for folder in dead:
        (folder / "000001").mkdir(parents=True)
    with ThreadPoolExecutor() as threads:
        for groups in list(threads.map(Cgroups, [[hierarchy]] * 4, [launcher_name(os.getpid())] * 4)):
            groups.close()
    assert not any(folder.exists() for folder in dead)


def test_the_trial_of_a_living_launcher_is_not_swept(hierarchy: Hierarchy) -> None:
    trial = hierarchy.folder / f"{launcher_name(os.getpid())}{TRIAL}"
    trial.mkdir()
    try:
        Cgroups([hierarchy], launcher_name(os.getpid())).close()
        assert trial.exists()
    finally:
        trial.rmdir()

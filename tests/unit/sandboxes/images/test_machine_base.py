"""The files around the machine's own programs: what programs need, and nothing private to the machine."""

import os
import sys
from pathlib import Path

import pytest

from etude.sandbox_spec import Image, SandboxSpec
from etude.sandboxes.images.machine_base import environment_mounts, machine_folders, variables_of, write_skeleton


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "skeleton"
    mask = os.umask(0o077)
    try:
        write_skeleton(folder)
    finally:
        os.umask(mask)
    return folder


def test_accounts_are_its_own_and_secrets_are_left_out(skeleton: Path) -> None:
    users = (skeleton / "etc/passwd").read_text(encoding="utf-8").splitlines()
    assert [line.split(":")[0] for line in users] == ["root", "nobody", "agent"]
    for name in ("shadow", "gshadow", "ssh", "machine-id", "sudoers", "fstab"):
        assert not (skeleton / "etc" / name).exists()
    assert list((skeleton / "root").rglob("*.*rc")) == []


def test_every_user_can_read_it(skeleton: Path) -> None:
    paths = [path for path in skeleton.rglob("*") if not path.is_symlink()]
    assert all(path.stat().st_mode & 0o004 for path in paths)
    assert all(path.stat().st_mode & 0o001 for path in paths if path.is_dir())
    assert (skeleton / "tmp").stat().st_mode & 0o7777 == 0o1777


def test_every_place_that_something_is_mounted_on_is_there(skeleton: Path) -> None:
    for place in ("/proc", "/dev", "/sys", "/usr", "/work", "/home/agent", *machine_folders()):
        assert (skeleton / place.strip("/")).is_dir()


def test_programs_of_mounts_come_first_and_the_interpreter_last(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    mounts = {"/harness": tmp_path, "/data": tmp_path / "none"}
    path = variables_of(SandboxSpec(mounts=mounts))["PATH"].split(":")
    assert path[0] == "/harness/bin"
    assert "/usr/bin" in path
    own = variables_of(SandboxSpec(image=Image(base="debian")))["PATH"]
    assert own == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    image = Image(base="scratch", environment={"PATH": "/opt/conda/bin:/bin"})
    assert variables_of(SandboxSpec(image=image, mounts=mounts))["PATH"] == "/harness/bin:/opt/conda/bin:/bin"


def test_a_python_environment_brings_its_python(tmp_path: Path) -> None:
    mounts = environment_mounts(Path(sys.prefix))
    assert str(Path(sys.prefix)) in mounts
    base = Path(sys.base_prefix)
    assert base.is_relative_to("/usr") or str(base) in mounts
    assert environment_mounts(tmp_path) == {str(tmp_path): tmp_path}

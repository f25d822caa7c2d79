"""Directories of dead providers go, those of living ones stay."""

import fcntl
import os
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandboxes.scratch import MEMORY, PREFIX, Scratch


def test_what_a_killed_provider_left_is_swept(tmp_path: Path) -> None:
    alive = Scratch.open(tmp_path)
    files = alive.create(reader=None) / "kept"
    files.write_text("kept", encoding="utf-8")
    dead = tmp_path / f"{PREFIX}dead"
    (dead / "000001" / "folder").mkdir(parents=True)
    (dead / "000001" / "link").symlink_to(alive.path)
    bystander = tmp_path / "bystander"
    bystander.mkdir()

    newest = Scratch.open(tmp_path)

    assert sorted(tmp_path.iterdir()) == sorted([alive.path, newest.path, bystander])
    assert files.read_text(encoding="utf-8") == "kept"
    for scratch in (alive, newest):
        scratch.close()
    assert list(tmp_path.iterdir()) == [bystander]


def test_a_directory_that_its_owner_removes_during_the_sweep_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, lock = [Scratch.open(tmp_path)], fcntl.flock

    def after_its_end(descriptor: int, operation: int) -> None:
        if ending and operation & fcntl.LOCK_NB and os.path.samestat(os.fstat(descriptor), ending[0].path.stat()):
            ending.pop().close()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", after_its_end)
    newest = Scratch.open(tmp_path)
    assert list(tmp_path.iterdir()) == [newest.path]
    assert not ending
    newest.close()


def test_a_scratch_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="choose another"):
        Scratch.open(tmp_path / "none")


def test_removal_follows_no_link_and_minds_no_mode(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept", encoding="utf-8")
    scratch = Scratch.open(tmp_path)
    place = scratch.create(reader=None)
    folder = place / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "link").symlink_to(precious)
    (folder / "hard").hardlink_to(precious / "file")
    os.mkfifo(folder / "pipe")
    folder.chmod(0)
    folder.parent.chmod(0)
    scratch.remove(place)
    assert list(scratch.path.iterdir()) == []
    assert (precious / "file").read_text(encoding="utf-8") == "kept"
    scratch.close()


def test_removal_minds_no_depth(tmp_path: Path) -> None:
    scratch = Scratch.open(None if MEMORY.is_dir() else tmp_path)  # a disk is slow to remove so many folders
    place = scratch.create(reader=None)
    here = os.open(place, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    scratch.remove(place)
    assert list(scratch.path.iterdir()) == []
    scratch.close()


def test_a_sandbox_is_readable_for_one_user_alone(tmp_path: Path) -> None:
    scratch = Scratch.open(tmp_path)
    group = os.getegid()
    assert (
        scratch.create(reader=group).stat().st_mode & 0o777,
        scratch.create(reader=None).stat().st_mode & 0o777,
    ) == (
        0o750,
        0o700,
    )
    scratch.close()


def test_other_users_get_no_further_unless_they_are_meant_to(tmp_path: Path) -> None:
    closed, passable = Scratch.open(tmp_path), Scratch.open(tmp_path, passable=True)
    assert (closed.path.stat().st_mode & 0o777, passable.path.stat().st_mode & 0o777) == (0o700, 0o711)
    for scratch in (closed, passable):
        scratch.close()

"""Directories of dead providers go, those of living ones stay."""

import os
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandboxes.scratch import PREFIX, Scratch


def test_what_a_killed_provider_left_is_swept(tmp_path: Path) -> None:
    alive = Scratch.open(tmp_path, owner=None)
    alive.write(alive.create(), "a/b", "kept")
    dead = tmp_path / f"{PREFIX}dead"
    (dead / "000001" / "folder").mkdir(parents=True)
    (dead / "000001" / "link").symlink_to(alive.path)
    bystander = tmp_path / "bystander"
    bystander.mkdir()

    newest = Scratch.open(tmp_path, owner=None)

    assert sorted(tmp_path.iterdir()) == sorted([alive.path, newest.path, bystander])
    assert alive.read("000001", "a/b") == "kept"
    for scratch in (alive, newest):
        scratch.close()
    assert list(tmp_path.iterdir()) == [bystander]


def test_a_scratch_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="choose another"):
        Scratch.open(tmp_path / "none", owner=None)


def test_removal_follows_no_link_and_minds_no_mode(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept", encoding="utf-8")
    scratch = Scratch.open(tmp_path, owner=None)
    name = scratch.create()
    folder = scratch.path / name / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "link").symlink_to(precious)
    (folder / "hard").hardlink_to(precious / "file")
    os.mkfifo(folder / "pipe")
    folder.chmod(0)
    folder.parent.chmod(0)
    scratch.remove(name)
    assert list(scratch.path.iterdir()) == []
    assert (precious / "file").read_text(encoding="utf-8") == "kept"
    scratch.close()

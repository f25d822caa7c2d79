"""Folders that are there whole or not at all, also while several machines with one disk create the same one."""

import os
from pathlib import Path

import pytest

from etude.run.phase_folders import LEFT_S, place


def fill(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).write_text(name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_two_nodes_that_create_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Regression: the second node removed what the first one wrote, and an incomplete checkpoint got the name."""
    target = tmp_path / "checkpoints" / "step-00000012"

    def fill_slowly(folder: Path) -> None:
        (folder / "a").write_text("a")
        place(target, fill)
        (folder / "b").write_text("b")

    place(target, fill_slowly)
    assert names(target) == ["a", "b"]
    assert names(target.parent) == [target.name]


def test_a_folder_that_could_not_be_filled_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "a").write_text("a")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        place(tmp_path / "model", fail)
    assert names(tmp_path) == []


def test_only_what_a_killed_process_left_long_ago_is_removed(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / f"model.{name}.partial").mkdir()
    before_s = (tmp_path / "model.new.partial").stat().st_mtime - LEFT_S - 10
    os.utime(tmp_path / "model.old.partial", (before_s, before_s))
    place(tmp_path / "model", fill)
    assert names(tmp_path) == ["model", "model.new.partial"]

"""Booted machines on disk: those that were used last are kept."""

import os
from pathlib import Path

from etude.sandboxes.qemu.templates import BOOTED_LIMIT, prune


def test_the_machines_that_were_used_last_are_kept(tmp_path: Path) -> None:
    for number in range(BOOTED_LIMIT + 3):
        folder = tmp_path / f"m{number:03d}"
        folder.mkdir()
        (folder / "ram").write_bytes(b"x")
        (folder / "frozen.json").write_text("{}")
        os.utime(folder / "frozen.json", (number, number))
    (tmp_path / "old.refused").write_text("")
    os.utime(tmp_path / "old.refused", (0, 0))
    os.utime(tmp_path / "m000/frozen.json", (1000, 1000))
    prune(tmp_path)
    frozen_disk = [f"m{number:03d}" for number in (0, *range(4, BOOTED_LIMIT + 3))]
    assert sorted(path.name for path in tmp_path.iterdir()) == frozen_disk
    prune(tmp_path)
    assert len(list(tmp_path.iterdir())) == BOOTED_LIMIT

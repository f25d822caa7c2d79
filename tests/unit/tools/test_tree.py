"""The repository holds what people wrote: binary files are only where they belong."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BINARY = ("docs/page", "tests/compatibility", "tests/fuzz/corpus", "tests/unit/weights/fixtures")
"""Folders with pictures, an archive, damaged input and weights of other systems."""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an unpacked source package has no list of its files")
def test_binary_files_are_only_where_they_belong() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert len(files) > 1000
    assert [name for name in files if b"\0" in (ROOT / name).read_bytes() and not name.startswith(BINARY)] == []

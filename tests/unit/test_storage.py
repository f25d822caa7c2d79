"""A full disk is recognised whichever library meets it first; each error here is the library's own."""

import errno
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from etude.errors import InfrastructureError
from etude.objects import ObjectStore
from etude.storage import FULL, fullest, storage_errno
from smalldisk import fill, small_disk


def write_file() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x")


def write_database() -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("PRAGMA max_page_count = 2")
        database.execute("CREATE TABLE t (x)")
        database.execute("INSERT INTO t VALUES (zeroblob(100000))")


def wrap() -> None:
    """Raise a library's error as stores and ledgers do: as the cause of one of étude's errors."""
    try:
        write_database()
    except sqlite3.Error as error:
        raise InfrastructureError("the ledger could not be asked") from error


@pytest.mark.parametrize("fails", [write_file, write_database, wrap])
def test_a_full_disk_is_recognised(fails: Callable[[], None]) -> None:
    with pytest.raises(Exception) as raised:
        fails()
    assert storage_errno(raised.value) in FULL


def test_other_failures_of_storage_are_told_apart() -> None:
    assert storage_errno(OSError(errno.EIO, "I/O error")) == errno.EIO
    assert storage_errno(OSError(errno.EDQUOT, "quota")) in FULL
    assert storage_errno(FileNotFoundError(errno.ENOENT, "no such file")) is None
    assert storage_errno(ValueError("28")) is None


def test_the_place_with_the_least_room_is_named(tmp_path: Path) -> None:
    folder, free_bytes = fullest([tmp_path / "not" / "there", Path("/proc")])
    assert (folder, free_bytes) == (Path("/proc"), 0)


def test_libraries_that_write_files_are_understood(tmp_path: Path) -> None:
    """Regression: safetensors and obstore raise no ``OSError``, so the full disk was not recognised."""
    with small_disk(tmp_path / "disk") as disk:
        store = ObjectStore(str(disk / "store"))
        fill(disk)
        with pytest.raises(SafetensorError) as tensors:
            save_file({"a": np.zeros(1 << 20, np.uint8)}, disk / "tensors")
        with pytest.raises(InfrastructureError) as objects:
            store.put_if_absent("packs/1", bytes(1 << 20))
    assert {storage_errno(tensors.value), storage_errno(objects.value)} == {errno.ENOSPC}

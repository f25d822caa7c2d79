"""The cache of compiled kernels: one process at a time adds to it."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from etude.jit import borrowing, kernel


def first(values: Any) -> Any:
    return values[0]


@pytest.mark.parametrize("compiled", [kernel, borrowing])
def test_a_kernel_is_stored_under_a_lock_between_processes(
    compiled: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    jitted, refused = compiled(first), list[str]()
    index = jitted._cache._cache_file
    save = index.save

    def save_watched(key: object, data: object) -> None:
        other = os.open(jitted._cache.cache_path, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refused.append("another process")
        finally:
            os.close(other)
        save(key, data)

    index.save = save_watched
    assert [jitted(np.arange(3, 5, dtype=kind)) for kind in ("int32", "float32")] == [3, 3.0]
    assert refused == ["another process"] * 2
    again = compiled(first)
    assert again(np.arange(7, 9, dtype="float32")) == 7.0
    assert sum(again.stats.cache_hits.values()) == 1


def test_without_a_cache_of_numbas_a_kernel_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    assert kernel(first) is first

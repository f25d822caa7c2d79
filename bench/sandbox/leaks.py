"""What sandboxes leave behind: processes, mounts, control groups and files that are still there.

Owns how each is counted, and that nothing of anybody else's is: processes are descendants of this one, which adopts
those whose parents ended; mounts and files are those in the provider's folder; groups those that are named after one of
our processes. Linux only.
"""

import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench import usage

CGROUPS = Path("/sys/fs/cgroup")
SET_CHILD_SUBREAPER = 36
"""Option of ``prctl``: orphans below become children of this process instead of the machine's first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """Resources that exist."""

    processes: int
    mounts: int
    cgroups: int
    files: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.processes + self.mounts + self.cgroups + self.files

    def beyond(self, before: "Remains") -> "Remains":
        """Resources added since ``before``; removed ones do not offset them."""
        return Remains(
            processes=max(0, self.processes - before.processes),
            mounts=max(0, self.mounts - before.mounts),
            cgroups=max(0, self.cgroups - before.cgroups),
            files=max(0, self.files - before.files),
        )


class Remainder:
    """Counts what the sandboxes of one folder left; a context, because orphans are adopted while it is open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pids = {os.getpid()}

    def __enter__(self) -> Self:
        _adopt_orphans(1)
        return self

    def __exit__(self, *_: object) -> None:
        _adopt_orphans(0)  # without a parent that waits: a process namespace would wait for them for ever

    def count(self) -> Remains:
        """Resources that exist now."""
        alive = [pid for pid in usage.descendants(os.getpid()) if _is_alive(pid)]
        self._pids.update(alive)
        return Remains(
            processes=len(alive),
            mounts=Path("/proc/self/mountinfo").read_text(encoding="utf-8").count(f" {self._folder}"),
            cgroups=sum(1 for _ in self._groups()),
            files=sum(1 for _ in self._folder.rglob("*")),
        )

    def _groups(self) -> Iterator[Path]:
        """Groups named after a process that is or was ours, and those in them."""
        for folder, inner, _ in os.walk(CGROUPS):
            named = [name for name in inner if self._pids & set(map(int, re.findall(r"\d+", name)))]
            for name in named:
                yield Path(folder) / name
                yield from (below for below in (Path(folder) / name).rglob("*") if below.is_dir())
            inner[:] = [name for name in inner if name not in named]


def _adopt_orphans(adopt: int) -> None:
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, adopt, 0, 0, 0)


def _is_alive(pid: int) -> bool:
    """True unless the process is a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

"""Free memory of the machine, from the kernel: /proc, the cgroups of this process, pressure stalls.

Owns what the files mean. What follows from it is decided in :mod:`etude.sandboxes.warm_pool`. Linux only; what a
kernel does not have is left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.errors import InfrastructureError


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """One reading of the machine's memory."""

    available_bytes: float
    """Bytes that can be taken before something is swapped out or killed."""
    stalled: float = math.nan
    """Share of the last ten seconds in which something waited for memory; ``nan`` where the kernel does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFiles:
    """File names of memory figures in one version of cgroups."""

    controller: str
    """Name of the hierarchy in ``/proc/self/cgroup``."""
    limit: str
    usage: str
    reclaimable: str
    """Line of ``memory.stat`` with the page cache that is given back first."""


VERSION_1 = MemoryFiles(
    controller="memory",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
VERSION_2 = MemoryFiles(controller="", limit="memory.max", usage="memory.current", reclaimable="inactive_file")
PLACES = (("memory", VERSION_1), ("", VERSION_2), ("unified", VERSION_2))
"""Mount points of each, below ``/sys/fs/cgroup``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGauge:
    """Reads the memory that this process and its children can still get."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")

    def read(self) -> MachineMemory:
        """The memory left: of the machine, or of the tightest cgroup above this process.

        Raises :class:`~etude.errors.InfrastructureError` where the kernel does not say what is available.
        """
        left = [self._machine_bytes(), *self._cgroup_bytes()]
        stalls = [_stalled(_text(self.proc / "pressure" / "memory"))]
        stalls += [_stalled(_text(folder / "memory.pressure")) for folder, _ in self._groups()]
        return MachineMemory(
            available_bytes=float(max(0, min(left))),
            stalled=max((stall for stall in stalls if not math.isnan(stall)), default=math.nan),
        )

    def _machine_bytes(self) -> int:
        file = self.proc / "meminfo"
        available = _field(_text(file), "MemAvailable:")
        if available is None:
            raise InfrastructureError(
                f"{file} does not tell MemAvailable: a pool of sandboxes needs Linux 3.14 or later"
            )
        return available * 1024

    def _cgroup_bytes(self) -> Iterator[int]:
        """The bytes that each limit above this process leaves."""
        for folder, files in self._groups():
            limit, usage = _text(folder / files.limit).strip(), _text(folder / files.usage).strip()
            if limit.isdigit() and usage.isdigit():
                cache = _field(_text(folder / "memory.stat"), files.reclaimable) or 0
                yield int(limit) - int(usage) + cache

    def _groups(self) -> Iterator[tuple[Path, MemoryFiles]]:
        """The cgroups of this process and those above them, where they are mounted."""
        paths: dict[str, str] = {}
        for line in _text(self.proc / "self" / "cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path.strip("/"))
        for place, files in PLACES:
            root = self.cgroups / place
            if files.controller in paths:
                own = root / paths[files.controller]
                yield from ((folder, files) for folder in (own, *own.parents) if folder.is_relative_to(root))


def _text(file: Path) -> str:
    """The text of a file; empty if it is not there or may not be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _field(text: str, name: str) -> int | None:
    """The number in the line that starts with ``name``."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return None


def _stalled(text: str) -> float:
    """The share of the last ten seconds in which something waited; ``nan`` if the text does not say."""
    for line in text.splitlines():
        kind, *figures = line.split()
        if kind == "some":
            return float(dict(figure.split("=", 1) for figure in figures)["avg10"]) / 100
    return math.nan

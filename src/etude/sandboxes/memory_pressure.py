"""Free memory of the machine, from the kernel: /proc, the cgroups of this process, pressure stall information.

Owns the interpretation of these files; :mod:`etude.sandboxes.warm_pool` acts on it. Linux only; features that a kernel
lacks are left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.errors import InfrastructureError


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """A reading of the machine's memory."""

    available_bytes: float
    """Bytes that can be allocated before the kernel swaps or kills."""
    stalled: float = math.nan
    """Share of the last ten seconds in which some task waited for memory; ``nan`` if the kernel does not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFiles:
    """Names of the memory files in one version of cgroups."""

    controller: str
    """Name of the hierarchy in ``/proc/self/cgroup``."""
    limit: str
    usage: str
    reclaimable: str
    """Line of ``memory.stat`` with the page cache that is reclaimed first."""


VERSION_1 = MemoryFiles(
    controller="memory",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
VERSION_2 = MemoryFiles(controller="", limit="memory.max", usage="memory.current", reclaimable="inactive_file")
PLACES = (("memory", VERSION_1), ("", VERSION_2), ("unified", VERSION_2))
"""Mount points of each version, below ``/sys/fs/cgroup``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGauge:
    """Reads the memory that this process and its children can still get."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")

    def read(self) -> MachineMemory:
        """The memory left: that of the machine, or of the tightest cgroup above this process.

        Raises :class:`~etude.errors.InfrastructureError` if the kernel does not report available memory.
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
        """The remaining bytes of each limit above this process."""
        for folder, files in self._groups():
            limit, usage = _text(folder / files.limit).strip(), _text(folder / files.usage).strip()
            if limit.isdigit() and usage.isdigit():
                cache = _field(_text(folder / "memory.stat"), files.reclaimable) or 0
                yield int(limit) - int(usage) + cache

    def _groups(self) -> Iterator[tuple[Path, MemoryFiles]]:
        """The cgroups of this process and their ancestors, where they are mounted."""
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
    """The text of a file; empty if it is missing or unreadable."""
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
    """The share of the last ten seconds in which some task waited; ``nan`` if the text has none."""
    for line in text.splitlines():
        kind, *figures = line.split()
        if kind == "some":
            return float(dict(figure.split("=", 1) for figure in figures)["avg10"]) / 100
    return math.nan

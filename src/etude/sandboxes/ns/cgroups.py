"""Control groups of sandboxes: limits of memory, processes and CPU time.

    machine's hierarchy ─▶ the provider's own group ─▶ etude-NAMESPACE-PID-START ─▶ one group a sandbox

Owns the folders below ``/sys/fs/cgroup``, of cgroup version 1 or 2, whichever has a controller; the next launcher
removes those of a killed one. Controllers that are not writable count as missing: the launcher reports which ones it
has, and falls back to limits per process. Standard library alone.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MEMORY, PROCESSES, CPU, CPU_TIME = "memory", "pids", "cpu", "cpuacct"
SWAP = "swap"
"""Not a controller, but a second limit of the memory controller, if the kernel counts swap."""
CONTROLLERS = (MEMORY, PROCESSES, CPU, CPU_TIME)
PREFIX, TRIAL = "etude-", "-trial"
"""Prefix of launchers' groups, and suffix of a group that only tests whether groups can be made."""
PERIOD_US = 100_000
"""Period for the distribution of CPU time."""
REMOVE_TIMEOUT_S = 2.0
"""Timeout for the kernel to release a group without processes; it takes milliseconds."""
SETTINGS: Mapping[tuple[int, str], str] = {
    (1, MEMORY): "memory.limit_in_bytes",
    (2, MEMORY): "memory.max",
    (1, PROCESSES): "pids.max",
    (2, PROCESSES): "pids.max",
    (1, SWAP): "memory.memsw.limit_in_bytes",
    (2, SWAP): "memory.swap.max",
    (1, CPU): "cpu.cfs_quota_us",
    (2, CPU): "cpu.max",
}
"""Version and controller → the limit's file."""
SHARES: Mapping[int, tuple[str, int]] = {1: ("cpu.shares", 1024), 2: ("cpu.weight", 100)}
"""Version → the file for a group's share of contended processors, and the default weight of one process.

All sandboxes of a launcher together weigh as much as the number of processors, not as one processor.
"""
READINGS: Mapping[tuple[int, str], str] = {
    (1, MEMORY): "memory.usage_in_bytes",
    (2, MEMORY): "memory.current",
    (1, PROCESSES): "pids.current",
    (2, PROCESSES): "pids.current",
    (1, CPU_TIME): "cpuacct.usage",
    (2, CPU_TIME): "cpu.stat",
}
"""Version and controller → the usage file."""


KILLS: Mapping[int, str] = {1: "memory.oom_control", 2: "memory.events"}
"""Version → the file with the number of processes of a group killed for lack of memory."""


class Hierarchy(NamedTuple):
    """One writable cgroup hierarchy, and its controllers."""

    version: int
    folder: Path
    """Folder in which a launcher makes its group."""
    controllers: tuple[str, ...]

    @property
    def entry(self) -> str:
        """The file through which a process enters a group; version 1's ``tasks`` takes no machine-wide lock."""
        return "tasks" if self.version == 1 else "cgroup.procs"


class Usage(NamedTuple):
    """A sandbox's resource usage; ``None`` if no group measures it."""

    memory_bytes: int | None
    processes: int | None
    cpu_s: float | None


class Cgroups:
    """The control groups of one launcher."""

    def __init__(self, hierarchies: Sequence[Hierarchy], launcher: str) -> None:
        self._hierarchies = tuple(hierarchies)
        self._launcher = launcher
        for hierarchy in self._hierarchies:
            _sweep(hierarchy)
            (hierarchy.folder / launcher).mkdir(exist_ok=True)
            if hierarchy.version == 2:
                _enable(hierarchy.folder / launcher, hierarchy.controllers)
            if CPU in hierarchy.controllers:
                file, share = SHARES[hierarchy.version]
                _set(f"{hierarchy.folder}/{launcher}/{file}", str(share * (os.cpu_count() or 1)))
        self._groups = tuple(
            (f"{hierarchy.folder}/{launcher}/{{}}", _settings(hierarchy)) for hierarchy in self._hierarchies
        )
        self._entries = tuple(
            f"{hierarchy.folder}/{launcher}/{{}}/{hierarchy.entry}" for hierarchy in self._hierarchies
        )
        self.controllers = frozenset(name for hierarchy in self._hierarchies for name in hierarchy.controllers)

    def make(self, name: str, limits: Mapping[str, float]) -> None:
        """Make the group of a sandbox; ``limits`` by controller. Raises ``OSError`` if a limit cannot be set."""
        for group, settings in self._groups:
            folder = group.format(name)
            os.mkdir(folder)  # noqa: PTH102 - many a second
            for controller, version, file in settings:
                limit = limits.get(MEMORY if controller == SWAP else controller)
                if limit is not None:
                    _set(f"{folder}/{file}", limit_text(version, controller, limit))

    def open_entries(self, name: str) -> list[int]:
        """Descriptors through which :func:`enter` enters a group, even if the hierarchies are not visible."""
        entries: list[int] = []
        try:
            for path in self._entries:
                entries.append(os.open(path.format(name), os.O_WRONLY | os.O_CLOEXEC))  # noqa: PERF401 - see below
        except OSError:
            close_entries(entries)
            raise
        return entries

    def usage(self, name: str) -> Usage:
        """The current usage of a group."""
        by_controller: dict[str, int] = {}
        for hierarchy, (group, _) in zip(self._hierarchies, self._groups, strict=True):
            for controller in hierarchy.controllers:
                if file := READINGS.get((hierarchy.version, controller)):
                    by_controller[controller] = _number(Path(group.format(name), file).read_text(encoding="ascii"))
        nanoseconds = 1e3 if any(hierarchy.version == 2 for hierarchy in self._hierarchies) else 1.0
        cpu = by_controller.get(CPU_TIME)
        return Usage(
            by_controller.get(MEMORY), by_controller.get(PROCESSES), None if cpu is None else cpu * nanoseconds / 1e9
        )

    def ran_out(self, name: str) -> bool:
        """True if a process of a group was killed because the group's memory was used up."""
        for hierarchy, (group, _) in zip(self._hierarchies, self._groups, strict=True):
            if MEMORY in hierarchy.controllers:
                events = Path(group.format(name), KILLS[hierarchy.version]).read_text(encoding="ascii")
                return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in events.splitlines())
        return False

    def remove(self, name: str) -> None:
        """Remove the group of a sandbox without processes. Raises ``OSError`` if any remain."""
        for group, _ in self._groups:
            _remove(group.format(name))

    def close(self) -> None:
        """Remove the launcher's own groups; those of sandboxes must be gone."""
        for hierarchy in self._hierarchies:
            _remove(f"{hierarchy.folder}/{self._launcher}")


def enter(entries: Sequence[int]) -> None:
    """Move the calling process into a group."""
    for entry in entries:
        os.write(entry, b"0")


def close_entries(entries: Sequence[int]) -> None:
    """Close the descriptors of :meth:`Cgroups.open_entries`."""
    for entry in entries:
        os.close(entry)


def find_hierarchies(mounts: str, groups: str) -> list[Hierarchy]:
    """Find the cgroup controllers, from the text of ``/proc/self/mountinfo`` and ``/proc/self/cgroup``.

    Version 1 first; a controller found there is not looked for in version 2.
    """
    own = _own_groups(groups)
    hierarchies: list[Hierarchy] = []
    taken: set[str] = set()
    unified: list[Path] = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        root, place = before.split(" ")[3:5]
        if kind == "cgroup2":
            unified.append(_below(place, root, own.get("", "/")))
        elif kind == "cgroup":
            here = tuple(name for name in CONTROLLERS if name in options.split(",") and name not in taken)
            if here:
                hierarchies.append(Hierarchy(1, _below(place, root, own.get(here[0], "/")), here))
                taken.update(here)
    for folder in unified[:1]:
        left = tuple(name for name in CONTROLLERS if name not in taken)
        if MEMORY in left and PROCESSES in left:
            hierarchies.append(Hierarchy(2, folder, left))
    return hierarchies


def writable(hierarchies: Sequence[Hierarchy], launcher: str) -> list[Hierarchy]:
    """The hierarchies in which this process can make groups, found by trial.

    A version 2 group with processes cannot delegate controllers to groups below it, so groups above it are tried.
    """
    usable = []
    for hierarchy in hierarchies:
        folders = [hierarchy.folder]
        if hierarchy.version == 2:
            folders += [parent for parent in hierarchy.folder.parents if (parent / "cgroup.procs").exists()]
        for folder in folders:
            if _try(hierarchy._replace(folder=folder), launcher):
                usable.append(hierarchy._replace(folder=folder))
                break
    return usable


def launcher_name(process: int) -> str:
    """The name of a launcher's cgroup: its process namespace and number, and its start time.

    Process numbers are reused, and have no meaning in another namespace. ``OSError`` if there is no such process.
    """
    return f"{_family()}{process}-{_start_ticks(process)}"


def limit_text(version: int, controller: str, limit: float) -> str:
    """A limit in the format of the kernel's file. For swap, version 1 counts memory and swap together."""
    if controller == SWAP and version == 2:
        return "0"
    if controller == CPU:
        quota_us = max(1000, round(limit * PERIOD_US))
        return str(quota_us) if version == 1 else f"{quota_us} {PERIOD_US}"
    return str(int(limit))


def _own_groups(groups: str) -> dict[str, str]:
    """Controller → this process's group; version 2's key is empty."""
    own = {}
    for line in groups.splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    return own


def _below(place: str, root: str, group: str) -> Path:
    """The folder of a group in a hierarchy mounted at ``place``; the mount may show only a part of it."""
    inner = group.removeprefix(root) if root != "/" else group
    return Path(place, inner.lstrip("/"))


def _try(hierarchy: Hierarchy, launcher: str) -> bool:
    trial = hierarchy.folder / f"{launcher}{TRIAL}"
    try:
        if hierarchy.version == 2:
            _enable(hierarchy.folder, hierarchy.controllers)
        trial.mkdir()
    except OSError:
        return False
    names = {SETTINGS.get((hierarchy.version, name)) for name in hierarchy.controllers} - {None}
    good = all(os.access(trial / str(name), os.W_OK) for name in names)
    trial.rmdir()
    return good


def _enable(folder: Path, controllers: Sequence[str]) -> None:
    enabled = " ".join(f"+{name}" for name in controllers if name != CPU_TIME)  # version 2 always counts CPU time
    (folder / "cgroup.subtree_control").write_text(enabled, encoding="ascii")


def _number(text: str) -> int:
    """The number in a file, or the one after ``usage_usec`` of version 2's ``cpu.stat``."""
    words = text.split()
    return int(words[1] if words[0] == "usage_usec" else words[0])


def _settings(hierarchy: Hierarchy) -> tuple[tuple[str, int, str], ...]:
    """Controller, version and file of each limit of a group."""
    controllers = list(hierarchy.controllers)
    if MEMORY in controllers and (hierarchy.folder / SETTINGS[hierarchy.version, SWAP]).exists():
        controllers.append(SWAP)
    files = ((name, SETTINGS.get((hierarchy.version, name))) for name in controllers)
    return tuple((name, hierarchy.version, file) for name, file in files if file)


def _set(file: str, text: str) -> None:
    """Write a setting; never create the file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _sweep(hierarchy: Hierarchy) -> None:
    """Remove the groups of dead launchers, and kill the processes they left."""
    for folder in hierarchy.folder.glob(f"{_family()}[0-9]*-[0-9]*"):
        process = folder.name.removeprefix(_family()).partition("-")[0]
        with suppress(OSError):
            if launcher_name(int(process)) == folder.name.removesuffix(TRIAL):
                continue
        for group in [*_inner(folder), folder]:
            with suppress(OSError):  # removed by another launcher meanwhile, or not this user's
                for left in (group / "cgroup.procs").read_text(encoding="ascii").split():
                    os.kill(int(left), signal.SIGKILL)
                _remove(str(group))


def _inner(folder: Path) -> list[Path]:
    """The groups in a group; empty if another launcher has removed it meanwhile."""
    try:
        return [inner for inner in folder.iterdir() if inner.is_dir()]
    except FileNotFoundError:
        return []


def _remove(folder: str) -> None:
    deadline_s = time.monotonic() + REMOVE_TIMEOUT_S
    while True:
        try:
            os.rmdir(folder)  # noqa: PTH106 - many a second
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.001)
        else:
            return


def _family() -> str:
    """Prefix of all groups of launchers in this process namespace."""
    return f"{PREFIX}{Path('/proc/self/ns/pid').stat().st_ino}-"


def _start_ticks(process: int) -> str:
    """The start time of a process, in ticks since boot. ``FileNotFoundError`` if there is none."""
    return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]

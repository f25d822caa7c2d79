"""Other people's sandboxes in `bench sandbox`: each command a process tree of its own, over a fresh overlay.

    bench ──order, a line of JSON──▶ launcher, in a mount namespace of its own ──▶ bwrap, crun, podman, runsc
          ◀─times, a line of JSON──

Owns how each is called and what is timed: directories and overlay made, the command run to its end (``ran_s``), overlay
and directories removed (``whole_s``). ``crun+exec`` is a sandbox that lives: a container that rests, confined as
``ns`` is, and the command in it by ``crun exec``. All see the machine's ``/usr`` read-only and nothing else of it, have
no network, and are given what their users would give them: crun and podman limits of memory and processes, bubblewrap
and runsc none, as they have no such option or do without. Bubblewrap before 0.11 mounts no overlay: ``bwrap+overlay``
has it done by mount(8), as a script would, ``bwrap+syscalls`` and the others by the launcher's own system calls, the
cheapest way.

The launcher's mount namespace keeps every mount off the machine, and lets cgroup 2 be hidden where it stands beside
cgroup 1, a mixture that crun refuses. Needs root: only then do all of them run.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, Self, final

from etude.errors import InfrastructureError
from etude.sandboxes.images.layers import AGENT
from etude.sandboxes.ns.seccomp import CALL_NUMBERS, PRIORITIES, SCHEDULING

COMMAND_TIMEOUT_S = 60.0
"""No start takes so long; a machine that is busy with others may need some of it."""
MEMORY_BYTES, PROCESSES = 1 << 30, 128
MNT_DETACH = 2
ROOT_FOLDERS = ("proc", "dev", "sys", "tmp", "etc", "work", "usr")
ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64")
CGROUPS = Path("/sys/fs/cgroup")
GROUP = "etude-bench"
"""Parent of whatever groups the programs make."""
NAMESPACES = ("pid", "network", "ipc", "uts", "mount")
FIRST_USER = 1 << 20
"""First user of the machine that containers with users of their own have."""
REFUSED_CALLS = tuple(
    sorted({*CALL_NUMBERS} - {"clone", "ioctl", "prlimit64", "socket", "socketpair", *SCHEDULING, *PRIORITIES})
)
"""System calls that ``ns`` refuses whatever their arguments are."""


class Launch(NamedTuple):
    """Seconds of one start."""

    ran_s: float
    """Until the command had ended."""
    whole_s: float
    """Until everything was removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Location of one start."""

    folder: Path
    """Folder of this start only."""
    lower: Path
    """The root that all starts share: mount points and links into ``/usr``."""
    state: Path
    """Folder for state that a program keeps between starts."""

    @property
    def root(self) -> Path:
        """The overlay's mount point."""
        return self.folder / "root"

    def make_folders(self) -> str:
        """Create an overlay's folders; returns its mount options. No syncs: the files are not read after a crash."""
        upper, work = self.folder / "upper", self.folder / "work"
        for folder in (upper, work, self.root):
            folder.mkdir()
        return f"lowerdir={self.lower},upperdir={upper},workdir={work},volatile"


class Overlay(Enum):
    """Component that mounts the overlay."""

    BY_PROGRAM = "mount(8) and umount(8), as a script does"
    BY_SYSCALL = "the launcher, by system call: what it costs at least"
    ITSELF = "the program"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One way to start a sandbox."""

    executable: str
    package: str
    """Debian's."""
    command: Callable[[Place, Sequence[str]], Sequence[str]]
    """Writes the files that a program needs and returns its command line."""
    overlay: Overlay = Overlay.BY_SYSCALL
    start: Callable[[Place], Sequence[str]] | None = None
    """Starts the container that the command is run in, where that is one more step."""
    remove: Callable[[Place], Sequence[str]] | None = None
    """Removes that container."""

    @property
    def missing(self) -> str | None:
        """Why it cannot run here."""
        if shutil.which(self.executable) is None:
            return f"{self.executable} is not installed: apt-get install {self.package}"
        return None if os.geteuid() == 0 else f"{self.executable} was not measured: its overlay takes root"


def bubblewrap(place: Place, argv: Sequence[str]) -> Sequence[str]:
    """All name spaces, and the overlay as its root."""
    return (
        *("bwrap", "--bind", str(place.root), "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"),
        *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv", *argv),
    )


def crun(place: Place, argv: Sequence[str]) -> Sequence[str]:
    """From a bundle."""
    limits = {"memory": {"limit": MEMORY_BYTES}, "pids": {"limit": PROCESSES}}
    devices = [{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}]
    _write_bundle(place, argv, devices, {"resources": limits, "cgroupsPath": f"/{GROUP}-{place.folder.name}"})
    return (*_crun(place), "run", "--bundle", str(place.folder), _container(place))


def crun_start(place: Place) -> Sequence[str]:
    """A container that rests, confined as a sandbox of ``ns`` is: users of its own, no capabilities, a filter of the
    same system calls, masked and read-only paths of ``/proc`` and ``/sys``, limits of memory and processes.
    """
    devices = [{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}]
    users = [{"containerID": 0, "hostID": FIRST_USER, "size": 1 << 16}]
    linux = {
        "resources": {"memory": {"limit": MEMORY_BYTES}, "pids": {"limit": PROCESSES}},
        "cgroupsPath": f"/{GROUP}-{place.folder.name}",
        "namespaces": [{"type": kind} for kind in (*NAMESPACES, "user", "cgroup")],
        "uidMappings": users,
        "gidMappings": users,
        "maskedPaths": ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware"],
        "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        "seccomp": {
            "defaultAction": "SCMP_ACT_ALLOW",
            "architectures": [f"SCMP_ARCH_{os.uname().machine.upper()}"],
            "syscalls": [{"names": [*REFUSED_CALLS], "action": "SCMP_ACT_ERRNO"}],
        },
    }
    _write_bundle(place, ("/usr/bin/sleep", "600"), devices, linux, user=AGENT)
    return (*_crun(place), "run", "--detach", "--bundle", str(place.folder), _container(place))


def crun_exec(place: Place, argv: Sequence[str]) -> Sequence[str]:
    """In the container that rests."""
    return (*_crun(place), "exec", _container(place), *argv)


def crun_remove(place: Place) -> Sequence[str]:
    """With all that runs in it."""
    return (*_crun(place), "delete", "--force", _container(place))


def runsc(place: Place, argv: Sequence[str]) -> Sequence[str]:
    """From a bundle, without cgroups and with the platform that works everywhere."""
    _write_bundle(place, argv, [], {})
    options = ("--root", str(place.state), "--platform=ptrace", "--network=none", "--ignore-cgroups")
    return ("runsc", *options, "run", "-bundle", str(place.folder), _container(place))


def podman(place: Place, argv: Sequence[str]) -> Sequence[str]:
    """Over a root folder, with the overlay that it makes itself; it cannot raise limits of processes here."""
    state = place.state
    return (
        *("podman", "--root", str(state / "root"), "--runroot", str(state / "run"), "--tmpdir", str(state / "tmp")),
        *("--cgroup-manager=cgroupfs", "--events-backend=none", "run", "--rm", "--network=none"),
        *("--cgroup-parent", f"/{GROUP}", "--memory", str(MEMORY_BYTES), "--pids-limit", str(PROCESSES)),
        *("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "--volume", "/usr:/usr:ro"),
        *("--rootfs", f"{place.lower}:O", *argv),
    )


PROGRAMS: Final[Mapping[str, Program]] = MappingProxyType(
    {
        "bwrap+overlay": Program(
            executable="bwrap", package="bubblewrap", command=bubblewrap, overlay=Overlay.BY_PROGRAM
        ),
        "bwrap+syscalls": Program(executable="bwrap", package="bubblewrap", command=bubblewrap),
        "crun+overlay": Program(executable="crun", package="crun", command=crun),
        "crun+exec": Program(
            executable="crun", package="crun", command=crun_exec, start=crun_start, remove=crun_remove
        ),
        "podman": Program(executable="podman", package="podman", command=podman, overlay=Overlay.ITSELF),
        "runsc+overlay": Program(executable="runsc", package="runsc", command=runsc),
    }
)
"""By the name of the contestant."""


# ── the launcher, seen from the bench ───────────────────────────────────────────────────────────────────────────────


@final
class Launcher:
    """A process that starts programs in a mount namespace of its own; leaving it ends it and removes its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            ("unshare", "--mount", "--propagation", "private", sys.executable, "-m", __name__, str(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(COMMAND_TIMEOUT_S)
        self._process.stdout.close()
        for folder in (*CGROUPS.glob(f"*/{GROUP}/conmon"), *CGROUPS.glob(f"*/{GROUP}")):
            with suppress(OSError):  # another bench uses it
                folder.rmdir()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def launch(self, name: str, argv: Sequence[str], *, seconds: float = 0.0, at_once: int = 1) -> list[Launch]:
        """Start again and again for so long, ``at_once`` at a time, but once at least.

        Raises :class:`~etude.errors.InfrastructureError` with the words of a program that fails.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"name": name, "argv": list(argv), "seconds": seconds, "at_once": at_once}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "the launcher died"}')
        if answer["error"]:
            raise InfrastructureError(f"{name} was not measured: {answer['error']}")
        return [Launch(*times) for times in answer["launches"]]


# ── the launcher itself ─────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Serve orders until the bench hangs up."""
    folder = Path(sys.argv[1])
    lower = folder / "lower"
    lower.mkdir()
    for name in ROOT_FOLDERS:
        (lower / name).mkdir()
    for name in ROOT_LINKS:
        if (Path("/") / name).exists():
            (lower / name).symlink_to(f"usr/{name}")
    system = System()
    if (CGROUPS / "unified").is_mount():
        system.unmount(CGROUPS / "unified")
    numbers = count(1)
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, object] = {"error": "", "launches": []}
        try:
            launches = _serve(system, folder, lower, numbers, order)
            answer["launches"] = launches
        except (InfrastructureError, OSError, subprocess.SubprocessError) as error:
            answer["error"] = str(error)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class System:
    """The two system calls that Python lacks."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def mount_overlay(self, target: Path, options: str) -> None:
        """Mount an overlay."""
        if self._libc.mount(b"overlay", os.fsencode(target), b"overlay", 0, options.encode()):
            raise OSError(ctypes.get_errno(), f"mounting an overlay: {os.strerror(ctypes.get_errno())}")

    def unmount(self, target: Path) -> None:
        """Take a mount away."""
        if self._libc.umount2(os.fsencode(target), MNT_DETACH):
            raise OSError(ctypes.get_errno(), f"unmounting {target}: {os.strerror(ctypes.get_errno())}")


def _serve(
    system: System, folder: Path, lower: Path, numbers: Iterator[int], order: Mapping[str, object]
) -> list[Launch]:
    name, argv, at_once = str(order["name"]), order["argv"], int(str(order["at_once"]))
    assert isinstance(argv, list)
    state = folder / name
    for inner in ("root", "run", "tmp"):
        (state / inner).mkdir(parents=True, exist_ok=True)
    ends_s = time.perf_counter() + float(str(order["seconds"]))

    def again(_: int) -> list[Launch]:
        launches: list[Launch] = []
        while not launches or time.perf_counter() < ends_s:
            place = Place(folder=folder / f"{next(numbers)}", lower=lower, state=state)
            launches.append(_launch(system, PROGRAMS[name], place, argv))
        return launches

    with ThreadPoolExecutor(at_once) as threads:
        return [launch for launches in threads.map(again, range(at_once)) for launch in launches]


def _launch(system: System, program: Program, place: Place, argv: Sequence[str]) -> Launch:
    began_s = time.perf_counter()
    place.folder.mkdir()
    try:
        with _mounted(system, place, program.overlay):
            try:
                if program.start is not None:
                    _run(program.start(place))
                _run(program.command(place, argv))
                ran_s = time.perf_counter() - began_s
            finally:
                if program.remove is not None:
                    _run(program.remove(place))
    finally:
        shutil.rmtree(place.folder)
    return Launch(ran_s, time.perf_counter() - began_s)


def _run(line: Sequence[str]) -> None:
    """Run a program to its end. Raises :class:`~etude.errors.InfrastructureError` with its last words if it fails."""
    # Neither /dev/null: as root, runsc changes the owner of its input and output. Nor a pipe: what a container that
    # rests holds open would never end.
    with tempfile.TemporaryFile() as nothing, tempfile.TemporaryFile() as errors:
        done = subprocess.run(
            line, stdin=nothing, stdout=nothing, stderr=errors, timeout=COMMAND_TIMEOUT_S, check=False
        )
        if done.returncode:
            errors.seek(0)
            words = errors.read().decode(errors="replace").strip().splitlines()
            raise InfrastructureError(words[-1] if words else f"exit code {done.returncode}")


@contextmanager
def _mounted(system: System, place: Place, overlay: Overlay) -> Iterator[None]:
    """The overlay of a place, for as long as a command runs."""
    if overlay is Overlay.ITSELF:
        yield
        return
    options = place.make_folders()
    if overlay is Overlay.BY_SYSCALL:
        system.mount_overlay(place.root, options)
    else:
        subprocess.run(("mount", "-t", "overlay", "overlay", "-o", options, str(place.root)), check=True)
    try:
        yield
    finally:
        if overlay is Overlay.BY_SYSCALL:
            system.unmount(place.root)
        else:
            subprocess.run(("umount", str(place.root)), check=True)


def _crun(place: Place) -> Sequence[str]:
    return ("crun", "--root", str(place.state), "--cgroup-manager=cgroupfs")


def _container(place: Place) -> str:
    return f"bench-{place.folder.name}"


def _write_bundle(
    place: Place,
    argv: Sequence[str],
    mounts: Sequence[Mapping[str, object]],
    linux: Mapping[str, object],
    user: int = 0,
) -> None:
    """Write the configuration for the runtimes of the Open Container Initiative (runtime-spec 1.0)."""
    config = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": user, "gid": user},
            "args": list(argv),
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {},
        },
        "root": {"path": str(place.root)},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
            *mounts,
        ],
        "linux": {"namespaces": [{"type": kind} for kind in NAMESPACES], **linux},
    }
    (place.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    main()

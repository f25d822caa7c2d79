"""Specs of environments and sandboxes, their limits and usage, and the capabilities of providers.

    Base system ◀── layers of an Image ◀── files of a task          limits, network, time to live: SandboxSpec

Nothing here does I/O. Paths of layers are on the machine of the provider, all others inside of the sandbox.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Literal

WORKDIR = "/work"
"""Working folder of a sandbox's commands, unless the image says otherwise."""
SCRATCH = "scratch"
"""Name of the base system without any file, on which the layers of a container's image lie."""
SERVICE_ROOTS = "/.services"
"""Folder in a sandbox's root that has the roots of its services; root alone may enter it."""
PLACE = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}")
"""``host:port``, as lists of allowed places have it."""


class Capability(StrEnum):
    """A property that a sandbox provider guarantees; the contract suite tests each.

    To run commands with deadlines and capped output, to carry files in and out, to count what is used, to be killed
    and to end by itself after its time to live is not in this list: every provider must.
    """

    CONFINED = "confined"
    """Commands see no file of the machine but the base system's programs and what they were given."""
    PROCESSES_APART = "processes_apart"
    """Commands see and signal no process but their own, and all of those die with the sandbox."""
    NETWORK_OFF = "network_off"
    """Commands reach nothing, not even the machine's own ports."""
    ALLOW_LIST = "allow_list"
    """Exactly the places of the network that the spec allows can be reached."""
    MEMORY_LIMIT = "memory_limit"
    """Beyond the limit commands die; the sandbox and its neighbours live on."""
    PROCESS_LIMIT = "process_limit"
    LIMIT_WALL = "limit_wall"
    """Far beyond its limits of memory and processes a sandbox gets no more, or ends as a whole, and its neighbours live
    on: for those who do not hold to the limits themselves.
    """
    DISK_LIMIT = "disk_limit"
    COUNTERS_APART = "counters_apart"
    """Counts of the kernel for each user, such as timers and watched files, are each sandbox's own."""
    BACKGROUND = "background"
    """Processes that a command left are still there for the next one; else nothing outlives its command."""
    IMAGES = "images"
    """Sandboxes start from an :class:`Image`."""
    IMAGE_SERVICES = "image_services"
    """Services of an image run, each in a root of its own."""
    SNAPSHOT = "snapshot"
    """``snapshot`` keeps the files as a new image."""
    FORK = "fork"
    """``fork`` makes independent copies with the same files."""
    LIVE_FORK = "live_fork"
    """Forks have the memory and the running processes, too."""
    OWN_KERNEL = "own_kernel"
    """Commands run on another kernel than the machine's: a boundary for hostile tenants."""


def is_place(path: str) -> bool:
    """True for an absolute path without ``..``: joined to a folder of the machine, it stays below that."""
    return path.startswith("/") and ".." not in PurePosixPath(path).parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageUser:
    """The user that commands in an image run as, unless a spec asks for root."""

    uid: int = 1000
    gid: int = 1000
    home: str = "/home/agent"

    def __post_init__(self) -> None:
        if not is_place(self.home):
            raise ValueError(f"home={self.home!r} is not a place in a sandbox: use an absolute path without '..'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthcheck:
    """A command that succeeds as soon as a sandbox is ready for its first one."""

    argv: tuple[str, ...]
    interval_s: float = 30.0
    timeout_s: float = 30.0
    """For one try."""
    start_period_s: float = 0.0
    """Failures in this time do not count."""
    retries: int = 3
    """Failures in a row after which the sandbox is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageService:
    """A program that runs in a sandbox beside its commands, in a root of its own: a folder of the sandbox's root.

    It has the sandbox's loopback, limits and life.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """All of its variables."""
    workdir: str = "/"
    """In its own root."""
    uid: int = 0
    gid: int = 0
    healthchecks: tuple[Healthcheck, ...] = ()
    """Run in its root; have to succeed before anything else is started."""

    def __post_init__(self) -> None:
        if "/" in self.name or self.name in ("", ".", ".."):
            raise ValueError(f"name={self.name!r} of a service is not the name of a folder")

    @property
    def root(self) -> str:
        """Its root, as a path in the sandbox."""
        return f"{SERVICE_ROOTS}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The initial file system of a sandbox, trees over a base system, and what the config of its container says."""

    digest: str = ""
    """SHA-256 over the layers' digests and the settings; empty for one that is nowhere stored."""
    base: str = ""
    """Name of a stored base system, ``SCRATCH`` for nothing at all, or empty for the provider's own (the machine's
    programs, or the root of its virtual machine).
    """
    layers: tuple[Path, ...] = ()
    """Each a tree as it is seen from ``/``, the lowest first."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every command."""
    workdir: str = WORKDIR
    user: ImageUser = ImageUser()
    """Owns the working folder and its home."""
    entrypoint: tuple[str, ...] = ()
    """Started in every sandbox before its first command, and left running."""
    healthchecks: tuple[Healthcheck, ...] = ()
    """Have to succeed, one after the other, before that."""
    services: tuple[ImageService, ...] = ()
    """Started one after the other, before the entry point; their files are in the layers."""

    def __post_init__(self) -> None:
        if not is_place(self.workdir):
            raise ValueError(f"workdir={self.workdir!r} is not a place in a sandbox: use an absolute path without '..'")
        if self.user.uid < 1:
            raise ValueError(f"user.uid={self.user.uid}: commands run as root only where a spec asks for root")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Resource limits of one sandbox, for all its processes together."""

    memory_bytes: int = 1 << 30
    disk_bytes: int = 1 << 30
    """Written, base system and image not counted."""
    processes: int = 128
    cpus: float = 1.0
    """Processor seconds a second."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes", "processes", "cpus"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: a sandbox needs some")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The spec of a sandbox. A provider that cannot satisfy it refuses; it never gives less."""

    image: Image = Image()
    limits: SandboxLimits = SandboxLimits()
    allow: tuple[str, ...] = ()
    """``host:port`` that commands may reach; none, and there is no network."""
    names: tuple[str, ...] = ()
    """Names beside ``localhost`` that lead to the sandbox's own loopback."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Folders and files of the machine, shown read-only, by their path inside."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every command, beside the image's."""
    user: Literal["agent", "root"] = "agent"
    """User of the commands. ``agent`` is the image's user, who owns the working folder, its home and ``/tmp``, and
    nothing else; ``root`` is root inside and no user outside: for building images.
    """
    ttl_s: float = 3600.0
    """After this the sandbox is killed, whether it is in use or not."""

    def __post_init__(self) -> None:
        wrong = [place for place in self.allow if not PLACE.fullmatch(place)]
        if wrong:
            raise ValueError(f"allow={wrong}: a place is written host:port, such as pypi.internal:443")
        if not 0 < self.ttl_s < math.inf:
            raise ValueError(f"ttl_s={self.ttl_s!r}: a sandbox lives for some time")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStats:
    """A sandbox's current usage; ``nan`` where its provider cannot measure it."""

    memory_bytes: float
    disk_bytes: float
    """Written, base system and image not counted."""
    processes: float
    cpu_s: float
    """Used since its start."""
    age_s: float


class ServiceKind(StrEnum):
    """Kinds of servers that an environment can have inside."""

    POSTGRES = "postgres"
    REDIS = "redis"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A server in the sandbox, started before the agent, with separate state for every rollout."""

    kind: ServiceKind
    setup: str = ""
    """Commands that are run once to prepare its state: SQL, or Redis commands, a line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """The image, services and limits of a task's sandbox; recorded with the task, so it names things and holds none."""

    image: str = ""
    """Digest of a stored image; empty: the provider's own base system and nothing over it."""
    workdir: str = WORKDIR
    services: tuple[Service, ...] = ()
    allow: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Names of its own loopback."""
    entrypoint: tuple[str, ...] = ()
    """Comes before that of the image, and runs it."""
    healthchecks: tuple[Healthcheck, ...] = ()
    """Come before those of the image."""
    variables: Mapping[str, str] = field(default_factory=dict)
    limits: SandboxLimits = SandboxLimits()

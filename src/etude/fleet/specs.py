"""The classes of placement: a process to run, its resources, and its status from a launcher.

A plan is a list of :class:`ProcessSpec`; an observation is a :class:`ProcessStatus` per name. Nothing here starts
processes or depends on what the commands do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

ETUDE = "etude"
"""First word of a command line that a launcher replaces by the way étude is started where the process runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The part of a machine that a process needs."""

    cpus: float = 1.0
    gpus: int = 0
    memory_gib: float = 0.0
    """0 asks for none in particular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """The place of a process in a group, as torchrun has it: its nodes begin together, and end together.

    Each member runs on a machine of its own, wherever there are several. Raises ``ValueError`` for a rank outside.
    """

    name: str
    rank: int
    """The first member, 0, is the one that the others meet at."""
    size: int
    port: int
    """Port on the machine of the first member."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of the group {self.name!r}, which has {self.size} members")

    def rendezvous(self, host: str) -> dict[str, str]:
        """The environment by which the ranks on each machine find the others, where the first is at ``host``."""
        return {
            "PET_NNODES": str(self.size),
            "PET_NODE_RANK": str(self.rank),
            "PET_RDZV_ENDPOINT": f"{host}:{self.port}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to run."""

    name: str
    """Unique within a run: ``serve-1@eu``."""
    command: tuple[str, ...]
    """Command line; one of étude's own begins with :data:`ETUDE`."""
    region: str
    resources: Resources = field(default_factory=Resources)
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Environment variables whose values the launcher takes from where it keeps secrets; a plan never has them."""
    group: GroupMember | None = None
    """All of a group restart when one of them ends before its time."""
    ends: bool = False
    """True if it ends by itself, with status 0, when its work is done; others serve until they are removed."""
    port: int = 0
    """Port on which it listens for others; 0: none."""
    is_lent: bool = False
    """True if its machine is one that production takes back when it needs it."""

    @property
    def unit(self) -> str:
        """Name of what restarts together: its group, or itself alone."""
        return self.name if self.group is None else self.group.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One process, as a launcher sees it. It runs, unless one of the fields says otherwise."""

    incarnation: str
    """Differs for each start of the same name."""
    host: str = ""
    pid: int = 0
    exit_status: int | None = None
    """Exit status once it ended, negative for a signal."""
    is_pending: bool = False
    """True while no machine has resources for it."""
    is_lost: bool = False
    """True while its machine does not answer."""
    beat: int = 0
    """Changes with each of its heartbeats."""
    memory_bytes: int = 0
    """Resident memory; 0 if unknown."""
    log: str = ""
    """Place of its output."""
    last_line: str = ""
    """Last line of its output, once it ended."""

    @property
    def is_running(self) -> bool:
        """True if it is known to be alive."""
        return self.exit_status is None and not self.is_pending and not self.is_lost

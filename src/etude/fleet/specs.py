"""The classes of placement: a process to run, its resources, and its status from a launcher.

A plan is a list of :class:`ProcessSpec`; an observation is a :class:`ProcessStatus` per name. Nothing here starts
processes or depends on what the commands do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

ETUDE = "etude"
"""First word of a command line. A launcher replaces it by the command that starts étude on the process's machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources that a process needs from its machine."""

    cpus: float = 1.0
    gpus: int = 0
    memory_gib: float = 0.0
    """0: no particular amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """The place of a process in a group, as in torchrun: its nodes start together and end together.

    Each member runs on its own machine if there are several. Raises ``ValueError`` for a rank out of range.
    """

    name: str
    rank: int
    """The address of the first member, 0, which the others connect to."""
    size: int
    port: int
    """Port on the machine of the first member."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of the group {self.name!r}, which has {self.size} members")

    def rendezvous(self, host: str) -> dict[str, str]:
        """Environment variables by which the ranks on each machine find the others, if the first member runs at
        ``host``.
        """
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
    """Command line; étude's own commands begin with :data:`ETUDE`."""
    region: str
    resources: Resources = field(default_factory=Resources)
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Environment variables whose values the launcher reads from its secrets; a plan never contains the values."""
    group: GroupMember | None = None
    """All members of a group restart when one of them ends early."""
    ends: bool = False
    """True if it ends by itself with status 0 when its work is done; other processes serve until they are removed."""
    port: int = 0
    """Port on which it accepts connections from others; 0: none."""
    is_lent: bool = False
    """True if production takes its machine back when it needs it."""

    @property
    def unit(self) -> str:
        """Name of the unit of restart: the group, or the process alone."""
        return self.name if self.group is None else self.group.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One process as a launcher sees it. It is running unless a field says otherwise."""

    incarnation: str
    """Different for each start of the same name."""
    host: str = ""
    pid: int = 0
    exit_status: int | None = None
    """Exit status once it ended; negative for a signal."""
    is_pending: bool = False
    """True while no machine has resources for it."""
    is_lost: bool = False
    """True while its machine does not answer."""
    beat: int = 0
    """Changes with each heartbeat."""
    memory_bytes: int = 0
    """Memory, with its share of what other processes use as well; 0 if unknown."""
    log: str = ""
    """Location of its output."""
    last_line: str = ""
    """Last line of its output, after its end."""

    @property
    def is_running(self) -> bool:
        """True if it is known to be running."""
        return self.exit_status is None and not self.is_pending and not self.is_lost

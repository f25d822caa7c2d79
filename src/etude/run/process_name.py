"""The name of one process of a run: its command, its replica number, its region.

    serve   serve-1   gateway   rollouts-2   train   serve-1@eu

Everything that belongs to one process has this name: lock, heartbeat, event file, log, endpoint, ledger leases.
"""

import re
from dataclasses import dataclass
from typing import Self

FORM = re.compile(r"(?P<command>[a-z]+)(-(?P<replica>[1-9][0-9]{0,5}))?(@(?P<region>[a-z0-9]([a-z0-9-]*[a-z0-9])?))?")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ProcessName:
    """A process's name, unique in its run. Raises ``ValueError`` for invalid parts."""

    command: str
    """The command of ``etude`` that it runs."""
    replica: int = 0
    """Number among processes of one command: 0, 1, 2, …; for a trainer, its rank."""
    region: str = ""
    """The region where it runs; empty for home."""

    def __post_init__(self) -> None:
        if FORM.fullmatch(str(self)) is None or self.replica < 0:
            raise ValueError(
                f"a process cannot be named {str(self)!r}: expected a command in small letters, a replica from 0 to "
                f"999999 and a region in small letters, digits and hyphens"
            )

    def __str__(self) -> str:
        number = f"-{self.replica}" if self.replica else ""
        return f"{self.command}{number}{'@' if self.region else ''}{self.region}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a name. Raises ``ValueError`` for anything else."""
        form = FORM.fullmatch(text)
        if form is None:
            raise ValueError(f"{text!r} is not a valid process name: expected serve, serve-1 or serve-1@eu")
        return cls(command=form["command"], replica=int(form["replica"] or 0), region=form["region"] or "")


ENGINE = ProcessName(command="serve")
"""The first engine at home."""
GATEWAY = ProcessName(command="gateway")
"""The first gateway at home."""
ROLLOUTS = ProcessName(command="rollouts")
"""The first rollouts process, which also evaluates."""
SANDBOXES = ProcessName(command="sandboxes")
"""The first sandbox host at home."""
PRODUCTION = ProcessName(command="production")
"""The first engine for users."""
PRODUCT = ProcessName(command="product")
"""The gateway for users."""
RELEASE = ProcessName(command="release")
"""The process that releases versions."""
FEEDBACK = ProcessName(command="feedback")
"""The process that joins signals and sessions of users."""
TRAINER = ProcessName(command="train")
"""The trainer, or its rank 0."""
NUMBERED = frozenset(each.command for each in (ENGINE, GATEWAY, SANDBOXES, ROLLOUTS))
"""Commands whose processes on a cluster get their replica number with ``--replica``."""

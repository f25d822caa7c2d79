"""Exceptions that étude raises on purpose, by who can fix each.

    EtudeError
    ├── UserError               the caller can fix it: one line, never a traceback
    │   ├── ConfigError         a recipe or a ``--set`` names a wrong key, type or value
    │   ├── RunFolderError      the run folder is missing, unwritable or belongs to something else
    │   ├── TaskFolderError     a folder is no task in Harbor's format (defined with its reader)
    │   └── PortInUseError      a configured port is taken
    ├── DamagedError            bytes on disk are not what their digest says: nothing is overwritten
    ├── FencedError             another process took over: it committed this weight version first, or holds the lease
    ├── MismatchError           trainer and engine compute different numbers: training stops
    ├── DivergedError           the gradient is not finite: nothing was changed
    ├── OutOfTime               an agent's commands took all the time they may: its work is graded as it stands
    ├── AgentFault              what an agent did to its own sandbox came in the way: worth nothing, never tried again
    ├── Refusal                 a request that the gateway turns down (defined there, with its HTTP status)
    └── InfrastructureError     a machine, process or connection failed: retried, never a reward
        ├── EngineUnavailable   no engine answered before the deadline
        │   └── EngineBusy      one did: it has as much waiting as it takes
        ├── VersionPending      no engine serves the wanted weight version yet
        ├── CaptureError        an engine's record of what it did is missing or does not fit
        ├── LedgerUnavailable   the ledger stayed out of reach (defined there)
        ├── SessionLost         the gateway no longer knows a session (it restarted)
        ├── JudgeUnavailable    no judgement could be had in time
        │   └── JudgeLost       waiting for one does not help
        │       └── JudgeDeclined  of this rollout there will be none, whenever it is asked for
        └── SandboxError        a sandbox could not start or died under a command
            ├── Unsupported     its provider does not claim to be capable of that
            └── SandboxesBusy   no place for one more is free in time: try again later, or elsewhere

Errors are raised where the fact is known, with the offending value and the fix in the message. They are classified
in two places only: ``cli.main`` (:class:`ExitCode`) and ``rollouts.worker`` (what becomes of a rollout).

A process of a run that an ``InfrastructureError`` ends (exit code 1), or a bug, is started again by its supervisor, a
bounded number of times: it goes on from what is on disk. All others (exit code 2) end the run with their message, since
a restart would meet the same again: what is wrong has to be mended first, then ``--resume`` goes on. Damage on the way
to a new weight version ends no engine at once: it waits for the full snapshot that it requested
(:mod:`etude.run.weight_follower`).
"""

import traceback
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit status of a command, also of a run's processes for their supervisor; 143 is SIGTERM's."""

    DONE = 0
    FAILED = 1
    """A machine or a process failed, or a bug was met: another try may help."""
    USER_ERROR = 2
    """No restart helps: the message says what to fix."""
    NOTHING_LEARNT = 3
    """The run was finished, and no step changed the model."""
    DISK_FULL = 4
    """There was no room on a disk."""
    INTERRUPTED = 130
    """Ctrl-C."""


class EtudeError(Exception):
    """Any error that étude raises on purpose."""


class UserError(EtudeError):
    """Error that the caller can fix; the message says how."""


class ConfigError(UserError):
    """A configuration key, type or value is wrong."""


class RunFolderError(UserError):
    """A run folder cannot be used for the requested operation."""


class PortInUseError(UserError):
    """A configured port is already taken."""


class DamagedError(EtudeError):
    """Stored bytes do not match their digest; the message names the object."""


class FencedError(EtudeError):
    """Another process took over a weight version or a lease that this one held; this one must stop."""


class MismatchError(EtudeError):
    """Trainer and engine compute different numbers from the same weights."""


class DivergedError(EtudeError):
    """The loss or its gradient is not finite; no step was taken."""


class OutOfTime(EtudeError):
    """An agent's commands have used up their time; its work is graded as it stands. No fault."""

    REASON: ClassVar[str] = "time"
    """Reason for which the agent stopped, beside those of harnesses."""


class AgentFault(EtudeError):
    """Something that an agent did to its own sandbox came in the way of étude's work there: the disk or memory that the
    sandbox may use is full, or a process inside killed or stopped what étude did there. Its own doing, so it is graded.
    """

    REASON: ClassVar[str] = "agent_fault"
    """Reason for which an agent stopped, beside those of harnesses; the part of a reward that says so has this name."""


class InfrastructureError(EtudeError):
    """Something outside the model's control failed; the work is retried, never scored."""


class EngineUnavailable(InfrastructureError):
    """No engine answered before the deadline."""


class EngineBusy(EngineUnavailable):
    """The engine's queue is full; retry later, or on another engine."""


class VersionPending(InfrastructureError):
    """No engine serves the requested weight version yet; retry later."""

    def __init__(self, required: int, newest: int) -> None:
        super().__init__(f"weight version {required} is not served yet, the newest is {newest}: try again later")
        self.required = required
        """The oldest version that would do."""
        self.newest = newest
        """The newest that is served."""


class CaptureError(InfrastructureError):
    """An engine's record of a turn, its routes or sampling masks, is missing or does not fit the turn."""


class SessionLost(InfrastructureError):
    """The gateway no longer knows this session."""


class JudgeUnavailable(InfrastructureError):
    """The judge is down or late, so there is no judgement; never scored as zero."""


class JudgeLost(JudgeUnavailable):
    """None can be had, and waiting does not help: what judging may cost is spent, the endpoint refuses the question,
    judging is held after an alarm, or the judge has been away for too long.
    """


class JudgeDeclined(JudgeLost):
    """No judgement of this rollout is possible: its own budget is spent, or the endpoint refuses the question."""


class SandboxError(InfrastructureError):
    """A sandbox could not be started or died under a command."""


class SandboxesBusy(SandboxError):
    """A pool, a server or all hosts of sandboxes have no free place; retry later, or elsewhere."""


class Unsupported(SandboxError):
    """A sandbox spec needs a capability that its provider lacks; the message names an alternative."""


def trace_of(error: BaseException) -> str:
    """Type and place of an unexpected error, without its words: they may quote a key, or what people wrote."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()

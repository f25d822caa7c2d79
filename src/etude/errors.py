"""Exceptions that étude raises on purpose, grouped by who can fix them.

    EtudeError
    ├── UserError               the caller can fix it: one line, never a traceback
    │   ├── ConfigError         a recipe or a ``--set`` names a wrong key, type or value
    │   ├── RunFolderError      the run folder is missing, unwritable or belongs to something else
    │   ├── TaskFolderError     a folder is not a task in Harbor's format (defined with its reader)
    │   └── PortInUseError      a configured port is taken
    ├── DamagedError            bytes on disk are not what their digest says: nothing is overwritten
    ├── FencedError             another process took over: it committed this weight version first, or holds the lease
    ├── MismatchError           trainer and engine compute different numbers: training stops
    ├── DivergedError           the gradient is not finite: nothing was changed
    ├── OutOfTime               an agent's commands used up their time limit: its work so far is graded
    ├── AgentFault              an agent broke its own sandbox: reward 0 if grading is impossible, never retried
    ├── Refusal                 the gateway refuses a request (defined there, with its HTTP status)
    └── InfrastructureError     a machine, process or connection failed: retried, never a reward
        ├── EngineUnavailable   no engine answered before the deadline
        │   └── EngineBusy      an engine answered, but its queue is full
        ├── VersionPending      no engine serves the required weight version yet
        ├── CaptureError        an engine's record of a turn is missing or does not fit the turn
        ├── LedgerUnavailable   the ledger could not be reached for too long (defined there)
        ├── SessionLost         the gateway no longer knows a session (it restarted)
        ├── JudgeUnavailable    the judge gave no judgement in time
        │   └── JudgeLost       waiting for a judgement does not help
        │       └── JudgeDeclined  this rollout cannot be judged, now or later
        └── SandboxError        a sandbox could not start, or died while a command ran
            ├── Unsupported     the provider lacks a capability that the sandbox needs
            └── SandboxesBusy   no sandbox became free in time: retry later, or elsewhere

Errors are raised where the fact is known, with the offending value and the fix in the message. They are classified
in two places only: ``cli.main`` (:class:`ExitCode`) and ``rollouts.worker`` (the outcome of a rollout).

If an ``InfrastructureError`` or a bug ends a process of a run (exit code 1), its supervisor restarts the process, a
limited number of times, and it continues from what is on disk. Every other error (exit code 2) ends the run with its
message, since it would occur again after a restart: fix the cause, then continue with ``--resume``. An engine that
receives damaged bytes of a new weight version does not end at once: it requests a full snapshot and waits for it
(:mod:`etude.run.weight_follower`).
"""

import traceback
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit status of a command, and of a run's processes. A command that SIGTERM ended has 143."""

    DONE = 0
    FAILED = 1
    """A machine or a process failed, or étude has a bug: another try may help."""
    USER_ERROR = 2
    """No restart helps: the message says what to fix."""
    NOTHING_LEARNT = 3
    """The run is finished, but no step changed the model."""
    DISK_FULL = 4
    """A disk is full."""
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
    """Another process took over a weight version or a lease that this process held; this process must stop."""


class MismatchError(EtudeError):
    """Trainer and engine compute different numbers from the same weights."""


class DivergedError(EtudeError):
    """The loss or its gradient is not finite; no step was taken."""


class OutOfTime(EtudeError):
    """An agent's commands have used up their time limit; its work so far is graded. Nothing has failed."""

    REASON: ClassVar[str] = "time"
    """Recorded reason why the agent stopped, besides those that harnesses give."""


class AgentFault(EtudeError):
    """An agent broke its own sandbox: it filled the disk or memory that the sandbox may use, or a process in it killed
    or stopped étude's own work there. The agent caused it: its work is graded, with 0 if that is no longer possible.
    """

    REASON: ClassVar[str] = "agent_fault"
    """Recorded reason why the agent stopped, besides those that harnesses give; also the name of the reward's part."""


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
        """The oldest version that is acceptable."""
        self.newest = newest
        """The newest version that is served."""


class CaptureError(InfrastructureError):
    """An engine's record of a turn, its routes or sampling masks, is missing or does not fit the turn."""


class SessionLost(InfrastructureError):
    """The gateway no longer knows this session."""


class JudgeUnavailable(InfrastructureError):
    """The judge is down or late, so there is no judgement; the rollout is never scored as zero."""


class JudgeLost(JudgeUnavailable):
    """No judgement is possible, and waiting does not help: the judge's budget is spent, the endpoint refuses the
    request, judging is paused after an alarm, or the judge has been unavailable for too long.
    """


class JudgeDeclined(JudgeLost):
    """No judgement of this rollout is possible: the rollout's budget is spent, or the endpoint refuses the request."""


class SandboxError(InfrastructureError):
    """A sandbox could not start, or died while a command ran."""


class SandboxesBusy(SandboxError):
    """The pool, the server or all hosts have no free sandbox; retry later, or elsewhere."""


class Unsupported(SandboxError):
    """A sandbox spec needs a capability that its provider lacks; the message names an alternative."""


def trace_of(error: BaseException) -> str:
    """Type and traceback of an unexpected error, without its message, which may quote a key or a user's text."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()

"""The arms that users' calls may go to: the gateway's view of the routing table.

    table ──follow──▶ ReleasedArms ──of_call(session, user)──▶ CallArm ──digests──▶ Router.choose, and no other engine

Without this object a gateway sends production calls to any engine. With it, a call goes to engines that report exactly
the digest of its user's arm, else to those of the live arm; otherwise it waits, as if there were no engine. Sampled
tokens are checked too: tokens from a version of neither arm are never sent to the user, since weights may be swapped
between a report and a call.

A session keeps the weights of its first call as long as they are live or canary in the table: no conversation changes
models because a share grew. Pure.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import final

from etude.errors import EngineUnavailable
from etude.routing_table import Assignment, RoutingTable

SESSIONS = 65_536
"""Sessions whose arm is remembered; the least recently used is forgotten first, and assigned again."""


@final
class ReleasedArms:
    """The newest table, and the arm of each session."""

    def __init__(self) -> None:
        self.table: RoutingTable | None = None
        """``None`` before the first release: until then no production call is answered."""
        self._sessions: OrderedDict[str, Assignment] = OrderedDict()

    def follow(self, table: RoutingTable) -> bool:
        """Use a table; return false and ignore it unless it is newer."""
        if self.table is not None and table.generation <= self.table.generation:
            return False
        self.table = table
        return True

    def of_call(self, session: str, user: str) -> "CallArm":
        """The arm of a session's next call; ``user`` is the calling user, or the session if the user is unknown.

        Raises :class:`~etude.errors.EngineUnavailable` before the first release.
        """
        if self.table is None:
            raise EngineUnavailable("nothing is released yet: no candidate has passed the gate (etude release status)")
        assignment = self._sessions.get(session)
        if assignment is None or assignment.arm.digest not in self.digests:
            assignment = self._sessions[session] = self.table.assign(user)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(session)
        return CallArm(arms=self, assignment=assignment, first_digests=self.digests)

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests that users may get now, the live one first."""
        return () if self.table is None else tuple(arm.digest for arm in self.table.arms)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallArm:
    """The arm of one call; the table may change during the call."""

    arms: ReleasedArms
    assignment: Assignment
    first_digests: tuple[str, ...]
    """Digests that users could get when the call began: their tokens are not taken back."""

    @property
    def label(self) -> str:
        """The label under which its session is counted."""
        return self.assignment.label

    def digests(self) -> tuple[str, ...]:
        """Digests of engines that may take it now, the best one first."""
        live, *others = self.arms.digests
        own = self.assignment.arm.digest
        return (own, live) if own in others else (live,)

    def allows(self, digest: str) -> bool:
        """True if tokens from these weights may be sent to the user."""
        return digest in self.first_digests or digest in self.arms.digests


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowArm:
    """The arm of a shadow call, whose answer no user sees."""

    digest: str

    def digests(self) -> tuple[str, ...]:
        """The one digest under test."""
        return (self.digest,)

    def allows(self, digest: str) -> bool:
        """True for the digest under test only."""
        return digest == self.digest

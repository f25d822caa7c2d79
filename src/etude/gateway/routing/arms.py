"""The arms that users' calls may go to: the routing table as a gateway follows it.

    table ──follow──▶ ReleasedArms ──of_call(session, user)──▶ CallArm ──digests──▶ Router.choose, and no other engine

Without this object a gateway gives production calls to any engine. With it, a call goes to engines that report exactly
the digest of its user's arm, else to those of the live arm, else nowhere: it waits as while there is no engine. What an
engine samples is looked at, too: tokens of a version that is of neither are never handed out, since weights may be
swapped between a report and a call.

A session keeps the weights that its first call got for as long as the table has them as live or canary: no conversation
changes models because a share grew. Pure.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import final

from etude.errors import EngineUnavailable
from etude.routing_table import Assignment, RoutingTable

SESSIONS = 65_536
"""Sessions whose arm is remembered; the longest unused is forgotten first, and assigned again."""


@final
class ReleasedArms:
    """The newest table, and the arm of each session."""

    def __init__(self) -> None:
        self.table: RoutingTable | None = None
        """``None`` while nothing was ever released: then no production call is answered."""
        self._sessions: OrderedDict[str, Assignment] = OrderedDict()

    def follow(self, table: RoutingTable) -> bool:
        """Take a table; false, and nothing changes, for one that is no newer."""
        if self.table is not None and table.generation <= self.table.generation:
            return False
        self.table = table
        return True

    def of_call(self, session: str, user: str) -> "CallArm":
        """The arm of a session's next call; ``user`` is who asks, or the session where nobody says.

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
        """The digests that users may meet now, the live one first."""
        return () if self.table is None else tuple(arm.digest for arm in self.table.arms)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallArm:
    """The arm of one call, while the table may change under it."""

    arms: ReleasedArms
    assignment: Assignment
    first_digests: tuple[str, ...]
    """Digests that users could meet when it began: what they sampled meanwhile is not taken back."""

    @property
    def label(self) -> str:
        """The label by which its session is counted."""
        return self.assignment.label

    def digests(self) -> tuple[str, ...]:
        """Digests of engines that it may go to now, the best one first."""
        live, *others = self.arms.digests
        own = self.assignment.arm.digest
        return (own, live) if own in others else (live,)

    def allows(self, digest: str) -> bool:
        """True if tokens of these weights may be handed out."""
        return digest in self.first_digests or digest in self.arms.digests


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowArm:
    """The arm of a call that nobody sees."""

    digest: str

    def digests(self) -> tuple[str, ...]:
        """The one digest that is tried."""
        return (self.digest,)

    def allows(self, digest: str) -> bool:
        """True for that one."""
        return digest == self.digest

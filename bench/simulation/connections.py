"""The connections of a process that may be killed: to the ledger, and to the gateways of its regions.

A process that is dead writes nothing, closes nothing and is answered nothing, whatever of it still runs in the event
loop: everything that it calls raises :class:`Killed`, or is out of reach.
"""

import asyncio
from dataclasses import dataclass, field
from typing import NoReturn, final

from etude.errors import EngineUnavailable
from etude.ledger.database import Database, Interrupted, Row, Value
from etude.protocols import Session
from etude.simulation.region import RESEND_S, ModelledRegion
from etude.types import Turn


class Killed(BaseException):
    """The process is dead. No part of it can catch that."""


@dataclass(slots=True)
class LedgerServer:
    """The ledger's side of all connections."""

    is_down: bool = False


@dataclass(slots=True, eq=False)
class Breakage:
    """Something that happens at a commit."""

    commits: int
    """Commits before it."""
    is_kept: bool
    is_fatal: bool
    """True if the process dies; otherwise only the reply is lost."""


@dataclass(slots=True, eq=False)
class Life:
    """One incarnation of a process."""

    dead: asyncio.Event = field(default_factory=asyncio.Event)
    breakage: Breakage | None = None
    opened: set[str] = field(default_factory=set)
    """Sessions that it opened and did not end."""

    def check(self) -> None:
        """Raise :class:`Killed` if it is over."""
        if self.dead.is_set():
            raise Killed


@final
class FaultyDatabase:
    """One process's connection to the ledger's database; implements :class:`~etude.ledger.database.Database`."""

    def __init__(self, database: Database, server: LedgerServer, life: Life, *, breaks: bool = True) -> None:
        """``breaks``: what happens at a commit of the process may happen at one of this connection's."""
        self._breaks = breaks
        self._database = database
        self._server = server
        self._life = life
        self._was_kept = False

    @property
    def name(self) -> str:
        """The database's own."""
        return self._database.name

    def execute(self, sql: str, *values: Value) -> list[Row]:
        """The rows of one statement."""
        self._check()
        return self._database.execute(sql, *values)

    def begin(self) -> None:
        """Start a transaction."""
        self._check()
        self._database.begin()

    def commit(self) -> None:
        """Commit, unless this is the commit at which the fault happens."""
        self._check()
        breakage = self._life.breakage if self._breaks else None
        if breakage is None or breakage.commits > 0:
            if breakage is not None:
                breakage.commits -= 1
            self._database.commit()
            return
        self._life.breakage, self._was_kept = None, breakage.is_kept
        if breakage.is_kept:
            self._database.commit()
        else:
            self._database.rollback()
        if breakage.is_fatal:
            self._life.dead.set()
            raise Killed
        raise Interrupted("the connection broke")

    def committed(self) -> bool:
        """Return true if the commit was kept whose reply was lost."""
        self._check()
        return self._was_kept

    def rollback(self) -> None:
        """Roll back."""
        self._database.rollback()

    def version(self) -> int:
        """The version of the tables."""
        return self._database.version()

    def set_version(self, version: int) -> None:
        """Note it."""
        self._database.set_version(version)

    def scrub(self) -> None:
        """Make deleted data unreadable."""
        self._check()
        self._database.scrub()

    def close(self) -> None:
        """Let go of the connection."""
        self._database.close()

    def _check(self) -> None:
        self._life.check()
        if self._server.is_down:
            raise Interrupted("the ledger is down")


@final
class ProcessSessions:
    """One process's way to the gateways of a region; implements :class:`~etude.rollouts.worker.SessionOpener`."""

    def __init__(self, region: ModelledRegion, life: Life) -> None:
        self._region = region
        self._life = life

    async def open(self, *, min_version: int | None = None) -> Session:
        """Start a session."""
        self._reach()
        session = await self._region.open(min_version=min_version)
        self._life.opened.add(session.session_id)
        return session

    async def fork(self, session_id: str) -> tuple[Session, int]:
        """Refused, as by the region."""
        return await self._region.fork(session_id)

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session and hand over its turns; waits while there is no way to its region."""
        self._life.opened.discard(session_id)
        while self._region.is_disconnected:
            self._reach()
            await asyncio.sleep(RESEND_S)
        self._reach()
        return await self._region.close(session_id)

    async def discard(self, session_id: str) -> None:
        """End a session."""
        await self.close(session_id)

    async def lost(self, session_id: str) -> NoReturn:
        """Never."""
        await self._region.lost(session_id)

    def _reach(self) -> None:
        if self._life.dead.is_set():
            raise EngineUnavailable("the process is dead")

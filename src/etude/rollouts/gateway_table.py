"""Gateways of a run as rollouts see them: which gets the next session, and which weight version all serve. Pure.

    polls ──heard, silent──▶ GatewayTable ──choose──▶ gateway of a new session
    sessions ─opened, closed─▶    │
                                  └─version─▶ admission

Of gateways that answer, the one with the fewest open sessions of ours gets the next, and of equal ones the one whose
turn it is. One that does not answer is left out until it does; where none answers, they are tried all the same.
Admission counts the lowest version of those that answer, which are those that sessions go to: see docs/control.md.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import final

from etude.errors import EngineUnavailable

UNHEARD = -1
"""The version before any gateway has named one."""


@dataclass(slots=True, kw_only=True, eq=False)
class _GatewayRecord:
    """One gateway, as of its last answer."""

    version: int = UNHEARD
    """The lowest weight version that its engines serve."""
    answers: bool = False
    sessions: int = 0
    """Open ones of this process."""
    chosen: int = 0
    """Grows with each choice of any gateway: the lower, the longer ago this one was chosen."""


@final
class GatewayTable:
    """The gateways of a run, by URL."""

    def __init__(self, urls: Sequence[str]) -> None:
        """``urls`` are the first gateways; those of a region may be unknown yet."""
        self._gateways: dict[str, _GatewayRecord] = {}
        self._choices = count(1)
        self._version = UNHEARD
        self.follow(urls)

    @property
    def urls(self) -> tuple[str, ...]:
        """All gateways, the first one first."""
        return tuple(self._gateways)

    @property
    def version(self) -> int:
        """The lowest version of gateways that answer; the last one known while none does."""
        return self._version

    def follow(self, urls: Sequence[str]) -> None:
        """Take these for the gateways from now on; of one that stays, what is known is kept."""
        before = self._gateways
        self._gateways = {url: before.get(url) or _GatewayRecord() for url in (each.rstrip("/") for each in urls)}

    def choose(self, avoid: Collection[str] = ()) -> str:
        """The gateway for a new session; those of ``avoid`` only where there is no other.

        Raises :class:`~etude.errors.EngineUnavailable` where none is known.
        """
        if not self._gateways:
            raise EngineUnavailable("no gateway is known yet")

        def rank(url: str) -> tuple[bool, bool, int, int]:
            gateway = self._gateways[url]
            return url in avoid, not gateway.answers, gateway.sessions, gateway.chosen

        url = min(self._gateways, key=rank)
        self._gateways[url].chosen = next(self._choices)
        return url

    def opened(self, url: str) -> None:
        """A session was opened there."""
        if url in self._gateways:
            self._gateways[url].sessions += 1

    def closed(self, url: str) -> None:
        """A session there is over, however it ended."""
        if url in self._gateways:
            self._gateways[url].sessions -= 1

    def heard(self, url: str, version: int) -> None:
        """A gateway answered: all its engines in reach serve ``version`` or a later one."""
        if url in self._gateways:
            gateway = self._gateways[url]
            gateway.version, gateway.answers = version, True
            self._count()

    def silent(self, url: str) -> None:
        """A gateway did not answer, or has no engine: it gets no sessions until it is heard again."""
        if url in self._gateways:
            self._gateways[url].answers = False
            self._count()

    def _count(self) -> None:
        self._version = min((each.version for each in self._gateways.values() if each.answers), default=self._version)

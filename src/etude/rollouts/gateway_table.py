"""Gateways of a run as rollouts see them: the choice for the next session, and the weight version that all serve. Pure.

    polls ──heard, silent──▶ GatewayTable ──choose──▶ gateway of a new session
    sessions ─opened, closed─▶    │
                                  └─version─▶ admission

The answering gateway with the fewest open sessions of this process gets the next session; ties are resolved in turn. A
gateway that does not answer is excluded until it does; if none answers, all are tried anyway. Admission uses the lowest
version of the answering gateways, which are those that get sessions: see docs/control.md.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import final

from etude.errors import EngineUnavailable

UNHEARD = -1
"""The version before any gateway has reported one."""


@dataclass(slots=True, kw_only=True, eq=False)
class _GatewayRecord:
    """One gateway, as of its last answer."""

    version: int = UNHEARD
    """The lowest weight version that its engines serve."""
    answers: bool = False
    sessions: int = 0
    """Open sessions of this process."""
    chosen: int = 0
    """Number of the last choice of this gateway: the lower, the longer ago."""


@final
class GatewayTable:
    """The gateways of a run, by URL."""

    def __init__(self, urls: Sequence[str]) -> None:
        """``urls`` are the first gateways; in a region they may be unknown at first."""
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
        """The lowest version of gateways that answer; the last known one while none does."""
        return self._version

    def follow(self, urls: Sequence[str]) -> None:
        """Replace the list of gateways; those that stay keep their state."""
        before = self._gateways
        self._gateways = {url: before.get(url) or _GatewayRecord() for url in (each.rstrip("/") for each in urls)}

    def choose(self, avoid: Collection[str] = ()) -> str:
        """The gateway for a new session; one of ``avoid`` only if there is no other.

        Raises :class:`~etude.errors.EngineUnavailable` if none is known.
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
        """Record a session opened at a gateway."""
        if url in self._gateways:
            self._gateways[url].sessions += 1

    def closed(self, url: str) -> None:
        """Record the end of a session at a gateway."""
        if url in self._gateways:
            self._gateways[url].sessions -= 1

    def record_answer(self, url: str, version: int) -> None:
        """Record an answer: all reachable engines of the gateway serve ``version`` or a later one."""
        if url in self._gateways:
            gateway = self._gateways[url]
            gateway.version, gateway.answers = version, True
            self._count()

    def record_silence(self, url: str) -> None:
        """Record that a gateway did not answer or has no engine: it gets no sessions until its next answer."""
        if url in self._gateways:
            self._gateways[url].answers = False
            self._count()

    def _count(self) -> None:
        self._version = min((each.version for each in self._gateways.values() if each.answers), default=self._version)

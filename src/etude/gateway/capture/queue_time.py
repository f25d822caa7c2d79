"""How long the calls of one session waited for engines: whoever plays a session must know whose fault it is that its
time ran out. Pure.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from etude.gateway.api.errors import GONE, UNSERVED
from etude.gateway.http.request_log import Visit
from etude.types import Json


@dataclass(slots=True, kw_only=True)
class Waits:
    """What became of the calls of a session. A call with a deadline of its caller's choice says nothing of engines."""

    calls: int = 0
    """In progress."""
    waited_s: float = 0.0
    """Of all that are over: in line, without an engine, and under engines that failed."""
    unserved: bool = False
    """Whether the last one that is over had no answer for want of an engine."""

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call is in progress."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    def add(self, visit: Visit) -> None:
        """A call is over."""
        if visit.hurried:
            return
        self.unserved = visit.code in UNSERVED or (visit.status == GONE and visit.taken is None)
        self.waited_s += visit.seconds if self.unserved else visit.waited_s

    def facts(self) -> dict[str, Json]:
        """As a caller is told."""
        return {"calls": self.calls, "waited_s": round(self.waited_s, 3), "unserved": self.unserved}

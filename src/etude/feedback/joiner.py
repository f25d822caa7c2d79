"""The joiner: closes expired windows, joins sessions with their signals and gives each to a sink exactly once.

    end idle sessions ─▶ give up unmatched signals ─▶ close windows ─▶ closed() ─▶ sink.take ─▶ taken
                                                                           ▲ killed here: taken again ┘

consumes: closed windows of the feedback store; produces: joined sessions in a sink; waits for: windows, and the sink;
woken by: its caller, periodically; on shutdown: may die at any point. A session is recorded as taken only after the
sink has stored it, and the sink stores none twice: it is delivered at least once and counted exactly once.
"""

import logging
from collections.abc import Sequence
from typing import final

from etude.feedback.follow_up import FollowUpRule
from etude.feedback.store import FeedbackStore
from etude.feedback.turns import DamagedSession
from etude.protocols import JoinedSessions
from etude.types import JoinedSession

BATCH = 500
"""Sessions per batch: as many as fit into memory with all their turns."""
DAMAGED = "damaged"
"""Result of a session that cannot be read: it is not given to the sink, and does not hold up the others."""
ABANDONED_S = 3600.0
"""Age of the last turn after which an open session's gateway counts as dead: a live one ends it in 15 min."""

logger = logging.getLogger(__name__)


@final
class Joiner:
    """Transfer of sessions with expired windows from ``store`` to ``sink``, in the order of their ends."""

    def __init__(
        self, store: FeedbackStore, sink: JoinedSessions, follow_up: FollowUpRule | None, *, batch: int = BATCH
    ) -> None:
        self._store = store
        self._sink = sink
        self._follow_up = follow_up
        self._batch = batch

    def step(self, now: float) -> int:
        """Process what is due, at most one batch; return the number of sessions that are done: given to the sink, or
        damaged.

        Raises :class:`~etude.errors.InfrastructureError` if the store or the sink is unreachable.
        """
        self._store.end_idle(now - ABANDONED_S, now)
        self._store.give_up_unmatched(now - self._store.window_s)
        try:
            joined, left_out = self._store.closed(self._batch, self._follow_up)
            if not joined and self._store.close_windows(now, self._batch):
                joined, left_out = self._store.closed(self._batch, self._follow_up)
        except DamagedSession as error:
            logger.error("%s; the others are learnt from", error)
            return self._store.taken({error.session_id: DAMAGED}, {}, now)
        if joined:
            outcomes = self._sink.take(joined)
            results = {one.session.session_id: outcome for one, outcome in zip(joined, outcomes, strict=True)}
            self._store.taken(results, left_out, now)
        return len(joined)


@final
class StoreOnlySink:
    """The sink of a run that does not train on live sessions: they stay in the store."""

    def take(self, sessions: Sequence[JoinedSession]) -> Sequence[str]:
        """Do nothing, and report each session as kept."""
        return ["kept"] * len(sessions)

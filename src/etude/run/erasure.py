"""Erasure of live sessions, on request or after their retention time, from every place that stores them.

    request ─▶ ledger: rollout, observation, a group outside batches ─▶ payloads ─▶ tests ─▶ feedback store

This order makes it safe to be killed at any point: the feedback store, which has the request, deletes a session last. A
session used by a step in progress stays until that step is committed; its request stays open.

Other copies: an open session stays in its gateway's memory until it has been idle for 15 minutes, and its keys and
values stay in an engine's prefix cache until the space is reused; exports are their owner's responsibility.
"""

from etude.feedback.privacy import DeletionRequest
from etude.feedback.store import FeedbackStore
from etude.ledger.ledger import Ledger
from etude.releases.store import ReleaseStore

AT_ONCE = 500
"""Maximum number of expired sessions per round."""


def carry_out(store: FeedbackStore, ledger: Ledger, releases: ReleaseStore, now: float) -> list[DeletionRequest]:
    """Carry out open requests; returns those that are done. Others wait for a step to be committed."""
    requests = store.privacy.requests(is_open=True)
    if not requests:
        return []
    done = [request.request_id for request in requests if _erase_all(request, store, ledger, releases, now)]
    _scrub(store, ledger)
    return [request for request in store.privacy.requests() if request.request_id in done]


def expire(store: FeedbackStore, ledger: Ledger, releases: ReleaseStore, keep_s: float, now: float) -> int:
    """Erase sessions that ended longer than ``keep_s`` ago, some at a time; returns their number."""
    sessions = store.privacy.expired(now - keep_s, AT_ONCE)
    gone = [session for session in sessions if not ledger.live.erase(session).is_busy]
    for session in gone:
        releases.forget_session(session)
        store.privacy.forget_expired(session, now)
    if gone:
        _scrub(store, ledger)
    return len(gone)


def _erase_all(
    request: DeletionRequest, store: FeedbackStore, ledger: Ledger, releases: ReleaseStore, now: float
) -> bool:
    """Erase the sessions of a request; true if none is left."""
    offered = ledger.live.of_user(request.user) if request.user else []
    sessions = dict.fromkeys([*offered, *store.privacy.sessions_of(request)])
    left = [session for session in sessions if not _erase(session, request, store, ledger, releases)]
    if not left:
        store.privacy.finish(request, now)
    return not left


def _erase(
    session_id: str, request: DeletionRequest, store: FeedbackStore, ledger: Ledger, releases: ReleaseStore
) -> bool:
    erased = ledger.live.erase(session_id, is_requested=True)
    if not erased.is_busy:
        releases.forget_session(session_id)
        store.privacy.session_is_gone(request, session_id, erased.step)
    return not erased.is_busy


def _scrub(store: FeedbackStore, ledger: Ledger) -> None:
    ledger.scrub()
    store.scrub()

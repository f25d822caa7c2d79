"""Erasure: what is kept of live sessions goes, on request or after its time, from every place that has it.

    request ─▶ ledger: rollout, observation, a group that no batch has ─▶ payloads ─▶ tests ─▶ feedback store

The order makes it safe to be killed at any point: the feedback store, which knows the request, forgets a session last.
A session that a step is computing with stays until that step is committed; its request stays open.

What is kept elsewhere, and how long: an open session in the memory of its gateway until it has been idle for a quarter
of an hour, its keys and values in an engine's prefix cache until they are needed for others; exports are their owner's.
"""

from etude.feedback.privacy import DeletionRequest
from etude.feedback.store import FeedbackStore
from etude.ledger.ledger import Ledger
from etude.releases.store import ReleaseStore

AT_ONCE = 500
"""Expired sessions of one round."""


def carry_out(store: FeedbackStore, ledger: Ledger, releases: ReleaseStore, now: float) -> list[DeletionRequest]:
    """Do what open requests ask for; returns those that are done now. Others wait for a step to be committed."""
    requests = store.privacy.requests(is_open=True)
    if not requests:
        return []
    done = [request.request_id for request in requests if _erase_all(request, store, ledger, releases, now)]
    _scrub(store, ledger)
    return [request for request in store.privacy.requests() if request.request_id in done]


def expire(store: FeedbackStore, ledger: Ledger, releases: ReleaseStore, keep_s: float, now: float) -> int:
    """Erase sessions that ended longer than ``keep_s`` ago, some at a time; returns how many went."""
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
    erased = ledger.live.erase(session_id)
    if not erased.is_busy:
        releases.forget_session(session_id)
        store.privacy.session_is_gone(request, session_id, erased.step)
    return not erased.is_busy


def _scrub(store: FeedbackStore, ledger: Ledger) -> None:
    ledger.scrub()
    store.scrub()

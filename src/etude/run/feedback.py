"""The feedback process: turns live sessions whose windows have ended into groups of one for the trainer and facts for
releases.

    feedback store ──Joiner──▶ joined sessions ──LiveRewards──▶ ledger: ready, or stale
                                                     └────────▶ releases: sessions of each arm, for A/B tests

    consumes: closed windows      waits for: the next one      woken by: its own polling
    produces: live groups, counts for tests      on shutdown: may die at any point

Each session is taken at least once and counted exactly once: ledger and releases know its id. This module owns the
wiring and the metrics of a session in tests; :mod:`etude.run.live_rewards` computes its reward.
"""

import asyncio
from contextlib import ExitStack
from typing import cast

from etude.clock import unix_s
from etude.config.feedback import FOLLOW_UPS
from etude.config.recipe import RunConfig
from etude.feedback.follow_up import FollowUpRule
from etude.feedback.joiner import Joiner, StoreOnlySink
from etude.feedback.store import FeedbackStore
from etude.ledger.ledger import Ledger
from etude.protocols import JoinedSessions
from etude.releases.store import ReleaseStore
from etude.rewards.live.formula import ScoredSession
from etude.run.erasure import carry_out, expire
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.live_rewards import LiveRewards
from etude.run.parent import tell_person
from etude.run.process_name import FEEDBACK
from etude.run.serving import run_until_signal
from etude.run.stores import open_feedback, open_ledger, open_releases
from etude.types import JoinedSession

DAY_S = 86_400.0
RIGHTS_S = 5.0
"""Pause between two checks for deletion requests and for sessions past their retention time."""
POLL_S = 0.2
"""Pause between two checks for windows that have ended."""
REWARD = "reward"
"""Release metric with the reward of the formula; the other metrics are the kinds of signals."""


def run_feedback(folder: RunFolder) -> None:
    """Join live sessions and pass them on until a stop signal.

    Raises :class:`~etude.errors.UserError` if none are stored.
    """
    run_until_signal(_serve(folder, folder.config()))


async def _serve(folder: RunFolder, config: RunConfig) -> None:
    feedback = config.feedback
    with ExitStack() as stack:
        store = stack.enter_context(open_feedback(folder))
        ledger = stack.enter_context(open_ledger(folder))
        releases = stack.enter_context(open_releases(folder))
        sink: JoinedSessions = StoreOnlySink()
        if config.live.groups_per_step:
            events = stack.enter_context(open_events(folder, FEEDBACK, lossy=True))

            def count(joined: JoinedSession, scored: ScoredSession) -> None:
                session = joined.session
                if session.arm:
                    metrics = metrics_of(joined, scored)
                    releases.add_session(session.session_id, session.arm, session.user, metrics)

            sink = LiveRewards(config, ledger, events, count)
        rule = cast("FollowUpRule", FOLLOW_UPS.make(feedback.follow_up)) if feedback.follow_up else None
        joiner, due_s = Joiner(store, sink, rule), 0.0
        tell_person(f"feedback of {folder.path}: a session is learnt from {feedback.window_s:g} s after its end")
        while True:
            if unix_s() >= due_s:
                keep_records(store, ledger, releases, feedback.keep_days)
                due_s = unix_s() + RIGHTS_S
            if not joiner.step(unix_s()):  # blocking is fine here, and SQLite stays on its thread
                await asyncio.sleep(POLL_S)


def keep_records(store: FeedbackStore, ledger: Ledger, releases: ReleaseStore, keep_days: float) -> None:
    """Finish deletion requests that had to wait for a step, and delete sessions past their retention time."""
    for request in carry_out(store, ledger, releases, unix_s()):
        tell_person(f"deletion request {request.request_id} is done: {request.sessions} sessions are gone")
    while keep_days and expire(store, ledger, releases, keep_days * DAY_S, unix_s()):
        pass


def metrics_of(joined: JoinedSession, scored: ScoredSession) -> dict[str, float]:
    """Metrics by which arms are compared: the reward, and the mean of each kind of signal present."""
    values: dict[str, list[float]] = {}
    for signal in joined.signals:
        values.setdefault(signal.kind.value, []).append(signal.value)
    reward = scored.session.reward + sum(scored.session.turn_rewards)
    return {REWARD: reward} | {kind: sum(own) / len(own) for kind, own in values.items()}

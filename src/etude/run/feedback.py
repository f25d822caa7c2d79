"""The feedback process: live sessions whose windows are over in, groups of one for the trainer and facts for releases
out.

    feedback store ──Joiner──▶ joined sessions ──▶ scored ──▶ suspected? ──▶ capped ─┬─▶ ledger: ready, or stale
                                                   formula    quarantined            └─▶ sessions of an arm: A/B tests

    consumes: closed windows      waits for: the next one      woken by: its own polling
    produces: live groups, what tests count      on shutdown: dies at any point

Each session is taken at least once and counted exactly once: ledger and releases know its id. Owns the wiring and the
order of these steps; what each decides is decided elsewhere (:mod:`etude.rewards.live`, :mod:`etude.feedback`,
:mod:`etude.rollouts.admission`).
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import cast, final

from etude.clock import unix_s
from etude.config.feedback import FOLLOW_UPS, FeedbackConfig
from etude.config.recipe import RunConfig
from etude.errors import UserError
from etude.feedback.follow_up import FollowUpRule
from etude.feedback.joiner import Joiner, KeptAlone
from etude.feedback.poisoning import RatedSession, capped_weights, suspicions
from etude.feedback.store import FeedbackStore
from etude.ledger.changes import LIVE
from etude.ledger.ledger import Ledger
from etude.protocols import JoinedSessions
from etude.releases.store import ReleaseStore
from etude.rewards.live.answers import observed_session
from etude.rewards.live.formula import LiveScorer, ScoredSession
from etude.rollouts.admission import Admission
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.payload_store import open_ledger
from etude.run.process_name import FEEDBACK
from etude.run.serving import run_until_signal, tell_person
from etude.telemetry.events import LiveSessionsTaken
from etude.types import JoinedSession, ObservedSession, Rollout, RolloutStatus

POLL_S = 0.2
"""Pause between two looks for windows that are over."""
REWARD = "reward"
"""Metric of releases that is the formula's; others are the kinds of signals."""
UNSERVED, QUARANTINED = "unserved", "quarantined"
"""Words for sessions that are not offered to the trainer: no reply was sampled; their user is suspected."""
COMPARED, WATCH_EVERY = 4096, 64
"""Newest rated sessions in which vandals are looked for, and of which shares are counted; new ones between two looks."""

logger = logging.getLogger(__name__)


def run_feedback(folder: RunFolder) -> None:
    """Join and hand on live sessions until a stop signal. Raises :class:`~etude.errors.UserError` where none are kept."""
    run_until_signal(_serve(folder, folder.config()))


async def _serve(folder: RunFolder, config: RunConfig) -> None:
    feedback = config.feedback
    if not feedback.window_s:
        raise UserError(f"{folder.path} keeps no live sessions: its recipe has feedback.window_s = 0")
    with ExitStack() as stack:
        events = stack.enter_context(open_events(folder, config, FEEDBACK, lossy=True))
        store = stack.enter_context(closing(FeedbackStore.open(folder.feedback, window_s=feedback.window_s)))
        sink: JoinedSessions = KeptAlone()
        if feedback.reward.parts:
            ledger = stack.enter_context(closing(open_ledger(folder)))
            releases = stack.enter_context(closing(ReleaseStore.open(folder.ledger, config.ledger)))
            sink = LiveSink(config, ledger, releases)
        rule = cast("FollowUpRule", FOLLOW_UPS.make(feedback.follow_up)) if feedback.follow_up else None
        joiner = Joiner(store, sink, rule)
        tell_person(f"feedback of {folder.path}: a session is learnt from {feedback.window_s:g} s after its end")
        while True:
            taken = await asyncio.to_thread(joiner.step, unix_s())
            if taken and isinstance(sink, LiveSink):
                events.write(LiveSessionsTaken(counts=dict(sink.counts), users_suspected=len(sink.suspected)))
            if not taken:
                await asyncio.sleep(POLL_S)


@final
class LiveSink:
    """Scores joined sessions and offers them to the trainer; a :class:`~etude.protocols.JoinedSessions`."""

    def __init__(self, config: RunConfig, ledger: Ledger, releases: ReleaseStore) -> None:
        """``ledger`` and ``releases`` stay the caller's to close."""
        self._config: FeedbackConfig = config.feedback
        self._learns = config.live.groups_per_step > 0
        self._admission = Admission(config.rollouts, steps=config.trainer.steps, live=config.live)
        self._ledger = ledger
        self._releases = releases
        earlier = ledger.observed(self._config.reward.history)
        self._scorer = LiveScorer(self._config.reward, earlier)
        self._rated: deque[RatedSession] = deque(maxlen=COMPARED)
        self._unwatched = 0
        self.suspected: dict[str, str] = {}
        """User → the rule that suspects them."""
        self.counts: Counter[str] = Counter()
        """Sessions by what became of them, since this process started."""
        self._watch(earlier)

    def take(self, sessions: Sequence[JoinedSession]) -> Sequence[str]:
        """Offer sessions to the trainer and count them for releases; returns a word for each: what became of it."""
        served = [joined for joined in sessions if joined.turns]
        observed = [observed_session(joined, self._config.reward) for joined in served]
        scored = {one.session.session_id: one for one in self._scorer.score(observed)} if observed else {}
        self._watch([one.session for one in scored.values()])
        weights = capped_weights([rated.user for rated in self._rated], self._config.poisoning.largest_share)
        words = [self._take(joined, scored.get(joined.session.session_id), weights) for joined in sessions]
        self.counts.update(words)
        return words

    def _watch(self, sessions: Sequence[ObservedSession]) -> None:
        """Add the rated ones to what users are compared by, and now and then look for vandals among all of them."""
        new = [rated for session in sessions if (rated := rated_session(session)) is not None]
        self._rated.extend(new)
        self._unwatched += len(new)
        if self._unwatched < WATCH_EVERY:
            return
        self._unwatched = 0
        found = suspicions(tuple(self._rated), self._config.poisoning)
        for user, suspicion in found.items():
            if self.suspected.get(user) != suspicion.rule:
                logger.warning("user %s is quarantined, by the rule %s: %s", user, suspicion.rule, suspicion.evidence)
        self.suspected = {user: suspicion.rule for user, suspicion in found.items()}

    def _take(self, joined: JoinedSession, scored: ScoredSession | None, weights: dict[str, float]) -> str:
        session = joined.session
        if scored is None or session.first_version is None:
            return UNSERVED
        user = session.user or session.session_id
        if user in self.suspected:
            return QUARANTINED
        if session.arm:
            self._releases.add_session(session.session_id, session.arm, session.user, metrics_of(joined, scored))
        if not self._learns:
            return "kept"
        observation = replace(scored.session.observation, weight=weights.get(user, 1.0))
        observed, version = replace(scored.session, observation=observation), session.first_version
        window = self._admission.window(version, self._ledger.loads(version), LIVE)
        rollout = rollout_of(joined, replace(scored, session=observed))
        return self._ledger.admit_live(rollout, observed, version=version, kept_below=window)


def rated_session(session: ObservedSession) -> RatedSession | None:
    """A session as vandals are looked for in it; ``None`` where its user said nothing."""
    if all(value is None for values in session.answers.values() for value in values):
        return None
    observation = session.observation
    return RatedSession(
        session_id=session.session_id,
        user=observation.user or session.session_id,
        template=observation.template,
        ended_at=session.ended_at,
        value=session.reward,
    )


def rollout_of(joined: JoinedSession, scored: ScoredSession) -> Rollout:
    """The rollout of a live session, as the trainer takes it; the ledger gives its group."""
    session = joined.session
    return Rollout(
        rollout_id=session.session_id,
        group_index=0,
        slot=0,
        attempt=0,
        status=RolloutStatus.GRADED,
        reward=scored.session.reward,
        reward_parts=scored.parts,
        reason=LIVE,
        turns=joined.turns,
        seconds=max(0.0, scored.session.ended_at - session.opened_at),
        turn_rewards=scored.session.turn_rewards,
        observation=scored.session.observation,
    )


def metrics_of(joined: JoinedSession, scored: ScoredSession) -> dict[str, float]:
    """Metrics by which arms are compared: the reward, and the mean of each kind of signal that there was."""
    values: dict[str, list[float]] = {}
    for signal in joined.signals:
        values.setdefault(signal.kind.value, []).append(signal.value)
    return {REWARD: scored.session.reward} | {kind: sum(own) / len(own) for kind, own in values.items()}

"""Conversion of a live session whose window has ended into a group that the trainer can claim.

    joined session ──▶ answers ──▶ reward (formula, estimates of silence) ──▶ caps, quarantine ──▶ ledger: ready | stale
                                        ▲                                          ▲
                                        └── earlier sessions, from the ledger ─────┘

Wiring only: :mod:`etude.rewards.live.formula` computes the reward of a session, :mod:`etude.feedback.poisoning`
excludes users, :mod:`etude.rollouts.admission` checks staleness. The session id is the id of the ledger row, so that
each session is trained on once, however often it is passed on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from etude.config.recipe import RunConfig
from etude.feedback.poisoning import RatedSession, Suspicion, capped_weights, suspicions
from etude.ledger.changes import LIVE, LiveAdmission
from etude.ledger.ledger import Ledger
from etude.rewards.live.answers import observed_session
from etude.rewards.live.formula import LiveScorer, ScoredSession, formula_spec
from etude.rollouts.admission import Admission
from etude.run.scoring import freeze_reward
from etude.telemetry.events import RolloutClosed
from etude.telemetry.log import EventLog
from etude.types import Disposition, JoinedSession, ObservedSession, Rollout, RolloutStatus, Turn, Verdict

REWARD_SECTION = "feedback.reward"
EMPTY = "empty"
"""Result for a session without model output: there is nothing to learn."""
WATCH_EVERY = 64
"""Number of rated sessions between two searches for vandals, which compare pairs of users."""
SUSPECTED = "user."
"""Prefix of the reason for quarantining a user's sessions."""


class LiveRewards:
    """Scores joined sessions and offers them to the ledger; implements :class:`~etude.protocols.JoinedSessions`.

    Raises :class:`~etude.errors.ConfigError` if the formula differs from the run's initial one. The state from earlier
    sessions is in the ledger, so a successor process continues seamlessly.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        events: EventLog,
        count: Callable[[JoinedSession, ScoredSession], None] = lambda joined, scored: None,
    ) -> None:
        """``count`` is called for each session of a user who is not suspected, whether or not it is trained on."""
        formula = config.feedback.reward
        freeze_reward(ledger.facts, formula_spec(formula), REWARD_SECTION)
        self._config = config
        self._ledger = ledger
        self._events = events
        self._count = count
        self._suspected: Mapping[str, Suspicion] = {}
        self._rated, self._rated_at_search = 0, -WATCH_EVERY
        self._admission = Admission(config.rollouts, steps=config.trainer.steps, live=config.live)
        self._scorer = LiveScorer(formula, ledger.live.observed(formula.history))

    def take(self, sessions: Sequence[JoinedSession]) -> Sequence[str]:
        """Score and offer sessions; returns the result of each as :class:`~etude.ledger.changes.LiveAdmission`, or
        ``empty``.

        Raises :class:`~etude.ledger.database.LedgerUnavailable`: sessions already recorded are then duplicates when
        they are offered again.
        """
        sampled = [session for session in sessions if any(len(turn.completion_ids) for turn in session.turns)]
        observed = [observed_session(session, self._config.feedback.reward) for session in sampled]
        scored = self._scorer.score(observed)
        weights, suspected = self._protection([one.session for one in scored])
        outcomes = {}
        for joined, one in zip(sampled, scored, strict=True):
            user = one.session.observation.user
            capped = replace(one.session.observation, weight=weights.get(user, 1.0))
            weighed = replace(one, session=replace(one.session, observation=capped))
            outcomes[joined.session.session_id] = self._offer(joined, weighed, suspected.get(user))
        deleted = {name for name, outcome in outcomes.items() if outcome == LiveAdmission.DELETED}
        self._scorer.learn(one.session for one in scored if one.session.session_id not in deleted)
        return [outcomes.get(joined.session.session_id, EMPTY) for joined in sessions]

    def _protection(self, scored: Sequence[ObservedSession]) -> tuple[Mapping[str, float], Mapping[str, Suspicion]]:
        """(User → weight of each of their sessions; user → suspicion, for users who are excluded from training)."""
        fresh = self._scorer.new_among(scored)
        limits, everything = self._config.feedback.poisoning, [*self._scorer.sessions, *fresh]
        self._rated += sum(_is_rated(session) for session in fresh)
        if self._rated - self._rated_at_search >= WATCH_EVERY:
            rated = [_rated(session) for session in everything if _is_rated(session)]
            self._suspected, self._rated_at_search = suspicions(rated, limits), self._rated
        users = [session.observation.user for session in everything]
        return capped_weights(users, limits.largest_share), self._suspected

    def _offer(self, joined: JoinedSession, scored: ScoredSession, suspicion: Suspicion | None) -> str:
        rollout = live_rollout(joined, scored, suspicion)
        version = oldest_version(joined.turns)
        window = self._admission.window(version, self._ledger.loads.count(version), LIVE)
        outcome = self._ledger.live.admit(rollout, scored.session, version=version, kept_below=window)
        if suspicion is None and outcome is not LiveAdmission.DELETED:
            self._count(joined, scored)
        if outcome is LiveAdmission.READY:
            self._events.write(_closed(rollout, scored.session.observation.template, joined.turns))
        return outcome


def _is_rated(session: ObservedSession) -> bool:
    return any(value is not None for value in chain.from_iterable(session.answers.values()))


def _rated(session: ObservedSession) -> RatedSession:
    return RatedSession(
        session_id=session.session_id,
        user=session.observation.user,
        template=session.observation.template,
        ended_at=session.ended_at,
        value=session.reward + sum(session.turn_rewards),
    )


def live_rollout(joined: JoinedSession, scored: ScoredSession, suspicion: Suspicion | None) -> Rollout:
    """The rollout of a session for the trainer; its group's number is assigned at admission."""
    session, reward = joined.session, scored.session.reward
    quarantine = None if suspicion is None else Verdict(
        disposition=Disposition.QUARANTINE, reason=f"{SUSPECTED}{suspicion.rule}", graded=reward
    )  # fmt: skip
    return Rollout(
        rollout_id=session.session_id,
        group_index=0,
        slot=0,
        attempt=0,
        status=RolloutStatus.GRADED,
        reward=reward,
        reward_parts=scored.parts,
        reason="window over",
        turns=joined.turns,
        seconds=scored.session.ended_at - session.opened_at,
        verdict=quarantine,
        turn_rewards=scored.session.turn_rewards,
        observation=scored.session.observation,
    )


def oldest_version(turns: Sequence[Turn]) -> int:
    """The oldest weight version that sampled a token of some turns."""
    return min(int(turn.versions.min()) for turn in turns if len(turn.versions))


def _closed(rollout: Rollout, template: str, turns: Sequence[Turn]) -> RolloutClosed:
    return RolloutClosed(
        rollout_id=rollout.rollout_id,
        purpose=LIVE,
        group_index=rollout.group_index,
        status=rollout.status,
        reason=rollout.reason,
        reward=rollout.reward,
        turns=len(turns),
        sampled_tokens=sum(len(turn.completion_ids) for turn in turns),
        seconds=rollout.seconds,
        template=template,
        version=max(int(turn.versions.max()) for turn in turns if len(turn.versions)),
    )

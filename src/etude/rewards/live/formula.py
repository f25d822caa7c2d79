"""The formula that computes the reward of a live session from its user's feedback. Pure.

    answers ────────────▶ part: the answer, a number for silence, or an estimate ──▶ Σ weight · part ─┬─▶ reward
    earlier sessions ──fit──▶ models (:mod:`etude.rewards.live.propensity`) ──┘                        └─▶ of each turn

Parts about the session add up to its reward; parts about turns to the rewards of turns, for ``[credit]``.

A run has one formula, as it has one ``[reward]``: its digest is stored in the ledger, and a different formula is
rejected. Baselines and the release test compare every session with earlier ones, and rewards by different formulas are
not comparable. To use another formula, start another run from the released checkpoint.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from etude.config.feedback import SignalPart, SignalReward
from etude.rewards.live.propensity import PartEstimate, PartModels, fit_answers
from etude.rewards.shaping.parts import RewardSpec
from etude.session_features import UserRecord
from etude.types import ObservedSession

REFITS = 8
"""Models are fitted again when one in this number of sessions is new to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSession:
    """A live session and its reward."""

    session: ObservedSession
    """With its reward, the rewards of its turns, and its propensity."""
    parts: Mapping[str, float]
    """Part → its value, given or estimated, averaged over turns; ``answered``, the share of the formula's values for
    which there was feedback; ``bounded``, the number of answers whose weight was bounded.
    """


class LiveScorer:
    """Scores live sessions in the order in which they ended, and learns from them which users give feedback.

    The models are fitted again when an eighth of the sessions is new to them. A session that was used for fitting is
    estimated by the model of its fold, which was fitted without it, and by its user's earlier answers. Scoring has no
    effect on later scores until :meth:`learn` is called, so it can be repeated if a score could not be stored.
    """

    def __init__(self, config: SignalReward, earlier: Iterable[ObservedSession] = ()) -> None:
        self._config = config
        self._estimated = [part for part in config.parts if part.missing == "estimate"]
        self._sessions: deque[ObservedSession] = deque(maxlen=config.history)
        self._records: defaultdict[tuple[str, str], UserRecord] = defaultdict(UserRecord)
        self._models: Mapping[str, PartModels] = {}
        self._unfitted = 0
        self.learn(earlier)

    @property
    def sessions(self) -> Sequence[ObservedSession]:
        """The sessions that models are fitted to: the last ``history`` ones."""
        return tuple(self._sessions)

    def new_among(self, sessions: Iterable[ObservedSession]) -> list[ObservedSession]:
        """The ``sessions`` that are not learnt from yet: after a crash, some are given again."""
        learnt = {session.session_id for session in self._sessions}
        return [session for session in sessions if session.session_id not in learnt]

    def score(self, sessions: Sequence[ObservedSession]) -> list[ScoredSession]:
        """Score the next sessions that ended."""
        everything = [*self._sessions, *self.new_among(sessions)]
        if not self._models or REFITS * (self._unfitted + len(sessions)) >= len(everything):
            self._models, self._unfitted = fit_answers(everything, self._config), -len(sessions)
        return [
            scored_session(
                session, {part.name: self._values(part, session) for part in self._config.parts}, self._config
            )
            for session in sessions
        ]

    def learn(self, sessions: Iterable[ObservedSession]) -> None:
        """Use the sessions, once they are stored, for the models of later ones; each counts once."""
        for session in self.new_among(sessions):
            self._sessions.append(session)
            self._unfitted += 1
            for part in self._estimated:
                self._records[part.name, session.observation.user].add(session.answers[part.name])

    def _values(self, part: SignalPart, session: ObservedSession) -> PartEstimate:
        if part.name in self._models:
            record = self._records[part.name, session.observation.user]
            return self._models[part.name].estimate(session, record, self._config.max_inverse)
        assert isinstance(part.missing, float), f"part {part.name} has no model"
        (low, high), missing = part.range, part.missing
        given = session.answers[part.name]
        return PartEstimate(tuple(missing if each is None else min(max(each, low), high) for each in given), (), 0)


def scored_session(
    session: ObservedSession, estimates: Mapping[str, PartEstimate], config: SignalReward
) -> ScoredSession:
    """The reward of a session: the weighted sum of its parts' estimates."""
    worth = [
        fsum(part.weight * estimates[part.name].values[turn] for part in config.parts if part.per == "turn")
        for turn in range(len(session.sampled_tokens))
    ]
    answers = [value for values in session.answers.values() for value in values]
    propensities = [chance for estimate in estimates.values() for chance in estimate.propensities]
    parts = {name: fsum(each.values) / len(each.values) for name, each in estimates.items() if each.values}
    parts["answered"] = sum(value is not None for value in answers) / max(1, len(answers))
    parts["bounded"] = float(sum(estimate.bounded for estimate in estimates.values()))
    observation = replace(session.observation, propensity=min(propensities, default=1.0))
    reward = fsum(part.weight * estimates[part.name].values[0] for part in config.parts if part.per == "session")
    turn_rewards = tuple(worth) if config.is_by_turn else ()
    scored = replace(session, observation=observation, reward=reward, turn_rewards=turn_rewards)
    return ScoredSession(session=scored, parts=parts)


def describe(config: SignalReward) -> list[str]:
    """Description of the formula, for people; empty if it has no parts."""
    if not config.parts:
        return []
    lines = ["a live session's reward:"]
    for part in config.parts:
        low, high = part.bounds
        silence = "silence is estimated" if part.missing == "estimate" else f"silence is {part.missing:g}"
        lines.append(f"  {part.name}: {low:g} to {high:g}, {part.weight:g} × {part.signal}, per {part.per}, {silence}")
    return lines


def formula_spec(config: SignalReward) -> RewardSpec:
    """Specification of the formula: everything that determines a session's reward, given the models."""
    spec: dict[str, Mapping[str, object]] = {
        part.name: part.model_dump(mode="json", exclude={"name"}) for part in config.parts
    }
    return {**spec, "estimates": {"max_inverse": config.max_inverse}} if spec else {}

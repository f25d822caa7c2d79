"""The formula that says what a live session is worth, by what its user said. Pure.

    answers ──▶ part: the answer; a number that stands for silence; or an estimate ──▶ Σ weight · part ─┬─▶ reward
    models ───▶ (:mod:`etude.rewards.live.propensity`)                                                  └─▶ of each turn

Parts about the session add up to its reward, parts about turns to the rewards of these, which ``[credit]`` shares out.

A run has one formula, as it has one ``[reward]``: its digest is a fact of the ledger, and another one is refused. Every
session is compared with earlier ones, by baselines and by the test that decides about a release, and worths by two
formulas cannot be compared. For another formula start another run from the checkpoint that is released.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from etude.config.feedback import SignalPart, SignalReward
from etude.rewards.live.propensity import PartEstimate, PartModels, turns_of
from etude.rewards.shaping.parts import RewardSpec
from etude.types import ObservedSession


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSession:
    """A live session and what it is worth."""

    session: ObservedSession
    """With its reward, the rewards of its turns, and its propensity."""
    parts: Mapping[str, float]
    """Part → its value, as given or estimated, of turns their mean; ``answered``, the share of what the formula asks
    that was; ``bounded``, answers whose weight was.
    """


def score_session(session: ObservedSession, models: Mapping[str, PartModels], config: SignalReward) -> ScoredSession:
    """The worth of a session; ``models`` are those of :func:`~etude.rewards.live.propensity.fit_answers`."""
    estimates = {part.name: _values(part, session, models, config.max_inverse) for part in config.parts}
    turns = range(len(session.sampled_tokens))
    worth = [
        fsum(part.weight * estimates[part.name].values[turn] for part in config.parts if part.per == "turn")
        for turn in turns
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
    """Description of the formula, for people; empty where there is none."""
    if not config.parts:
        return []
    lines = ["a live session's reward:"]
    for part in config.parts:
        low, high = part.bounds
        silence = "silence is estimated" if part.missing == "estimate" else f"silence is {part.missing:g}"
        lines.append(f"  {part.name}: {low:g} to {high:g}, {part.weight:g} × {part.signal}, per {part.per}, {silence}")
    return lines


def formula_spec(config: SignalReward) -> RewardSpec:
    """Specification of the formula: all that decides what a session is worth, given the models."""
    spec: dict[str, Mapping[str, object]] = {
        part.name: part.model_dump(mode="json", exclude={"name"}) for part in config.parts
    }
    return {**spec, "estimates": {"max_inverse": config.max_inverse}} if spec else {}


def _values(
    part: SignalPart, session: ObservedSession, models: Mapping[str, PartModels], max_inverse: float
) -> PartEstimate:
    if part.name in models:
        return models[part.name].estimate(session, max_inverse)
    assert isinstance(part.missing, float), f"part {part.name} has no model"
    (low, high), missing = part.range, part.missing
    given: Sequence[float | None] = session.answers[part.name]
    values = tuple(missing if value is None else min(max(value, low), high) for value in given)
    assert len(values) == len(turns_of(part, session)), part.name
    return PartEstimate(values, (), 0)

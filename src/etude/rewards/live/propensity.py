"""Estimates of what was never answered: models of who answers and of what they say, doubly robust. Pure.

    sessions so far ──fit, by fold of users──▶ P(answered | x), E[value | x] ──▶ estimate of each silent, and of each
                                                                                  answered part

Those who answer are not like those who do not: by the kind of request, by how long the session was, by who they are. So
the mean of the answers is not the mean of the sessions, and to count silence as 0 teaches whatever makes people silent.
With a = 1 where a part was answered, p̂(x) the chance of that, m̂(x) the answer that is expected, and W a bound,

    φ = m̂(x) + a · min(1/p̂(x), W) · (y − m̂(x))

(augmented inverse propensity weighting: Robins, Rotnitzky & Zhao, JASA 1994, equation 2.1; the weight alone is Horvitz &
Thompson's, JASA 1952). A silent session is worth what is expected of it, an answered one that and its surprise, times
by how many it stands for. Given x let answering be independent of the answer (missing at random), p be its true chance
and μ the true mean. Then E[φ | x] − μ = (p · min(1/p̂, W) − 1) · (μ − m̂): 0 if either model is right, small if both
nearly are. Where p < 1/W the bound leaves (pW − 1) · (μ − m̂), towards what is expected (truncated weights: Ionides, J.
Comp. Graph. Stat. 2008). It counts as *bounded*.

Every estimate is by models that have seen nothing of its user: models of folds, each fitted without the users of one
(cross-fitting: Chernozhukov et al., Econometrics Journal 2018). Without that an answer would help to expect itself.

x is known whatever was answered: template, arm, lengths, the turn's place, and how its user answered *earlier* sessions.
It has the length of what the model said, as an estimate may and a baseline may not
(:mod:`etude.trainer.batching.baselines`). What is not in x and moves both answering and answers is not corrected.

Array legend: N rows (sessions, or turns of some), D features.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from typing import NamedTuple

import numpy as np

from etude.config.feedback import SignalPart, SignalReward
from etude.regression import Array, chances, fit_linear, fit_logistic
from etude.types import Mask, ObservedSession

MOST_NAMES = 24
"""Templates, and arms, with a feature of their own: the most frequent; the others share one."""
FEWEST_ROWS = 24
"""Answered and silent rows, below which models are means: there is nothing to learn who answers from."""
PRIOR = 4.0
"""Rows of the average user that a user's own earlier ones are weighed against."""
MEASURES = 8
"""Features that are no names."""
SAME = 1e-9
"""Deviation of a feature that is the same everywhere."""
LINEAR_RIDGE = 2.0
"""Rows that the penalty of the model of answers weighs as much as."""


class PartEstimate(NamedTuple):
    """Estimates of one part of a session, one for it or for each turn."""

    values: tuple[float, ...]
    """φ."""
    propensities: tuple[float, ...]
    """p̂."""
    bounded: int
    """Answers whose weight was bounded."""


@dataclass(slots=True)
class _UserRecord:
    """What a user answered so far, of one part."""

    asked: int = 0
    answered: int = 0
    total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Features:
    """The features of a part's rows: which names have one of their own."""

    templates: Mapping[str, int]
    arms: Mapping[str, int]
    middle: float
    """An answer in the middle of the part's range."""

    @property
    def width(self) -> int:
        """D."""
        return len(self.templates) + len(self.arms) + 2 + MEASURES

    def row(self, session: ObservedSession, turn: int | None, record: _UserRecord) -> list[float]:
        """[D] of a session, or one of its turns."""
        observation, lengths = session.observation, session.sampled_tokens
        own = lengths[turn] if turn is not None else 0
        return [
            *_one_hot(self.templates, observation.template),
            *_one_hot(self.arms, observation.arm),
            np.log1p(observation.prompt_tokens),
            np.log1p(sum(lengths)),
            np.log1p(len(lengths)),
            np.log1p(own),
            np.log1p(turn or 0),
            float(turn is not None and turn == len(lengths) - 1),
            (record.answered + PRIOR / 2) / (record.asked + PRIOR),
            (record.total + PRIOR * self.middle) / (record.answered + PRIOR),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoldModel:
    """Models of one part, fitted without the users of one fold."""

    middle_D: Array
    width_D: Array
    answering: tuple[Array, float]
    expected: tuple[Array, float]

    def predict(self, rows_ND: Array) -> tuple[Array, Array]:
        """[N] p̂ and m̂."""
        scaled_ND = (rows_ND - self.middle_D) / self.width_D
        (who_D, who), (what_D, what) = self.answering, self.expected
        return chances(scaled_ND @ who_D + who), scaled_ND @ what_D + what


@dataclass(frozen=True, slots=True, kw_only=True)
class PartModels:
    """Models of one part, by fold of users."""

    part: SignalPart
    features: _Features
    folds: Sequence[_FoldModel]
    records: Mapping[str, _UserRecord] = field(default_factory=dict)
    """User → what they answered, up to the newest session of the fit."""

    def estimate(self, session: ObservedSession, max_inverse: float) -> PartEstimate:
        """The estimates of a session, by a model that has seen nothing of its user."""
        record = self.records.get(session.observation.user, _UserRecord())
        model = self.folds[fold_of(session.observation.user, len(self.folds))]
        turns = turns_of(self.part, session)
        if not turns:
            return PartEstimate((), (), 0)
        rows_ND = np.array([self.features.row(session, turn, record) for turn in turns])
        propensities_N, expected_N = model.predict(rows_ND)
        answers_N = np.array([_clipped(self.part, value) for value in session.answers[self.part.name]])
        expected_N = expected_N.clip(*self.part.range)
        values_N, bounded_N = doubly_robust(answers_N, propensities_N, expected_N, max_inverse)
        return PartEstimate(tuple(values_N.tolist()), tuple(propensities_N.tolist()), int(bounded_N.sum()))


def doubly_robust(answers_N: Array, propensities_N: Array, expected_N: Array, max_inverse: float) -> tuple[Array, Mask]:
    """[N] φ = m̂ + a · min(1/p̂, W) · (y − m̂), and where an answer's weight was bounded; ``nan`` is no answer."""
    answered_N = ~np.isnan(answers_N)
    inverse_N = 1.0 / np.maximum(propensities_N, 1e-12)
    surprise_N = np.where(answered_N, np.nan_to_num(answers_N) - expected_N, 0.0)
    values_N: Array = expected_N + np.minimum(inverse_N, max_inverse) * surprise_N
    bounded_N: Mask = answered_N & (inverse_N > max_inverse)
    return values_N, bounded_N


def fit_answers(sessions: Sequence[ObservedSession], config: SignalReward) -> dict[str, PartModels]:
    """Part → its models, for the parts whose silence is estimated. ``sessions`` are in the order in which they ended.

    The same sessions give the same models.
    """
    return {part.name: _fit_part(part, sessions, config.folds) for part in config.parts if part.missing == "estimate"}


def fold_of(user: str, folds: int) -> int:
    """The fold of a user, for ever the same."""
    return int.from_bytes(sha256(user.encode()).digest()[:8]) % folds


def turns_of(part: SignalPart, session: ObservedSession) -> Sequence[int | None]:
    """The turns that a part asks about; of one about the session the one ``None``."""
    return range(len(session.sampled_tokens)) if part.per == "turn" else [None]


def _fit_part(part: SignalPart, sessions: Sequence[ObservedSession], folds: int) -> PartModels:
    sessions = [session for session in sessions if part.name in session.answers]
    values = [value for session in sessions for value in session.answers[part.name]]
    features = _Features(
        templates=_numbered(session.observation.template for session in sessions),
        arms=_numbered(session.observation.arm for session in sessions),
        middle=sum(part.range) / 2,
    )
    records: dict[str, _UserRecord] = {}
    rows = list(chain.from_iterable(_rows(part, session, features, records) for session in sessions))
    rows_ND = np.array([row for row, _ in rows]).reshape(len(rows), features.width)
    answers_N = np.array([_clipped(part, value) for value in values])
    fold_N = np.array([
        fold_of(session.observation.user, folds) for session in sessions for _ in session.answers[part.name]
    ])  # fmt: skip
    models = [_fit_fold(rows_ND[fold_N != fold], answers_N[fold_N != fold], features) for fold in range(folds)]
    return PartModels(part=part, features=features, folds=models, records=records)


def _rows(
    part: SignalPart, session: ObservedSession, features: _Features, records: dict[str, _UserRecord]
) -> Iterator[tuple[list[float], float | None]]:
    """The rows of a session, by what its user answered before; then what they answered now is added."""
    record = records.setdefault(session.observation.user, _UserRecord())
    values = session.answers[part.name]
    yield from [(features.row(session, turn, record), value)
                for turn, value in zip(turns_of(part, session), values, strict=True)]  # fmt: skip
    given = [_clipped(part, value) for value in values if value is not None]
    record.asked += len(values)
    record.answered += len(given)
    record.total += sum(given)


def _fit_fold(rows_ND: Array, answers_N: Array, features: _Features) -> _FoldModel:
    """Fit both models; while there are few rows of either kind, means stand for them."""
    answered_N, nothing_D = ~np.isnan(answers_N), np.zeros(features.width)
    answered, silent = int(answered_N.sum()), int((~answered_N).sum())
    if min(answered, silent) < FEWEST_ROWS:
        usual = float(answers_N[answered_N].mean()) if answered else features.middle
        return _FoldModel(
            middle_D=nothing_D,
            width_D=np.ones(features.width),
            answering=(nothing_D, float(np.log((answered + 1) / (silent + 1)))),
            expected=(nothing_D, usual),
        )
    middle_D, width_D = rows_ND.mean(axis=0), rows_ND.std(axis=0)
    width_D = np.where(width_D > SAME, width_D, 1.0)
    scaled_ND = (rows_ND - middle_D) / width_D
    answering = fit_logistic(scaled_ND, answered_N.astype(np.int64), np.ones(len(scaled_ND)), ridge=1 / len(scaled_ND))
    expected = fit_linear(scaled_ND[answered_N], answers_N[answered_N], ridge=LINEAR_RIDGE)
    return _FoldModel(middle_D=middle_D, width_D=width_D, answering=answering, expected=expected)


def _clipped(part: SignalPart, value: float | None) -> float:
    """A value within the part's range; ``nan`` for none."""
    low, high = part.range
    return float("nan") if value is None else min(max(value, low), high)


def _numbered(names: Iterator[str]) -> dict[str, int]:
    common = sorted(Counter(names).most_common(), key=lambda pair: (-pair[1], pair[0]))[:MOST_NAMES]
    return {name: number for number, (name, _) in enumerate(common)}


def _one_hot(numbers: Mapping[str, int], name: str) -> list[float]:
    row = [0.0] * (len(numbers) + 1)
    row[numbers.get(name, len(numbers))] = 1.0
    return row

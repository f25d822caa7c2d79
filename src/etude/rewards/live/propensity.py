"""Estimates of missing feedback: models of who answers and of the answers, doubly robust. Pure.

    sessions so far ──fit, by fold of users──▶ P(answered | x), E[value | x] ──▶ estimate of each silent, and of each
                                                                                  answered part

Users who answer differ from those who do not: in the kind of request, the length of the session, their identity. So the
mean of the answers is not the mean of the sessions, and counting silence as 0 trains for or against whatever makes
people silent. With a = 1 if a part was answered, p̂(x) the probability of that, m̂(x) the expected answer, and W a
bound,

    φ = m̂(x) + a · min(1/p̂(x), W) · (y − m̂(x))

(augmented inverse propensity weighting: Robins, Rotnitzky & Zhao, JASA 1994; the weight alone is Horvitz & Thompson's,
JASA 1952). A silent session gets its expected answer; an answered one also gets its deviation from the expected answer,
times the number of sessions that it represents. Given x, let answering be independent of the answer (missing at
random), with true probability p and true mean μ. Then E[φ | x] − μ = (p · min(1/p̂, W) − 1) · (μ − m̂): 0 if either
model is right, small if both nearly are. Where p < 1/W the bound leaves (pW − 1) · (μ − m̂), towards the expected
answer (truncated weights: Ionides, J. Comp. Graph. Stat. 2008). It counts as *bounded*.

Every estimate uses models that have seen nothing of its user: one model per fold, fitted without the users of that fold
(cross-fitting: Chernozhukov et al., Econometrics Journal 2018). Otherwise an answer would help to predict itself.

x does not depend on the answer: template, arm, lengths, position of the turn, its user's answers to *earlier* sessions.
It includes the length of the model's output, which is allowed for an estimate but not for a baseline
(:mod:`etude.trainer.batching.baselines`). Influences on both answering and answers that are not in x are not corrected.

Array legend: N rows (sessions, or turns of some), D features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from math import log1p
from typing import NamedTuple

import numpy as np

from etude.config.feedback import SignalPart, SignalReward
from etude.regression import Array, chances, fit_linear, fit_logistic
from etude.session_features import SessionFeatures, UserRecord
from etude.types import Mask, ObservedSession

FEWEST_ROWS = 24
"""Fewest answered and silent rows for fitting: with fewer of either, models are means."""
LENGTHS = 5
"""Number of features of the model's output."""
SAME = 1e-9
"""Deviation of a feature that is the same everywhere."""
LINEAR_RIDGE = 2.0
"""Ridge penalty of the answer model, in units of rows."""


class PartEstimate(NamedTuple):
    """Estimates of one part of a session, one for it or for each turn."""

    values: tuple[float, ...]
    """φ."""
    propensities: tuple[float, ...]
    """p̂, one for each value."""
    bounded: int
    """Answers whose weight was bounded."""


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
    features: SessionFeatures
    folds: Sequence[_FoldModel]

    def estimate(self, session: ObservedSession, record: UserRecord, max_inverse: float) -> PartEstimate:
        """The estimates of a session, by a model that has seen nothing of its user; ``record`` has the user's earlier
        answers.
        """
        model = self.folds[fold_of(session.observation.user, len(self.folds))]
        turns = turns_of(self.part, session)
        if not turns:
            return PartEstimate((), (), 0)
        rows_ND = np.array([_row(self.features, session, turn, record) for turn in turns])
        propensities_N, expected_N = model.predict(rows_ND)
        answers_N = _array(self.part, session.answers[self.part.name])
        expected_N = expected_N.clip(*self.part.range)
        values_N, bounded_N = doubly_robust(answers_N, propensities_N, expected_N, max_inverse)
        return PartEstimate(tuple(values_N.tolist()), tuple(propensities_N.tolist()), int(bounded_N.sum()))


def doubly_robust(answers_N: Array, propensities_N: Array, expected_N: Array, max_inverse: float) -> tuple[Array, Mask]:
    """[N] φ = m̂ + a · min(1/p̂, W) · (y − m̂), and whether an answer's weight was bounded; ``nan`` is no answer."""
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
    """The fold of a user, which never changes."""
    return int.from_bytes(sha256(user.encode()).digest()[:8]) % folds


def turns_of(part: SignalPart, session: ObservedSession) -> Sequence[int | None]:
    """The turns that a part is about; for a part about the session a single ``None``."""
    return range(len(session.sampled_tokens)) if part.per == "turn" else [None]


def _fit_part(part: SignalPart, sessions: Sequence[ObservedSession], folds: int) -> PartModels:
    sessions = [session for session in sessions if part.name in session.answers]
    values = [value for session in sessions for value in session.answers[part.name]]
    features = SessionFeatures.of([session.observation for session in sessions], usual=sum(part.range) / 2)
    records: dict[str, UserRecord] = {}
    rows = list(chain.from_iterable(_rows(part, session, features, records) for session in sessions))
    rows_ND = np.array(rows).reshape(len(rows), features.width + LENGTHS)
    answers_N = _array(part, values)
    fold_N = np.array([
        fold_of(session.observation.user, folds) for session in sessions for _ in session.answers[part.name]
    ])  # fmt: skip
    models = [_fit_fold(rows_ND[fold_N != fold], answers_N[fold_N != fold], features) for fold in range(folds)]
    return PartModels(part=part, features=features, folds=models)


def _rows(
    part: SignalPart, session: ObservedSession, features: SessionFeatures, records: dict[str, UserRecord]
) -> Iterator[list[float]]:
    """The rows of a session, based on its user's earlier answers; afterwards its own answers are recorded."""
    record = records.setdefault(session.observation.user, UserRecord())
    yield from [_row(features, session, turn, record) for turn in turns_of(part, session)]
    record.add(session.answers[part.name])


def _row(features: SessionFeatures, session: ObservedSession, turn: int | None, record: UserRecord) -> list[float]:
    """[D] features of a session or a turn: the session's features, then lengths of the model's output."""
    lengths, own = session.sampled_tokens, 0 if turn is None else session.sampled_tokens[turn]
    is_last = turn is not None and turn == len(lengths) - 1
    replies = (log1p(sum(lengths)), log1p(len(lengths)), log1p(own), log1p(turn or 0), float(is_last))
    return [*features.row(session.observation, record), *replies]


def _fit_fold(rows_ND: Array, answers_N: Array, features: SessionFeatures) -> _FoldModel:
    """Fit both models; with few rows of either kind, use means instead."""
    answered_N, nothing_D = ~np.isnan(answers_N), np.zeros(features.width + LENGTHS)
    answered, silent = int(answered_N.sum()), int((~answered_N).sum())
    if min(answered, silent) < FEWEST_ROWS:
        usual = float(answers_N[answered_N].mean()) if answered else features.usual
        return _FoldModel(
            middle_D=nothing_D,
            width_D=np.ones(features.width + LENGTHS),
            answering=(nothing_D, float(np.log((answered + 1) / (silent + 1)))),
            expected=(nothing_D, usual),
        )
    middle_D, width_D = rows_ND.mean(axis=0), rows_ND.std(axis=0)
    width_D = np.where(width_D > SAME, width_D, 1.0)
    scaled_ND = (rows_ND - middle_D) / width_D
    answering = fit_logistic(scaled_ND, answered_N.astype(np.int64), np.ones(len(scaled_ND)), ridge=1 / len(scaled_ND))
    expected = fit_linear(scaled_ND[answered_N], answers_N[answered_N], ridge=LINEAR_RIDGE)
    return _FoldModel(middle_D=middle_D, width_D=width_D, answering=answering, expected=expected)


def _array(part: SignalPart, values: Sequence[float | None]) -> Array:
    """[N] values within the part's range; ``nan`` for none."""
    return np.array([np.nan if value is None else value for value in values], np.float64).clip(*part.range)

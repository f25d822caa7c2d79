"""Logistic regression, and how well its scores tell two sides apart, for sessions whose rows are not independent. Pure.

Array legend: N rows, D features, S sessions.

- :func:`held_out_scores` scores every session by a model that has seen none of its rows: rows of one session are alike,
  and a model that knows some recognises the others (grouped cross-validation).
- :func:`area` is the chance that a row of side 1 scores above one of side 0, over pairs that the same model scored, and
  its confidence interval by a bootstrap over sessions (for clustered data: Field & Welsh 2007), widened by what
  cross-validation hides (Nadeau & Bengio 2003).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etude.regression import Array, Labels, fit_logistic

DRAWS = 2_000
"""Rounds of the bootstrap: the interval's ends are good to about one hundredth of its width."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """An area under the ROC curve and its confidence interval."""

    value: float
    """0.5: the sides cannot be told apart."""
    low: float
    high: float


def held_out_scores(matrix_ND: Array, labels_N: Labels, sessions_N: Labels, folds_S: Labels) -> tuple[Array, Array]:
    """Scores [N], each by a model without that row's fold, and the mean coefficients [D] of all models.

    ``sessions_N`` are session numbers, ``folds_S`` the fold of each session. A session counts as much as any other of
    its side, however many rows it has.
    """
    fold_N = folds_S[sessions_N]
    scores_N = np.zeros(len(matrix_ND))
    folds = np.unique(folds_S)
    coefficients_D = np.zeros(matrix_ND.shape[1])
    for fold in folds:
        known_N = fold_N != fold
        mean_D = matrix_ND[known_N].mean(axis=0)
        weights_N = balanced(labels_N[known_N], sessions_N[known_N])
        fitted_D, intercept = fit_logistic(matrix_ND[known_N] - mean_D, labels_N[known_N], weights_N)
        scores_N[~known_N] = (matrix_ND[~known_N] - mean_D) @ fitted_D + intercept
        coefficients_D += fitted_D / len(folds)
    return scores_N, coefficients_D


def assign_folds(labels_S: Labels, count: int, rng: np.random.Generator) -> Labels:
    """A cross-validation fold for each session, both sides spread evenly."""
    folds_S = np.zeros(len(labels_S), np.int64)
    for label in (0, 1):
        members = rng.permutation(np.flatnonzero(labels_S == label))
        folds_S[members] = np.arange(len(members)) % count
    return folds_S


def balanced(labels_N: Labels, sessions_N: Labels) -> Array:
    """Weights [N] under which both sides, and all sessions of a side, count the same."""
    rows_S = np.bincount(sessions_N)
    weights_N: Array = 1.0 / rows_S[sessions_N]
    for label in (0, 1):
        weights_N[labels_N == label] /= weights_N[labels_N == label].sum()
    return weights_N


def area(
    rounds: Sequence[tuple[Array, Labels]], labels_N: Labels, sessions_N: Labels, rng: np.random.Generator
) -> Area:
    """The area under the ROC curve of scores for side 1 against side 0: of each round, scores [N] and the folds [S]
    that they were made in.
    """
    labels_S = np.zeros(len(rounds[0][1]), np.int64)
    labels_S[sessions_N] = labels_N
    ones, zeros = np.flatnonzero(labels_S == 1), np.flatnonzero(labels_S == 0)
    wins, pairs = np.zeros((len(ones), len(zeros))), np.zeros((len(ones), len(zeros)))
    for scores_N, folds_S in rounds:
        scores_of = [scores_N[sessions_N == session] for session in range(len(folds_S))]
        same = folds_S[ones][:, None] == folds_S[zeros][None]
        pairs += same
        for row, column in np.argwhere(same):
            wins[row, column] += _wins(scores_of[ones[row]], scores_of[zeros[column]])
    ones_BS = rng.multinomial(len(ones), np.full(len(ones), 1 / len(ones)), DRAWS)
    zeros_BS = rng.multinomial(len(zeros), np.full(len(zeros), 1 / len(zeros)), DRAWS)
    compared_B = np.einsum("bj,bj->b", ones_BS @ pairs, zeros_BS)
    won_B = np.einsum("bj,bj->b", ones_BS @ wins, zeros_BS)
    drawn_B = won_B[compared_B > 0] / compared_B[compared_B > 0]
    low, high = np.quantile(drawn_B, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    value = float(wins.sum() / pairs.sum())
    wider = widening(len(np.unique(rounds[0][1])))
    return Area(
        value=value,
        low=max(0.0, value - wider * max(0.0, value - float(low))),
        high=min(1.0, value + wider * max(0.0, float(high) - value)),
    )


def widening(folds: int) -> float:
    """By how much an interval over held-out scores is too narrow: models of different folds learnt from the same rows.

    √(1 + J·n₂/n₁) of Nadeau & Bengio 2003, eq. 9 against the naive variance; 1.5 for five folds.
    """
    return math.sqrt(1 + folds / (folds - 1)) if folds > 1 else 1.0


def _wins(ones: Array, zeros: Array) -> float:
    """The share of pairs in which the first is above the second; equal ones count half."""
    ordered = np.sort(zeros)
    below, upto = np.searchsorted(ordered, ones, "left"), np.searchsorted(ordered, ones, "right")
    return float((below + upto).mean() / (2 * len(zeros)))

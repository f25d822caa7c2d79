"""Regressions small enough to have no library: logistic by gradient descent, linear in closed form. Pure.

Array legend: N rows, D features.
"""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

RIDGE = 0.02
"""Strength of the penalty, per row: weak enough that a plain tell stands out, strong enough for more D than N."""
ITERATIONS = 150
"""Steps of gradient descent."""
POWER_STEPS = 20
"""To find how steep the loss can be."""


def fit_logistic(matrix_ND: Array, labels_N: Labels, weights_N: Array, *, ridge: float = RIDGE) -> tuple[Array, float]:
    """Fit a logistic regression: coefficients [D] and intercept for ``labels_N`` (0 or 1) with ``weights_N``.

    Ridge-penalised loss by accelerated gradient descent (Nesterov 1983).
    """
    weights_N = weights_N / weights_N.sum()
    rows_NE = np.hstack((matrix_ND, np.ones((len(matrix_ND), 1))))
    penalty_E = np.full(rows_NE.shape[1], ridge)
    penalty_E[-1] = 0.0
    step = 1.0 / (_steepest(rows_NE, weights_N) / 4 + ridge)
    at_E = ahead_E = np.zeros(rows_NE.shape[1])
    for iteration in range(ITERATIONS):
        slope_E = rows_NE.T @ (weights_N * (chances(rows_NE @ ahead_E) - labels_N)) + penalty_E * ahead_E
        next_E = ahead_E - step * slope_E
        ahead_E = next_E + iteration / (iteration + 3) * (next_E - at_E)
        at_E = next_E
    return at_E[:-1], float(at_E[-1])


def fit_linear(matrix_ND: Array, values_N: Array, *, ridge: float) -> tuple[Array, float]:
    """Fit a linear regression: coefficients [D], penalised by ``ridge`` · |w|² beside the sum of squares, and intercept
    (Hoerl & Kennard 1970).
    """
    middle_D, middle = matrix_ND.mean(axis=0), float(values_N.mean())
    rows_ND = matrix_ND - middle_D
    squares_DD = rows_ND.T @ rows_ND + ridge * np.eye(rows_ND.shape[1])
    fitted_D: Array = np.linalg.solve(squares_DD, rows_ND.T @ (values_N - middle))
    return fitted_D, middle - float(middle_D @ fitted_D)


def chances(logits_N: Array) -> Array:
    """[N] 1 / (1 + e^(−x))."""
    chances_N: Array = 1.0 / (1.0 + np.exp(-np.clip(logits_N, -30, 30)))
    return chances_N


def _steepest(rows_NE: Array, weights_N: Array) -> float:
    """The largest eigenvalue of the weighted second moments, from below, with a little room."""
    vector_E = np.ones(rows_NE.shape[1])
    size = 1.0
    for _ in range(POWER_STEPS):
        vector_E = rows_NE.T @ (weights_N * (rows_NE @ vector_E))
        size = float(np.linalg.norm(vector_E))
        vector_E = vector_E / max(size, 1e-12)
    return size * 1.05

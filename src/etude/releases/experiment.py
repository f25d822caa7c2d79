"""A sequential A/B test: the difference of a per-user metric between two arms, valid for any number of evaluations.

    per-user sums of both arms ──▶ mean of users, variance ──▶ confidence sequence
    users of both arms, drawn share ──▶ sample-ratio test

**Mixture SPRT** (R. Johari, P. Koomen, L. Pekelis and D. Walsh, "Always Valid Inference: Continuous Monitoring of A/B
Tests", arXiv 1512.04922, for normal data and the mixing N(θ₀, τ²)): with the difference d of two means and its variance
V, the likelihood ratio of the mixture to a true difference θ₀ is

    Λ(θ₀) = sqrt(V / (V + τ²)) · exp(τ² (d − θ₀)² / (2 V (V + τ²)))

Under θ₀ it is a martingale of mean 1, so the probability that it ever exceeds 1/α is at most α (Ville). The θ₀ with
Λ(θ₀) < 1/α are the confidence sequence. V is estimated, which is valid for many users: I. Waudby-Smith, D. Arbour, R.
Sinha, E. H. Kennedy and A. Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", arXiv
2103.06476.

**Changed:** the unit is the user, not the session, since sessions of one user are similar: a user's value is the mean
over the user's sessions, users count equally, and V is the variance over users. τ² is derived from V, not set by hand,
so that the sequence is narrowest near a given number of users (S. Howard, A. Ramdas, J. McAuliffe and J. Sekhon,
"Time-uniform, nonparametric, nonasymptotic confidence sequences", arXiv 1810.08240, section 3.2). Values beyond the
:data:`WINSORISED` quantiles of both arms together count as these quantiles: otherwise, one user in a thousand who waits
an hour would dominate the variance.

**Sample-ratio mismatch** (M. Lindon and A. Malek, "Anytime-Valid Inference for Multinomial Count Data", arXiv
2011.03567, with two cells): compares the users of each arm with its drawn share, by the ratio of a beta-binomial to the
binomial. An experiment whose arms lose users differently has no valid result.

Pure. Array legend: U users of one arm.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

WINSORISED = 0.005
"""Share of users at either end whose values are clipped to the quantile there."""
TUNED = 8.0
"""τ² in variances at the number of users with the narrowest sequence; the flat optimum for α = 0.05."""
PRIOR_USERS = 100.0
"""Weight of the stated share in the prior of the sample-ratio test, in users: mismatches are small, if any."""
LEAST_SPREAD = 1e-12
"""Minimum variance; below it all values are equal and show nothing."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UserSums:
    """One metric in one arm, user by user. Raises ``ValueError`` for inconsistent arrays."""

    totals_U: Floats
    """Sum over the user's sessions that have the metric."""
    sessions_U: Floats
    """Number of these sessions, at least 1."""

    def __post_init__(self) -> None:
        if self.totals_U.shape != self.sessions_U.shape or (len(self.sessions_U) and self.sessions_U.min() < 1):
            raise ValueError("per-user sums: expected one total and one number of sessions, from 1, for each user")

    @property
    def values(self) -> Floats:
        """[U] the value of each user."""
        return self.totals_U / self.sessions_U


NO_USERS = UserSums(totals_U=np.empty(0), sessions_U=np.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCounts:
    """Users and sessions of one arm, with or without metrics."""

    users: int = 0
    sessions: int = 0


class ArmMetrics(Protocol):
    """Signals of users by arm; ``label`` is that of :class:`~etude.routing_table.Assignment`."""

    def counts(self, label: str) -> ArmCounts:
        """Users and ended sessions with this label."""
        ...

    def sums(self, label: str, metric: str) -> UserSums:
        """One metric of these sessions, user by user; sessions without it do not count."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDifference:
    """The treatment's mean over users minus the control's, with its confidence sequence."""

    value: float
    low: float
    high: float
    users: tuple[int, int]
    """Users of the control and of the treatment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The rules of one comparison of arms."""

    alpha: float
    """Level of each confidence sequence."""
    tuned_users: int
    """Number of users, of both arms, at which sequences are narrowest."""

    def difference(self, control: UserSums, treatment: UserSums) -> ArmDifference | None:
        """Treatment minus control; ``None`` if one of them has fewer than two users."""
        users = len(control.totals_U), len(treatment.totals_U)
        if min(users) < 2:
            return None
        values = winsorised(control.values, treatment.values)
        value = float(values[1].mean() - values[0].mean())
        variance = sum(float(one.var(ddof=1)) / len(one) for one in values)
        half = self.half_width(variance, sum(users)) if variance > LEAST_SPREAD else math.inf
        return ArmDifference(value=value, low=value - half, high=value + half, users=users)

    def half_width(self, variance: float, users: int) -> float:
        """Half the width of the sequence: the distance at which Λ = 1/α."""
        tau2 = self._tau2(variance, users)
        total = variance + tau2
        return math.sqrt(variance * total / tau2 * (math.log(total / variance) - 2 * math.log(self.alpha)))

    def _tau2(self, variance: float, users: int) -> float:
        """τ², about constant in time, as the variance falls with the number of users."""
        return TUNED * variance * users / self.tuned_users


def winsorised(*arms: Floats) -> tuple[Floats, ...]:
    """The values clipped to quantiles of all arms together, so that all arms are treated equally."""
    low, high = np.quantile(np.concatenate(arms), [WINSORISED, 1 - WINSORISED])
    return tuple(np.clip(one, low, high) for one in arms)


def mismatch_p_value(control: int, treatment: int, share: float) -> float:
    """The p-value of one evaluation of the users of two arms, where ``share`` is the treatment's; the minimum over all
    evaluations is always valid, and exact. Raises ``ValueError`` for a share outside (0, 1).
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share}: expected a number between 0 and 1")
    a, b = PRIOR_USERS * share, PRIOR_USERS * (1 - share)
    mixture = _log_beta(a + treatment, b + control) - _log_beta(a, b)
    stated = treatment * math.log(share) + control * math.log1p(-share)
    return math.exp(min(0.0, stated - mixture))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

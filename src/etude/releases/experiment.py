"""A sequential A/B test: the difference of a per-user metric between two arms, valid however often it is looked at.

    per-user sums of both arms ──▶ mean of users, variance ──▶ confidence sequence
    users of both arms, share that was drawn ──▶ sample-ratio test

**Mixture SPRT** (R. Johari, P. Koomen, L. Pekelis and D. Walsh, "Always Valid Inference: Continuous Monitoring of A/B
Tests", arXiv 1512.04922, for normal data and the mixing N(θ₀, τ²)): with the difference d of two means and its variance
V, the likelihood ratio of the mixture to a true difference θ₀ is

    Λ(θ₀) = sqrt(V / (V + τ²)) · exp(τ² (d − θ₀)² / (2 V (V + τ²)))

Under θ₀ it is a martingale of mean 1, so it ever exceeds 1/α with a chance of α at most (Ville). The θ₀ with
Λ(θ₀) < 1/α are the confidence sequence. V is estimated, which is right for many users: I. Waudby-Smith, D. Arbour, R.
Sinha, E. H. Kennedy and A. Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", arXiv
2103.06476.

**Changed:** the unit is the user, not the session, since sessions of one user are alike: a user's value is the mean
over their sessions, users count equally, and V is the variance over users. τ² is not given by hand but from V, so that
the sequence is narrowest near a number of users that is given (S. Howard, A. Ramdas, J. McAuliffe and J. Sekhon,
"Time-uniform, nonparametric, nonasymptotic confidence sequences", arXiv 1810.08240, section 3.2). Values beyond the
:data:`WINSORISED` quantiles of both arms together count as these quantiles: one user in a thousand who waits an hour
has else all of the variance.

**Sample-ratio mismatch** (M. Lindon and A. Malek, "Anytime-Valid Inference for Multinomial Count Data", arXiv
2011.03567, with two cells): the users of each arm against the share that was drawn for it, by the ratio of a
beta-binomial to the binomial. An experiment whose arms lose users differently says nothing.

Pure. Array legend: U users of one arm.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

WINSORISED = 0.005
"""Share of users at either end whose values are pulled in to the quantile there."""
TUNED = 8.0
"""τ² in variances at the number of users where the sequence shall be narrowest; the best for α = 0.05, and flat."""
PRIOR_USERS = 100.0
"""Weight of the stated share in the prior of the sample-ratio test, in users: mismatches are small, if any."""
LEAST_SPREAD = 1e-12
"""Variances below are of values that are all alike: there is nothing to be told from them."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UserSums:
    """One metric in one arm, user by user. Raises ``ValueError`` for arrays that do not belong together."""

    totals_U: Floats
    """Sum over the user's sessions that have the metric."""
    sessions_U: Floats
    """Their number, at least 1."""

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
    """Users and sessions of one arm, whether they have any metric or not."""

    users: int = 0
    sessions: int = 0


class ArmMetrics(Protocol):
    """Signals of users by arm; ``label`` is that of :class:`~etude.routing_table.Assignment`."""

    def counts(self, label: str) -> ArmCounts:
        """Users and ended sessions that were given this label."""
        ...

    def sums(self, label: str, metric: str) -> UserSums:
        """One metric of these sessions, user by user; sessions without it do not count."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDifference:
    """The mean of users of one arm less that of another, with its confidence sequence."""

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
    """Users, of both arms, at which sequences are narrowest."""

    def difference(self, control: UserSums, treatment: UserSums) -> ArmDifference | None:
        """Treatment less control; ``None`` with fewer than two users in one of them."""
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
        """About constant in time, as the variance falls with the number of users."""
        return TUNED * variance * users / self.tuned_users


def winsorised(*arms: Floats) -> tuple[Floats, ...]:
    """The values with their ends pulled in, by quantiles of all arms together, so that no arm is treated otherwise."""
    low, high = np.quantile(np.concatenate(arms), [WINSORISED, 1 - WINSORISED])
    return tuple(np.clip(one, low, high) for one in arms)


def mismatch_p_value(control: int, treatment: int, share: float) -> float:
    """The p-value of one look at the users of two arms, the treatment's being a ``share`` of them; the least of all
    looks is always valid, and exact. Raises ``ValueError`` for a share outside of (0, 1).
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share}: expected a number between 0 and 1")
    a, b = PRIOR_USERS * share, PRIOR_USERS * (1 - share)
    mixture = _log_beta(a + treatment, b + control) - _log_beta(a, b)
    stated = treatment * math.log(share) + control * math.log1p(-share)
    return math.exp(min(0.0, stated - mixture))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

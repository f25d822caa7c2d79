"""Protection of training against users who try to manipulate it: caps on each user's weight, and quarantine. Pure.

    rated sessions ──▶ pace ─────────▶ ┐
                       outliers ─────▶ ├ user → suspicion: quarantined, counted, for a person to look at
                       collusion ────▶ ┘
                   └─▶ shares ───────▶ session → weight, so that no user exceeds a share of the training signal

A single session cannot distinguish a vandal from an unhappy user, so the rules judge all sessions of a user together,
compared with other users' ratings of the same kinds of request. There are three rules, each simple and each counted.
Their cost is known: training ignores an honest user whom a rule misjudges, which changes the result by at most that
user's share.

Owns these rules. Does not own the source of sessions (:mod:`etude.feedback.store`) or the meaning of quarantine
(:mod:`etude.types`). Legend: U users, S sessions.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, sqrt
from statistics import median

from etude.config.feedback import PoisoningLimits

HOUR_S = 3600.0
MAD_TO_DEVIATION = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedSession:
    """A live session that its user rated."""

    session_id: str
    user: str
    template: str
    """Kind of request; only ratings of one kind are compared."""
    ended_at: float
    """Seconds since 1970, by the server's clock."""
    value: float
    """Its value, computed from its signals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """A reason to exclude a user from training."""

    rule: str
    """``pace``, ``outlier`` or ``collusion``; also the name of its count."""
    evidence: str
    """One sentence for people; it names no other user."""


def suspicions(sessions: Sequence[RatedSession], limits: PoisoningLimits) -> dict[str, Suspicion]:
    """User → reason to exclude all of the user's sessions from training, by the first rule that applies."""
    residuals = _residuals(sessions)
    suspected: dict[str, Suspicion] = {}
    for rule in (_pace(sessions, limits), _outliers(residuals, limits), _collusion(residuals, limits)):
        for user, suspicion in rule:
            suspected.setdefault(user, suspicion)
    return suspected


def capped_weights(users: Sequence[str], largest_share: float) -> dict[str, float]:
    """User → weight of each session: 1 or less, so that no user's total exceeds ``largest_share`` of the sum.

    ``users`` [S] are the users of the sessions. If there are too few users for that, all get the total of the user
    with the fewest sessions. With counts n₁ ≥ n₂ ≥ … and the first k capped, the total T solves
    T = k · share · T + Σ_{i>k} n_i; k is the smallest number that leaves no other user above the cap.
    """
    counts = Counter(users).most_common()
    share = max(largest_share, 1 / len(counts)) if counts else 1.0
    rest = len(users)
    for capped, (_, count) in enumerate(counts):
        cap = share * rest / max(1 - capped * share, 1e-12)
        if count <= cap * (1 + 1e-9):
            return {user: min(1.0, cap / of_user) for user, of_user in counts}
        rest -= count
    return {}


def _pace(sessions: Iterable[RatedSession], limits: PoisoningLimits) -> Iterator[tuple[str, Suspicion]]:
    """Users who rate more sessions within an hour than a person can."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for session in sessions:
        times[session.user].append(session.ended_at)
    for user, at in times.items():
        at.sort()
        first = next((i for i in range(len(at) - limits.per_hour) if at[i + limits.per_hour] - at[i] < HOUR_S), None)
        if first is not None:
            yield user, Suspicion(rule="pace", evidence=f"rated more than {limits.per_hour} sessions within an hour")


def _outliers(
    residuals: Mapping[str, Sequence[tuple[str, float]]], limits: PoisoningLimits
) -> Iterator[tuple[str, Suspicion]]:
    """Users whose ratings differ from others' of the same kinds by more than users usually differ.

    z = (m_u − median m) / √(τ² + σ²/n_u): m_u is a user's mean residual, σ² the variance of residuals around it, and τ²
    the variance between users, estimated by the median absolute deviation so that vandals cannot inflate it.
    """
    averages = {
        user: (sum(r for _, r in own) / len(own), len(own))
        for user, own in residuals.items()
        if len(own) >= limits.min_sessions
    }
    if len(averages) < limits.min_users:
        return
    spread = [(r - averages[user][0]) ** 2 for user in averages for _, r in residuals[user]]
    noise = sum(spread) / max(1, len(spread) - len(averages))
    middle = median(mean for mean, _ in averages.values())
    width = MAD_TO_DEVIATION * median(abs(mean - middle) for mean, _ in averages.values())
    between = max(0.0, width**2 - noise * median(1 / count for _, count in averages.values()))
    for user, (mean, count) in averages.items():
        z = (mean - middle) / sqrt(between + noise / count + 1e-12)
        if abs(z) > limits.outlier_z:
            yield user, Suspicion(rule="outlier", evidence=f"{count} ratings, {z:+.1f} deviations from other users'")


def _collusion(
    residuals: Mapping[str, Sequence[tuple[str, float]]], limits: PoisoningLimits
) -> Iterator[tuple[str, Suspicion]]:
    """Users in rings that agree, per kind of request, more than chance explains for any of the pairs.

    The compared value is the sign of a user's mean residual for a template, minus that user's overall mean, so that
    users who always complain do not agree for that reason alone. Under independence, the signs of two users agree as
    often as two draws from the population. A pair is linked if the binomial tail of its agreements, times the number of
    pairs (Bonferroni), is below ``limits.alpha``; linked users are a ring if there are at least ``limits.min_ring``.
    """
    signs = {user: _signs(own) for user, own in residuals.items() if len(own) >= limits.min_sessions}
    drawn = [sign for of_user in signs.values() for sign in of_user.values()]
    if not drawn:
        return
    up = sum(drawn) / len(drawn)
    chance = up**2 + (1 - up) ** 2
    pairs: list[tuple[str, str, int, int]] = []
    for one, other in combinations(sorted(signs), 2):
        if shared := signs[one].keys() & signs[other].keys():
            agreed = sum(signs[one][template] == signs[other][template] for template in shared)
            pairs.append((one, other, len(shared), agreed))
    ring_of = {user: frozenset({user}) for user in signs}
    for one, other, compared, agreed in pairs:
        if _tail(compared, agreed, chance) * len(pairs) < limits.alpha:
            ring = ring_of[one] | ring_of[other]
            ring_of |= dict.fromkeys(ring, ring)
    for user, ring in ring_of.items():
        if len(ring) >= limits.min_ring:
            evidence = f"rates as {len(ring) - 1} others do, kind by kind, more than chance allows"
            yield user, Suspicion(rule="collusion", evidence=evidence)


def _signs(residuals: Sequence[tuple[str, float]]) -> dict[str, bool]:
    """Template → true if a user rates it above the user's own mean; a template equal to the mean is absent."""
    mean = sum(r for _, r in residuals) / len(residuals)
    sums: defaultdict[str, float] = defaultdict(float)
    for template, residual in residuals:
        sums[template] += residual - mean
    return {template: total > 0 for template, total in sums.items() if abs(total) > 1e-9}


def _residuals(sessions: Sequence[RatedSession]) -> dict[str, list[tuple[str, float]]]:
    """User → (template, value minus other users' mean for it), for templates that other users rated."""
    totals: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))  # template → user → Σ
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for session in sessions:
        totals[session.template][session.user] += session.value
        counts[session.template][session.user] += 1
    residuals: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    sums = {template: (sum(totals[template].values()), counts[template].total()) for template in counts}
    for session in sessions:
        total, count = sums[session.template]
        others = count - counts[session.template][session.user]
        if others:
            mean = (total - totals[session.template][session.user]) / others
            residuals[session.user].append((session.template, session.value - mean))
    return dict(residuals)


def _tail(trials: int, successes: int, chance: float) -> float:
    """P(X ≥ successes) for a binomial X."""
    return sum(comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(successes, trials + 1))

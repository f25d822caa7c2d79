"""The A/B test of a pending release: its evidence so far, and the evidence after each session.

    sessions of both arms, in the order in which they ended ──▶ the confidence interval after each of PLACES prefixes

Figures are the controller's own (:meth:`~etude.releases.controller.ReleaseController.canary_evidence`), so the page
shows what decides. Confidence sequences are valid at all times, so looking early costs nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from etude.config.release import MetricConfig, ReleaseConfig
from etude.feedback.archive import SessionArchive
from etude.releases.controller import ReleaseController, canary_facts
from etude.releases.experiment import ArmDifference, UserSums
from etude.releases.states import pending_release
from etude.releases.store import ArmSession, ReleaseStore, finite
from etude.routing_table import RoutingTable
from etude.types import Json

PLACES = 40
"""Maximum number of points of the curve."""


def arm_test(
    config: ReleaseConfig, store: ReleaseStore, feedback: SessionArchive | None, table: RoutingTable | None
) -> Json:
    """The running test; ``None`` if there is none."""
    pending = pending_release(store.releases())
    canary = canary_facts(store, config, pending, table)
    if canary is None or pending is None or table is None or table.canary is None:
        return None
    controller = ReleaseController(config)
    sessions = store.sessions([table.label(table.live), table.label(table.canary)])
    ends = {} if feedback is None else feedback.ends([session.session_id for session in sessions])
    ordered = sorted(sessions, key=lambda session: ends.get(session.session_id, 0.0))
    metrics = (config.metric, *config.guardrails)
    sums = {metric.name: canary.sums[metric.name] for metric in metrics}
    return {
        "version": pending.version,
        "against": table.live.version,
        "evidence": finite(controller.canary_evidence(canary, pending)),
        "proof": _plain(controller.proof(*sums[config.metric.name])),
        "metrics": [_metric(metric, sums[metric.name], metric == config.metric) for metric in metrics],
        "path": _path(controller, ordered, config.metric.name, table),
        "needs": {
            "min_sessions": config.min_sessions,
            "min_users": config.min_users,
            "max_sessions": config.max_sessions,
            "alpha": config.alpha,
            "stages": len(config.canary_shares),
        },
    }


def _metric(metric: MetricConfig, sums: tuple[UserSums, UserSums], decides: bool) -> Json:
    averages: list[Json] = [float(arm.values.mean()) if len(arm.totals_U) else None for arm in sums]
    return {
        "name": metric.name,
        "direction": metric.direction,
        "margin": metric.margin,
        "decides": decides,
        "means": averages,
        "users": [len(arm.totals_U) for arm in sums],
    }


def _path(
    controller: ReleaseController, sessions: Sequence[ArmSession], metric: str, table: RoutingTable
) -> list[Json]:
    """The confidence interval after growing prefixes of the sessions, up to all of them."""
    assert table.canary is not None
    control, treatment = table.label(table.live), table.label(table.canary)
    counts = sorted({round(number) for number in np.linspace(len(sessions) / PLACES, len(sessions), PLACES)} - {0})
    path: list[Json] = []
    for number in counts:
        seen = [session for session in sessions[:number] if metric in session.metrics]
        arms = [_sums([one for one in seen if one.label == label], metric) for label in (control, treatment)]
        difference = controller.proof(arms[0], arms[1])
        if difference is not None:
            path.append({"sessions": number, **_bounds(difference)})
    return path


def _sums(sessions: Sequence[ArmSession], metric: str) -> UserSums:
    users = sorted({session.user for session in sessions})
    places = {user: place for place, user in enumerate(users)}
    totals, numbers = np.zeros(len(users)), np.zeros(len(users))
    for session in sessions:
        totals[places[session.user]] += session.metrics[metric]
        numbers[places[session.user]] += 1
    return UserSums(totals_U=totals, sessions_U=numbers)


def _bounds(difference: ArmDifference) -> dict[str, Json]:
    low, high = (finite(end) for end in (difference.low, difference.high))
    return {"value": difference.value, "low": low, "high": high, "users": list(difference.users)}


def _plain(difference: ArmDifference | None) -> Json:
    return None if difference is None else finite(asdict(difference))

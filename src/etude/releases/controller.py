"""The release controller: decides moves from facts about versions, measurements, users and approvals. Pure.

    candidate ─gate─▶ gated ─approvals─▶ shadow ─▶ canary, its share growing ─A/B test─▶ released        one at a time
                                                      └─ guardrail, mismatch, no proof, a user ───▶ rolled_back

This module decides, with evidence; :mod:`etude.run.release` gathers the facts and acts. Moves of one decision are
recorded in one transaction. The simulator of ``bench live`` runs this same class.

**Error rates.** Each stage of the canary is a separate experiment, with only the sessions drawn under its share. It may
be evaluated at any time: confidence sequences are always valid (:mod:`etude.releases.experiment`). The chance ``alpha``
of a false rollback is divided by the stages, and within one by its metrics and the sample-ratio test; that of a false
promotion belongs to the single test of the last stage.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import final

from etude.config.release import MetricConfig, ReleaseConfig
from etude.releases.experiment import ArmCounts, ArmDifference, ArmMetrics, Experiment, UserSums, mismatch_p_value
from etude.releases.gate import GateFacts, checks, evidence_of
from etude.releases.states import (
    TAKEN_BACK,
    Release,
    ReleaseState,
    former_release,
    live_release,
    move_release,
    pending_release,
)
from etude.routing_table import RoutingTable
from etude.types import Json

TUNED_TIMES = 5
"""Number of users, in ``min_users``, at which sequences are narrowest: between the first and the last evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowFacts:
    """Users' calls that were also sent to a shadow."""

    calls: int
    failures: int
    """Calls without an answer or without a valid reply."""
    seconds: float
    """Total time of its answers."""
    live_seconds: float
    """Total time of the users' answers to the same calls."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CanaryFacts:
    """Users of one stage of a canary: the control, with the released version, and the treatment."""

    control: ArmCounts
    treatment: ArmCounts
    sums: Mapping[str, tuple[UserSums, UserSums]]
    """Metric → sums per user of control and treatment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFacts:
    """Loads of weights into the trainer (:mod:`etude.run.trainer`)."""

    pending: bool = False
    """True if a requested load has not become a version yet."""
    version: int | None = None
    """Version created by the last load; no earlier version can become a candidate."""
    checkpoint: str = ""
    """Its checkpoint; empty for a version of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFacts:
    """All inputs of a decision."""

    releases: tuple[Release, ...]
    versions: Mapping[int, str]
    """Newest published versions → their digests."""
    loads: LoadFacts = LoadFacts()
    gate: GateFacts | None = None
    """Measurements of the candidate, once there are any."""
    gate_failure: str = ""
    """The reason why it cannot be measured."""
    approved_by: frozenset[str] = frozenset()
    """People who approved the pending version."""
    shadow: ShadowFacts | None = None
    canary: CanaryFacts | None = None
    rollback_by: str = ""
    """The user who requests a rollback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseMove:
    """One move of a release, to be recorded with its evidence."""

    release: Release
    """The release before the move."""
    to: ReleaseState
    reason: str
    evidence: Mapping[str, Json] = field(default_factory=dict)
    stage: int = 0
    by: str = ""
    """The user who requested it; empty for the controller itself."""
    is_new: bool = False
    """True for a new candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDecision:
    """Moves that are executed together."""

    moves: tuple[ReleaseMove, ...]
    load: int | None = None
    """Version that the trainer must load."""


@final
class ReleaseController:
    """Decides about releases by the rules of ``[release]``."""

    def __init__(self, config: ReleaseConfig, *, first: int = 0) -> None:
        """``first`` is the first version that may be released; further ones follow every ``release.every_steps``."""
        self._config = config
        self._first = first
        tests = len(config.canary_shares) * (2 + len(config.guardrails))
        users = TUNED_TIMES * config.min_users
        self._harm = Experiment(alpha=config.alpha / tests, tuned_users=users)
        self._proof = Experiment(alpha=config.alpha, tuned_users=users)

    def decide(self, facts: ReleaseFacts) -> ReleaseDecision | None:
        """The next decision; ``None`` while there is nothing to decide."""
        pending = pending_release(facts.releases)
        live = live_release(facts.releases)
        if facts.rollback_by:
            return self._go_back(facts, pending, live)
        if pending is None:
            return self._next_candidate(facts, live)
        match pending.state:
            case ReleaseState.CANDIDATE:
                return self._gate(facts, pending, live)
            case ReleaseState.GATED:
                return self._admit(facts, pending, live)
            case ReleaseState.SHADOW:
                return self._look_at_shadow(facts, pending, live)
            case _:
                return self._look_at_canary(facts, pending, live)

    def _next_candidate(self, facts: ReleaseFacts, live: Release | None) -> ReleaseDecision | None:
        """The newest version that is due; a copy of the released version replaces it without tests, as it is identical.

        None while a load is pending: versions published meanwhile descend from the rejected one.
        """
        loads = facts.loads
        after = max((release.version for release in facts.releases), default=-1)
        if live is not None and loads.version is not None and facts.versions.get(loads.version) == live.digest:
            copy = Release(
                version=loads.version, digest=live.digest, state=ReleaseState.CANDIDATE, replaces=live.version
            )
            if loads.version > after:
                return _renumbered(copy, live)
        if loads.pending:
            return None
        after = max(after, -1 if loads.version is None else loads.version - 1)
        proposed = loads.version if loads.checkpoint else None
        due = {version for version in facts.versions if version > after and self._is_due(version)}
        if proposed is not None and proposed in facts.versions and proposed > after:
            due = {proposed}
        if not due:
            return None
        version = max(due)
        candidate = Release(
            version=version,
            digest=facts.versions[version],
            state=ReleaseState.CANDIDATE,
            replaces=None if live is None else live.version,
            loaded=loads.checkpoint if version == proposed else "",
        )
        return ReleaseDecision(
            moves=(ReleaseMove(release=candidate, to=ReleaseState.CANDIDATE, reason="due", is_new=True),)
        )

    def _is_due(self, version: int) -> bool:
        return version >= self._first and (version - self._first) % self._config.every_steps == 0

    def _gate(self, facts: ReleaseFacts, pending: Release, live: Release | None) -> ReleaseDecision | None:
        if facts.gate_failure:
            return _reject_unmeasured(pending, facts.gate_failure, {})
        if facts.gate is None:
            return None
        results = checks(facts.gate, self._config)
        evidence, failed = evidence_of(facts.gate, results), [check for check in results if not check.passed]
        if failed:
            reason = "; ".join(f"{check.name}: {check.says}" for check in failed)
            if not facts.gate.is_measured:
                return _reject_unmeasured(pending, reason, evidence)
            return self._take_back(pending, ReleaseState.REJECTED, reason, evidence, live)
        return ReleaseDecision(
            moves=(ReleaseMove(release=pending, to=ReleaseState.GATED, reason="passed the gate", evidence=evidence),)
        )

    def _admit(self, facts: ReleaseFacts, pending: Release, live: Release | None) -> ReleaseDecision | None:
        """Move a candidate from the gate to users, once it has enough approvals."""
        if len(facts.approved_by) < self._config.approvals:
            return None
        evidence: dict[str, Json] = {"approved_by": [*sorted(facts.approved_by)]}
        if live is None:
            reason = "the first release: there is none to compare it with"
            return ReleaseDecision(
                moves=(ReleaseMove(release=pending, to=ReleaseState.RELEASED, reason=reason, evidence=evidence),)
            )
        to = ReleaseState.SHADOW if self._config.shadow_sessions else ReleaseState.CANARY
        return ReleaseDecision(moves=(ReleaseMove(release=pending, to=to, reason="approved", evidence=evidence),))

    def _look_at_shadow(self, facts: ReleaseFacts, pending: Release, live: Release | None) -> ReleaseDecision | None:
        shadow, config = facts.shadow, self._config
        if shadow is None or shadow.calls < config.shadow_sessions:
            return None
        evidence: dict[str, Json] = {"shadow": asdict(shadow)}
        failures = shadow.failures / shadow.calls
        if failures > config.max_shadow_failures:
            reason = f"shadow: {failures:.1%} of calls failed, at most {config.max_shadow_failures:.1%}"
            return self._take_back(pending, ReleaseState.REJECTED, reason, evidence, live)
        if shadow.seconds > config.max_latency_ratio * shadow.live_seconds:
            reason = f"shadow: {shadow.seconds:.1f} s where users waited {shadow.live_seconds:.1f} s"
            return self._take_back(pending, ReleaseState.REJECTED, reason, evidence, live)
        return ReleaseDecision(
            moves=(ReleaseMove(release=pending, to=ReleaseState.CANARY, reason="shadow passed", evidence=evidence),)
        )

    def _look_at_canary(self, facts: ReleaseFacts, pending: Release, live: Release | None) -> ReleaseDecision | None:
        config, canary = self._config, facts.canary
        assert live is not None, "a canary is compared with what users have"
        if canary is None:
            return None
        share = config.canary_shares[pending.stage]
        evidence = self.canary_evidence(canary, pending)
        mismatch = mismatch_p_value(canary.control.users, canary.treatment.users, share)
        seen = self._differences(canary)
        if mismatch < self._harm.alpha:
            reason = f"sample-ratio mismatch: {canary.treatment.users} users of {share:.0%} (p = {mismatch:.1g})"
            return self._take_back(pending, ReleaseState.ROLLED_BACK, reason, evidence, live)
        for metric in self._metrics:
            difference = seen[metric.name]
            if difference is not None and self._counts(difference) and gain(difference, metric)[1] < -metric.margin:
                reason = f"{metric.name} is worse: {_words(difference)}, margin {metric.margin:g}"
                return self._take_back(pending, ReleaseState.ROLLED_BACK, reason, evidence, live)
        if canary.treatment.sessions < config.min_sessions or canary.treatment.users < config.min_users:
            return None
        if pending.stage + 1 < len(config.canary_shares):
            reason = f"no harm at {share:.0%}"
            move = ReleaseMove(
                release=pending, to=ReleaseState.CANARY, reason=reason, evidence=evidence, stage=pending.stage + 1
            )
            return ReleaseDecision(moves=(move,))
        return self._conclude(canary, pending, live, evidence)

    def canary_evidence(self, canary: CanaryFacts, pending: Release) -> dict[str, Json]:
        """The figures that decide on a canary, as JSON."""
        share = self._config.canary_shares[pending.stage]
        seen = self._differences(canary)
        return {
            "stage": pending.stage,
            "share": share,
            "users": [canary.control.users, canary.treatment.users],
            "sessions": [canary.control.sessions, canary.treatment.sessions],
            "sample_ratio_p": mismatch_p_value(canary.control.users, canary.treatment.users, share),
            "alpha_of_each_test": self._harm.alpha,
            "differences": {name: None if one is None else asdict(one) for name, one in seen.items()},
        }

    def proof(self, control: UserSums, treatment: UserSums) -> ArmDifference | None:
        """The metric's difference at the level at which a version is promoted."""
        return self._proof.difference(control, treatment)

    def _differences(self, canary: CanaryFacts) -> dict[str, ArmDifference | None]:
        return {metric.name: self._harm.difference(*canary.sums[metric.name]) for metric in self._metrics}

    def _conclude(
        self, canary: CanaryFacts, pending: Release, live: Release, evidence: dict[str, Json]
    ) -> ReleaseDecision | None:
        """Promote with proof; roll back without proof when the sessions are used up."""
        metric, most = self._config.metric, self._config.max_sessions
        difference = self.proof(*canary.sums[metric.name])
        evidence["proof"] = None if difference is None else asdict(difference)
        if difference is not None and self._counts(difference) and gain(difference, metric)[0] > -metric.margin:
            reason = f"{metric.name}: {_words(difference)}, must be above {-metric.margin:g}"
            return ReleaseDecision(moves=(
                ReleaseMove(release=pending, to=ReleaseState.RELEASED, reason=reason, evidence=evidence),
                ReleaseMove(release=live, to=ReleaseState.SUPERSEDED, reason=f"version {pending.version} was released"),
            ))  # fmt: skip
        if canary.treatment.sessions >= most:
            reason = f"inconclusive: {metric.name} was proven neither way in {canary.treatment.sessions} sessions"
            return self._take_back(pending, ReleaseState.ROLLED_BACK, reason, evidence, live)
        return None

    def _go_back(self, facts: ReleaseFacts, pending: Release | None, live: Release | None) -> ReleaseDecision | None:
        """Roll back on a user's request: the pending version, else the released one."""
        by = facts.rollback_by
        if pending is not None:
            to = ReleaseState.ROLLED_BACK if pending.state is ReleaseState.CANARY else ReleaseState.REJECTED
            return self._take_back(pending, to, "a person went back", {}, live, by)
        former = former_release(facts.releases)
        if live is None or former is None:
            return None
        return ReleaseDecision(
            moves=(
                ReleaseMove(release=live, to=ReleaseState.ROLLED_BACK, reason="a person went back", by=by),
                ReleaseMove(
                    release=former, to=ReleaseState.RELEASED, reason=f"instead of version {live.version}", by=by
                ),
            ),
            load=former.version if self._config.revert else None,
        )

    def _take_back(
        self,
        pending: Release,
        to: ReleaseState,
        reason: str,
        evidence: Mapping[str, Json],
        live: Release | None,
        by: str = "",
    ) -> ReleaseDecision:
        assert to in TAKEN_BACK
        move = ReleaseMove(release=pending, to=to, reason=reason, evidence=evidence, stage=pending.stage, by=by)
        return ReleaseDecision(moves=(move,), load=live.version if live is not None and self._config.revert else None)

    def _counts(self, difference: ArmDifference) -> bool:
        return min(difference.users) >= self._config.min_users

    @property
    def _metrics(self) -> tuple[MetricConfig, ...]:
        return (self._config.metric, *self._config.guardrails)


def _reject_unmeasured(pending: Release, reason: str, evidence: Mapping[str, Json]) -> ReleaseDecision:
    """Reject a candidate that a machine or a judge kept from being measured.

    Nothing is proven against its weights, so the trainer goes on with them; the next version that is due is measured.
    """
    move = ReleaseMove(release=pending, to=ReleaseState.REJECTED, reason=reason, evidence=evidence)
    return ReleaseDecision(moves=(move,))


def canary_facts(
    metrics: ArmMetrics, config: ReleaseConfig, pending: Release | None, table: RoutingTable | None
) -> CanaryFacts | None:
    """Users of the current canary stage: those whose sessions began under the current table."""
    if pending is None or pending.state is not ReleaseState.CANARY or table is None or table.canary is None:
        return None
    labels = table.label(table.live), table.label(table.canary)
    names = [config.metric.name, *(guardrail.name for guardrail in config.guardrails)]
    return CanaryFacts(
        control=metrics.counts(labels[0]),
        treatment=metrics.counts(labels[1]),
        sums={name: (metrics.sums(labels[0], name), metrics.sums(labels[1], name)) for name in names},
    )


def gain(difference: ArmDifference, metric: MetricConfig) -> tuple[float, float]:
    """The interval of the treatment's gain, in the metric's better direction."""
    low, high = difference.low, difference.high
    return (low, high) if metric.direction == "up" else (-high, -low)


def check_moves(decision: ReleaseDecision) -> None:
    """Raise ``ValueError`` for a move that is not in the table of states."""
    for move in decision.moves:
        if not move.is_new:
            move_release(move.release.state, move.to)


def _renumbered(copy: Release, live: Release) -> ReleaseDecision:
    """Release the same weights under a newer version, so that users' signals belong to a version that is recent for the
    trainer.
    """
    reason = f"the weights of version {live.version}, loaded again"
    steps = (ReleaseState.CANDIDATE, ReleaseState.GATED, ReleaseState.RELEASED)
    before = (copy.state, *steps[:-1])
    rises = [
        ReleaseMove(release=_at(copy, state), to=to, reason=reason, is_new=to is ReleaseState.CANDIDATE)
        for state, to in zip(before, steps, strict=True)
    ]
    return ReleaseDecision(moves=(*rises, ReleaseMove(release=live, to=ReleaseState.SUPERSEDED, reason=reason)))


def _at(release: Release, state: ReleaseState) -> Release:
    return Release(version=release.version, digest=release.digest, state=state, replaces=release.replaces)


def _words(difference: ArmDifference) -> str:
    users = sum(difference.users)
    return f"{difference.value:+.4g} [{difference.low:+.4g}, {difference.high:+.4g}] over {users} users"

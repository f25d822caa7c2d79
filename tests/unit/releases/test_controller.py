"""Decisions about a version's way to users and back, from facts alone."""

from dataclasses import replace

import numpy as np
import pytest

from etude.config.release import MetricConfig, ReleaseConfig, SuiteConfig
from etude.releases.controller import (
    CanaryFacts,
    LoadFacts,
    ReleaseController,
    ReleaseDecision,
    ReleaseFacts,
    ShadowFacts,
)
from etude.releases.experiment import ArmCounts, UserSums
from etude.releases.gate import Against, GateFacts, Interval, MissingTries, checks, evidence_of
from etude.releases.states import Release, ReleaseState

CONFIG = ReleaseConfig(
    every_steps=2,
    minimum_bar=0.4,
    shadow_sessions=10,
    canary_shares=(0.1, 0.5),
    min_sessions=40,
    min_users=20,
    max_sessions=1000,
    guardrails=(MetricConfig(name="follow_up", direction="down", margin=0.05),),
)
LIVE = Release(version=2, digest="live", state=ReleaseState.RELEASED, since=1.0)
GOOD = Interval(value=0.5, low=0.45, high=0.55)
SAME = Interval(value=0.0, low=-0.01, high=0.01)
LESS = Interval(value=-1.0, low=-2.0, high=-0.5)
AGAINST = Against(reward=SAME, cost_excess=LESS, latency_excess=LESS)
PASSED = GateFacts(reward=GOOD, tries=64, cheats=0, parity=True, against=AGAINST)
FEW = MissingTries(evaluation="suite own", version=3, missing=1, planned=20, reason="the judge was away")


def on_the_way(state: ReleaseState, stage: int = 0) -> Release:
    return Release(version=4, digest="new", state=state, stage=stage, replaces=2)


def decide(way: Release | None, config: ReleaseConfig = CONFIG, **facts: object) -> ReleaseDecision | None:
    releases = (LIVE,) if way is None else (LIVE, way)
    return ReleaseController(config).decide(ReleaseFacts(releases=releases, versions={}, **facts))  # type: ignore[arg-type]


def arms(control: float, treatment: float, *, users: int = 200, follow_up: float = 0.2) -> CanaryFacts:
    """Users of two arms with these means and a little spread."""
    spread = np.linspace(-0.1, 0.1, users)

    def sums(mean: float) -> UserSums:
        return UserSums(totals_U=2 * (mean + spread), sessions_U=np.full(users, 2.0))

    counts = ArmCounts(users=users, sessions=2 * users)
    metrics = {"reward": (sums(control), sums(treatment)), "follow_up": (sums(0.2), sums(follow_up))}
    return CanaryFacts(control=counts, treatment=counts, sums=metrics)


def states(decision: ReleaseDecision | None) -> list[tuple[int, ReleaseState]]:
    assert decision is not None
    return [(move.release.version, move.to) for move in decision.moves]


def test_evidence_has_what_was_measured_and_every_check() -> None:
    results = checks(PASSED, CONFIG)
    evidence = evidence_of(PASSED, results)
    assert evidence.keys() == {"measured", "checks"}
    assert isinstance(evidence["checks"], list)
    assert len(evidence["checks"]) == len(results)


def test_the_newest_version_that_is_due_is_the_one_candidate() -> None:
    controller = ReleaseController(CONFIG)
    versions = {3: "x", 4: "new", 6: "newer"}
    decision = controller.decide(ReleaseFacts(releases=(LIVE,), versions=versions))
    assert states(decision) == [(6, ReleaseState.CANDIDATE)]
    assert controller.decide(ReleaseFacts(releases=(LIVE,), versions={3: "x"})) is None, "none of every two steps"
    odd = ReleaseController(CONFIG, first=5)  # the trainer has stopped there: nobody is served yet
    assert states(odd.decide(ReleaseFacts(releases=(), versions={5: "first"}))) == [(5, ReleaseState.CANDIDATE)]
    assert odd.decide(ReleaseFacts(releases=(), versions={3: "early"})) is None


@pytest.mark.parametrize(
    ("gate", "named"),
    [
        (replace(PASSED, reward=replace(GOOD, value=0.39)), "minimum bar"),
        (replace(PASSED, cheats=2), "cheating"),
        (replace(PASSED, parity=False), "numerics"),
        (replace(PASSED, against=replace(AGAINST, reward=replace(SAME, low=-0.06))), "held-out tasks"),
        (replace(PASSED, against=replace(AGAINST, cost_excess=replace(LESS, high=0.1))), "cost"),
        (replace(PASSED, against=replace(AGAINST, latency_excess=replace(LESS, high=0.1))), "latency"),
        (replace(PASSED, against=replace(AGAINST, suites={"own": replace(SAME, low=-0.03)})), "suite own"),
    ],
)
def test_a_gate_blocks_for_each_of_its_checks_and_the_trainer_goes_back(gate: GateFacts, named: str) -> None:
    suites = (SuiteConfig(name="own", recipe="r.toml", margin=0.02),) if named.startswith("suite") else ()
    config = CONFIG.model_copy(update={"suites": suites})
    decision = decide(on_the_way(ReleaseState.CANDIDATE), config, gate=gate)
    assert states(decision) == [(4, ReleaseState.REJECTED)]
    assert decision is not None
    assert decision.moves[0].reason.startswith(named)
    assert decision.load == LIVE.version
    for passed in (PASSED, replace(PASSED, missing=(FEW,))):
        assert states(decide(on_the_way(ReleaseState.CANDIDATE), gate=passed)) == [(4, ReleaseState.GATED)]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"gate_failure": "the judge was unavailable"}, "the judge was unavailable"),
        ({"gate": replace(PASSED, missing=(replace(FEW, missing=2),))}, "tries of suite own: 2 of 20 tries"),
        ({"gate": replace(PASSED, cheats=2, missing=(replace(FEW, missing=2),))}, "cheating"),
    ],
)
def test_an_outage_rejects_a_candidate_and_leaves_the_trainer_its_weights(
    facts: dict[str, object], reason: str
) -> None:
    decision = decide(on_the_way(ReleaseState.CANDIDATE), **facts)  # type: ignore[arg-type]
    assert states(decision) == [(4, ReleaseState.REJECTED)]
    assert decision is not None
    assert decision.moves[0].reason.startswith(reason)
    assert decision.load is None
    rejected = replace(on_the_way(ReleaseState.REJECTED), since=2.0)
    later = ReleaseController(CONFIG).decide(ReleaseFacts(releases=(LIVE, rejected), versions={6: "later"}))
    assert states(later) == [(6, ReleaseState.CANDIDATE)], "what descends from it is measured"


def test_below_the_bar_there_is_no_first_release_and_above_it_there_is_one() -> None:
    controller = ReleaseController(CONFIG)
    way = replace(on_the_way(ReleaseState.CANDIDATE), replaces=None)
    poor = GateFacts(reward=replace(GOOD, value=0.1), tries=64, cheats=0)
    decision = controller.decide(ReleaseFacts(releases=(way,), versions={}, gate=poor))
    assert states(decision) == [(4, ReleaseState.REJECTED)]
    assert decision is not None
    assert decision.load is None, "there is nothing to go back to"
    gated = replace(way, state=ReleaseState.GATED)
    assert states(controller.decide(ReleaseFacts(releases=(gated,), versions={}))) == [(4, ReleaseState.RELEASED)]


def test_two_different_people_have_to_agree() -> None:
    config = CONFIG.model_copy(update={"approvals": 2})
    way = on_the_way(ReleaseState.GATED)
    assert decide(way, config, approved_by=frozenset({"a"})) is None
    assert states(decide(way, config, approved_by=frozenset({"a", "b"}))) == [(4, ReleaseState.SHADOW)]


def test_a_shadow_that_fails_or_is_slow_meets_no_user() -> None:
    way = on_the_way(ReleaseState.SHADOW)
    good = ShadowFacts(calls=10, failures=0, seconds=10.0, live_seconds=9.0)
    assert decide(way, shadow=replace(good, calls=9)) is None
    assert states(decide(way, shadow=good)) == [(4, ReleaseState.CANARY)]
    for bad in (replace(good, failures=1), replace(good, seconds=37.0)):
        assert states(decide(way, shadow=bad)) == [(4, ReleaseState.REJECTED)]


def test_a_share_grows_and_then_proof_decides() -> None:
    first, last = on_the_way(ReleaseState.CANARY), on_the_way(ReleaseState.CANARY, stage=1)
    few = arms(0.5, 0.6)
    small = replace(few, control=ArmCounts(users=1800, sessions=3600))  # as it is drawn at a tenth
    decision = decide(first, canary=small)
    assert decision is not None
    assert (decision.moves[0].to, decision.moves[0].stage) == (ReleaseState.CANARY, 1)
    released = [(4, ReleaseState.RELEASED), (2, ReleaseState.SUPERSEDED)]
    assert states(decide(last, canary=few)) == released
    assert decide(last, canary=arms(0.5, 0.5)) is None, "proven neither way"
    used_up = replace(arms(0.5, 0.5), treatment=ArmCounts(users=200, sessions=1000))
    decision = decide(last, canary=used_up)
    assert states(decision) == [(4, ReleaseState.ROLLED_BACK)]
    assert decision is not None
    assert decision.moves[0].reason.startswith("inconclusive")


@pytest.mark.parametrize(
    ("canary", "named"),
    [
        (arms(0.5, 0.4), "reward is worse"),
        (arms(0.5, 0.6, follow_up=0.3), "follow_up is worse"),
        (replace(arms(0.5, 0.6), treatment=ArmCounts(users=100, sessions=200)), "sample-ratio mismatch"),
    ],
)
def test_a_canary_that_harms_is_rolled_back_by_itself_with_its_evidence(canary: CanaryFacts, named: str) -> None:
    decision = decide(on_the_way(ReleaseState.CANARY, stage=1), canary=canary)
    assert states(decision) == [(4, ReleaseState.ROLLED_BACK)]
    assert decision is not None
    assert decision.moves[0].reason.startswith(named)
    assert decision.load == LIVE.version
    assert {"sample_ratio_p", "differences", "users"} <= decision.moves[0].evidence.keys()


def test_what_descends_from_a_rejected_version_is_no_candidate_and_the_copy_of_the_released_one_takes_its_place() -> (
    None
):
    controller = ReleaseController(CONFIG)
    rejected = Release(version=4, digest="new", state=ReleaseState.REJECTED)
    facts = ReleaseFacts(releases=(LIVE, rejected), versions={6: "child"}, loads=LoadFacts(pending=True))
    assert controller.decide(facts) is None
    copied = replace(facts, versions={6: "child", 7: "live"}, loads=LoadFacts(version=7))
    assert states(controller.decide(copied)) == [
        (7, ReleaseState.CANDIDATE),
        (7, ReleaseState.GATED),
        (7, ReleaseState.RELEASED),
        (2, ReleaseState.SUPERSEDED),
    ]
    proposed = replace(facts, versions={6: "child", 7: "own"}, loads=LoadFacts(version=7, checkpoint="folder"))
    assert states(controller.decide(proposed)) == [(7, ReleaseState.CANDIDATE)]


def test_a_person_goes_back_from_whatever_there_is() -> None:
    decision = decide(on_the_way(ReleaseState.CANARY), rollback_by="a")
    assert states(decision) == [(4, ReleaseState.ROLLED_BACK)]
    assert decide(None, rollback_by="a") is None, "there is no earlier release"
    former = Release(version=0, digest="old", state=ReleaseState.SUPERSEDED)
    decision = ReleaseController(CONFIG).decide(ReleaseFacts(releases=(former, LIVE), versions={}, rollback_by="a"))
    assert states(decision) == [(2, ReleaseState.ROLLED_BACK), (0, ReleaseState.RELEASED)]
    assert decision is not None
    assert (decision.load, decision.moves[0].by) == (0, "a")

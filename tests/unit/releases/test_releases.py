"""Tables of arms, states and the store of releases."""

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.loading import default_recipe
from etude.errors import ConfigError
from etude.ledger.ledger import Ledger
from etude.releases.controller import ReleaseDecision, ReleaseMove
from etude.releases.routing import held_arm, routing_table
from etude.releases.states import Release, ReleaseState, former_release, move_release, release_to_take_back
from etude.releases.store import ReleaseRequest, ReleaseStore, RequestKind
from etude.routing_table import CANARY, FALLBACK, LIVE, SHADOW, RoutingTable, bucket

OLD = Release(version=1, digest="old", state=ReleaseState.RELEASED, since=1.0)
NEW = Release(version=2, digest="new", state=ReleaseState.CANARY)
SHARES = (0.1, 0.5)


def at(release: Release, state: ReleaseState, since: float = 2.0) -> Release:
    return Release(version=release.version, digest=release.digest, state=state, since=since)


def table(*releases: Release, before: RoutingTable | None = None) -> RoutingTable:
    made = routing_table(releases, SHARES, before)
    assert made is not None
    return made


def test_a_table_follows_from_the_releases_and_survives_json() -> None:
    assert routing_table((at(OLD, ReleaseState.GATED),), SHARES, None) is None
    first = table(OLD)
    assert table(OLD, before=first) is first
    tried = table(OLD, NEW, before=first)
    assert RoutingTable.from_json(tried.to_json()) == tried
    assert (tried.generation, [(arm.name, arm.share) for arm in tried.arms]) == (2, [(LIVE, 0.9), (CANARY, 0.1)])
    released = table(at(OLD, ReleaseState.SUPERSEDED), at(NEW, ReleaseState.RELEASED), before=tried)
    assert (released.live.digest, released.fallback and released.fallback.digest) == ("new", "old")
    assert (released.live.share, released.fallback and released.fallback.share) == (1.0, 0.0)
    back = table(at(OLD, ReleaseState.RELEASED), at(NEW, ReleaseState.ROLLED_BACK), before=released)
    assert (back.live.digest, back.canary, back.fallback) == ("old", None, None)
    with pytest.raises(ValueError, match="not a routing table"):
        RoutingTable.from_json(b'{"arms": 1}')


def test_a_shadow_takes_the_engine_of_the_fallback() -> None:
    older = Release(version=0, digest="older", state=ReleaseState.SUPERSEDED)
    shadowed = table(older, OLD, at(NEW, ReleaseState.SHADOW))
    assert shadowed.shadow is not None
    assert (shadowed.shadow.name, shadowed.shadow.version, shadowed.fallback) == (SHADOW, 2, None)
    assert (shadowed.live.share, shadowed.shadow.share) == (1.0, 0.0), "no user meets it"
    assert [held_arm(shadowed, engine, 5).name for engine in range(5)].count(SHADOW) == 1


@pytest.mark.parametrize(("stage", "engines", "expected"), [(0, 10, 1), (1, 10, 5), (0, 30, 3), (0, 2, 1), (0, 1, 0)])
def test_a_canary_has_its_share_of_the_engines_and_leaves_one(stage: int, engines: int, expected: int) -> None:
    tried = table(OLD, Release(version=2, digest="new", state=ReleaseState.CANARY, stage=stage))
    assert [held_arm(tried, engine, engines).name for engine in range(engines)].count(CANARY) == expected


def test_the_former_release_is_the_last_one_with_other_weights() -> None:
    live = Release(version=5, digest="e", state=ReleaseState.RELEASED, since=9.0)
    before = [
        Release(version=version, digest=digest, state=ReleaseState.SUPERSEDED, since=since)
        for version, digest, since in ((1, "a", 4.0), (2, "b", 6.0), (3, "c", 6.0), (4, "e", 8.0))
    ]
    former = former_release((*before, live))
    assert former is not None and former.version == 3
    assert former_release((live,)) is None


def test_users_stay_in_an_arm_that_grows() -> None:
    small = table(OLD, NEW)
    large = table(OLD, Release(version=2, digest="new", state=ReleaseState.CANARY, stage=1), before=small)
    users = [f"user {number}" for number in range(2000)]
    few, many = ({user for user in users if one.assign(user).arm.name == CANARY} for one in (small, large))
    assert few < many
    assert len(few) == pytest.approx(200, abs=60)
    assert len(many) == pytest.approx(1000, abs=100)
    assert 0 <= bucket("", "\ud800") < 1


def test_the_only_engine_holds_the_live_version() -> None:
    superseded = at(OLD, ReleaseState.SUPERSEDED)
    for one in (table(OLD, NEW), table(OLD, at(NEW, ReleaseState.SHADOW)), table(superseded, at(NEW, OLD.state))):
        assert held_arm(one, 0, 1) == one.live


def test_canaries_of_different_weights_take_different_engines() -> None:
    first = set()
    for number in range(50):
        canary = Release(version=2, digest=f"new {number}", state=ReleaseState.CANARY)
        names = [held_arm(table(OLD, canary), engine, 5).name for engine in range(5)]
        first.add(names.index(CANARY))
    assert first == {0, 1, 2, 3, 4}


@given(st.integers(2, 9), st.text(min_size=1, max_size=4), st.text(min_size=1, max_size=4), st.sampled_from([0, 1]))
def test_each_arm_has_an_engine_and_going_back_moves_no_bytes(engines: int, old: str, new: str, stage: int) -> None:
    before = Release(version=1, digest="a" + old, state=ReleaseState.RELEASED)
    canary = Release(version=2, digest="b" + new, state=ReleaseState.CANARY, stage=stage)
    tried = table(before, canary)
    during = [held_arm(tried, engine, engines).name for engine in range(engines)]
    assert set(during) == {LIVE, CANARY}
    released = table(at(before, ReleaseState.SUPERSEDED), at(canary, ReleaseState.RELEASED), before=tried)
    after = [held_arm(released, engine, engines) for engine in range(engines)]
    assert {arm.name for arm in after} == {LIVE, FALLBACK}
    for name, arm in zip(during, after, strict=True):
        if name == CANARY:
            assert arm.digest == canary.digest, "it has it already"
        if arm.name == FALLBACK:
            assert name == LIVE, "it never had anything else"


@pytest.mark.parametrize(
    ("state", "to", "allowed"),
    [
        (ReleaseState.REJECTED, ReleaseState.RELEASED, "nothing: that is an end"),
        (ReleaseState.CANARY, ReleaseState.CANDIDATE, "canary, released, rolled_back"),
        (ReleaseState.CANDIDATE, ReleaseState.CANARY, "gated, rejected"),
    ],
)
def test_a_move_that_is_not_in_the_table_is_refused(state: ReleaseState, to: ReleaseState, allowed: str) -> None:
    with pytest.raises(
        ValueError, match=f"^no move of a release from {state} to {to}; from {state} it may become {allowed}$"
    ):
        move_release(state, to)


def test_a_rollback_withdraws_the_pending_release_or_else_the_live_one() -> None:
    ended = Release(version=3, digest="bad", state=ReleaseState.REJECTED)
    assert release_to_take_back((ended, OLD, NEW)) == NEW
    assert release_to_take_back((ended, OLD)) == OLD
    assert release_to_take_back((ended,)) is None


def test_a_decision_is_recorded_whole_and_once(tmp_path: Path) -> None:
    candidate = Release(version=4, digest="new", state=ReleaseState.CANDIDATE)
    due = ReleaseMove(release=candidate, to=ReleaseState.CANDIDATE, reason="due", is_new=True)
    rejected = ReleaseMove(
        release=candidate, to=ReleaseState.REJECTED, reason="bad", evidence={"low": float("-inf"), "checks": [1.0]}
    )
    place = tmp_path / "ledger.db"
    with closing(ReleaseStore.open(place)) as store, closing(ReleaseStore.open(place)) as other:
        store.apply(ReleaseDecision(moves=(due,)), 1.0)
        number = other.ask(ReleaseRequest(kind=RequestKind.ROLLBACK, by="a", at=2.0))
        store.apply(ReleaseDecision(moves=(rejected,), load=2), 3.0, request=number)
        with pytest.raises(ValueError, match="release 4 is rejected now, not candidate"):
            other.apply(ReleaseDecision(moves=(rejected,), load=0), 4.0)
        assert [move.to_state for move in other.moves(4)] == ["candidate", "rejected"]
        assert other.moves(4)[1].evidence == {"low": None, "checks": [1.0]}
        assert other.requests(is_open=True) == ()
        assert other.requests()[0].outcome == "version 4 is rejected"
        assert other.loads().pending


def test_sessions_are_counted_once_by_arm_and_user(tmp_path: Path) -> None:
    with closing(ReleaseStore.open(tmp_path / "ledger.db")) as store:
        for session, user, metrics in (("s", "u", {"reward": 1.0}), ("t", "u", {"reward": 2.0}), ("v", "w", {})):
            store.add_session(session, "live.1", user, metrics)
            store.add_session(session, "canary.2", user, metrics)
        assert (store.counts("live.1").users, store.counts("live.1").sessions) == (2, 3)
        sums = store.sums("live.1", "reward")
        assert (sums.totals_U.tolist(), sums.sessions_U.tolist()) == ([3.0], [2.0])
        assert store.counts("canary.2").sessions == 0


def test_a_load_is_taken_by_one_step_and_handed_out_again(tmp_path: Path) -> None:
    with closing(ReleaseStore.open(tmp_path / "ledger.db")) as store, Ledger.open(tmp_path / "ledger.db") as ledger:
        assert ledger.loads.claim(1) is None
        store.load_checkpoint(1, "folder")
        taken = ledger.loads.claim(1)
        assert taken == {"id": "proposal-1", "checkpoint": "folder", "step": 1}
        assert ledger.loads.claim(1) == taken
        assert store.loads().version is None, "it is no version yet"
        ledger.commit_step(1)
        assert (store.loads().pending, store.loads().version, store.loads().checkpoint) == (False, 1, "folder")
        assert ledger.loads.claim(2) is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["release.margin=0.1"], "release.margin would have no effect with release.every_steps = 0"),
        (["release.every_steps=2", "release.engines=1"], "release.engines"),
        (["release.every_steps=2", "release.canary_shares=[0.5, 0.25]"], "expected ascending shares"),
        (["release.every_steps=2", "release.max_sessions=10"], "no candidate could ever be promoted"),
        (["release.every_steps=2", "release.shadow_share=0.5"], "release.shadow_share would have no effect"),
        (["release.every_steps=2", 'release.guardrails=[{name="reward"}]'], "a metric is named twice"),
    ],
)
def test_nonsense_is_refused_at_the_start(settings: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace("[", r"\[")):
        default_recipe(settings)

"""Keys: their scopes and limits, and that a key ring reveals no secret."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.http.auth import (
    Key,
    KeyLimits,
    Keyring,
    Permission,
    Scope,
    digest_of,
    may,
    may_close,
    may_enter,
    new_key_id,
    new_secret,
    retry_after,
)


def key_of(secret: str, scope: Scope = Scope.PRODUCTION, **fields: object) -> Key:
    session_id = "s" if scope is Scope.ROLLOUT else None
    opener = "product" if scope is Scope.FEEDBACK else None
    chosen: dict[str, object] = {"key_id": f"id of {secret}", "session_id": session_id, "opener": opener, **fields}
    return Key(digest=digest_of(secret), scope=scope, **chosen)  # type: ignore[arg-type]  # fields by name


def ring_of(*keys: Key) -> Keyring:
    ring = Keyring()
    for key in keys:
        ring.add(key, now=0.0)
    return ring


def test_a_secret_opens_until_its_key_is_revoked() -> None:
    key = key_of("a")
    ring = ring_of(key, key_of("b"))
    assert ring.authenticate("a", now=0.0) is key
    assert ring.authenticate("A", now=0.0) is None
    assert ring.authenticate("", now=0.0) is None
    assert ring.authenticate("\ud800", now=0.0) is None
    assert ring.authenticate(key.digest, now=0.0) is None
    assert ring.revoke(key.key_id) is key
    assert ring.revoke(key.key_id) is None
    assert ring.authenticate("a", now=0.0) is None
    assert [key.key_id for key in ring] == ["id of b"]


def test_a_key_expires() -> None:
    ring = ring_of(key_of("a", expires_at=10.0))
    assert ring.authenticate("a", now=9.9) is not None
    assert ring.authenticate("a", now=10.0) is None


def test_the_key_of_a_session_dies_with_it() -> None:
    key = key_of("a", Scope.ROLLOUT)
    ring = ring_of(key)
    assert ring.end_session("other") is None
    assert ring.end_session("s") is key
    assert ring.authenticate("a", now=0.0) is None
    assert len(ring) == 0
    ring.add(key_of("b", Scope.ROLLOUT), now=0.0)  # the session's id is free again


def test_the_key_of_a_session_lives_and_spends_as_the_key_that_opened_it() -> None:
    opener = key_of("a", expires_at=100.0, limits=KeyLimits(requests_per_minute=2, tokens_per_minute=10))
    own = key_of("b", Scope.ROLLOUT, opener=opener.key_id)
    ring = ring_of(opener, own)
    assert ring.authenticate("b", now=99.9) is own
    assert ring.authenticate("b", now=100.0) is None
    assert [ring.charge_request(key, now=0.0) > 0 for key in (own, opener, own, opener)] == [False, False, True, True]
    ring.spend(own, 40, now=60.0)
    assert ring.charge_request(opener, now=60.0) > 120.0
    ring.revoke(opener.key_id)
    assert ring.authenticate("b", now=0.0) is None
    with pytest.raises(ValueError, match="has an opener, 'x', and no session"):
        key_of("c", opener="x")


def test_a_session_has_one_key_and_an_id_or_secret_too() -> None:
    ring = ring_of(key_of("a", Scope.ROLLOUT))
    for twin in (key_of("b", Scope.ROLLOUT), key_of("a"), key_of("c", key_id="id of a")):
        with pytest.raises(ValueError, match="there is one with this id, secret or session"):
            ring.add(twin, now=0.0)
    assert len(ring) == 1


def test_scopes_allow_what_the_table_says_and_nothing_else() -> None:
    allowed = {scope: {action for action in Permission if may(key_of("x", scope), action)} for scope in Scope}
    assert allowed == {
        Scope.ROLLOUT: {Permission.SAMPLE},
        Scope.PRODUCTION: {Permission.SAMPLE, Permission.SESSIONS, Permission.REPORT, Permission.STATUS},
        Scope.FEEDBACK: {Permission.REPORT},
        Scope.ADMIN: {Permission.SESSIONS, Permission.KEYS, Permission.ENGINES, Permission.METRICS},
    }


def test_a_rollouts_key_opens_its_own_session_and_nothing_else() -> None:
    key = key_of("a", Scope.ROLLOUT)
    assert may_enter(key, "s", owner="somebody")
    assert not may_enter(key, "t", owner="somebody")
    assert not may_enter(key, "t", owner=key.key_id)
    assert not may_close(key, owner="somebody")


def test_a_product_has_its_own_sessions_and_an_admin_closes_any() -> None:
    product, admin = key_of("a"), key_of("b", Scope.ADMIN)
    assert may_enter(product, "s", owner=product.key_id)
    assert not may_enter(product, "s", owner=admin.key_id)
    assert may_close(product, owner=product.key_id)
    assert not may_close(product, owner=admin.key_id)
    assert not may_enter(admin, "s", owner=admin.key_id)
    assert may_close(admin, owner=product.key_id)


def test_a_secret_looks_like_one_and_is_nowhere_kept() -> None:
    for scope in Scope:
        assert re.fullmatch(rf"etude-{scope}-[A-Za-z0-9_-]{{43}}", new_secret(scope))
    secret = new_secret(Scope.ADMIN)
    ring = ring_of(key_of(secret, Scope.ADMIN, key_id=new_key_id()))
    assert secret not in repr(ring)
    assert secret != new_secret(Scope.ADMIN)
    assert new_key_id() != new_key_id()


@pytest.mark.parametrize(
    ("scope", "session_id", "digest"),
    [(Scope.ROLLOUT, None, "a" * 64), (Scope.ADMIN, "s", "a" * 64), (Scope.ADMIN, None, "A" * 64)],
)
def test_a_key_that_makes_no_sense_is_refused(scope: Scope, session_id: str | None, digest: str) -> None:
    with pytest.raises(ValueError, match="key 'k'"):
        Key(key_id="k", digest=digest, scope=scope, session_id=session_id)


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match="tokens_per_minute=0"):
        KeyLimits(tokens_per_minute=0)


def test_requests_are_counted_when_they_are_let_in() -> None:
    key = key_of("a", limits=KeyLimits(requests_per_minute=2))
    ring = ring_of(key)
    assert [ring.charge_request(key, now=0.0) for _ in range(4)] == [0.0, 0.0, 30.0, 30.0]
    assert ring.charge_request(key, now=20.0) == pytest.approx(10.0)
    assert ring.charge_request(key, now=30.0) == 0.0
    assert ring.charge_request(key, now=30.0) == pytest.approx(30.0)


def test_tokens_are_counted_when_they_are_known_and_a_debt_is_paid_off() -> None:
    key = key_of("a", limits=KeyLimits(tokens_per_minute=60))
    ring = ring_of(key)
    assert ring.charge_request(key, now=0.0) == 0.0
    ring.spend(key, 100, now=0.0)
    assert ring.charge_request(key, now=0.0) == pytest.approx(41.0)
    assert ring.charge_request(key, now=41.0) == 0.0


def test_a_call_that_tokens_refuse_is_no_request() -> None:
    key = key_of("a", limits=KeyLimits(requests_per_minute=1, tokens_per_minute=60))
    ring = ring_of(key)
    ring.spend(key, 60, now=0.0)
    assert ring.charge_request(key, now=0.0) == pytest.approx(1.0)
    assert ring.charge_request(key, now=1.0) == 0.0


def test_keys_without_limits_and_keys_that_are_gone_are_not_held_back() -> None:
    free, gone = key_of("a"), key_of("b", limits=KeyLimits(requests_per_minute=1))
    ring = ring_of(free)
    ring.spend(free, 10**9, now=0.0)
    ring.spend(gone, 10**9, now=0.0)
    assert [ring.charge_request(key, now=0.0) for key in (free, gone, gone)] == [0.0, 0.0, 0.0]


@given(
    st.integers(1, 50),
    st.lists(st.floats(0.0, 20.0), max_size=60),
)
def test_no_minute_has_more_requests_than_two_full_buckets(per_minute: int, pauses_s: list[float]) -> None:
    key = key_of("a", limits=KeyLimits(requests_per_minute=per_minute))
    ring, now, let_in = ring_of(key), 0.0, list[float]()
    for pause_s in pauses_s:
        now += pause_s
        if not ring.charge_request(key, now):
            let_in.append(now)
    for start in let_in:
        assert sum(start <= at < start + 60.0 for at in let_in) <= 2 * per_minute


@given(st.integers(1, 100), st.integers(0, 1000), st.floats(0.0, 100.0))
def test_after_the_time_that_was_named_a_call_is_let_in(per_minute: int, spent: int, later_s: float) -> None:
    key = key_of("a", limits=KeyLimits(tokens_per_minute=per_minute))
    ring = ring_of(key)
    ring.spend(key, spent, now=0.0)
    refused_s = ring.charge_request(key, now=later_s)
    assert ring.charge_request(key, now=later_s + refused_s + 1e-6) == 0.0


def test_the_keys_of_a_file_replace_those_it_had_and_no_others() -> None:
    session, admin = key_of("s", Scope.ROLLOUT), key_of("admin", Scope.ADMIN)
    stays, goes, changed = (key_of(name, limits=KeyLimits(requests_per_minute=1)) for name in "abc")
    ring = ring_of(session, admin)
    ring.replace([stays, goes, changed], now=0.0)
    assert {key.key_id for key in ring} == {key.key_id for key in (session, admin, stays, goes, changed)}
    for key in (stays, changed):
        assert ring.charge_request(key, now=0.0) == 0.0
    freed = key_of("c", limits=KeyLimits(requests_per_minute=5))
    ring.replace([stays, freed, key_of("d")], now=0.0)
    assert [ring.authenticate(secret, now=0.0) is not None for secret in ("s", "admin", *"abcd")] == [
        *(True, True, True, False, True, True)
    ]
    assert ring.charge_request(stays, now=0.0) > 0
    assert ring.charge_request(freed, now=0.0) == 0.0
    ring.replace([], now=0.0)
    assert len(ring) == 2


def test_a_key_that_was_added_by_hand_and_then_written_is_the_files() -> None:
    ring = ring_of(key_of("a", expires_at=10.25), key_of("b"))
    ring.replace([key_of("a", expires_at=10.0), key_of("b")], now=0.0)
    assert {key.expires_at for key in ring} == {10.0, None}
    ring.replace([], now=0.0)
    assert len(ring) == 0


def test_a_file_cannot_take_the_name_of_another_key() -> None:
    ring = ring_of(key_of("admin", Scope.ADMIN, key_id="admin"))
    with pytest.raises(ValueError, match="'admin'"):
        ring.replace([key_of("other", Scope.ADMIN, key_id="admin")], now=0.0)
    ring.replace([key_of("a")], now=0.0)
    assert [ring.authenticate(secret, now=0.0) is not None for secret in ("admin", "other", "a")] == [True, False, True]


def test_retry_after_is_never_too_early() -> None:
    assert [retry_after(seconds) for seconds in (0.0, 0.2, 1.0, 1.1)] == [1, 1, 1, 2]

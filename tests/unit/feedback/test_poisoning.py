"""Caps, outliers, rates and rings, on populations with known vandals."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.feedback import PoisoningLimits
from etude.feedback.poisoning import HOUR_S, RatedSession, capped_weights, suspicions

TEMPLATES = [f"t{index}" for index in range(24)]
LIMITS = PoisoningLimits()


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=200), st.floats(0.02, 1))
def test_no_user_is_more_than_the_share_of_all(users: list[str], share: float) -> None:
    weights = capped_weights(users, share)
    totals = {user: weights[user] * users.count(user) for user in set(users)}
    reachable = max(share, 1 / len(totals))
    assert max(totals.values()) <= reachable * sum(totals.values()) * (1 + 1e-6)
    assert all(0 < weight <= 1 for weight in weights.values())


def test_every_weight_is_1_where_no_user_has_too_much() -> None:
    assert capped_weights([f"u{index}" for index in range(50)] * 3, 0.05) == {f"u{index}": 1.0 for index in range(50)}


def test_the_cap_is_a_share_of_what_is_left_after_capping() -> None:
    weights = capped_weights(["big"] * 900 + [f"u{index}" for index in range(95)], 0.05)
    assert weights["big"] * 900 == pytest.approx(5.0)
    assert weights["u0"] == 1.0


def honest(rng: random.Random, users: int, each: int) -> list[RatedSession]:
    """Users of different tempers who rate kinds of different difficulty, with noise."""
    tempers = {f"u{index}": rng.gauss(0, 0.1) for index in range(users)}
    difficulty = {template: rng.uniform(0.6, 1) for template in TEMPLATES}
    return [
        _session(user, index, template, (rng.random() < min(1, max(0, difficulty[template] + temper))) * 2.0 - 1)
        for user, temper in tempers.items()
        for index in range(each)
        for template in [rng.choice(TEMPLATES)]
    ]


def _session(user: str, index: int, template: str, value: float, apart_s: float = HOUR_S) -> RatedSession:
    return RatedSession(
        session_id=f"{user}-{index}", user=user, template=template, ended_at=index * apart_s, value=value
    )


@pytest.mark.parametrize("seed", range(8))
def test_honest_users_of_all_tempers_are_left_alone(seed: int) -> None:
    assert suspicions(honest(random.Random(seed), users=60, each=40), LIMITS) == {}


def test_a_user_who_hates_everything_is_an_outlier() -> None:
    sessions = honest(random.Random(0), users=60, each=40)
    sessions += [_session("vandal", index, TEMPLATES[index % 24], -1.0) for index in range(60)]
    assert {user: suspicion.rule for user, suspicion in suspicions(sessions, LIMITS).items()} == {"vandal": "outlier"}


def test_a_program_that_rates_is_told_by_its_pace() -> None:
    sessions = honest(random.Random(1), users=40, each=20)
    fast = LIMITS.per_hour + 1
    sessions += [_session("bot", index, TEMPLATES[index % 24], 1.0, apart_s=1.0) for index in range(fast)]
    assert suspicions(sessions, LIMITS)["bot"].rule == "pace"
    slower = [session for session in sessions if session.session_id != "bot-0"]
    assert "bot" not in suspicions(slower, LIMITS) or suspicions(slower, LIMITS)["bot"].rule != "pace"


def test_a_ring_that_pushes_some_kinds_and_damns_others_is_suspected_and_no_other_user() -> None:
    rng = random.Random(2)
    sessions = honest(rng, users=60, each=40)
    script = {template: rng.choice([-1.0, 1.0]) for template in TEMPLATES}
    ring = {f"ring{index}" for index in range(4)}
    sessions += [
        _session(user, index, template, script[template])
        for user in sorted(ring)
        for index, template in enumerate(TEMPLATES * 2)
    ]
    suspected = suspicions(sessions, LIMITS)
    assert suspected.keys() == ring
    assert {suspicion.rule for suspicion in suspected.values()} == {"collusion"}

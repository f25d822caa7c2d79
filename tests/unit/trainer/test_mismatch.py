"""The mismatch measure: zero for equal numbers, the truth for different ones, silent where it cannot compare."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.config.inference import NumericsConfig
from etude.errors import DamagedError
from etude.models.checkpoint import state_of
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY
from etude.trainer.mismatch import (
    POSITIONS,
    Mismatch,
    MismatchLevel,
    MismatchProbe,
    comparable,
    mismatch_level,
    positions,
    summarise,
)
from etude.types import NO_ROUTE, UNSAMPLED, Trajectory

OFF, REPLAY = NumericsConfig(replay="off"), NumericsConfig(replay="completion", replay_floor=0.0)


def make_model(seed: int) -> Decoder:
    model = Decoder(TINY, InvariantArithmetic())
    model.initialise(seed, std=0.2)
    return model


def make_trajectory(models: dict[int, Decoder], versions: list[int], turn_starts: tuple[int, ...]) -> Trajectory:
    """A trajectory whose sampled tokens have the logprobs of their versions."""
    ids = [(7 * i) % 20 for i in range(len(versions))]
    logprobs = np.zeros(len(ids), np.float32)
    for index, version in enumerate(versions):
        if version != UNSAMPLED:
            model = models[version]
            with torch.no_grad():
                row = model.logits(model.forward_packed(torch.tensor(ids))[index - 1 : index]).log_softmax(-1)
            logprobs[index] = row[0, ids[index]]
    mask = np.array(versions) != UNSAMPLED
    return Trajectory(
        rollout_id="r",
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=np.array(versions, np.int32),
        temperatures=np.ones(len(ids), np.float32),
        turn_starts=turn_starts,
        advantages=mask.astype(np.float32),
    )


N = UNSAMPLED
TWO_TURNS = [N, N, 3, 3, N, N, 4, 4, 4]


def test_equal_numbers_have_no_mismatch_even_when_the_trainer_has_moved_on() -> None:
    models = {version: make_model(version) for version in (3, 4)}
    probe = MismatchProbe.alone(make_model(9), OFF, versions=3)
    for version, model in models.items():
        probe.remember(version, state_of(model))
    result = probe.measure([make_trajectory(models, TWO_TURNS, (2, 6))], max_tokens=100).total
    assert result.tokens == 5
    assert result.k3 < 1e-12
    assert result.p99 < 1e-6


def test_a_version_that_is_gone_is_not_compared() -> None:
    models = {version: make_model(version) for version in (3, 4)}
    probe = MismatchProbe.alone(make_model(9), OFF, versions=1)
    probe.remember(3, state_of(models[3]))
    probe.remember(4, state_of(models[4]))
    assert probe.measure([make_trajectory(models, TWO_TURNS, (2, 6))], max_tokens=100).total.tokens == 3


def test_a_turn_of_two_versions_is_not_comparable() -> None:
    models = {version: make_model(version) for version in (3, 4)}
    trajectory = make_trajectory(models, [N, 3, 3, 4, N, 4, 4], (1, 5))
    assert comparable(trajectory, 3).sum() == 0
    assert comparable(trajectory, 4).tolist() == [False] * 5 + [True] * 2


def test_a_different_engine_shows() -> None:
    models = {3: make_model(3)}
    probe = MismatchProbe.alone(make_model(9), OFF, versions=1)
    probe.remember(3, state_of(make_model(5)))
    result = probe.measure([make_trajectory(models, [N, N, 3, 3, 3], (2,))], max_tokens=100).total
    assert result.k3 > 1e-4


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=50))
def test_the_statistics_are_schulmans(differences: list[float]) -> None:
    result = summarise(np.array(differences, np.float32))
    assert math.isclose(result.k1, -sum(differences) / len(differences), abs_tol=1e-6)
    k3 = sum(math.exp(d) - 1 - d for d in differences) / len(differences)
    assert math.isclose(result.k3, k3, rel_tol=1e-6, abs_tol=1e-9)
    assert result.k3 >= 0
    assert result.p99 <= result.max == max(abs(d) for d in differences)
    assert result.equal == sum(d == 0 for d in differences)


def test_nothing_compared_is_nothing_claimed() -> None:
    result = summarise(np.zeros(0, np.float32))
    assert result == Mismatch(tokens=0, k1=0.0, k3=0.0, p99=0.0, max=0.0, equal=0)


def test_the_same_function_on_both_sides_is_equal_to_the_last_bit() -> None:
    model = make_model(3)
    trajectory = scored(make_trajectory({3: model}, [N, N, 3, 3, 3], (2,)), model)
    probe = MismatchProbe.alone(make_model(9), OFF, versions=1)
    probe.remember(3, state_of(model))
    total = probe.measure([trajectory], max_tokens=100).total
    assert (total.equal, total.max, total.k1) == (3, 0.0, 0.0)


def scored(trajectory: Trajectory, model: Decoder, routing: Routing | None = None) -> Trajectory:
    """The trajectory with the logprobs that ``model`` gives it in one pass."""
    ids = torch.from_numpy(trajectory.token_ids).long()
    with torch.no_grad():
        logits = model.logits(model.forward_packed(ids, routing=routing)[:-1])
        own = model.arithmetic.logprobs(logits, ids[1:], torch.from_numpy(trajectory.temperatures[1:]), None)
    logprobs = np.where(trajectory.loss_mask, np.append(np.float32(0), own.numpy()), 0).astype(np.float32)
    return replace(trajectory, logprobs=logprobs)


def test_temperature_is_compared_as_it_was_sampled() -> None:
    model = make_model(3)
    plain = make_trajectory({3: model}, [N, N, 3, 3, 3], (2,))
    sharp = scored(replace(plain, temperatures=np.array([1, 1, 0.5, 0.5, 0.5], np.float32)), model)
    probe = MismatchProbe.alone(make_model(9), OFF, versions=1)
    probe.remember(3, state_of(model))
    assert probe.measure([sharp], max_tokens=100).total.max == 0
    assert probe.measure([replace(sharp, temperatures=plain.temperatures)], max_tokens=100).total.k3 > 1e-3


def test_replay_repairs_what_another_choice_of_experts_breaks_and_flips_are_counted() -> None:
    model = make_model(3)
    trajectory = make_trajectory({3: model}, [N, N, 3, 3, 3], (2,))
    routes = np.array([[[2, 1], [0, 3]]] * 5, np.uint16)  # an engine whose router is odd
    routes[[0, 4]] = NO_ROUTE
    engine = Routing(replay=torch.from_numpy(routes.astype(np.int64)))
    trajectory = replace(scored(trajectory, model, engine), routes=routes)
    result = {}
    for numerics in (OFF, REPLAY):
        probe = MismatchProbe.alone(make_model(9), numerics, versions=1)
        probe.remember(3, state_of(model))
        result[numerics.replay] = probe.measure([trajectory], max_tokens=100).total
    assert result["off"].max > 1e-3
    assert (result["off"].pairs, result["off"].flips) == (0, 0)
    assert result["completion"].max == 0
    assert result["completion"].pairs == 3 * 4
    assert result["completion"].flips == engine.flips > 0


def test_routes_of_tokens_that_are_not_compared_are_left_to_the_router() -> None:
    models = {version: make_model(version) for version in (3, 4)}
    trajectory = make_trajectory(models, TWO_TURNS, (2, 6))
    trajectory = replace(trajectory, routes=np.array([[[2, 1], [0, 3]]] * 9, np.uint16))
    probe = MismatchProbe.alone(make_model(9), REPLAY, versions=1)
    probe.remember(4, state_of(models[4]))
    assert probe.measure([trajectory], max_tokens=100).total.pairs == 3 * 4


def test_positions_count_from_the_start_of_each_completion() -> None:
    models = {version: make_model(version) for version in (3, 4)}
    trajectory = make_trajectory(models, TWO_TURNS, (2, 6))
    assert positions(trajectory)[trajectory.loss_mask].tolist() == [0, 1, 0, 1, 2]


def test_the_breakdown_adds_up_to_the_whole() -> None:
    models = {version: make_model(version) for version in (3, 4)}
    probe = MismatchProbe.alone(make_model(9), OFF, versions=2)
    for version, seed in ((3, 3), (4, 8)):
        probe.remember(version, state_of(make_model(seed)))
    lengthy = make_trajectory(models, [N, *[3] * 12], (1,))
    report = probe.measure([make_trajectory(models, TWO_TURNS, (2, 6)), lengthy], max_tokens=100)
    assert {version: result.tokens for version, result in report.versions} == {3: 14, 4: 3}
    assert report.versions[0][1].k3 < 1e-9 < report.versions[1][1].k3
    assert {first: result.tokens for first, result in report.positions} == {0: 3, 1: 10, 8: 4}
    assert max(result.max for _, result in report.positions) == report.total.max
    assert set(dict(report.positions)) < set(POSITIONS)


def test_how_many_are_compared_at_a_time_changes_nothing() -> None:
    models = {version: make_model(version) for version in (3, 4)}
    probe = MismatchProbe.alone(make_model(9), OFF, versions=2)
    probe.remember(3, state_of(make_model(5)))
    batch = [make_trajectory(models, [N, *[3] * length], (1,)) for length in (2, 5, 9, 1)]
    reports = [probe.measure(batch, max_tokens=max_tokens) for max_tokens in (1, 7, 9, 1_000)]
    assert reports[0].total.tokens == 17
    assert reports[0].total.k3 > 0
    assert all(report == reports[0] for report in reports)


@pytest.mark.parametrize(
    ("k3", "tokens", "before", "after"),
    [
        (9e-4, 100, MismatchLevel.WARN, MismatchLevel.CLEAR),
        (1.1e-3, 100, MismatchLevel.CLEAR, MismatchLevel.WARN),
        (1.1e-3, 99, MismatchLevel.CLEAR, MismatchLevel.CLEAR),
        (9e-4, 99, MismatchLevel.WARN, MismatchLevel.WARN),
        (1.1e-2, 100, MismatchLevel.CLEAR, MismatchLevel.STOP),
        (math.nan, 100, MismatchLevel.CLEAR, MismatchLevel.STOP),
        (math.nan, 99, MismatchLevel.CLEAR, MismatchLevel.CLEAR),
    ],
)
def test_the_ladder(k3: float, tokens: int, before: MismatchLevel, after: MismatchLevel) -> None:
    mismatch = Mismatch(tokens=tokens, k1=0.0, k3=k3, p99=0.0, max=0.0, equal=0)
    assert mismatch_level(mismatch, NumericsConfig(), before) is after


@pytest.mark.parametrize("max_tokens", [1, 100])
def test_every_token_is_scored_with_the_weights_that_sampled_it(max_tokens: int) -> None:
    """Also if two versions sampled one turn; the engine's logprobs are not used."""
    models = {version: make_model(version) for version in (3, 4)}
    probe = MismatchProbe.alone(make_model(9), OFF, versions=3)
    for version, model in models.items():
        probe.remember(version, state_of(model))
    sampled = [
        make_trajectory(models, TWO_TURNS, (2, 6)),
        make_trajectory(models, [N, 4, 4], (1,)),
        make_trajectory(models, [N, N, 3, 4], (2,)),
    ]
    silent = [replace(one, logprobs=np.zeros_like(one.logprobs)) for one in sampled]
    result = probe.old_logprobs(silent, max_tokens=max_tokens)
    for one, row in zip(sampled, result, strict=True):
        np.testing.assert_allclose(row, one.logprobs, atol=1e-6)
    unknown = replace(sampled[1], versions=np.array([N, 4, 5], np.int32))
    with pytest.raises(DamagedError, match=r"weight version 5 sampled .*; set loss\.options\.old_policy = 'engine'"):
        probe.old_logprobs([unknown], max_tokens=max_tokens)

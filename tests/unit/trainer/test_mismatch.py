"""The mismatch measure: zero for equal numbers, the truth for different ones, silent where it cannot compare."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.models.checkpoint import state_of
from etude.models.qwen3_moe import TINY, Qwen3Moe
from etude.trainer.mismatch import MismatchProbe, comparable, summarise
from etude.types import UNSAMPLED, Trajectory


def make_model(seed: int) -> Qwen3Moe:
    model = Qwen3Moe(TINY)
    model.initialise(seed, std=0.2)
    return model


def make_trajectory(models: dict[int, Qwen3Moe], versions: list[int], turn_starts: tuple[int, ...]) -> Trajectory:
    """A trajectory whose every sampled token has the logprob that its version gives it."""
    ids = [(7 * i) % 20 for i in range(len(versions))]
    logprobs = np.zeros(len(ids), np.float32)
    for index, version in enumerate(versions):
        if version != UNSAMPLED:
            model = models[version]
            with torch.no_grad():
                row = model.logits(model.forward_padded(torch.tensor([ids]))[0, index - 1]).log_softmax(-1)
            logprobs[index] = row[ids[index]]
    mask = np.array(versions) != UNSAMPLED
    return Trajectory(
        rollout_id="r",
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=np.array(versions, np.int32),
        turn_starts=turn_starts,
        advantages=mask.astype(np.float32),
    )


N = UNSAMPLED
TWO_TURNS = [N, N, 3, 3, N, N, 4, 4, 4]


def test_equal_numbers_have_no_mismatch_even_when_the_trainer_has_moved_on() -> None:
    models = {version: make_model(version) for version in (3, 4)}
    probe = MismatchProbe(make_model(9), versions=3)
    for version, model in models.items():
        probe.remember(version, state_of(model))
    found = probe.measure([make_trajectory(models, TWO_TURNS, (2, 6))], max_tokens=100)
    assert found.tokens == 5
    assert found.k3 < 1e-12
    assert found.p99 < 1e-6


def test_a_version_that_is_gone_is_not_compared() -> None:
    models = {version: make_model(version) for version in (3, 4)}
    probe = MismatchProbe(make_model(9), versions=1)
    probe.remember(3, state_of(models[3]))
    probe.remember(4, state_of(models[4]))
    assert probe.measure([make_trajectory(models, TWO_TURNS, (2, 6))], max_tokens=100).tokens == 3


def test_a_turn_of_two_versions_is_not_comparable() -> None:
    models = {version: make_model(version) for version in (3, 4)}
    trajectory = make_trajectory(models, [N, 3, 3, 4, N, 4, 4], (1, 5))
    assert comparable(trajectory, 3).sum() == 0
    assert comparable(trajectory, 4).tolist() == [False] * 5 + [True] * 2


def test_a_different_engine_shows() -> None:
    models = {3: make_model(3)}
    probe = MismatchProbe(make_model(9), versions=1)
    probe.remember(3, state_of(make_model(5)))
    found = probe.measure([make_trajectory(models, [N, N, 3, 3, 3], (2,))], max_tokens=100)
    assert found.k3 > 1e-4


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=50))
def test_the_statistics_are_schulmans(differences: list[float]) -> None:
    found = summarise(np.array(differences, np.float32))
    assert math.isclose(found.k1, -sum(differences) / len(differences), abs_tol=1e-6)
    k3 = sum(math.exp(d) - 1 - d for d in differences) / len(differences)
    assert math.isclose(found.k3, k3, rel_tol=1e-6, abs_tol=1e-9)
    assert found.k3 >= 0
    assert found.p99 <= max(abs(d) for d in differences) + 1e-6


def test_nothing_compared_is_nothing_claimed() -> None:
    found = summarise(np.zeros(0, np.float32))
    assert found == type(found)(tokens=0, k1=0.0, k3=0.0, p99=0.0)
    assert found.tokens == pytest.approx(0)

"""Rotation tables: exact where they can be checked, elsewhere equal to transformers' formulas (tests/numerics)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.models.decoder import Decoder, RotaryTables
from etude.models.rotary import frequencies, rotary_tables
from etude.models.spec import TINY, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

LLAMA3 = Llama3Scaling(factor=8.0, low_factor=1.0, high_factor=4.0, original_positions=8192)
YARN = YarnScaling(factor=32.0, original_positions=4096)


def test_tables_are_cosines_and_sines_of_position_times_frequency() -> None:
    cosines, sines = rotary_tables(replace(TINY, max_positions=4), TINY.rope)
    assert cosines.shape == sines.shape == (4, 16)
    assert cosines.dtype is torch.float32
    assert torch.equal(cosines[0], torch.ones(16))
    assert cosines[3, 0] == pytest.approx(np.cos(3.0), abs=1e-7)
    assert sines[3, 9] == pytest.approx(np.sin(3 * 10_000 ** (-2 / 16)), abs=1e-7)
    assert torch.equal(cosines[:, :8], cosines[:, 8:])


@given(theta=st.floats(100.0, 1e7), half=st.integers(4, 64))
def test_a_pair_turns_slower_than_the_one_before(theta: float, half: int) -> None:
    rates = frequencies(RopeSpec(theta=theta), 2 * half)
    assert rates.dtype == np.float32
    assert rates[0] == 1.0
    assert (np.diff(rates) < 0).all()


@pytest.mark.parametrize("scaling", [LinearScaling(factor=8.0), LLAMA3, YARN])
def test_scaling_never_speeds_up_nor_slows_by_more_than_its_factor(scaling: LinearScaling) -> None:
    plain = frequencies(RopeSpec(theta=500_000.0), 128)
    ratio = plain / frequencies(RopeSpec(theta=500_000.0, scaling=scaling), 128)
    assert (ratio >= 1 - 1e-6).all()
    assert (ratio <= scaling.factor * (1 + 1e-6)).all()
    assert ratio[-1] == pytest.approx(scaling.factor)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_fast_pairs_are_left_alone(scaling: Llama3Scaling) -> None:
    plain = frequencies(RopeSpec(theta=500_000.0), 128)
    scaled = frequencies(RopeSpec(theta=500_000.0, scaling=scaling), 128)
    assert (plain == scaled)[:8].all()


def test_yarn_stretches_the_tables() -> None:
    cosines, _ = rotary_tables(TINY, RopeSpec(scaling=replace(YARN, attention_factor=1.5)))
    assert torch.equal(cosines[0], torch.full((16,), 1.5))


def cosines_of(model: Decoder) -> Tensor:
    tables = model.rotary[0]
    assert isinstance(tables, RotaryTables)
    return tables.cosines_PD.values


def test_a_cast_of_the_model_leaves_the_tables_alone() -> None:
    model = Decoder(TINY)
    before = cosines_of(model).clone()
    model.to(torch.bfloat16)
    assert model.embedding.dtype is torch.bfloat16
    assert cosines_of(model).dtype is torch.float32
    assert torch.equal(cosines_of(model), before)

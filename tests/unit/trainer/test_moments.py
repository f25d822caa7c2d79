"""Moments in 8 bits learn as float32 ones do, those on the host are the same bits; checkpoints hold them all."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from etude.config.training import OptimiserConfig, OptimiserState
from etude.errors import DamagedError
from etude.models.decoder import Decoder
from etude.models.hf import CausalModel
from etude.models.spec import TINY, TINY_DENSE
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.moments import BLOCK, InEightBits, decode, dynamic_code, encode
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser

CASES = [OptimiserConfig(kind=kind, state=state) for kind in ("adamw", "muon") for state in get_args(OptimiserState)]


def optimisation(config: OptimiserConfig, seed: int = 0, rate: float = 1e-2) -> Optimisation:
    model = Decoder(TINY)
    model.initialise(seed)
    optimiser = build_optimiser(model, config, learning_rate=rate, betas=(0.9, 0.95), weight_decay=0.01)
    return Optimisation(model, optimiser, RateSchedule(steps=100, warmup_steps=1), clip_norm=1.0)


def loss(model: CausalModel, seed: int) -> Tensor:
    """A loss on sequences that count in steps of 1 to 3, which can be learnt."""
    generator = torch.Generator().manual_seed(seed)
    starts, steps = (torch.randint(low, high, (8, 1), generator=generator) for low, high in ((0, 20), (1, 4)))
    ids_BL = (starts + steps * torch.arange(12)) % 50
    logits_NV = model.logits(model.forward_packed(ids_BL.flatten(), [12] * 8))
    return functional.cross_entropy(logits_NV.view(8, 12, -1)[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten())


def train(one: Optimisation, steps: range) -> list[float]:
    curve = []
    for step in steps:
        value = loss(one.model, step)
        one.step(step, [value])
        curve.append(float(value.detach()))
    return curve


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_on_the_host_are_the_same_bits(kind: str) -> None:
    here, there = (optimisation(OptimiserConfig(kind=kind, state=state)) for state in ("fp32", "offload"))  # type: ignore[arg-type]
    assert train(here, range(1, 6)) == train(there, range(1, 6))
    expected, result = here.tensors(), there.tensors()
    assert expected.keys() == result.keys()
    assert all(torch.equal(tensor, result[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_eight_bits_learn_as_float32_does(kind: str) -> None:
    curves = {
        state: train(optimisation(OptimiserConfig(kind=kind, state=state), rate=5e-3), range(1, 61))  # type: ignore[arg-type]
        for state in ("fp32", "8bit")
    }
    wide, narrow = (sum(curve[-10:]) / 10 for curve in curves.values())
    assert wide < 0.6 * curves["fp32"][0]
    assert narrow == pytest.approx(wide, rel=0.02)


@pytest.mark.parametrize("config", CASES, ids=lambda config: f"{config.kind} {config.state}")
def test_a_checkpoint_goes_on_to_the_same_bits(config: OptimiserConfig, tmp_path: Path) -> None:
    one, other = optimisation(config), optimisation(config, seed=5)
    train(one, range(1, 4))
    Checkpoints(tmp_path).save(3, one.tensors())
    other.restore(Checkpoints(tmp_path).load(3, other.like))
    for each in (one, other):
        train(each, range(4, 6))
    expected, result = one.tensors(), other.tensors()
    assert expected.keys() == result.keys()
    assert all(torch.equal(tensor, result[name]) for name, tensor in expected.items())


@pytest.mark.parametrize(("saved", "own"), [("8bit", "fp32"), ("fp32", "8bit"), ("8bit", "offload")])
def test_moments_of_another_kind_are_refused(saved: OptimiserState, own: OptimiserState) -> None:
    one, other = (optimisation(OptimiserConfig(state=state)) for state in (saved, own))
    train(one, range(1, 2))
    with pytest.raises(DamagedError, match=r"continue with the optimiser.state that it was saved with"):
        other.restore(one.tensors())


def test_host_and_device_take_each_others_checkpoints() -> None:
    one, other = (optimisation(OptimiserConfig(state=state)) for state in ("fp32", "offload"))
    train(one, range(1, 3))
    other.restore(one.tensors())
    assert train(one, range(3, 5)) == train(other, range(3, 5))


def test_a_number_is_off_by_a_code_at_most() -> None:
    """The error is at most 5 % of the block's largest number; four decades below, less than half of the number."""
    generator = torch.Generator().manual_seed(0)
    exponents = 4 * torch.rand(40, 700, generator=generator)
    x = torch.randn(40, 700, generator=generator).sign() * 10**-exponents
    for signed in (True, False):
        code = dynamic_code(signed=signed)
        assert len(code.unique()) == 256
        values = x if signed else x.abs()
        codes, scales = encode(values, code=code)
        assert (codes.shape, codes.dtype, scales.shape) == (x.shape, torch.uint8, (40, 3))
        result = decode(codes, scales, code=code)
        largest = scales.repeat_interleave(BLOCK, -1)[:, :700]
        assert ((result - values).abs() <= largest * 0.05).all()
        assert ((result - values).abs() / values.abs() < 0.5).all()
    assert not decode(*encode(torch.zeros(2, 300), code=code), code=code).any()
    assert decode(*encode(torch.full((1, 3), torch.nan), code=code), code=code).isnan().all()


def test_what_a_second_moment_divides_by_is_never_lost() -> None:
    """An update with a gradient of a ten-thousandth of its neighbour's is AdamW's, not the moment over nothing."""
    state: dict[str, Tensor] = {}
    parameter = torch.zeros(1, 2)
    InEightBits().write(state, "exp_avg_sq", parameter, torch.tensor([[1.0, 1e-8]]))
    assert InEightBits().read(state, "exp_avg_sq", parameter)[0, 1] == pytest.approx(1e-8, rel=0.5)


def test_eight_bits_are_two_bytes_a_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(64, 4 * BLOCK))
    parameter.grad = torch.ones_like(parameter)
    model = Decoder(TINY_DENSE)
    optimiser = build_optimiser(model, OptimiserConfig(state="8bit"), learning_rate=1e-3, betas=(0.9, 0.95))
    optimiser.add_param_group({"params": [parameter]})
    optimiser.step()
    size_bytes = sum(tensor.nbytes for tensor in optimiser.state[parameter].values())
    assert size_bytes / parameter.numel() == pytest.approx(2 + 2 * 4 / BLOCK, abs=1e-3)

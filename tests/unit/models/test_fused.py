"""The small steps of a decoder on a CPU: values and gradients are those that torch derives from the formula."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from etude.models.arithmetic import Dispatch, inverse_of
from etude.models.fast import FastArithmetic
from etude.models.kernels import fused

TYPES = (torch.float32, torch.bfloat16)
SLOTS, EXPERTS, WIDTH = 2, 4, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers in float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dispatched(tokens: int) -> Dispatch:
    """Rows of tokens that are sent to random experts."""
    experts_Nk = torch.stack([torch.randperm(EXPERTS)[:SLOTS] for _ in range(tokens)] or [torch.empty(0, SLOTS).long()])
    return FastArithmetic().dispatch(experts_Nk.view(tokens, SLOTS), EXPERTS)


def compare(step: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Values and gradients of both, within the rounding of the inputs' type."""
    outcomes = []
    for function in (step, formula):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        weights = random(*out.shape, seed=9).to(out.dtype)
        outcomes.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    tolerance = 2e-6 if inputs[0].dtype is torch.float32 else 2e-2
    for result, expected, like in zip(*outcomes, [outcomes[1][0], *inputs], strict=True):
        assert result.dtype == like.dtype
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(7, WIDTH), (7, 3, WIDTH), (0, WIDTH)])
def test_norms(shape: tuple[int, ...]) -> None:
    compare(
        lambda x, gain: fused.norm(x, gain, 1e-3),
        lambda x, gain: functional.rms_norm(x, (WIDTH,), gain, 1e-3),
        random(*shape),
        random(WIDTH, seed=1),
    )


def test_a_norm_whose_gain_is_frozen_has_no_gradient_of_it() -> None:
    x, gain = random(5, WIDTH).requires_grad_(), random(WIDTH, seed=1)
    (of_x,) = torch.autograd.grad(fused.norm(x, gain, 1e-3).sum(), x)
    (expected,) = torch.autograd.grad(functional.rms_norm(x, (WIDTH,), gain, 1e-3).sum(), x)
    torch.testing.assert_close(of_x, expected)
    gain.requires_grad_()
    (of_gain,) = torch.autograd.grad(fused.norm(x.detach(), gain, 1e-3).sum(), gain)
    torch.testing.assert_close(of_gain, functional.rms_norm(x.detach(), (WIDTH,), None, 1e-3).sum(0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [7, 0])
def test_rotations(tokens: int, dtype: torch.dtype) -> None:
    cosines, sines = (random(tokens, WIDTH // 2, seed=seed).tile(1, 2) for seed in (1, 2))

    def formula(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        tables = [table.unsqueeze(1).to(x.dtype) for table in (cosines, sines)]
        return x * tables[0] + torch.cat([-high, low], -1) * tables[1]

    compare(lambda x: fused.rotate(x, cosines, sines), formula, random(tokens, 3, WIDTH).to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [7, 0])
def test_gates(tokens: int, dtype: torch.dtype) -> None:
    compare(
        fused.gated,
        lambda x: functional.silu(x[:, : WIDTH // 2]) * x[:, WIDTH // 2 :],
        random(tokens, WIDTH).to(dtype),
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [7, 0])
def test_rows_of_experts_are_spread(tokens: int, dtype: torch.dtype) -> None:
    dispatch = dispatched(tokens)
    compare(lambda x: fused.spread(x, dispatch), lambda x: x[dispatch.tokens_R], random(tokens, WIDTH).to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [7, 0])
def test_rows_of_experts_are_combined(tokens: int, dtype: torch.dtype) -> None:
    order_R = dispatched(tokens).order_R

    def formula(y_RH: Tensor, gates_Nk: Tensor) -> Tensor:
        y_NkH = y_RH[inverse_of(order_R)].view(tokens, SLOTS, WIDTH)
        return (y_NkH * gates_Nk.unsqueeze(-1)).sum(1).to(y_RH.dtype)

    gates_Nk = random(tokens, SLOTS, seed=1).sigmoid()
    compare(
        lambda y, gates: fused.combine(y, order_R, gates), formula, random(tokens * SLOTS, WIDTH).to(dtype), gates_Nk
    )

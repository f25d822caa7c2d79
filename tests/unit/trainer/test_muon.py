"""Muon: updates are nearly orthogonal, head by head and expert by expert, and as large as AdamW's."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from etude.config.training import OptimiserConfig
from etude.models.decoder import Decoder
from etude.models.spec import TINY, TINY_DENSE, TINY_LATENT, ModelSpec
from etude.trainer.moments import InFloat32
from etude.trainer.muon import ADAMW_RMS, MatrixSplit, Muon, matrices_of, orthogonalise
from etude.trainer.optimisation import build_optimiser
from largest_tensor import Largest

SPECS = [TINY, TINY_DENSE, TINY_LATENT]


def gradients(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def polar(x: Tensor) -> Tensor:
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    result: Tensor = u @ vt
    return result


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 40), (2, 40, 8), (1, 1, 7)])
def test_it_has_the_singular_vectors_of_the_polar_factor(shape: tuple[int, ...]) -> None:
    x = gradients(shape).double()
    result, exact = orthogonalise(x), polar(x)
    values = torch.linalg.svdvals(result)
    assert ((values > 0.65) & (values < 1.25)).all()  # what five steps of these coefficients promise
    # U and V are kept: UᵀfoundV is diagonal, so the product with the exact factor is symmetric and positive.
    product = result @ exact.mT if shape[1] <= shape[2] else exact.mT @ result
    assert torch.allclose(product, product.mT, atol=1e-9)
    assert (torch.linalg.eigvalsh(product) > 0.65).all()


def test_singular_values_end_near_one_unless_they_were_next_to_nothing() -> None:
    """The second of two, from 10⁻⁶ to 0.7 of the norm: from 0.0015 on it does; below, it is multiplied at most."""
    shares_M = torch.logspace(-6, -0.155, 2001, dtype=torch.float64)
    values_M = torch.linalg.svdvals(
        orthogonalise(torch.diag_embed(torch.stack([(1 - shares_M**2).sqrt(), shares_M], 1)))
    )
    large_M = shares_M >= 0.0015
    assert ((values_M[large_M] > 0.68) & (values_M[large_M] < 1.21)).all()
    small_M = values_M[~large_M].min(-1).values
    assert (small_M < 0.7).all()
    assert (small_M <= 485 * shares_M[~large_M]).all()
    assert small_M.min() < 0.001


def test_matrices_do_not_see_each_other() -> None:
    x = gradients((5, 6, 9))
    jointly = orthogonalise(x)
    alone = torch.stack([orthogonalise(matrix[None])[0] for matrix in x])
    assert torch.allclose(jointly, alone, atol=1e-6)
    assert torch.equal(orthogonalise(torch.zeros(2, 4, 4)), torch.zeros(2, 4, 4))


def test_one_matrix_steps_as_torchs_does() -> None:
    ours, theirs = (nn.Parameter(gradients((24, 16))) for _ in range(2))
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.02)
    mine = Muon({ours: MatrixSplit()}, adamw, InFloat32(), momentum=0.95, weight_decay=0.1)
    torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for parameter, optimiser in ((ours, mine), (theirs, torchs)):
            parameter.grad = gradients((24, 16), seed=step + 1)
            optimiser.step()
    # torch iterates in bfloat16, and its momentum is an average: the same up to the scale that is normalised away
    assert (ours - theirs).abs().max() < 0.02 * ADAMW_RMS * math.sqrt(24) * 0.05


def test_heads_and_experts_are_matrices_of_their_own() -> None:
    model = Decoder(TINY)
    model.initialise(0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = gradients(tuple(parameter.shape), seed=index)
    optimiser = build_optimiser(model, OptimiserConfig(kind="muon"), learning_rate=0.5, betas=(0.9, 0.95))
    optimiser.step()

    moved = {name: (before[name] - parameter.detach()) / 0.5 for name, parameter in model.named_parameters()}
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    def check(update: Tensor, gradient: Tensor) -> None:
        scale = ADAMW_RMS * math.sqrt(max(gradient.shape))
        assert torch.allclose(update, scale * orthogonalise(gradient[None])[0], atol=1e-4)

    head, size = 16, 16
    for start in range(0, 8 * head, head):
        rows = slice(start, start + head)
        check(moved["blocks.0.attention.qkv"][rows], grads["blocks.0.attention.qkv"][rows])
    for start in range(0, 4 * head, head):
        columns = slice(start, start + head)
        check(moved["blocks.1.attention.output"][:, columns], grads["blocks.1.attention.output"][:, columns])
    for expert in range(4):
        for rows in (slice(0, size), slice(size, 2 * size)):
            check(
                moved["blocks.0.feed.routed.gate_up"][expert, rows], grads["blocks.0.feed.routed.gate_up"][expert, rows]
            )
        check(moved["blocks.1.feed.routed.down"][expert], grads["blocks.1.feed.routed.down"][expert])


@pytest.mark.parametrize("spec", SPECS)
def test_every_parameter_moves_once_and_only_matrices_are_muons(spec: ModelSpec) -> None:
    model = Decoder(spec)
    model.initialise(0)
    matrices = matrices_of(model)
    assert {id(p) for p in matrices} == {
        id(p) for name, p in model.named_parameters() if p.ndim > 1 and name not in ("embedding", "head")
    }
    for parameter, split in matrices.items():
        parts = split.parts(parameter.detach())
        assert sum(part.numel() for part in parts) == parameter.numel()
    optimiser = build_optimiser(model, OptimiserConfig(kind="muon"), learning_rate=0.1, betas=(0.9, 0.95))
    listed = [id(p) for group in optimiser.param_groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = gradients(tuple(parameter.shape), seed=index)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimiser.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        change = (parameter.detach() - old).square().mean().sqrt()
        # Of AdamW's first step every number is the rate; Muon's are scaled to a fifth of it, of full rank at least.
        assert 0.01 < float(change) / 0.1 < 1.1
        state = optimiser.state[parameter]
        assert set(state) == ({"momentum"} if parameter in matrices else {"step", "exp_avg", "exp_avg_sq"})


def test_what_is_stacked_is_bounded_and_makes_the_same_step() -> None:
    results = []
    for most in (1, 1 << 26):
        model = Decoder(replace(TINY_DENSE, layers=6))
        model.initialise(0)
        matrices = {parameter: MatrixSplit() for parameter in matrices_of(model)}
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = gradients(tuple(parameter.shape), seed=index)
        adamw = torch.optim.AdamW([model.embedding], lr=0.1)
        with Largest() as largest:  # type: ignore[no-untyped-call]
            Muon(matrices, adamw, InFloat32(), momentum=0.95, most_stacked=most).step()
        results.append((model.state_dict(), largest.numbers))
    (few, bounded), (stacked, whole) = results
    assert bounded == max(parameter.numel() for parameter in model.parameters())
    assert whole >= 6 * max(parameter.numel() for parameter in matrices)
    assert all(torch.allclose(few[name], tensor, atol=1e-5) for name, tensor in stacked.items())


def test_rates_that_are_set_reach_both(spec: ModelSpec = TINY) -> None:
    model = Decoder(spec)
    model.initialise(0)
    optimiser = build_optimiser(model, OptimiserConfig(kind="muon"), learning_rate=0.1, betas=(0.9, 0.95))
    for group in optimiser.param_groups:
        group["lr"] = 0.0
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = gradients(tuple(parameter.shape), seed=index)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

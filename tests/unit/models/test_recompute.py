"""Activations computed again instead of kept: the same gradients, bit for bit, and every route counted once."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from etude.models.arithmetic import Arithmetic
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.fast import FastArithmetic
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY, TINY_DENSE, TINY_LATENT, ModelSpec

IDS = torch.arange(24) % 50


def gradients(spec: ModelSpec, arithmetic: Arithmetic, *, recompute: bool) -> tuple[list[torch.Tensor], int]:
    """The gradients of every parameter, and how many numbers were kept for them outside of blocks."""
    model = Decoder(spec, arithmetic)
    model.initialise(0, std=0.2)
    model.recompute = recompute
    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.forward_packed(IDS, (10, 14))
    hidden.square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], sum(saved)


@pytest.mark.parametrize("spec", [TINY, TINY_DENSE, TINY_LATENT])
@pytest.mark.parametrize("arithmetic", [FastArithmetic(), InvariantArithmetic()])
def test_gradients_are_the_same_and_less_is_kept(spec: ModelSpec, arithmetic: Arithmetic) -> None:
    plain, much = gradients(spec, arithmetic, recompute=False)
    again, little = gradients(spec, arithmetic, recompute=True)
    assert len(plain) == len(again) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert little < much / 4


def test_replayed_pairs_are_counted_once() -> None:
    model = Decoder(TINY)
    model.initialise(0)
    model.recompute = True
    replay = torch.randint(0, 4, (24, 2, 2), generator=torch.Generator().manual_seed(0))
    replay[..., 1] = (replay[..., 0] + 1) % 4
    routing = Routing(replay=replay, floor=0.9)
    hidden = model.forward_packed(IDS, (10, 14), routing)
    before = (routing.pairs, routing.flips, routing.replaced)
    hidden.sum().backward()
    assert (routing.pairs, routing.flips, routing.replaced) == before
    assert before[0] == replay.numel()
    assert before[1] > before[2] > 0

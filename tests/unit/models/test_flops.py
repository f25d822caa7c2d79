"""Costs by shape, compared with the matrices of real models and with torch's own counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from etude.models.decoder import Decoder
from etude.models.flops import head_flops, pair_flops, token_flops, window_flops
from etude.models.spec import TINIEST, TINY, TINY_DENSE, TINY_GEMMA, TINY_LATENT, ModelSpec
from etude.trainer.batching.packing import Cost


def entries(spec: ModelSpec) -> int:
    """Entries of the layers' matrices that one token meets: of a layer's experts, those that it is sent to."""
    share = spec.experts.per_token / spec.experts.count if spec.experts else 1.0
    routed = ("gate_up", "down")
    return round(
        sum(
            parameter.numel() * (share if parameter.ndim == 3 and name.endswith(routed) else 1.0)
            for name, parameter in Decoder(spec).named_parameters()
            if name.startswith("blocks.") and parameter.ndim > 1 and not name.endswith("bias")
        )
    )


@pytest.mark.parametrize("spec", TINIEST)
def test_a_token_costs_two_operations_for_each_entry_that_it_meets(spec: ModelSpec) -> None:
    assert token_flops(spec) == 2 * entries(spec)


def test_torch_counts_the_same_for_a_dense_model() -> None:
    model = Decoder(TINY_DENSE)
    model.initialise(0)
    length = 20
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model.logits(model.forward_packed(torch.arange(length)))
    products = length * (token_flops(TINY_DENSE) + head_flops(TINY_DENSE))
    attention = length**2 * pair_flops(TINY_DENSE)  # torch counts pairs that the causal mask leaves out, too
    assert counted.get_total_flops() in (products, products + attention)


def test_a_pair_costs_a_score_and_a_value_in_every_head() -> None:
    assert pair_flops(TINY) == 2 * 2 * 4 * (16 + 16)
    assert pair_flops(TINY_LATENT) == 2 * 3 * 4 * ((16 + 8) + 16)
    assert pair_flops(TINY_GEMMA) == 2 * 1 * 4 * (16 + 16)


def test_layers_with_a_window_cost_the_pairs_inside_it() -> None:
    assert window_flops(TINY_GEMMA) == 2 * pair_flops(TINY_GEMMA)
    assert window_flops(TINY) == 0
    length, window = 30, 11
    pairs = length * (length + 1) / 2
    inside = sum(min(place + 1, window) for place in range(length))
    expected = token_flops(TINY_GEMMA) * length + pair_flops(TINY_GEMMA) * (pairs + 2 * inside)
    assert Cost.of_model(TINY_GEMMA).of(length) == expected

"""Models and stored bytes: there and back, bit for bit."""

import pytest
import torch

from etude.models.checkpoint import state_of
from etude.models.qwen3_moe import TINY, Qwen3Moe
from etude.run.states import build_model, resolve_device, to_stored, to_tensors
from etude.weights.codec import decode_full, encode_full
from etude.weights.state import state_digest


def make_model(seed: int) -> Qwen3Moe:
    model = Qwen3Moe(TINY)
    model.initialise(seed)
    return model


def test_a_model_survives_the_store_bit_for_bit() -> None:
    model = make_model(0)
    rebuilt = build_model(TINY, decode_full(encode_full(to_stored(state_of(model)))), "cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), rebuilt.parameters(), strict=True))
    assert state_digest(to_stored(state_of(rebuilt))) == state_digest(to_stored(state_of(model)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_type_round_trips(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    (back,) = to_tensors(to_stored({"w": tensor})).values()
    assert back.dtype is dtype
    assert torch.equal(back, tensor)


def test_the_device_is_decided_once() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") in {"cpu", "cuda"}

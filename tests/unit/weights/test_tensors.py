"""Models and stored bytes: there and back, bit for bit."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from etude.models.checkpoint import load_state, state_of
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.objects import ObjectStore
from etude.run.resolve import resolve_device
from etude.weights.digest import state_digest
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher
from etude.weights.pull import Receiver, pull
from etude.weights.state import State
from etude.weights.tensors import to_stored, to_tensors


def make_model(seed: int) -> Decoder:
    model = Decoder(TINY)
    model.initialise(seed)
    return model


def nudge(model: Decoder) -> None:
    """A small step of every weight, as training takes them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)


def rebuild(state: State) -> Decoder:
    model = Decoder(TINY)
    load_state(model, to_tensors(state))
    return model


def assert_equal(model: Decoder, rebuilt: Decoder) -> None:
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), rebuilt.parameters(), strict=True))
    assert state_digest(to_stored(state_of(rebuilt))) == state_digest(to_stored(state_of(model)))


def as_bf16(model: Decoder) -> Mapping[str, Tensor]:
    """The published weights of a model that is trained in higher precision than it is served."""
    return {name: tensor.bfloat16() for name, tensor in state_of(model).items()}


def test_a_model_survives_the_store_bit_for_bit() -> None:
    model, log = make_model(0), WeightLog(ObjectStore("memory://"))
    with Publisher(log) as publisher, Receiver(log) as receiver:
        for version in range(3):
            record = publisher.publish(to_stored(state_of(model)), version=version, step=version).result(60)
            assert record.digest == state_digest(to_stored(state_of(model)))
            receiver.advance()
            assert receiver.version == version
            assert_equal(model, rebuild(receiver.weights().state))
            nudge(model)
    for version in range(3):
        assert pull(log, version).digest == receiver_digest(version)


def receiver_digest(version: int) -> str:
    """The digest of the model above after some nudges, computed without any store."""
    model = make_model(0)
    for _ in range(version):
        nudge(model)
    return state_digest(to_stored(state_of(model)))


def test_a_model_in_fewer_bits_survives_the_store() -> None:
    model, log = make_model(0), WeightLog(ObjectStore("memory://"))
    with Publisher(log) as publisher:
        for version in range(2):
            publisher.publish(to_stored(as_bf16(model)), version=version, step=version).result(60)
            nudge(model)
    pulled = to_tensors(pull(log, 0).state)
    expected = as_bf16(make_model(0))
    assert pulled.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in pulled.items())


def test_a_model_survives_being_stored() -> None:
    model = make_model(0)
    assert_equal(model, rebuild(to_stored(state_of(model))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn])
def test_every_weight_type_round_trips(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    (back,) = to_tensors(to_stored({"w": tensor})).values()
    assert back.dtype is dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_the_device_is_decided_once() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") in {"cpu", "cuda"}

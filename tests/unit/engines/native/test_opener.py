"""Weights of the native engine change in place: bit for bit as a full load, and as a probed layout's writes."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.engines.native.opener import ResidentModel
from etude.engines.vllm.inplace import InPlaceWeights
from etude.errors import InfrastructureError, UserError
from etude.models.checkpoint import load_state, state_of
from etude.models.decoder import Decoder
from etude.models.spec import TINIEST, TINY, TINY_LATENT, ModelSpec
from etude.weights.digest import state_digest
from etude.weights.replica import ChangedNumbers, PulledWeights
from etude.weights.state import State
from etude.weights.tensors import to_stored, to_tensors

torch.set_num_threads(1)
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


def make_model(spec: ModelSpec, dtype: torch.dtype, seed: int, device: str = "cpu") -> Decoder:
    model = Decoder(spec)
    model.initialise(seed, std=0.15)
    return model.to(dtype=dtype, device=device)


def pulled_of(state: State, version: int = 0) -> PulledWeights:
    return PulledWeights(version=version, digest=state_digest(state), state=state)


def make_resident(model: Decoder, state: State) -> ResidentModel:
    return ResidentModel(model, partial(load_state, model), pulled_of(state))


def changes_between(old: State, new: State) -> dict[str, list[ChangedNumbers]]:
    """Changes in the form that a receiver reports them; two runs each, as from two ranks of a trainer."""
    changes = {}
    for name, stored in new.items():
        places = np.flatnonzero(old[name].numbers != stored.numbers)
        runs = [run for run in np.array_split(places, 2) if len(run)]
        if runs:
            changes[name] = [ChangedNumbers(indices=run.astype(np.uint64), bits=stored.numbers[run]) for run in runs]
    return changes


def nudged(model: Decoder, seed: int, share: float = 0.05) -> State:
    """Move some weights of every tensor; returns the new state, in memory of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in state_of(model).values():
            chosen = torch.rand(weights.shape, generator=generator) < share
            weights.copy_(torch.where(chosen, weights * -1.25 + 0.5, weights))
    return copied(model)


def copied(model: Decoder) -> State:
    return to_stored({name: tensor.clone() for name, tensor in state_of(model).items()})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spec",
    [*TINIEST, replace(TINY_LATENT, draft=True)],
    ids=["experts", "dense", "latent", "glm", "gemma", "oss", "draft head"],
)
def test_deltas_lead_to_the_bits_of_a_full_load_and_of_a_probed_layout(
    spec: ModelSpec, dtype: torch.dtype, device: str
) -> None:
    trained = make_model(spec, dtype, 0)
    state = copied(trained)
    resident = make_resident(make_model(spec, dtype, 1, device), state)
    model = make_model(spec, dtype, 2, device)
    load = partial(load_state, model)
    probed = InPlaceWeights(model.state_dict(), load, [stored.spec for stored in state.values()])
    load(to_tensors(state))
    for version in range(1, 4):
        new = nudged(trained, version)
        changes = changes_between(state, new)
        resident.fall_behind(changes)
        (scatter,) = resident.catch_up({})
        assert scatter.reload is None and scatter.numbers == probed.prepare(changes).numbers
        assert resident.digest() == state_digest(state), "preparing touches nothing"
        scatter.apply()
        scatter.apply()  # writes are of bits, not of differences
        probed.prepare(changes).apply()
        resident.prove(version, state_digest(new))
        assert resident.digest() == probed.digest() == state_digest(new)
        assert_same(state_of(resident.model), to_tensors(new))
        state = new


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        bits = (one.cpu().contiguous().view(-1).view(torch.uint8) for one in (actual[name], tensor))
        assert torch.equal(*bits), name


def test_a_parameter_is_written_once_however_many_of_its_tensors_changed() -> None:
    trained = make_model(TINY, torch.bfloat16, 0)
    state = copied(trained)
    resident = make_resident(make_model(TINY, torch.bfloat16, 1), state)
    resident.fall_behind(changes_between(state, nudged(trained, 1, share=0.9)))
    (scatter,) = resident.catch_up({})
    assert len(scatter.writes) == len(list(resident.model.parameters()))


def test_a_single_wrong_bit_is_noticed() -> None:
    state = copied(make_model(TINY, torch.bfloat16, 0))
    resident = make_resident(make_model(TINY, torch.bfloat16, 1), state)
    resident.model.embedding.detach().view(torch.int16)[3, 5] ^= 1
    with pytest.raises(InfrastructureError, match="loads it anew"):
        resident.prove(0, state_digest(state))


@pytest.mark.parametrize(("index", "kind", "why"), [(1 << 40, np.uint16, "cannot change"), (0, np.uint32, "its bits")])
def test_a_change_that_does_not_fit_is_refused(index: int, kind: type[np.unsignedinteger], why: str) -> None:
    state = copied(make_model(TINY, torch.bfloat16, 0))
    resident = make_resident(make_model(TINY, torch.bfloat16, 1), state)
    change = ChangedNumbers(indices=np.array([index], np.uint64), bits=np.zeros(1, kind))
    resident.fall_behind({"model.norm.weight": [change]})
    with pytest.raises(UserError, match=why):
        resident.catch_up({})

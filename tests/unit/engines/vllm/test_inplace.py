"""Weights changed in place equal those of a full load, whatever the engine's loader does with them."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.engines.vllm.inplace import InPlaceWeights
from etude.errors import UserError
from etude.models.checkpoint import load_state, state_of
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.types import TensorSpec
from etude.weights.device import STORED_TYPES
from etude.weights.digest import state_digest
from etude.weights.placement import Scattering
from etude.weights.replica import ChangedNumbers
from etude.weights.state import ELEMENTS, NUMBER_TYPES, StoredTensor

torch.set_num_threads(1)

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
devices = pytest.mark.parametrize("device", DEVICES)
Tensors = Mapping[str, Tensor]

COPIED = {
    "embed": (10, 8),
    "q": (16, 8),
    "k": (4, 8),
    "v": (4, 8),
    "gate": (12, 8),
    "up": (12, 8),
    "down": (8, 12),
    "norm": (8,),
}
COMPUTED = {"scaled": (8,), "router": (4, 8)}


class ToyEngine:
    """One rank of two: fused, split, transposed, padded, tied and replicated parameters, and two computed ones."""

    def __init__(self, rank: int, device: str = "cpu") -> None:
        self.rank = rank

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.full(shape, 7, dtype=dtype, device=device)

        self.runtime = {
            "embedding": empty(16, 8),
            "head": empty(8, 16),
            "qkv": empty(12, 8),
            "kv_twice": empty(8, 8),
            "gate_up": empty(12, 8),
            "down": empty(6, 8),
            "norm": empty(8),
            "scaled": empty(8),
            "router_codes": empty(4, 8, dtype=torch.int8),
            "router_scale": empty(1, dtype=torch.float32),
            "positions": empty(5, dtype=torch.int64),
        }

    def load(self, tensors: Tensors) -> None:
        runtime = self.runtime
        half = {name: tensor.chunk(2)[self.rank] for name, tensor in tensors.items() if tensor.ndim == 2}
        runtime["embedding"][:10].copy_(tensors["embed"])
        runtime["head"][:, :10].copy_(tensors["embed"].t())
        runtime["qkv"].copy_(torch.cat([half["q"], half["k"], half["v"]]))
        runtime["kv_twice"].copy_(half["k"].repeat_interleave(2, 0).repeat(2, 1))
        runtime["gate_up"].copy_(torch.cat([half["gate"], half["up"]]))
        runtime["down"].copy_(tensors["down"].chunk(2, dim=1)[self.rank].t())
        runtime["norm"].copy_(tensors["norm"])
        if "scaled" in tensors:
            runtime["scaled"].copy_(tensors["scaled"] * 3)
            scale = tensors["router"].float().abs().max() / 127
            runtime["router_codes"].copy_((tensors["router"].float() / scale).round().nan_to_num().to(torch.int8))
            runtime["router_scale"].copy_(scale)


def random_checkpoint(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def specs_of(tensors: Tensors) -> list[TensorSpec]:
    return [
        TensorSpec(name=name, dtype=STORED_TYPES[tensor.dtype], shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def bits_of(tensor: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]":
    size = ELEMENTS[STORED_TYPES[tensor.dtype]].size_bytes
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().view(NUMBER_TYPES[size])


def digest_of(tensors: Tensors) -> str:
    stored = [StoredTensor(spec=spec, data=bits_of(tensors[spec.name]).view(np.uint8)) for spec in specs_of(tensors)]
    return state_digest({tensor.spec.name: tensor for tensor in stored})


def nudged(tensors: Tensors, names: list[str], seed: int, share: float = 0.05) -> dict[str, Tensor]:
    """Some numbers of some tensors get other bits, at least one of each."""
    generator = torch.Generator().manual_seed(seed)
    result = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in names:
        flat = result[name].view(-1)
        chosen = torch.rand(len(flat), generator=generator) < share
        chosen[-1] = True
        flat[chosen] = (flat[chosen].float() * -1.25 + 0.5).to(flat.dtype)
    return result


def changes_between(old: Tensors, new: Tensors) -> dict[str, list[ChangedNumbers]]:
    """Changes in the form that a receiver reports them; two runs each, as from two ranks of a trainer."""
    changes = {}
    for name in old:
        before, after = bits_of(old[name]), bits_of(new[name])
        places = np.flatnonzero(before != after)
        if len(places):
            runs = np.array_split(places, 2)
            changes[name] = [ChangedNumbers(indices=run.astype(np.uint64), bits=after[run]) for run in runs]
    return changes


def assert_same(actual: Tensors, expected: Tensors) -> None:
    for name, tensor in expected.items():
        assert torch.equal(actual[name].cpu().view(-1).view(torch.uint8), tensor.cpu().view(-1).view(torch.uint8)), name


@devices
@pytest.mark.parametrize("rank", [0, 1])
def test_a_change_in_place_is_a_full_load(rank: int, device: str) -> None:
    engine, reference = ToyEngine(rank, device), ToyEngine(rank, device)
    old = random_checkpoint(COPIED | COMPUTED, 0)
    weights = InPlaceWeights(engine.runtime, engine.load, specs_of(old))
    engine.load(old)
    for seed in range(3):
        new = nudged(old, list(COPIED), seed)
        scatter = weights.prepare(changes_between(old, new))
        assert scatter.reload is None
        scatter.apply()
        scatter.apply()  # writes are of bits, not of differences
        reference.load(new)
        assert_same(engine.runtime, reference.runtime)
        old = new


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (COPIED | COMPUTED, "the engine computes 'router_codes'"),
        (COPIED, "the engine holds 64 of the 128 numbers of 'q'"),
    ],
    ids=["computed", "a part"],
)
def test_what_is_no_copy_of_everything_is_noticed(shapes: Mapping[str, tuple[int, ...]], words: str) -> None:
    engine = ToyEngine(0)
    weights = InPlaceWeights(engine.runtime, engine.load, specs_of(random_checkpoint(shapes, 0)))
    assert weights.misfit == words


def test_a_change_costs_what_changed() -> None:
    engine = ToyEngine(1)
    old = random_checkpoint(COPIED | COMPUTED, 0)
    weights = InPlaceWeights(engine.runtime, engine.load, specs_of(old))
    places = {"embed": 2, "norm": 1}
    for name, count in places.items():
        changes = changes_between(old, nudged(old, [name], 3, share=0.1))
        changed = sum(len(run.indices) for run in changes[name])
        assert weights.prepare(changes).numbers == changed * count
    other_rank = {"k": [ChangedNumbers(indices=np.array([0, 5], np.uint64), bits=np.zeros(2, np.uint16))]}
    this_rank = {"k": [ChangedNumbers(indices=np.array([17, 31], np.uint64), bits=np.zeros(2, np.uint16))]}
    assert weights.prepare(other_rank).numbers == 0
    assert weights.prepare(this_rank).numbers == 2 * (1 + 4)


def make_model(dtype: torch.dtype, seed: int, device: str = "cpu") -> Decoder:
    model = Decoder(TINY)
    model.initialise(seed, std=0.15)
    return model.to(dtype=dtype, device=device)


def probed(model: Decoder, state: Tensors, **options: int) -> InPlaceWeights:
    """The in-place weights of an engine with ``load_state`` as its loader."""
    return InPlaceWeights(
        dict(model.named_parameters()), lambda tensors: load_state(model, tensors), specs_of(state), **options
    )


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_is_followed_in_place_and_proves_it(dtype: torch.dtype, device: str) -> None:
    old = {name: tensor.clone() for name, tensor in state_of(make_model(dtype, 0)).items()}
    new = nudged(old, list(old), 1)
    model = make_model(dtype, 7, device)
    weights = probed(model, old)
    assert not weights.misfit
    assert len(weights.placement.blocks) == len(old)
    load_state(model, old)
    assert weights.digest() == digest_of(old)
    scatter = weights.prepare(changes_between(old, new))
    assert weights.digest() == digest_of(old)  # preparing touches nothing
    assert scatter.numbers == sum(int((bits_of(old[name]) != bits_of(new[name])).sum()) for name in old)
    scatter.apply()
    assert weights.digest() == digest_of(new)
    assert_same(state_of(model), new)


def test_a_single_wrong_bit_shows_in_the_digest() -> None:
    model = make_model(torch.bfloat16, 0)
    state = {name: tensor.clone() for name, tensor in state_of(model).items()}
    weights = probed(model, state)
    load_state(model, state)
    bits = model.embedding.detach().view(torch.int16)
    bits[3, 5] ^= 1
    assert weights.digest() != digest_of(state)
    bits[3, 5] ^= 1
    assert weights.digest() == digest_of(state)


def test_probing_parameters_in_groups_finds_the_same() -> None:
    state = state_of(make_model(torch.bfloat16, 0))
    batched, apart = (probed(make_model(torch.bfloat16, 1), state, probe_bytes=size) for size in (1 << 30, 1))
    assert batched.placement.blocks == apart.placement.blocks


@pytest.mark.parametrize(
    ("published", "resident", "is_exact"),
    [(torch.bfloat16, torch.float32, True), (torch.float32, torch.bfloat16, False)],
)
def test_a_loader_may_cast(published: torch.dtype, resident: torch.dtype, is_exact: bool) -> None:
    old = {name: tensor.clone() for name, tensor in state_of(make_model(published, 0)).items()}
    new = nudged(old, list(old), 1)
    model, reference = make_model(resident, 7), make_model(resident, 8)
    weights = probed(model, old)
    load_state(model, old)
    weights.prepare(changes_between(old, new)).apply()
    load_state(reference, new)
    assert_same(state_of(model), state_of(reference))
    assert ("in another form" in weights.misfit) != is_exact
    assert (weights.digest() == digest_of(new)) == is_exact


@pytest.mark.parametrize("dtype", STORED_TYPES, ids=STORED_TYPES.values())
def test_every_stored_type_is_placed_or_a_misfit(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    high = 2 if dtype is torch.bool else 64

    def checkpoint() -> dict[str, Tensor]:
        raw = torch.from_numpy(rng.integers(0, high, 48 * dtype.itemsize).astype(np.uint8))
        return {"w": raw.view(dtype).view(6, 8)}

    runtime = {"p": torch.zeros(6, 8, dtype=dtype)}

    def load(tensors: Tensors) -> None:
        runtime["p"].view(torch.uint8).copy_(tensors["w"].view(torch.uint8))

    old, new = checkpoint(), checkpoint()
    weights = InPlaceWeights(runtime, load, specs_of(old))
    load(old)
    if dtype is torch.bool or dtype.itemsize == 8:
        assert weights.misfit.startswith("the engine holds 0 of")
    else:
        assert not weights.misfit
        weights.prepare(changes_between(old, new)).apply()
        assert_same(runtime, {"p": new["w"]})


def test_a_loader_without_order_is_followed_too() -> None:
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(0))
    runtime = {"p": torch.zeros(4096, dtype=torch.bfloat16)}
    old = random_checkpoint({"w": (64, 64)}, 0)
    new = nudged(old, ["w"], 1)

    def load(tensors: Tensors) -> None:
        runtime["p"].copy_(tensors["w"].view(-1)[order])

    weights = InPlaceWeights(runtime, load, specs_of(old))
    assert [type(block) for block in weights.placement.blocks] == [Scattering]
    load(old)
    weights.prepare(changes_between(old, new)).apply()
    assert torch.equal(runtime["p"], new["w"].view(-1)[order])
    assert weights.digest() == digest_of(new)


@pytest.mark.parametrize(
    "compute",
    [torch.abs, torch.neg, lambda w: w + 1, lambda w: w * 0.5, lambda w: w.clamp(-1e6, 1e6), lambda w: w.cumsum(1)],
    ids=["abs", "neg", "shift", "halve", "clamp", "sum"],
)
def test_nothing_but_copies_passes_for_a_copy(compute: Callable[[Tensor], Tensor]) -> None:
    runtime = {"p": torch.zeros(8, 16, dtype=torch.bfloat16), "whole": torch.zeros(8, 16, dtype=torch.bfloat16)}

    def load(tensors: Tensors) -> None:
        runtime["p"].copy_(compute(tensors["w"]))
        runtime["whole"].copy_(tensors["other"])

    state = random_checkpoint({"w": (8, 16), "other": (8, 16)}, 0)
    weights = InPlaceWeights(runtime, load, specs_of(state))
    assert weights.misfit == "the engine computes 'p'"


def test_what_cannot_be_followed_is_refused() -> None:
    state = random_checkpoint({"w": (8, 16)}, 0)
    transposed = torch.zeros(16, 8, dtype=torch.bfloat16).t()
    with pytest.raises(UserError, match="not contiguous"):
        InPlaceWeights({"p": transposed}, lambda tensors: None, specs_of(state))
    runtime = torch.zeros(8, 16, dtype=torch.bfloat16)

    def load(tensors: Tensors) -> None:
        runtime.copy_(tensors["w"])

    weights = InPlaceWeights({"p": runtime}, load, specs_of(state))
    change = ChangedNumbers(indices=np.array([128], np.uint64), bits=np.zeros(1, np.uint16))
    with pytest.raises(UserError, match="number 128 cannot change"):
        weights.prepare({"w": [change]})
    with pytest.raises(UserError, match="probe again"):
        weights.prepare({"new": [change]})
    wide = ChangedNumbers(indices=np.array([1], np.uint64), bits=np.zeros(1, np.uint32))
    with pytest.raises(UserError, match="its bits are uint16"):
        weights.prepare({"w": [wide]})

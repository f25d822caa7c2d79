"""Weights of an external engine are verified before they are loaded, with or without access to its parameters."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.engines.vllm.host_copy import HostCopy, RuntimeWeights
from etude.engines.vllm.patches import Patch
from etude.errors import DamagedError
from etude.types import TensorSpec
from etude.weights.digest import state_digest
from etude.weights.replica import ChangedNumbers
from etude.weights.state import StoredTensor, snapshot

torch.set_num_threads(1)
SHAPES = {"up": (6, 4), "gate": (6, 4), "norm": (4,)}


class ForeignEngine:
    """Fuses two matrices, as most engines do; ``fails`` makes a load break off half-way."""

    def __init__(self) -> None:
        self.runtime = {"fused": torch.zeros(12, 4), "norm": torch.zeros(4)}
        self.loads = 0
        self.fails = False

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.loads += 1
        self.runtime["fused"][:6].copy_(tensors["up"])
        if self.fails:
            raise RuntimeError("out of memory")
        self.runtime["fused"][6:].copy_(tensors["gate"])
        self.runtime["norm"].copy_(tensors["norm"])


def make_state(seed: int) -> dict[str, StoredTensor]:
    rng = np.random.default_rng(seed)
    return {
        name: StoredTensor(
            spec=TensorSpec(name=name, dtype="F32", shape=shape),
            data=rng.normal(size=shape).astype(np.float32).reshape(-1).view(np.uint8),
        )
        for name, shape in SHAPES.items()
    }


def changed(state: dict[str, StoredTensor], name: str, indices: list[int]) -> tuple[dict[str, StoredTensor], Patch]:
    """Some numbers of one tensor doubled, in two runs."""
    after = snapshot(state)
    after[name].data.view(np.float32)[indices] *= 2
    runs = [
        ChangedNumbers(indices=np.array(part, np.uint64), bits=after[name].numbers[part])
        for part in (indices[:1], indices[1:])
    ]
    return after, Patch(base=state_digest(state), digest=state_digest(after), changes={name: runs})


@pytest.mark.parametrize("is_open", [False, True])
def test_a_patch_leads_where_a_full_load_would(is_open: bool) -> None:
    state = make_state(0)
    engine, fresh = ForeignEngine(), ForeignEngine()
    copy = HostCopy(state, state_digest(state))
    weights = RuntimeWeights(copy, engine.load, engine.runtime if is_open else None)
    loads = engine.loads
    after, patch = changed(state, "gate", [3, 5, 23])
    weights.follow(patch)
    fresh.load(
        {
            name: torch.from_numpy(stored.data).view(torch.float32).view(stored.spec.shape)
            for name, stored in after.items()
        }
    )
    assert all(torch.equal(engine.runtime[name], fresh.runtime[name]) for name in fresh.runtime)
    assert engine.loads - loads == (0 if is_open else 1)
    assert weights.digest() == state_digest(after)

    weights.replace(HostCopy(state, state_digest(state)))
    assert weights.digest() == state_digest(state)


class ScalingEngine(ForeignEngine):
    """Computes one of its parameters."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load({**tensors, "norm": tensors["norm"] * 0.5})


def test_an_engine_that_computes_is_loaded_whole() -> None:
    state, engine = make_state(5), ScalingEngine()
    weights = RuntimeWeights(HostCopy(state, state_digest(state)), engine.load, engine.runtime)
    loads = engine.loads
    after, patch = changed(state, "gate", [3, 5, 23])
    weights.follow(patch)
    assert engine.loads - loads == 1
    assert torch.equal(engine.runtime["fused"][6:].flatten().view(torch.uint8), torch.from_numpy(after["gate"].data))
    assert weights.digest() == state_digest(after)


@pytest.mark.parametrize("fault", ["digest", "base", "name", "index", "type"])
def test_a_wrong_patch_is_refused_and_nothing_is_touched(fault: str) -> None:
    state = make_state(1)
    engine = ForeignEngine()
    weights = RuntimeWeights(HostCopy(state, state_digest(state)), engine.load, None)
    before, loads = engine.runtime["fused"].clone(), engine.loads
    _, patch = changed(state, "up", [1, 2])
    first, second = patch.changes["up"]
    wrong = {
        "digest": Patch(base=patch.base, digest="0" * 32, changes=patch.changes),
        "base": Patch(base=patch.digest, digest=patch.base, changes=patch.changes),
        "name": Patch(base=patch.base, digest=patch.digest, changes={"up": [first], "nobody": [second]}),
        "index": Patch(
            base=patch.base,
            digest=patch.digest,
            changes={"up": [first, ChangedNumbers(indices=np.array([24], np.uint64), bits=second.bits)]},
        ),
        "type": Patch(
            base=patch.base,
            digest=patch.digest,
            changes={"up": [first, ChangedNumbers(indices=second.indices, bits=second.bits.astype(np.uint16))]},
        ),
    }[fault]
    with pytest.raises(DamagedError):
        weights.follow(wrong)
    assert torch.equal(engine.runtime["fused"], before)
    assert engine.loads == loads
    assert weights.digest() == state_digest(state)
    weights.follow(patch)  # the copy is whole, too
    assert weights.digest() == patch.digest


def test_a_checkpoint_of_another_digest_is_refused() -> None:
    with pytest.raises(DamagedError, match="another version"):
        HostCopy(make_state(2), state_digest(make_state(3)))


def test_a_load_that_broke_off_is_not_passed_off_as_whole() -> None:
    state = make_state(4)
    engine = ForeignEngine()
    weights = RuntimeWeights(HostCopy(state, state_digest(state)), engine.load, None)
    _, patch = changed(state, "gate", [0, 7])
    engine.fails = True
    with pytest.raises(RuntimeError):
        weights.follow(patch)
    with pytest.raises(DamagedError, match="half-way"):
        weights.digest()

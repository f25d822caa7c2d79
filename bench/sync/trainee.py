"""The two ends of `bench sync` without the network: a model that trains, and one that serves.

The weights are synthetic, but change as real ones do: fp32 masters, published as bf16, take Adam-sized steps that do
not depend on the weight, so the smaller a weight's exponent the likelier it changes (research: twice as likely per
exponent). Names and shapes are those of a Qwen3-MoE, so that the native engine can hold them.
"""

import time
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from etude.models.checkpoint import load_checkpoint, load_state, save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import ExpertsSpec, GroupedSpec, ModelSpec
from etude.types import TensorSpec
from etude.weights.state import State, StoredTensor
from etude.weights.tensors import to_tensors

INITIAL_SCALE = 0.02
STEP_SCALE = 4e-7
"""Standard deviation of a master's step; changes about 1.5 % of the published weights."""

Masters = npt.NDArray[np.float32]


def model_spec(layers: int) -> ModelSpec:
    """A model of 8.4 MB and 11.1 MB per layer, in bf16."""
    return ModelSpec(
        vocab_size=8192,
        hidden_size=512,
        layers=layers,
        attention=GroupedSpec(heads=8, kv_heads=4, head_dim=64, normed=True),
        experts=ExpertsSpec(count=16, per_token=2, size=192),
        sparse_layers=tuple(range(layers)),
    )


@final
class TrainedWeights:
    """Weights on the trainer's side; equal seeds give equal weights, version by version, everywhere."""

    def __init__(self, layers: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        with torch.device("meta"):
            shapes = {name: tuple(tensor.shape) for name, tensor in state_of(Decoder(model_spec(layers))).items()}
        self._specs = [TensorSpec(name=name, dtype="BF16", shape=shape) for name, shape in shapes.items()]
        self._masters: list[Masters] = [
            self._random.standard_normal(int(np.prod(spec.shape)), dtype=np.float32) * np.float32(INITIAL_SCALE)
            for spec in self._specs
        ]
        self.state: State = self._published()

    def step(self) -> int:
        """One optimiser step; ``state`` is new afterwards, the old one untouched. Returns how many numbers differ."""
        for masters in self._masters:
            masters += self._random.standard_normal(len(masters), dtype=np.float32) * np.float32(STEP_SCALE)
        before, self.state = self.state, self._published()
        return sum(int(np.count_nonzero(before[name].numbers != self.state[name].numbers)) for name in before)

    def _published(self) -> State:
        return {
            spec.name: StoredTensor(spec=spec, data=_rounded(masters).view(np.uint8))
            for spec, masters in zip(self._specs, self._masters, strict=True)
        }


@final
class ReloadedModel:
    """An engine's model that reloads new weights in full, through its loader, while sampling is paused."""

    def __init__(self, layers: int) -> None:
        self._spec = model_spec(layers)
        self._model = Decoder(self._spec).to(torch.bfloat16).eval()

    def load(self, state: State) -> float:
        """Load from host memory; returns the seconds this took."""
        tensors = to_tensors(state)
        started_s = time.perf_counter()
        load_state(self._model, tensors)
        return time.perf_counter() - started_s

    def load_checkpoint(self, folder: Path) -> float:
        """Load a checkpoint from the local disk (out of the page cache); returns the seconds this took."""
        started_s = time.perf_counter()
        load_state(self._model, load_checkpoint(folder)[1])
        return time.perf_counter() - started_s

    def save_checkpoint(self, folder: Path, state: State) -> None:
        """Write what :meth:`load_checkpoint` reads."""
        save_checkpoint(folder, self._spec, to_tensors(state), end_id=0, pad_id=0)


def _rounded(masters: Masters) -> npt.NDArray[np.unsignedinteger[Any]]:
    """[n] float32 → [n] bits of the nearest bf16, ties to even; for finite values."""
    bits = masters.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype(np.uint16)

"""Between tensors and published bytes: where the model's world and the weight store's meet.

The store knows names, bytes and digests; models know tensors. Neither knows the other, so the two conversions live
with the compositions that need them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from etude.models.checkpoint import load_state
from etude.models.qwen3_moe import ModelSpec, Qwen3Moe
from etude.types import TensorSpec
from etude.weights.state import State, StoredTensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Stored type → torch type, for what a model's weights may be."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def to_stored(state: Mapping[str, Tensor]) -> State:
    """The bytes of a model's state; tensors already on the CPU and contiguous are not copied."""
    return {name: _stored(name, tensor.detach().cpu().contiguous()) for name, tensor in state.items()}


def to_tensors(state: State) -> dict[str, Tensor]:
    """Tensors over a state's bytes; they share memory with it and must not be written to."""
    return {
        name: torch.from_numpy(stored.data).view(DTYPES[stored.spec.dtype]).view(stored.spec.shape)
        for name, stored in state.items()
    }


def build_model(spec: ModelSpec, state: State, device: str) -> Qwen3Moe:
    """A model that holds a copy of a published state."""
    model = Qwen3Moe(spec).to(device)
    load_state(model, to_tensors(state))
    return model.eval()


def resolve_device(name: str) -> str:
    """The device that ``auto`` stands for on this machine."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _stored(name: str, tensor: Tensor) -> StoredTensor:
    spec = TensorSpec(name=name, dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape))
    return StoredTensor(spec=spec, data=tensor.view(-1).view(torch.uint8).numpy())

"""Between tensors and published bytes: where the model's world and the weight store's meet.

The store knows names, bytes and digests; models know tensors. Neither knows the other, so the two conversions live
with the compositions that need them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from etude.engines.weights.parameters import TORCH_TYPES
from etude.types import TensorSpec
from etude.weights.device import STORED_TYPES
from etude.weights.state import State, StoredTensor


def to_stored(state: Mapping[str, Tensor]) -> State:
    """The bytes of a model's state; tensors already on the CPU and contiguous are not copied."""
    return {name: _stored(name, tensor.detach().cpu().contiguous()) for name, tensor in state.items()}


def to_tensors(state: State) -> dict[str, Tensor]:
    """Tensors over a state's bytes; they share memory with it and must not be written to."""
    return {
        name: torch.from_numpy(stored.data).view(TORCH_TYPES[stored.spec.dtype]).view(stored.spec.shape)
        for name, stored in state.items()
    }


def _stored(name: str, tensor: Tensor) -> StoredTensor:
    spec = TensorSpec(name=name, dtype=STORED_TYPES[tensor.dtype], shape=tuple(tensor.shape))
    return StoredTensor(spec=spec, data=tensor.view(-1).view(torch.uint8).numpy())

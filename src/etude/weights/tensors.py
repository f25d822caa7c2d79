"""Conversions between torch's tensors and published bytes.

The store knows names, bytes and digests, models know tensors; the two meet here and in ``device.py``.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from etude.types import TensorSpec
from etude.weights.device import STORED_TYPES
from etude.weights.state import State, StoredTensor

TORCH_TYPES: Mapping[str, torch.dtype] = MappingProxyType({name: dtype for dtype, name in STORED_TYPES.items()})
"""Stored type → torch type."""


def to_stored(state: Mapping[str, Tensor]) -> State:
    """Convert a model's state to bytes; tensors already on the CPU and contiguous are not copied."""
    return {name: _stored(name, tensor.detach().cpu().contiguous()) for name, tensor in state.items()}


def to_tensors(state: State) -> dict[str, Tensor]:
    """View a state's bytes as tensors; they share memory and must not be written to."""
    return {
        name: torch.from_numpy(stored.data).view(TORCH_TYPES[stored.spec.dtype]).view(stored.spec.shape)
        for name, stored in state.items()
    }


def _stored(name: str, tensor: Tensor) -> StoredTensor:
    spec = TensorSpec(name=name, dtype=STORED_TYPES[tensor.dtype], shape=tuple(tensor.shape))
    return StoredTensor(spec=spec, data=tensor.view(-1).view(torch.uint8).numpy())

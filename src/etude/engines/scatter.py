"""Prepared writes of changed numbers into an engine's parameters, on any device.

A write has positions and bits, not differences: applied twice, or again after a crash, it gives the same weights. The
engine kind maps numbers of a checkpoint to parameters. Also runs inside vLLM's process, so it imports only numpy, torch
and numba.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias, final

import torch
from torch import Tensor

from etude.errors import UserError
from etude.types import TensorSpec
from etude.weights.kernels import put_numbers
from etude.weights.replica import ChangedNumbers
from etude.weights.state import ELEMENTS, NUMBER_TYPES, spec_bytes

SIGNED: Mapping[int, torch.dtype] = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""Bytes of a number → the integer type its bits are written as."""
RELOAD_SHARE = 8
"""If one number in this many has changed, a full load moves no more bytes than their positions (8) and bits (2)."""

Load: TypeAlias = Callable[[Mapping[str, Tensor]], None]
"""Writes a whole checkpoint, given as CPU tensors by name, into the parameters, in place."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """New bits for some positions of one parameter, on its device."""

    parameter: Tensor
    """[n] the parameter's values as integers of their width; shares its memory."""
    positions: Tensor
    """[k] int64"""
    bits: Tensor
    """[k]"""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scatter:
    """A prepared update of some or all numbers of parameters."""

    writes: tuple[Write, ...]
    reload: Callable[[], None] | None = None
    """Loads everything instead, if something changed that cannot be written number by number."""

    @property
    def numbers(self) -> int:
        """Count of the values that the writes set."""
        return sum(len(write.positions) for write in self.writes)

    @torch.no_grad()
    def apply(self) -> None:
        """Write. Nothing may read the weights meanwhile; on a GPU, later launches on the same stream see the result."""
        if self.reload is not None:
            self.reload()
        for write in self.writes:
            if write.parameter.is_cuda:
                write.parameter.index_put_((write.positions,), write.bits)
            else:  # torch takes twice as long
                put_numbers(*(tensor.numpy() for tensor in (write.parameter, write.positions, write.bits)))


def write_to(parameter: Tensor, positions: Tensor, bits: Tensor) -> Write:
    """Copy positions and bits to the device of a parameter, which is viewed as integers."""
    return Write(parameter=parameter, positions=positions.to(parameter.device), bits=bits.to(parameter.device))


def scatter_of(writes: Iterable[Write]) -> Scatter:
    """The update that consists of these writes; it may be applied on another CUDA stream."""
    scatter = Scatter(writes=tuple(writes))
    for device in {write.positions.device for write in scatter.writes if write.positions.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return scatter


def numbers_of(spec: TensorSpec) -> int:
    """Number of elements of a tensor."""
    return spec_bytes(spec) // ELEMENTS[spec.dtype].size_bytes


def check_change(spec: TensorSpec, run: ChangedNumbers) -> None:
    """Raise :class:`~etude.errors.UserError` for positions outside a tensor, or numbers of another width."""
    if len(run.indices) and int(run.indices[-1]) >= numbers_of(spec):
        raise UserError(f"tensor {spec.name!r} has {numbers_of(spec)} numbers, number {run.indices[-1]} cannot change")
    expected = NUMBER_TYPES[ELEMENTS[spec.dtype].size_bytes]
    if run.bits.dtype != expected:
        raise UserError(f"tensor {spec.name!r} is {spec.dtype}: its bits are {expected.__name__}, not {run.bits.dtype}")

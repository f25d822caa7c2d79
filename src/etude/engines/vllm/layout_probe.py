"""Finds an engine's parameter layout: loads numbers that encode their origin, and reads their positions.

    random bits, and their complements  ──loader──▶  positions that the loader writes
    digits of codes, highest first      ──loader──▶  source of each position: tensor and number
    random bits again                   ──loader──▶  proof that the map found explains every bit

A parameter that fails any of these is *computed*: scaled, quantised, summed. The only assumption about the loader is
that it is a function of the checkpoint. This file owns the loads; codes and maps are in ``weights/placement.py``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.engines.scatter import SIGNED, Load
from etude.errors import UserError
from etude.types import TensorSpec
from etude.weights.device import STORED_TYPES
from etude.weights.placement import (
    NO_CODE,
    Block,
    Flags,
    Numbering,
    Places,
    digit,
    digit_base,
    digit_count,
    random_bits,
)
from etude.weights.state import ELEMENTS
from etude.weights.tensors import TORCH_TYPES

Make: TypeAlias = Callable[[TensorSpec, Places], Tensor]
"""(tensor, the codes of its numbers [n]) → values [n] to load."""

BYTES_PER_CODE = 24
"""Host memory for reading one position: its code, two copies of its bits, the decoded digit, flags."""


@final
class Parameter:
    """One flat parameter of an engine: its values in row-major order, and their bits.

    Raises :class:`~etude.errors.UserError` for a tensor that is not contiguous or has an unsupported type.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise UserError(
                f"parameter {name!r} of shape {list(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
                "pass the tensor that it is a view of"
            )
        if tensor.dtype not in STORED_TYPES:
            raise UserError(f"parameter {name!r} is {tensor.dtype}, which is not stored; view it as torch.uint8")
        self.values = tensor.detach().view(-1)
        self.bits = self.values.view(SIGNED[tensor.dtype.itemsize])

    def read_bits(self) -> npt.NDArray[np.signedinteger[Any]]:
        """[n] a copy on the host."""
        return self.bits.cpu().numpy().copy()

    def read_values(self) -> npt.NDArray[np.float64]:
        """[n] its values as numbers: E8M0 exponents as integers, the real parts of complex ones."""
        values = self.values.cpu()
        if values.dtype is torch.float8_e8m0fnu:
            values = values.view(torch.uint8)
        elif values.is_complex():
            values = values.real
        return values.to(torch.float64).numpy()

    def cast(self, values: Tensor) -> Tensor:
        """The bits of host values in this parameter's type."""
        return values.to(self.values.dtype).view(self.bits.dtype)

    def keeps(self, spec: TensorSpec) -> bool:
        """Report whether every value of a tensor's type can be read back from it."""
        stored, own = ELEMENTS[spec.dtype], ELEMENTS[STORED_TYPES[self.values.dtype]]
        if stored.name == own.name:
            return True
        is_wider = own.exponent_bits >= stored.exponent_bits and own.mantissa_bits >= stored.mantissa_bits
        return stored.is_float and own.is_float and is_wider

    def stored(self, bits: Tensor, spec: TensorSpec) -> Tensor:
        """The values, in a tensor's type, that some bits of this parameter represent."""
        return bits.contiguous().view(self.values.dtype).to(TORCH_TYPES[spec.dtype])


@final
class LayoutProbe:
    """A probe that finds the layout of parameters by loading coded checkpoints with an engine's loader.

    For each group of parameters that fits into ``limit_bytes`` of host memory, it takes one load per digit of the
    largest code and two more; and a final one to verify the map.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], load: Load, specs: tuple[TensorSpec, ...], limit_bytes: int
    ) -> None:
        self._parameters = parameters
        self._load = load
        self._specs = specs
        self._limit_bytes = limit_bytes
        self._numbering = Numbering.of(specs)
        types = {spec.dtype for spec in self._numbering.specs}
        types |= {STORED_TYPES[parameter.values.dtype] for parameter in parameters.values()}
        self._base = digit_base(ELEMENTS[name] for name in types if name != "BOOL")
        self.computed: set[str] = set()
        """Parameters that are not mere copies of numbers."""

    def blocks(self) -> list[Block]:
        """The positions of all numbers in parameters that are copies; the others are added to :attr:`computed`."""
        blocks: dict[str, list[Block]] = {}
        for names in self._groups():
            for name, codes in self._read(names).items():
                if codes is None:
                    self.computed.add(name)
                else:
                    blocks[name] = self._numbering.blocks(name, codes)
        self._fill(partial(_random_values, flipped=False))
        self.computed |= {name for name, own in blocks.items() if not self._explains(name, own)}
        return [block for name, own in blocks.items() if name not in self.computed for block in own]

    def _groups(self) -> Iterator[list[str]]:
        """Groups of parameters that can be read together; one that is too large is read alone."""
        group: list[str] = []
        size = 0
        for name, parameter in self._parameters.items():
            needed = parameter.values.numel() * BYTES_PER_CODE
            if group and size + needed > self._limit_bytes:
                yield group
                group, size = [], 0
            group.append(name)
            size += needed
        if group:
            yield group

    def _read(self, names: Sequence[str]) -> dict[str, Places | None]:
        """The code at every position of some parameters; ``None`` for a parameter with anything other than codes."""
        readings = {name: _ProbeReading(self._parameters[name]) for name in names}
        for flipped in (False, True):
            self._fill(partial(_random_values, flipped=flipped))
            for reading in readings.values():
                reading.note()
        for place in reversed(range(digit_count(self._numbering.end, self._base))):
            self._fill(partial(_digit_values, place=place, base=self._base))
            for reading in readings.values():
                reading.note()
                reading.note_digit(self._base)
        return {name: reading.codes(self._numbering.end) for name, reading in readings.items()}

    def _explains(self, name: str, blocks: Sequence[Block]) -> bool:
        """Report whether the loaded random bits are at the positions of the blocks, cast to the parameter's type."""
        parameter = self._parameters[name]
        actual = parameter.read_bits()
        specs = {spec.name: (spec, first) for spec, first, _ in self._numbering.codes()}
        for part in (part for block in blocks for part in block.parts()):
            spec, first = specs[part.tensor]
            indices, positions = part.expand()
            expected = parameter.cast(_random_values(spec, first + indices, flipped=False)).numpy()
            if not np.array_equal(actual[positions], expected):
                return False
        return True

    def _fill(self, make: Make) -> None:
        self._load(_Pattern(self._specs, self._numbering, make))


class _ProbeReading:
    """The values at the positions of one parameter over several loads."""

    def __init__(self, parameter: Parameter) -> None:
        self._parameter = parameter
        count = parameter.values.numel()
        self._before: npt.NDArray[np.signedinteger[Any]] | None = None
        self._varied: Flags = np.zeros(count, np.bool_)
        self._legible: Flags = np.ones(count, np.bool_)
        self._codes: Places = np.zeros(count, np.int64)

    def note(self) -> None:
        """Record the positions that differ from the previous load."""
        bits = self._parameter.read_bits()
        if self._before is not None:
            self._varied |= bits != self._before
        self._before = bits

    def note_digit(self, base: int) -> None:
        """Read the next lower digit of all codes."""
        values = self._parameter.read_values()
        legible = (values >= 0) & (values < base) & (values == np.floor(values))
        self._legible &= legible
        self._codes = self._codes * base + np.where(legible, values, 0).astype(np.int64)

    def codes(self, end: int) -> Places | None:
        """[n] codes, :data:`NO_CODE` at positions that never changed; ``None`` if a changed position has no code."""
        is_code = self._legible & (self._codes > NO_CODE) & (self._codes < end)
        if not is_code[self._varied].all():
            return None
        return np.where(self._varied, self._codes, NO_CODE)


class _Pattern(Mapping[str, Tensor]):
    """A checkpoint that generates each tensor when it is read; tensors without codes are zeros."""

    def __init__(self, specs: tuple[TensorSpec, ...], numbering: Numbering, make: Make) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._codes = {spec.name: (first, end) for spec, first, end in numbering.codes()}
        self._make = make

    def __getitem__(self, name: str) -> Tensor:
        spec = self._specs[name]
        if name not in self._codes:
            return torch.zeros(spec.shape, dtype=TORCH_TYPES[spec.dtype])
        return self._make(spec, np.arange(*self._codes[name], dtype=np.int64)).view(spec.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def _random_values(spec: TensorSpec, codes: Places, *, flipped: bool) -> Tensor:
    bits = random_bits(codes, ELEMENTS[spec.dtype], flipped=flipped)
    return torch.from_numpy(bits).view(TORCH_TYPES[spec.dtype])


def _digit_values(spec: TensorSpec, codes: Places, *, place: int, base: int) -> Tensor:
    return _integers(spec, digit(codes, place, base))


def _integers(spec: TensorSpec, integers: Places) -> Tensor:
    """[k] small integers as values of a tensor's type; as exponents if the type has only these."""
    dtype = TORCH_TYPES[spec.dtype]
    values = torch.from_numpy(integers)
    return values.to(torch.uint8).view(dtype) if dtype is torch.float8_e8m0fnu else values.to(dtype)

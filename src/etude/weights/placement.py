"""The map from a checkpoint's numbers to the parameters that an engine computes with.

An engine keeps weights fused, stacked, sliced, transposed or padded; a change names checkpoint tensors and canonical
indices. A :class:`Placement` is the map between the two, so that a change costs what changed and not the model's size.
It is learned by probing: every number of the checkpoint gets a *code*, its loader is given the codes digit by digit,
and what then lies in the parameters says where it came from (``engines/vllm/inplace.py`` does that; the numbers a
probe loads are here). Real layouts are affine in blocks, so a map of a billion codes becomes a handful of rectangles:

    q_proj  [256, 128]  ──▶  qkv rows   0–63     Rectangle(region = rows 128–191 of q_proj, position = 0, …)
    k_proj  [ 64, 128]  ──▶  qkv rows  64–95     …

This file owns codes, the fit of rectangles and the lookup. It knows neither torch nor engines. Positions count the
values of one parameter in row-major order; types of 8 bytes and truth values are not numbered, hence have no place.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from etude.types import TensorSpec
from etude.weights.state import ELEMENTS, NUMBER_TYPES, Element, Numbers, Region, spec_bytes

Places: TypeAlias = npt.NDArray[np.int64]
"""[k] codes, canonical indices or positions."""
Flags: TypeAlias = npt.NDArray[np.bool_]
"""[k] one truth value each."""

NO_CODE = 0
"""Code of a position where the loader writes nothing, e.g. in padding."""
BASE_LIMIT = 1 << 24
"""No type is asked to carry larger digits: what float32 represents exactly."""
PART_NUMBERS = 1 << 22
"""Numbers looked at together when a map is walked through: some 100 MB of codes, indices and positions."""
NUMBERS_PER_RECTANGLE = 1024
"""Below this average, explicit indices (16 bytes a number, searched once) beat rectangles (searched one by one)."""
FEW_RECTANGLES = 8
"""So many are always fine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A region of a tensor that lies in a parameter at constant steps.

    The number in row r and column c of the region is at ``position + r * row_step + c * column_step``.
    """

    tensor: str
    parameter: str
    region: Region
    position: int
    column_step: int
    row_step: int

    @property
    def count(self) -> int:
        """Numbers that it places."""
        return self.region.count

    @property
    def end(self) -> int:
        """One past the largest canonical index."""
        return self.region.end

    def expand(self) -> tuple[Places, Places]:
        """(canonical indices, positions), [count] each, the indices ascending."""
        rows = np.arange(self.region.rows, dtype=np.int64)[:, None]
        columns = np.arange(self.region.width, dtype=np.int64)
        indices = self.region.offset + rows * self.region.stride + columns
        positions = self.position + rows * self.row_step + columns * self.column_step
        return indices.ravel(), positions.ravel()

    def find(self, indices: Places) -> tuple[Places, Places]:
        """Find those of ascending canonical indices [k] that are in it (places in ``indices``), and their positions."""
        low, high = np.searchsorted(indices, (self.region.offset, self.region.end))
        rows, columns = np.divmod(indices[low:high] - self.region.offset, max(self.region.stride, 1))
        inside = np.flatnonzero(columns < self.region.width)
        positions = self.position + rows[inside] * self.row_step + columns[inside] * self.column_step
        return low + inside, positions

    def parts(self, limit: int = PART_NUMBERS) -> Iterator["Rectangle"]:
        """The same in rectangles of at most ``limit`` numbers."""
        width = min(self.region.width, limit)
        rows = max(1, limit // width)
        for row in range(0, self.region.rows, rows):
            for column in range(0, self.region.width, width):
                yield self._part(row, min(rows, self.region.rows - row), column, width)

    def _part(self, row: int, rows: int, column: int, width: int) -> "Rectangle":
        region = Region(
            offset=self.region.offset + row * self.region.stride + column,
            width=min(width, self.region.width - column),
            stride=self.region.stride,
            rows=rows,
        )
        return Rectangle(
            tensor=self.tensor,
            parameter=self.parameter,
            region=region,
            position=self.position + row * self.row_step + column * self.column_step,
            column_step=self.column_step,
            row_step=self.row_step,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scattering:
    """Numbers of a tensor that lie in a parameter without any order: one index and one position each."""

    tensor: str
    parameter: str
    indices: Places
    """[n] canonical, ascending."""
    positions: Places
    """[n]"""

    @property
    def count(self) -> int:
        """Numbers that it places."""
        return len(self.indices)

    @property
    def end(self) -> int:
        """One past the largest canonical index."""
        return int(self.indices[-1]) + 1

    def expand(self) -> tuple[Places, Places]:
        """(canonical indices, positions), [count] each, the indices ascending."""
        return self.indices, self.positions

    def find(self, indices: Places) -> tuple[Places, Places]:
        """Find those of ascending canonical indices [k] that are in it (places in ``indices``), and their positions."""
        nearest = np.minimum(np.searchsorted(self.indices, indices), self.count - 1)
        chosen = np.flatnonzero(self.indices[nearest] == indices)
        return chosen, self.positions[nearest[chosen]]

    def parts(self, limit: int = PART_NUMBERS) -> Iterator["Scattering"]:
        """The same in pieces of at most ``limit`` numbers."""
        for start in range(0, self.count, limit):
            yield Scattering(
                tensor=self.tensor,
                parameter=self.parameter,
                indices=self.indices[start : start + limit],
                positions=self.positions[start : start + limit],
            )


Block: TypeAlias = Rectangle | Scattering
"""Some numbers of one tensor and where they lie in one parameter, none of them twice."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedNumbers:
    """Numbers found by a lookup, and their places in one parameter."""

    parameter: str
    positions: Places
    """[k'] where they lie."""
    chosen: Places
    """[k'] which of the indices asked for they are."""


@final
class Placement:
    """The places of all numbers of a checkpoint, in as many parameters and places as it does."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks = tuple(blocks)
        self._of_tensor: dict[str, list[Block]] = {}
        for block in self.blocks:
            self._of_tensor.setdefault(block.tensor, []).append(block)

    def place(self, tensor: str, indices: npt.NDArray[np.uint64]) -> list[PlacedNumbers]:
        """Look up ascending canonical indices [k] of one tensor.

        A number that lives in several places is in several answers, one that is not here is in none. Costs O(k) for
        each block of the tensor that has numbers in the range of the indices.
        """
        placed = []
        signed = indices.astype(np.int64)
        for block in self._of_tensor.get(tensor, ()):
            chosen, positions = block.find(signed)
            if len(chosen):
                placed.append(PlacedNumbers(parameter=block.parameter, positions=positions, chosen=chosen))
        return placed

    @cached_property
    def witnesses(self) -> tuple[Block, ...]:
        """Blocks with one place for every number that has any: what a digest of the weights reads."""
        return tuple(witness for blocks in self._of_tensor.values() for witness in _first_places(blocks))

    def resident(self, tensor: str) -> int:
        """The count of a tensor's numbers that have a place."""
        return self._residents.get(tensor, 0)

    @cached_property
    def _residents(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for block in self.witnesses:
            counts[block.tensor] = counts.get(block.tensor, 0) + block.count
        return counts


def fit(tensor: str, parameter: str, indices: Places, positions: Places) -> list[Block]:
    """Describe a map by as few blocks as the layouts of engines need; the blocks reproduce it exactly.

    ``indices`` [n] are canonical, ascending and unique; ``positions`` [n] says where each lies in the parameter.
    Numbers that follow each other at the map's most common step form runs, runs of one width at the most common
    distance rectangles: every slice, transposition and interleaving is one or few of them. What would need too many
    becomes a :class:`Scattering`.
    """
    heads, column_step = _runs(indices, positions)
    widths = np.diff(heads, append=len(indices))
    starts, places = indices[heads], positions[heads]
    tops = _tops(starts, places, widths)
    if len(tops) > FEW_RECTANGLES + len(indices) // NUMBERS_PER_RECTANGLE:
        return [Scattering(tensor=tensor, parameter=parameter, indices=indices, positions=positions)]
    blocks: list[Block] = []
    for top, bottom in zip(tops.tolist(), [*tops[1:].tolist(), len(heads)], strict=True):
        is_single = bottom == top + 1
        width = int(widths[top])
        region = Region(
            offset=int(starts[top]),
            width=width,
            stride=width if is_single else int(starts[top + 1] - starts[top]),
            rows=bottom - top,
        )
        rectangle = Rectangle(
            tensor=tensor,
            parameter=parameter,
            region=region,
            position=int(places[top]),
            column_step=column_step,
            row_step=0 if is_single else int(places[top + 1] - places[top]),
        )
        blocks.append(rectangle)
    return blocks


def _runs(indices: Places, positions: Places) -> tuple[Places, int]:
    """The beginnings of runs of neighbours at one step, and that step (0 when all runs are of one number)."""
    moves = np.diff(positions)
    is_next = np.diff(indices) == 1
    step = _most_common(moves[is_next])
    if step <= 0:
        return np.arange(len(indices)), 0
    return _heads(is_next & (moves == step)), step


def _tops(starts: Places, places: Places, widths: Places) -> Places:
    """The runs that begin a rectangle."""
    strides, moves = np.diff(starts), np.diff(places)
    is_alike = widths[1:] == widths[:-1]
    move = _most_common(moves[is_alike])
    is_alike &= moves == move
    stride = _most_common(strides[is_alike])
    return _heads(is_alike & (strides == stride) & (move > 0))


def _heads(joined: Flags) -> Places:
    """The indices, among n things in a row, that start a group, when ``joined`` [n − 1] says which belong to the one
    before.
    """
    return np.flatnonzero(np.concatenate((np.ones(1, np.bool_), ~joined)))


def _most_common(numbers: Places) -> int:
    """The mode, 0 of nothing."""
    if len(numbers) == 0:
        return 0
    values, counts = np.unique(numbers, return_counts=True)
    return int(values[counts.argmax()])


def _first_places(blocks: Sequence[Block]) -> Iterator[Block]:
    """Parts of the blocks of one tensor, less the numbers that an earlier one has."""
    seen = np.zeros(max(block.end for block in blocks), np.bool_)
    for part in (part for block in blocks for part in block.parts()):
        indices, positions = part.expand()
        is_new = ~seen[indices]
        seen[indices] = True
        if is_new.all():
            yield part
        elif is_new.any():
            yield from fit(part.tensor, part.parameter, indices[is_new], positions[is_new])


# ── codes: what a probe loads, and what it reads back ───────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """A code for every number of a checkpoint: 1, 2, 3, … through its tensors in the order given."""

    specs: tuple[TensorSpec, ...]
    """The tensors with codes."""
    starts: Places = field(repr=False)
    """[tensors + 1] the code of each tensor's first number; at the end, one past the last code."""

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> "Numbering":
        """Number the tensors whose values are single numbers. Raises ``ValueError`` for unknown types."""
        numbered = tuple(spec for spec in specs if spec_bytes(spec) and has_codes(spec))
        counts = [spec_bytes(spec) // ELEMENTS[spec.dtype].size_bytes for spec in numbered]
        return cls(specs=numbered, starts=np.cumsum([1, *counts], dtype=np.int64))

    @property
    def end(self) -> int:
        """One past the largest code."""
        return int(self.starts[-1])

    def codes(self) -> Iterator[tuple[TensorSpec, int, int]]:
        """(tensor, its first code, one past its last)."""
        for number, spec in enumerate(self.specs):
            yield spec, int(self.starts[number]), int(self.starts[number + 1])

    def blocks(self, parameter: str, codes: Places) -> list[Block]:
        """Describe a parameter by the codes that lie at its positions, [n] each, :data:`NO_CODE` for none."""
        positions = np.flatnonzero(codes)
        positions = positions[np.argsort(codes[positions], kind="stable")]
        placed = codes[positions]
        which = np.searchsorted(self.starts, placed, side="right") - 1
        repeats = _repeats(placed)
        blocks = []
        for number in np.unique(which).tolist():
            low, high = np.searchsorted(which, (number, number + 1))
            indices = placed[low:high] - self.starts[number]
            for repeat in range(int(repeats[low:high].max()) + 1):
                chosen = repeats[low:high] == repeat
                name = self.specs[number].name
                blocks += fit(name, parameter, indices[chosen], positions[low:high][chosen])
        return blocks


def has_codes(spec: TensorSpec) -> bool:
    """Return true if the tensor's type can carry digits and be placed by them."""
    return ELEMENTS[spec.dtype].per_value == 1 and spec.dtype != "BOOL"


def digit_base(elements: Iterable[Element]) -> int:
    """The largest base whose digits all these types represent exactly, as integers: 256 for bfloat16, 16 for e4m3."""
    return min((_digit_limit(element) for element in elements), default=BASE_LIMIT)


def digit_count(end: int, base: int) -> int:
    """The number of digits of the codes below ``end``."""
    count = 1
    while base**count < end:
        count += 1
    return count


def digit(codes: Places, place: int, base: int) -> Places:
    """[k] one digit of each code; place 0 counts ones."""
    digits: Places = codes // base**place % base
    return digits


def random_bits(codes: Places, element: Element, *, flipped: bool) -> Numbers:
    """[k] random bits, finite where the type has infinities; ``flipped`` inverts the highest and the lowest.

    A function of the code alone: what should be at a position follows from whose place it is.
    """
    kind = NUMBER_TYPES[element.size_bytes]
    bits = _scrambled(codes).astype(kind)
    if element.is_float:
        exponent = kind((2**element.exponent_bits - 1) << element.mantissa_bits)
        bits[bits & exponent == exponent] ^= kind(1 << element.mantissa_bits)
    if flipped:
        bits ^= kind(1 << (8 * element.size_bytes - 1) | 1)
    return bits


def _scrambled(codes: Places) -> npt.NDArray[np.uint64]:
    """Sixty-four bits that look random, of each code: the output function of SplitMix64 (Steele et al., 2014)."""
    words = codes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _digit_limit(element: Element) -> int:
    if element.is_float:
        return min(BASE_LIMIT, 1 << (element.mantissa_bits + 1))
    return min(BASE_LIMIT, 1 << (8 * element.size_bytes - 1))


def _repeats(ascending: Places) -> Places:
    """[n] how many equal numbers stand before each one."""
    heads = _heads(ascending[1:] == ascending[:-1]) if len(ascending) else ascending
    sizes = np.diff(heads, append=len(ascending))
    return np.arange(len(ascending)) - np.repeat(heads, sizes)

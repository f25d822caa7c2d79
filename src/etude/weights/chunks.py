"""Which numbers of a rank's share are encoded together, and where each of them lies in its tensor.

A *layout* says what a rank holds: parts of tensors, in a fixed order. It is cut into *chunks* of a few million numbers
of one type; a large part spans many chunks, many small ones share a chunk. The cut follows from the layout alone, so
publisher and receiver make it independently. This file owns that arithmetic; it reads no weights but to slice them.

    parts    embed ▒▒▒▒▒▒▒▒▒▒▒▒▒▒│ norm ▒│ q_proj ▒▒▒▒▒│ …      (by type, then by name)
    chunks   0 ──────┤ 1 ──────┤ 2 ──────────────┤ …
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import numpy as np
import numpy.typing as npt
import orjson

from etude.errors import DamagedError
from etude.types import TensorSpec
from etude.weights.digest import Digest, Place, digest_numbers, digest_steps
from etude.weights.elements import ELEMENTS, Element
from etude.weights.frames import Changes
from etude.weights.state import Numbers, Region, State, StoredTensor, ordered, spec_bytes, spec_key

CHUNK_NUMBERS = 1 << 22
"""Numbers per chunk: large enough that headers and the coders' learning cost below 1 %, small enough to spread over
cores and to fetch alone.
"""
_MOST_NUMBERS = 1 << 26

Positions = npt.NDArray[np.uint32]
"""[k] ascending places in a chunk."""
Indices = npt.NDArray[np.uint64]
"""[k] ascending canonical indices in a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank holds of one tensor. Raises ``ValueError`` for an unknown type or a region outside of the tensor."""

    spec: TensorSpec
    region: Region

    def __post_init__(self) -> None:
        if self.region.end > _whole_region(self.spec).count:
            raise ValueError(f"{self.region} reaches beyond tensor {self.spec.name!r} of shape {list(self.spec.shape)}")

    @property
    def element(self) -> Element:
        """How its bytes are cut into numbers."""
        return ELEMENTS[self.spec.dtype]

    def indices(self, local: npt.NDArray[np.int64]) -> Indices:
        """[k] places within the part → [k] canonical indices in the tensor."""
        if self.region.rows == 1:
            return (local + self.region.offset).astype(np.uint64)
        rows, columns = np.divmod(local, self.region.width)
        return (self.region.offset + rows * self.region.stride + columns).astype(np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of one part's numbers."""

    part: Part
    start: int
    stop: int

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Numbers of one type that are encoded into one frame."""

    index: int
    element: Element
    pieces: tuple[Piece, ...]

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return sum(piece.count for piece in self.pieces)

    def numbers(self, share: State) -> list[Numbers]:
        """Views of its numbers in a share, piece by piece: read as if concatenated."""
        return [share[piece.part.spec.name].numbers[piece.start : piece.stop] for piece in self.pieces]

    def digest(self, numbers: Sequence[Numbers]) -> Digest:
        """What these contents add to the state digest."""
        total = Digest.ZERO
        for piece, held in zip(self.pieces, numbers, strict=True):
            total += digest_numbers(held, spec_key(piece.part.spec), piece.part.region, piece.start)
        return total

    def move(self, changes: Changes, numbers: Sequence[Numbers], *, take: bool) -> Digest:
        """What the state digest gains by ``changes`` of these contents; with ``take`` they are made, in place."""
        total = Digest.ZERO
        ends = list(accumulate((piece.count for piece in self.pieces), initial=0))
        cuts = np.searchsorted(changes.positions, ends).tolist()
        for index, (piece, held) in enumerate(zip(self.pieces, numbers, strict=True)):
            chosen = slice(cuts[index], cuts[index + 1])
            key, region = spec_key(piece.part.spec), piece.part.region
            place = Place(element=self.element, key=key, region=region, first=piece.start)
            moved = (changes.positions[chosen], changes.steps[chosen])
            total += digest_steps(held, ends[index], moved, place, take=take)
        return total

    def local(self, positions: Positions) -> Iterator[tuple[Piece, npt.NDArray[np.int64]]]:
        """For each piece, those positions that lie in it, counted from its start."""
        ends = list(accumulate((piece.count for piece in self.pieces), initial=0))
        cuts = np.searchsorted(positions, ends)
        for piece, start, (low, high) in zip(self.pieces, ends, pairwise(cuts), strict=False):
            yield piece, positions[low:high].astype(np.int64) - start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What one rank holds, and how that is cut. Equal layouts give equal chunks everywhere.

    Raises ``ValueError`` for parts in another order, two parts of one tensor, or an impossible size of chunks.
    """

    parts: tuple[Part, ...]
    """By type, then by name."""
    chunk_numbers: int = CHUNK_NUMBERS

    def __post_init__(self) -> None:
        if not 0 < self.chunk_numbers <= _MOST_NUMBERS:
            raise ValueError(f"chunks of {self.chunk_numbers} numbers: choose 1 to {_MOST_NUMBERS}")
        places = [(part.spec.dtype, part.spec.name) for part in self.parts]
        if len({name for _, name in places}) < len(places):
            raise ValueError("a layout holds two parts of one tensor: a rank has one region of each")
        if places != sorted(places):
            raise ValueError("the parts of a layout must be in the order of types, then of names")

    @classmethod
    def of(cls, share: State, chunk_numbers: int = CHUNK_NUMBERS) -> "Layout":
        """The layout of a share."""
        parts = [Part(spec=tensor.spec, region=tensor.held) for tensor in ordered(share)]
        return cls(parts=tuple(sorted(parts, key=lambda part: part.spec.dtype)), chunk_numbers=chunk_numbers)

    def is_of(self, share: State) -> bool:
        """Whether this is the layout of a share: the question that a publisher asks anew for every version."""
        return len(share) == len(self.parts) and all(
            (tensor := share.get(part.spec.name)) is not None
            and tensor.spec == part.spec
            and (_is_whole(part) if tensor.region is None else tensor.region == part.region)
            for part in self.parts
        )

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks, in order; parts without numbers are in none."""
        pieces = (
            (dtype, group)
            for dtype, parts in groupby(self.parts, key=lambda part: part.spec.dtype)
            for group in _cut(parts, self.chunk_numbers)
        )
        return tuple(
            Chunk(index=index, element=ELEMENTS[dtype], pieces=group) for index, (dtype, group) in enumerate(pieces)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes to hold it, known before anything is cut or held."""
        return sum(part.region.count * part.element.size_bytes for part in self.parts)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Of all tensors it holds a part of."""
        return tuple(part.spec for part in self.parts)

    def empty_share(self, wanted: Iterable[Chunk] | None = None) -> dict[str, StoredTensor]:
        """Zeros in this layout, to be filled; only the parts that ``wanted`` touches, by default all."""
        names = None if wanted is None else {piece.part.spec.name for chunk in wanted for piece in chunk.pieces}
        return {
            part.spec.name: StoredTensor(
                spec=part.spec,
                data=np.zeros(part.region.count * part.element.size_bytes, np.uint8),
                region=None if _is_whole(part) else part.region,
            )
            for part in self.parts
            if names is None or part.spec.name in names
        }

    def cut(self, state: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The rank's share of a state of whole tensors: views where it can be, copies of regions with many rows.

        Raises ``ValueError`` when the state lacks a tensor of the layout or has it in another type or shape.
        """
        return {part.spec.name: _cut_tensor(part, state) for part in self.parts}

    def to_bytes(self) -> bytes:
        """Its canonical form; the SHA-256 of that names it."""
        parts = [[p.spec.name, p.spec.dtype, list(p.spec.shape), *_region_fields(p.region)] for p in self.parts]
        return orjson.dumps({"chunk_numbers": self.chunk_numbers, "parts": parts})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Layout":
        """The inverse of :meth:`to_bytes`. Raises :class:`~etude.errors.DamagedError` for anything else."""
        try:
            fields = orjson.loads(data)
            parts = tuple(_parse_part(*row) for row in fields["parts"])
            layout = cls(parts=parts, chunk_numbers=_require_integer(fields["chunk_numbers"]))
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedError(f"a layout cannot be read: {error}; run `etude weights verify`") from error
        if layout.to_bytes() != data:
            raise DamagedError("a layout is not in its canonical form; run `etude weights verify`")
        return layout

    @property
    def digest(self) -> str:
        """Its name in the store: the SHA-256 of its canonical form, in hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def assemble(shares: Sequence[State]) -> dict[str, StoredTensor]:
    """Whole tensors from the shares of all ranks; tensors that one rank holds whole are not copied.

    Raises ``ValueError`` when the shares leave a part of a tensor uncovered, or differ in its type or shape.
    """
    held: dict[str, list[StoredTensor]] = {}
    for tensor in (tensor for share in shares for tensor in ordered(share)):
        held.setdefault(tensor.spec.name, []).append(tensor)
    return {name: _join(tensors) for name, tensors in held.items()}


def _whole_region(spec: TensorSpec) -> Region:
    """The region that is all of a tensor. Raises ``ValueError`` as :func:`~etude.weights.state.spec_bytes`."""
    return Region.run(0, spec_bytes(spec) // ELEMENTS[spec.dtype].size_bytes)


def _join(tensors: Sequence[StoredTensor]) -> StoredTensor:
    """One whole tensor from what ranks hold of it."""
    spec = tensors[0].spec
    if stranger := next((tensor.spec for tensor in tensors if tensor.spec != spec), None):
        raise ValueError(f"the ranks do not agree about tensor {spec.name!r}: {spec} and {stranger}")
    everything = _whole_region(spec)
    for tensor in tensors:
        if tensor.held == everything:
            return tensor if tensor.region is None else StoredTensor(spec=spec, data=tensor.data)
    whole = StoredTensor(spec=spec, data=np.zeros(spec_bytes(spec), np.uint8))
    covered = np.zeros(everything.count, np.uint8)
    for tensor in tensors:
        _rows(whole.numbers, tensor.held)[...] = tensor.numbers.reshape(tensor.held.rows, tensor.held.width)
        _rows(covered, tensor.held)[...] = 1
    if not covered.all():
        raise ValueError(f"no rank holds number {int(covered.argmin())} of tensor {spec.name!r}: a share is missing")
    return whole


def _cut(parts: Iterable[Part], size: int) -> Iterator[tuple[Piece, ...]]:
    """Parts of one type, filled into chunks of ``size`` numbers."""
    pieces: list[Piece] = []
    room = size
    for part in parts:
        start = 0
        while start < part.region.count:
            stop = min(part.region.count, start + room)
            pieces.append(Piece(part=part, start=start, stop=stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield tuple(pieces)
                pieces, room = [], size
    if pieces:
        yield tuple(pieces)


def _cut_tensor(part: Part, state: Mapping[str, StoredTensor]) -> StoredTensor:
    tensor = state.get(part.spec.name)
    if tensor is None or tensor.spec != part.spec or tensor.region is not None:
        raise ValueError(f"the layout holds {part.region} of {part.spec}, the state has {tensor and tensor.spec}")
    if _is_whole(part):
        return tensor
    numbers = np.ascontiguousarray(_rows(tensor.numbers, part.region)).reshape(-1)
    return StoredTensor(spec=part.spec, data=numbers.view(np.uint8), region=part.region)


def _is_whole(part: Part) -> bool:
    return part.region == _whole_region(part.spec)


def _rows(numbers: Numbers, region: Region) -> Numbers:
    """A [rows, width] view of a region of a whole tensor's numbers."""
    size = numbers.itemsize
    return np.lib.stride_tricks.as_strided(
        numbers[region.offset :], (region.rows, region.width), (region.stride * size, size)
    )


def _region_fields(region: Region) -> tuple[int, int, int, int]:
    return (region.offset, region.width, region.stride, region.rows)


def _parse_part(name: str, dtype: str, shape: list[int], *region: int) -> Part:
    offset, width, stride, rows = map(_require_integer, region)
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no name of a tensor")
    spec = TensorSpec(name=name, dtype=dtype, shape=tuple(map(_require_integer, shape)))
    return Part(spec=spec, region=Region(offset=offset, width=width, stride=stride, rows=rows))


def _require_integer(value: object) -> int:
    if type(value) is not int:  # a bool is no number here
        raise ValueError(f"{value!r} is no integer")
    return value

"""Chunks: numbers that are encoded together, and the place of each in its tensor.

A *layout* names the tensors of a model in a fixed order. It is cut into *chunks* of a few million numbers of one type;
a large tensor spans many chunks, many small ones share a chunk. The cut follows from the layout alone, so publisher and
receiver make it independently. This file owns that arithmetic; it reads no weights but to slice them.

    tensors  embed ▒▒▒▒▒▒▒▒▒▒▒▒▒▒│ norm ▒│ q_proj ▒▒▒▒▒│ …      (by type, then by name)
    chunks   0 ──────┤ 1 ──────┤ 2 ──────────────┤ …
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import numpy as np
import numpy.typing as npt
import orjson

from etude.errors import DamagedError
from etude.types import TensorSpec
from etude.weights.codecs.codec import Changes
from etude.weights.digest import Digest, Place, digest_numbers, digest_steps
from etude.weights.kernels import Positions
from etude.weights.state import ELEMENTS, Element, Numbers, Region, State, StoredTensor, ordered, spec_bytes, spec_key

CHUNK_NUMBERS = 1 << 22
"""Numbers per chunk: large enough that headers and the coders' learning cost below 1 %, small enough to spread over
cores and to fetch alone.
"""
_MOST_NUMBERS = 1 << 26

Indices = npt.NDArray[np.uint64]
"""[k] ascending canonical indices in a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of one tensor's numbers, by canonical index."""

    spec: TensorSpec
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Numbers in it."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Numbers of one type that are encoded into one frame."""

    index: int
    element: Element
    segments: tuple[Segment, ...]

    @property
    def count(self) -> int:
        """Numbers in it."""
        return sum(segment.count for segment in self.segments)

    def numbers(self, state: State) -> list[Numbers]:
        """Views of its numbers in a state, segment by segment: read as if concatenated."""
        return [state[segment.spec.name].numbers[segment.start : segment.stop] for segment in self.segments]

    def digest(self, numbers: Sequence[Numbers]) -> Digest:
        """The term that these contents add to the state digest."""
        total = Digest.ZERO
        for segment, own in zip(self.segments, numbers, strict=True):
            total += digest_numbers(own, spec_key(segment.spec), _all_of(segment.spec), segment.start)
        return total

    def move(self, changes: Changes, numbers: Sequence[Numbers], *, take: bool) -> Digest:
        """The difference that ``changes`` make to the state digest; with ``take`` they are made, in place."""
        total = Digest.ZERO
        ends = list(accumulate((segment.count for segment in self.segments), initial=0))
        bounds = np.searchsorted(changes.positions, ends).tolist()
        for index, (segment, own) in enumerate(zip(self.segments, numbers, strict=True)):
            chosen = slice(bounds[index], bounds[index + 1])
            region = _all_of(segment.spec)
            place = Place(element=self.element, key=spec_key(segment.spec), region=region, first=segment.start)
            moved = (changes.positions[chosen], changes.steps[chosen])
            total += digest_steps(own, ends[index], moved, place, take=take)
        return total

    def local(self, positions: Positions) -> Iterator[tuple[Segment, npt.NDArray[np.int64]]]:
        """For each segment, those positions that lie in it, counted from its start."""
        ends = list(accumulate((segment.count for segment in self.segments), initial=0))
        bounds = np.searchsorted(positions, ends)
        for segment, start, (low, high) in zip(self.segments, ends, pairwise(bounds), strict=False):
            yield segment, positions[low:high].astype(np.int64) - start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors of a state, and how they are cut. Equal layouts give equal chunks everywhere.

    Raises ``ValueError`` for tensors in another order, two of one name, an unknown type, or an impossible size of
    chunks.
    """

    specs: tuple[TensorSpec, ...]
    """By type, then by name."""
    chunk_numbers: int = CHUNK_NUMBERS

    def __post_init__(self) -> None:
        if not 0 < self.chunk_numbers <= _MOST_NUMBERS:
            raise ValueError(f"chunks of {self.chunk_numbers} numbers: choose 1 to {_MOST_NUMBERS}")
        places = [(spec.dtype, spec.name) for spec in self.specs]
        if len({name for _, name in places}) < len(places):
            raise ValueError("a layout has two tensors of one name")
        if places != sorted(places):
            raise ValueError("the tensors of a layout must be in the order of types, then of names")
        for spec in self.specs:
            spec_bytes(spec)

    @classmethod
    def of(cls, state: State, chunk_numbers: int = CHUNK_NUMBERS) -> "Layout":
        """The layout of a state."""
        specs = sorted((tensor.spec for tensor in ordered(state)), key=lambda spec: spec.dtype)
        return cls(specs=tuple(specs), chunk_numbers=chunk_numbers)

    def is_of(self, state: State) -> bool:
        """Return true if this is the layout of a state: what a publisher asks anew for every version."""
        return len(state) == len(self.specs) and all(
            (tensor := state.get(spec.name)) is not None and tensor.spec == spec for spec in self.specs
        )

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks, in order; tensors without numbers are in none."""
        groups = (
            (dtype, segments)
            for dtype, specs in groupby(self.specs, key=lambda spec: spec.dtype)
            for segments in _cut(specs, self.chunk_numbers)
        )
        return tuple(
            Chunk(index=index, element=ELEMENTS[dtype], segments=segments)
            for index, (dtype, segments) in enumerate(groups)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes to hold the state, known before anything is cut or held."""
        return sum(map(spec_bytes, self.specs))

    def empty_state(self) -> dict[str, StoredTensor]:
        """Zeros in this layout, to be filled."""
        return {spec.name: StoredTensor(spec=spec, data=np.zeros(spec_bytes(spec), np.uint8)) for spec in self.specs}

    def to_bytes(self) -> bytes:
        """Its canonical form; the SHA-256 of that names it. Of each tensor all is held: one run of all its numbers."""
        parts = [[spec.name, spec.dtype, list(spec.shape), *_run_fields(spec)] for spec in self.specs]
        return orjson.dumps({"chunk_numbers": self.chunk_numbers, "parts": parts})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Layout":
        """The inverse of :meth:`to_bytes`. Raises :class:`~etude.errors.DamagedError` for anything else."""
        try:
            fields = orjson.loads(data)
            specs = tuple(_parse_spec(*row) for row in fields["parts"])
            layout = cls(specs=specs, chunk_numbers=_require_integer(fields["chunk_numbers"]))
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedError(f"a layout cannot be read: {error}; run `etude weights verify`") from error
        if layout.to_bytes() != data:
            raise DamagedError("a layout is not in its canonical form; run `etude weights verify`")
        return layout

    @property
    def digest(self) -> str:
        """Its name in the store: the SHA-256 of its canonical form, in hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def _count(spec: TensorSpec) -> int:
    """Numbers of a tensor. Raises ``ValueError`` as :func:`~etude.weights.state.spec_bytes`."""
    return spec_bytes(spec) // ELEMENTS[spec.dtype].size_bytes


def _all_of(spec: TensorSpec) -> Region:
    return Region.run(0, _count(spec))


def _cut(specs: Iterable[TensorSpec], size: int) -> Iterator[tuple[Segment, ...]]:
    """Tensors of one type, filled into chunks of ``size`` numbers."""
    segments: list[Segment] = []
    room = size
    for spec in specs:
        start, count = 0, _count(spec)
        while start < count:
            stop = min(count, start + room)
            segments.append(Segment(spec=spec, start=start, stop=stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield tuple(segments)
                segments, room = [], size
    if segments:
        yield tuple(segments)


def _run_fields(spec: TensorSpec) -> tuple[int, int, int, int]:
    """Offset, width, stride and rows of what is held of a tensor: the format has room for less than all."""
    count = _count(spec)
    return 0, count, count, 1


def _parse_spec(name: str, dtype: str, shape: list[int], *run: int) -> TensorSpec:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not a valid tensor name")
    spec = TensorSpec(name=name, dtype=dtype, shape=tuple(map(_require_integer, shape)))
    if tuple(map(_require_integer, run)) != _run_fields(spec):
        raise ValueError(f"it holds a part of tensor {name!r} only")
    return spec


def _require_integer(value: object) -> int:
    if type(value) is not int:  # a bool is no number here
        raise ValueError(f"{value!r} is not an integer")
    return value

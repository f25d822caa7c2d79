"""A digest of 128 bits of a whole state, however it is cut up.

    D = Σ over tensors presence(name, type, shape) + Σ over numbers mix(key, canonical index, bits)    two lanes mod 2⁶⁴

A sum does not care about order: the digests of shards add up to that of the whole, in any layout (TP, EP, FSDP), and
changing some numbers changes the sum by the terms of those numbers alone. ``mix`` is not linear on purpose: a change
applied to a wrong base, a moved value or two swapped ones alter the sum. All arithmetic wraps at 64 bits, so that
torch's int64 yields the same value (``device.py``). It finds accidents; against forgers, sign what carries it.

This file owns digests of weights. SHA-256 names of stored objects are ``log.py``'s.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import orjson

from etude.types import TensorSpec
from etude.weights import kernels
from etude.weights.state import Element, Numbers, Region, State, ordered, spec_key

_MODULUS = 1 << 64
_HEX_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Digest:
    """An element of the group (Z/2⁶⁴)², both lanes between 0 and 2⁶⁴ − 1."""

    first: int
    second: int

    ZERO: ClassVar["Digest"]
    """The digest of nothing."""

    def __post_init__(self) -> None:
        if not (0 <= self.first < _MODULUS and 0 <= self.second < _MODULUS):
            raise ValueError(f"a digest has two lanes of 64 bits, got {self.first} and {self.second}")

    def __add__(self, other: "Digest") -> "Digest":
        return Digest((self.first + other.first) % _MODULUS, (self.second + other.second) % _MODULUS)

    def __sub__(self, other: "Digest") -> "Digest":
        return Digest((self.first - other.first) % _MODULUS, (self.second - other.second) % _MODULUS)

    def hex(self) -> str:
        """32 lower-case hex digits, the first lane first."""
        return f"{self.first:016x}{self.second:016x}"

    @classmethod
    def parse(cls, text: str) -> "Digest":
        """The inverse of :meth:`hex`. Raises ``ValueError`` for anything else."""
        if len(text) != _HEX_DIGITS or not set(text) <= set("0123456789abcdef"):
            raise ValueError(f"{text!r} is not a digest: it must be {_HEX_DIGITS} lower-case hex digits")
        return cls(int(text[:16], 16), int(text[16:], 16))


Digest.ZERO = Digest(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of an array of numbers in a tensor."""

    element: Element
    key: int
    """The tensor's :func:`~etude.weights.state.spec_key`."""
    region: Region
    first: int
    """Index in the region of the array's first number."""


def digest_numbers(numbers: Numbers, key: int, region: Region, start: int = 0) -> Digest:
    """The term that some numbers of a tensor add to the digest.

    ``numbers`` [n] are those that the region counts as ``start``, ``start + 1``, …; ``key`` is the tensor's
    :func:`~etude.weights.state.spec_key`. Raises ``ValueError`` when the region has fewer.
    """
    if not 0 <= start <= start + len(numbers) <= region.count:
        raise ValueError(f"numbers {start}–{start + len(numbers)} are not all in {region}, which has {region.count}")
    if len(numbers) == 0:
        return Digest.ZERO
    lanes = np.zeros(2, np.uint64)
    shape = (region.offset, region.width, region.stride)
    kernels.digest_region(kernels.readonly(numbers), np.uint64(key), shape, start, lanes)
    return Digest(int(lanes[0]), int(lanes[1]))


def digest_change(key: int, indices: npt.NDArray[np.uint64], old: Numbers, new: Numbers) -> Digest:
    """The difference to the digest when the numbers at ``indices`` change from ``old`` to ``new``.

    ``indices`` [k] are canonical; ``old`` and ``new`` are [k] bits of one type. The digest of the state after a change
    is the one before plus this.
    """
    lanes = np.zeros(2, np.uint64)
    arrays = (kernels.readonly(indices), kernels.readonly(old), kernels.readonly(new))
    kernels.digest_change(*arrays, np.uint64(key), lanes)
    return Digest(int(lanes[0]), int(lanes[1]))


def digest_steps(
    numbers: Numbers, start: int, changes: tuple[kernels.Positions, kernels.Steps], place: Place, *, take: bool
) -> Digest:
    """The difference to the digest when some numbers move by steps; with ``take`` they do so, in place.

    ``changes`` are (positions, steps), [k] each; ``numbers`` begin at position ``start`` and lie at ``place``.
    """
    lanes = np.zeros(2, np.uint64)
    positions, steps = changes
    fold = kernels.fold_of(place.element)
    moves = kernels.Moves(start, kernels.readonly(positions), kernels.readonly(steps), fold)
    region = place.region
    stretch = kernels.Stretch(np.uint64(place.key), place.first, region.offset, region.width, region.stride)
    kernels.take_steps(numbers, moves, stretch, take, lanes)
    return Digest(int(lanes[0]), int(lanes[1]))


def presence(spec: TensorSpec) -> Digest:
    """The digest term of a tensor's name, type and shape, which counts even without numbers."""
    line = orjson.dumps([spec.name, spec.dtype, list(spec.shape)])
    lanes = hashlib.sha256(line).digest()[8:24]
    return Digest(int.from_bytes(lanes[:8], "little"), int.from_bytes(lanes[8:], "little"))


def layout_digest(specs: Iterable[TensorSpec]) -> Digest:
    """The part of a state's digest that its tensors' descriptions make up, each counted once."""
    return sum(map(presence, specs), start=Digest.ZERO)


def content_digest(state: State) -> Digest:
    """The part of a state's digest that its numbers make up."""
    parts = (
        digest_numbers(tensor.numbers, spec_key(tensor.spec), Region.run(0, len(tensor.numbers)))
        for tensor in ordered(state)
    )
    return sum(parts, start=Digest.ZERO)


def state_digest(state: State) -> str:
    """The digest of a whole state, in hex: equal exactly when names, types, shapes and bits are, but for accidents."""
    return (layout_digest(tensor.spec for tensor in ordered(state)) + content_digest(state)).hex()

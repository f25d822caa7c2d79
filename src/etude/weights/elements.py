"""How the bits of one weight are numbered, so that a change is a small number.

Consecutive floats differ by 1 in their *ordinal*: the involution f(s) = s ^ ((s >> (w−1)) & max) on the signed integer
with the same w bits. −0 and +0 are neighbours (−1 and 0), infinities and NaNs are ordinary numbers at the ends. A
change is the difference of ordinals modulo 2^w, its *step*, hence lossless for every pair of bit patterns, invertible
and additive: the steps form a group. Integers are their own ordinals.

This file owns what types exist and how each is read; arithmetic on arrays is in ``kernels.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """How a stored type is cut into numbers of 1, 2 or 4 bytes."""

    name: str
    """The stored type, as safetensors spells it."""
    size_bytes: int
    """Bytes of one number: types of 8 bytes are read as two numbers of 4."""
    per_value: int = 1
    """Numbers per value of the stored type."""
    is_float: bool = False
    """Whether the numbers are sign-magnitude floats, whose ordinal is the involution above."""
    exponent_bits: int = 0
    """Width of the exponent, 0 for integers; the sign is above it, the mantissa below."""

    @property
    def mantissa_bits(self) -> int:
        """Width of the mantissa of a float."""
        return 8 * self.size_bytes - 1 - self.exponent_bits


ELEMENTS: Mapping[str, Element] = MappingProxyType(
    {
        element.name: element
        for element in (
            Element(name="BOOL", size_bytes=1),
            Element(name="U8", size_bytes=1),
            Element(name="I8", size_bytes=1),
            Element(name="F8_E4M3", size_bytes=1, is_float=True, exponent_bits=4),
            Element(name="F8_E5M2", size_bytes=1, is_float=True, exponent_bits=5),
            Element(name="F8_E8M0", size_bytes=1),
            Element(name="U16", size_bytes=2),
            Element(name="I16", size_bytes=2),
            Element(name="F16", size_bytes=2, is_float=True, exponent_bits=5),
            Element(name="BF16", size_bytes=2, is_float=True, exponent_bits=8),
            Element(name="U32", size_bytes=4),
            Element(name="I32", size_bytes=4),
            Element(name="F32", size_bytes=4, is_float=True, exponent_bits=8),
            Element(name="U64", size_bytes=4, per_value=2),
            Element(name="I64", size_bytes=4, per_value=2),
            Element(name="F64", size_bytes=4, per_value=2),
            Element(name="C64", size_bytes=4, per_value=2, is_float=True, exponent_bits=8),
        )
    }
)
"""Every type we store. Packed 4-bit formats (NVFP4, MXFP4, int4) are published as ``U8``, their block scales as the
type they have; a step of one nibble is then a step of 1 or 16.
"""

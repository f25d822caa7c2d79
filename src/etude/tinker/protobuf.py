"""Protocol buffers on the wire: fields by their numbers, both ways.

    message = (tag varint, value)*          value: a varint, 8 bytes, or a length and bytes

Owns the encoding (https://protobuf.dev/programming-guides/encoding/) as far as the Tinker API needs it. Which number
means what is :mod:`etude.tinker.messages`'s.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import TypeAlias

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""
MAX_VARINT_BITS = 64

Value: TypeAlias = int | float | bytes
"""A varint, a double or float, or bytes: text, arrays, other messages."""
Fields: TypeAlias = Mapping[int, list[Value]]
"""The values of each field, in order."""


def decode(data: bytes) -> dict[int, list[Value]]:
    """The fields of a message. Raises ``ValueError`` where it is cut or damaged."""
    fields: dict[int, list[Value]] = {}
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        value: Value
        match wire_type:
            case 0:
                value, position = _varint(data, position)
            case 1:
                (value,), position = struct.unpack("<d", _cut(data, position, 8)), position + 8
            case 5:
                (value,), position = struct.unpack("<f", _cut(data, position, 4)), position + 4
            case 2:
                size, position = _varint(data, position)
                value, position = _cut(data, position, size), position + size
            case _:
                raise ValueError(f"protobuf field {number} has wire type {wire_type}, which no message here has")
        fields.setdefault(number, []).append(value)
    return fields


def varints(packed: bytes) -> list[int]:
    """The numbers of a packed field. Raises ``ValueError``."""
    return list(_varints(packed))


def field(number: int, value: Value | str) -> bytes:
    """One field of a message: a whole number as a varint, a float as a double, text and bytes as they are."""
    if isinstance(value, int):
        return _encode_varint(number << 3 | VARINT) + _encode_varint(value)
    if isinstance(value, float):
        return _encode_varint(number << 3 | FIXED64) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return _encode_varint(number << 3 | BYTES) + _encode_varint(len(data)) + data


def entry(number: int, key: str, value: Value) -> bytes:
    """One entry of a map field."""
    return field(number, field(1, key) + field(2, value))


def _varints(packed: bytes) -> Iterator[int]:
    position = 0
    while position < len(packed):
        value, position = _varint(packed, position)
        yield value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, MAX_VARINT_BITS, 7):
        if position >= len(data):
            raise ValueError("a protobuf message is cut short")
        byte = data[position]
        value, position = value | (byte & 0x7F) << shift, position + 1
        if byte < 0x80:
            return value, position
    raise ValueError("a protobuf number is longer than 64 bits")


def _cut(data: bytes, position: int, size: int) -> bytes:
    if position + size > len(data):
        raise ValueError("a protobuf message is cut short")
    return data[position : position + size]


def _encode_varint(value: int) -> bytes:
    if value < 0:
        raise ValueError(f"{value} is negative: no field here is")
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)

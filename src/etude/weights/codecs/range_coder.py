"""An adaptive binary range coder: yes-or-no decisions in, nearly as few bits as they surprise out.

*Decisions* go through the range coder (G. N. N. Martin, "Range encoding", 1979; binary and carry-propagating as in
LZMA, but with 64 bits of range, so that a word leaves only every dozens of decisions). Each has a *model*, the
probability of a one, which learns from what was coded before: from its n-th decision at a rate of 1 ∕ (n + 1.5), which
is counting, down to 1 ∕ 256, which forgets. Both ends learn the same, so no table travels. *Plain bits*, which no model
would predict better than a coin, skip the coder and fill the same array from its end, as in Opus (RFC 6716 §4.1.4).

This file owns how decisions and bits become 32-bit words. What they mean, and which model each decision has, is the
caller's. All but ``fresh_models`` is called from kernels: writers and readers are immutable tuples that live in
registers. Writing checks no bounds: the caller keeps a word free for each decision and each 32 plain bits, and two
more. Reading never leaves the array: it goes on with zeros, and ``is_whole`` tells afterwards whether all was right.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from etude.jit import inlined

Words: TypeAlias = npt.NDArray[np.uint32]
"""[n] decisions from the front, plain bits from the back."""
Models: TypeAlias = npt.NDArray[np.uint32]
"""[m] probability of a one in units of 2^−22, above ten bits that count the decisions seen."""

Register: TypeAlias = Any
"""An integer inside a kernel: numba settles its type."""

WORD_BITS = 32
LIKELY_BITS = 22
"""Resolution of a model's probability."""
SEEN_BITS = 10
SEEN_MASK = (1 << SEEN_BITS) - 1
RATE_BITS = 16
SLOWEST = 255
"""Decisions after which a model stops slowing down: real updates lose less to its forgetting than to its memory."""
INHERITED = 24
"""Worth of an inherited model in decisions of its own, see ``inherit``."""
RATES = ((2 << RATE_BITS) // (2 * np.arange(SLOWEST + 1) + 3)).astype(np.uint32)
"""[256] how far a model moves towards its n-th decision, in units of 2^−16."""
RATES.setflags(write=False)

_FULL = np.uint64(0xFFFFFFFFFFFFFFFF)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(WORD_BITS)


class RangeWriter(NamedTuple):
    """State of a range encoder."""

    low: Register
    """Decisions say: the code is at least this, after ``at`` words …"""
    span: Register
    """… and less than this above it."""
    at: Register
    pending: Register
    """Plain bits on their way into a word …"""
    pending_bits: Register
    """… how many there are …"""
    back: Register
    """… and how many words of them there are already."""


class RangeReader(NamedTuple):
    """State of a range decoder; the fields of the encoder but the first."""

    offset: Register
    """The distance of the code from ``low``."""
    span: Register
    at: Register
    pending: Register
    pending_bits: Register
    back: Register


def fresh_models(count: int) -> Models:
    """[count] untrained probability models."""
    return np.full(count, 1 << (LIKELY_BITS - 1 + SEEN_BITS), np.uint32)


@inlined
def inherit(models: Models) -> None:
    """Keep what was learnt only as a first guess, for decisions of a similar kind."""
    for index in range(models.size):
        seen = min(models[index] & np.uint32(SEEN_MASK), np.uint32(INHERITED))
        models[index] = (models[index] >> np.uint32(SEEN_BITS) << np.uint32(SEEN_BITS)) | seen


@inlined
def learn(models: Models, index: Register, one: Register) -> None:
    """Move a model towards a decision, 0 or 1: what is left of the other one shrinks, but rounding spares its last."""
    seen = np.int64(models[index] & np.uint32(SEEN_MASK))
    flip = -np.int64(one) & ((1 << LIKELY_BITS) - 1)
    left = np.int64(models[index] >> np.uint32(SEEN_BITS)) ^ flip
    left -= (left * np.int64(RATES[seen])) >> RATE_BITS
    models[index] = np.uint32(((left ^ flip) << SEEN_BITS) | min(seen + 1, np.int64(SLOWEST)))


@inlined
def begin_writing() -> RangeWriter:
    """A writer that has written nothing."""
    return RangeWriter(np.uint64(0), _FULL, np.int64(0), np.uint64(0), np.int64(0), np.int64(0))


@inlined
def write(writer: RangeWriter, words: Words, models: Models, index: Register, one: Register) -> RangeWriter:
    """Encode a decision, 0 or 1, that ``models[index]`` predicts."""
    low, span, at, pending, pending_bits, back = writer
    bound = (span >> np.uint64(LIKELY_BITS)) * np.uint64(models[index] >> np.uint32(SEEN_BITS))
    learn(models, index, one)
    above = low if one else low + bound
    span = bound if one else span - bound
    if above < low:
        carry(words, at)
    low = above
    if span <= _LOW:
        words[at] = np.uint32(low >> _WORD)
        at += 1
        low <<= _WORD
        span <<= _WORD
    return RangeWriter(low, span, at, pending, pending_bits, back)


@inlined
def carry(words: Words, at: Register) -> None:
    """Add one to the number that the first ``at`` words are."""
    place = at - 1
    while words[place] == np.uint32(_LOW):
        words[place] = np.uint32(0)
        place -= 1
    words[place] += np.uint32(1)


@inlined
def write_plain(writer: RangeWriter, words: Words, value: Register, width: Register) -> RangeWriter:
    """Add a value below 2^width as it is; at most 32 bits."""
    low, span, at, pending, pending_bits, back = writer
    pending |= np.uint64(value) << np.uint64(pending_bits)
    pending_bits += width
    if pending_bits >= WORD_BITS:
        back += 1
        words[words.size - back] = np.uint32(pending & _LOW)
        pending_bits -= WORD_BITS
        pending >>= _WORD
    return RangeWriter(low, span, at, pending, pending_bits, back)


@inlined
def finish_writing(writer: RangeWriter, words: Words) -> tuple[Register, Register]:
    """Settle both ends; returns how many words are used at the front and at the back. What is between is to be cut."""
    low, _, at, pending, pending_bits, back = writer
    words[at] = np.uint32(low >> _WORD)
    words[at + 1] = np.uint32(low & _LOW)
    if pending_bits:
        back += 1
        words[words.size - back] = np.uint32(pending)
    return at + 2, back


@inlined
def word_at(words: Words, at: Register) -> Register:
    """One word, zero beyond the ends."""
    return np.uint64(words[at]) if 0 <= at < words.size else np.uint64(0)


@inlined
def begin_reading(words: Words) -> RangeReader:
    """A reader that has read nothing."""
    first = word_at(words, 0) << _WORD
    return RangeReader(first | word_at(words, 1), _FULL, np.int64(2), np.uint64(0), np.int64(0), np.int64(0))


@inlined
def read(reader: RangeReader, words: Words, models: Models, index: Register) -> tuple[RangeReader, Register]:
    """Decode a decision, 0 or 1, that ``models[index]`` predicted."""
    offset, span, at, pending, pending_bits, back = reader
    bound = (span >> np.uint64(LIKELY_BITS)) * np.uint64(models[index] >> np.uint32(SEEN_BITS))
    one = np.int64(offset < bound)
    span = bound if one else span - bound
    offset = offset if one else offset - bound
    learn(models, index, one)
    if span <= _LOW:
        offset = (offset << _WORD) | word_at(words, at)
        span <<= _WORD
        at += 1
    return RangeReader(offset, span, at, pending, pending_bits, back), one


@inlined
def read_plain(reader: RangeReader, words: Words, width: Register) -> tuple[RangeReader, Register]:
    """The next plain bits, at most 32."""
    offset, span, at, pending, pending_bits, back = reader
    if pending_bits < width:
        back += 1
        pending |= word_at(words, words.size - back) << np.uint64(pending_bits)
        pending_bits += WORD_BITS
    value = pending & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))
    return RangeReader(offset, span, at, pending >> np.uint64(width), pending_bits - width, back), np.int64(value)


@inlined
def is_whole(reader: RangeReader, words: Words) -> bool:
    """Return true if all words were read, none from both ends, and no plain bit is left."""
    return bool(reader.at + reader.back == words.size and reader.pending == 0)

"""Drawing tokens: temperature, top-k, top-p and the choice itself, one row of logits at a time.

Owns which token a row of logits and a random number give, and which set it was drawn from; not the log-probability,
which is the arithmetic's, and not the seeds, which are the engine's.

A probability is a whole number here: token v weighs ⌊2⁴⁰ · exp((logit_v − largest) / temperature)⌋. Whole numbers add
up to the same sum in any order, so sums can be taken by blocks, by histogram or by vectors of any width and still be
the one that the definition names: a row's result depends on that row alone, bit for bit. What is lost is tokens 10¹²
times less likely than the likeliest, and of the others 2⁻⁴⁰ of the likeliest's probability.

Nothing sorts the vocabulary. Top-p first drops all tokens so unlikely that together they could not reach 1 − p, top-k
all below the k-th largest of the blocks' maxima; a radix selection finds the limit among the few that are left.

Shape legend: R rows, V vocabulary, B blocks of ``BLOCK`` tokens, n candidates. Arrays are contiguous; nothing checks
bounds.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from etude.jit import inlined, kernel

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
Float32s: TypeAlias = npt.NDArray[np.float32]
Float64s: TypeAlias = npt.NDArray[np.float64]

NO_TOKEN = -1
"""The id drawn from logits without a finite maximum or with NaN among them, and at a temperature that is none."""
UNIT_BITS = 40
"""The likeliest token weighs 2⁴⁰: four million tokens of that weight still add up to less than 2⁶³."""
FASTEST_FALL = 1e300
"""Bound of 1 / temperature: keeps the likeliest token's exponent, 0 / temperature, a number."""

BLOCK = 64
"""Tokens with one sum and one maximum. Smaller ones let top-k look at fewer candidates, larger ones cost less."""

_FRACTION_BITS = 50
"""A power of two in [2^−½, 2^½] is a whole number of 2⁻⁵⁰ before its exponent shifts it."""
_NOTHING = -52.0
"""Exponent from which on a weight is 0 for certain, and yet a shift that processors have."""
_TERMS = tuple(math.log(2.0) ** n / math.factorial(n) for n in range(12))
"""Taylor series of 2^f; for |f| ≤ ½ what follows is less than 10⁻¹⁴, a hundredth of the smallest weight."""

_DIGIT = 11
"""Bits of a key per round of the radix selection: three rounds, and counters that fit the first-level cache."""
_KEY_OFFSET = 1 << 31
"""Mask that makes a key unsigned."""
_LOWEST, _HIGHEST = np.int32(-(2**31)), np.int32(2**31 - 1)
_MINUS_INFINITY, _INFINITY = np.int32(-0x7F800000), np.int32(0x7F800000)

_STEP = np.uint64(0x9E3779B97F4A7C15)
"""2⁶⁴ / φ, odd: from one number of a splitmix64 sequence to the next."""
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_SURPLUS = np.uint64(11)
"""Random bits dropped: float64 holds 53 of 64."""


class Choices(NamedTuple):
    """The tokens drawn from R rows of logits."""

    token_ids: Int32s
    """[R] ``NO_TOKEN`` where nothing can be drawn."""
    offsets: Int64s
    """[R + 1] row r was drawn from ``sampling_mask[offsets[r]:offsets[r + 1]]``, or from the whole vocabulary."""
    sampling_mask: Int32s
    """Token ids, ascending in each row."""


class Row(NamedTuple):
    """One row of logits, ranked and weighed, and scratch memory; reused for each row."""

    keys_V: Int32s
    """Whole numbers in the order of the logits."""
    maxima_B: Int32s
    """The largest key of each block."""
    weights_V: Int64s
    sums_B: Int64s
    """The weight of each block."""
    ids_V: Int32s
    """Candidates, ascending."""
    spare_V: Int32s


@inlined
def _mixed(z: Any) -> Any:
    """splitmix64's finaliser: every bit of the input changes half of the bits of the output."""
    z = (z ^ (z >> _SHIFTS[0])) * _FACTORS[0]
    z = (z ^ (z >> _SHIFTS[1])) * _FACTORS[1]
    return z ^ (z >> _SHIFTS[2])


@kernel
def uniforms(seeds_R: npt.NDArray[np.uint64], positions_R: npt.NDArray[np.uint64]) -> Float64s:
    """[R] numbers in [0, 1), multiples of 2⁻⁵³, that depend on a seed and a position and on nothing else.

    The number of position t is entry t of the splitmix64 sequence (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014) whose start is the seed, mixed: neighbouring seeds do not share
    numbers.
    """
    numbers_R = np.empty(len(seeds_R), np.float64)
    for row in range(len(seeds_R)):
        bits = _mixed(_mixed(seeds_R[row] + _STEP) + _STEP * (positions_R[row] + np.uint64(1)))
        numbers_R[row] = np.float64(bits >> _SURPLUS) * 2.0**-53
    return numbers_R


@kernel
def draw(
    logits_RV: Float32s, temperatures_R: Float64s, top_ks_R: Int64s, top_ps_R: Float64s, uniforms_R: Float64s
) -> Choices:
    """Draw one token per row, by inverse cumulative sum in the order of ids over what top-k, then top-p, keep.

    Temperature 0 takes the largest logit, of equals the lowest id, and keeps no set. Top-k keeps the k largest logits,
    0 keeps all; top-p the fewest largest of those whose probabilities, renormalised after top-k, add up to p (at least
    one), 1 keeps all. Of equal logits those with lower ids go first. Logits of −∞ are never drawn. ``uniforms_R`` in
    [0, 1).

    Top-p is Holtzman et al., "The curious case of neural text degeneration", arXiv 1904.09751.
    """
    rows, vocabulary = logits_RV.shape
    bits_RV, row = logits_RV.view(np.int32), _blank(vocabulary)
    token_ids_R, offsets, mask_ids = np.empty(rows, np.int32), np.zeros(rows + 1, np.int64), np.empty(0, np.int32)
    for r in range(rows):
        offsets[r + 1] = offsets[r]
        if not (_rank(bits_RV[r], row) and 0.0 <= temperatures_R[r] < np.inf):
            token_ids_R[r] = NO_TOKEN
            continue
        largest = np.argmax(row.keys_V)
        if temperatures_R[r] == 0.0:
            token_ids_R[r] = largest
            continue
        total = _weigh(logits_RV[r], np.float64(logits_RV[r, largest]), temperatures_R[r], row)
        if not 0 < top_ks_R[r] < vocabulary and top_ps_R[r] >= 1.0:
            token_ids_R[r] = _pick_any(row, _target(uniforms_R[r], total))
            continue
        ids = row.ids_V[: _keep(row, top_ks_R[r], top_ps_R[r])]
        token_ids_R[r] = _pick_masked(row, ids, uniforms_R[r])
        if len(ids) < vocabulary:
            mask_ids = _appended(mask_ids, offsets[r], ids)
            offsets[r + 1] += len(ids)
    return Choices(token_ids_R, offsets, mask_ids[: offsets[rows]].copy())


@kernel
def _blank(vocabulary: int) -> Row:
    """Room for the numbers of one row."""
    blocks = (vocabulary + BLOCK - 1) // BLOCK
    return Row(
        np.empty(vocabulary, np.int32),
        np.empty(blocks, np.int32),
        np.empty(vocabulary, np.int64),
        np.empty(blocks, np.int64),
        np.empty(vocabulary, np.int32),
        np.empty(vocabulary, np.int32),
    )


@kernel
def _rank(bits_V: Int32s, row: Row) -> bool:
    """Fill in keys and maxima; false if the logits are unfit to draw from.

    −0 and 0 have one key. What is not a number has a key beyond that of an infinity.
    """
    lowest, highest = _HIGHEST, _LOWEST
    for block in range(len(row.maxima_B)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        bits_v, keys_v = bits_V[part], row.keys_V[part]
        low, high = _HIGHEST, _LOWEST
        for v in range(len(bits_v)):
            key = bits_v[v] if bits_v[v] >= 0 else np.int32(_LOWEST - bits_v[v])
            keys_v[v] = key
            low, high = min(low, key), max(high, key)
        row.maxima_B[block] = high
        lowest, highest = min(lowest, low), max(highest, high)
    return bool(lowest >= _MINUS_INFINITY and _MINUS_INFINITY < highest < _INFINITY)


@inlined
def _weight(exponent: Any) -> Any:
    """⌊2⁴⁰ · 2^exponent⌋ of an exponent in [−52, 0]."""
    whole = math.floor(exponent + 0.5)
    f = exponent - whole
    power = _TERMS[11]
    for n in range(10, -1, -1):
        power = power * f + _TERMS[n]
    return np.int64(power * 2.0**_FRACTION_BITS) >> (_FRACTION_BITS - UNIT_BITS - np.int64(whole))


@kernel
def _weigh(logits_V: Float32s, peak: float, temperature: float, row: Row) -> int:
    """Fill in weights and their sums; returns the sum of all."""
    rise = min(1.0 / (temperature * math.log(2.0)), FASTEST_FALL)
    total = 0
    for block in range(len(row.sums_B)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        logits_v, weights_v = logits_V[part], row.weights_V[part]
        block_sum = 0
        for v in range(len(logits_v)):
            weight = _weight(max((np.float64(logits_v[v]) - peak) * rise, _NOTHING))
            weights_v[v] = weight
            block_sum += weight
        row.sums_B[block] = block_sum
        total += block_sum
    return total


@kernel
def _keep(row: Row, top_k: int, top_p: float) -> int:
    """Leave in ``ids_V`` what top-k and then top-p keep; returns how many that are."""
    vocabulary, blocks = len(row.keys_V), len(row.maxima_B)
    if not 0 < top_k < vocabulary:
        total = row.sums_B.sum()
        needed = _needed(total, top_p)
        # Tokens that weigh no more than this cannot add up to what may be left out, however many they are.
        negligible = (total - needed) // vocabulary
        count = _at_least(row.weights_V, row.sums_B, negligible + 1, row.ids_V)
        return _cut(row.keys_V, row.weights_V, True, row.ids_V[:count], needed, row.spare_V)
    floor = _LOWEST
    if top_k <= blocks:
        # Of the k blocks with the largest maxima each holds a token as large as the least of those maxima.
        best = row.ids_V[:blocks]
        for block in range(blocks):
            best[block] = block
        floor = _HIGHEST
        for n in range(_cut(row.maxima_B, row.weights_V, False, best, top_k, row.spare_V)):
            floor = min(floor, row.maxima_B[best[n]])
    count = _at_least(row.keys_V, row.maxima_B, floor, row.ids_V)
    count = _cut(row.keys_V, row.weights_V, False, row.ids_V[:count], top_k, row.spare_V)
    if top_p >= 1.0:
        return count
    needed = _needed(_mass(row, row.ids_V[:count]), top_p)
    return _cut(row.keys_V, row.weights_V, True, row.ids_V[:count], needed, row.spare_V)


@kernel
def _needed(total: int, share: float) -> int:
    """The least weight that is ``share`` of the total."""
    return max(1, min(total, math.ceil(share * total)))


@kernel
def _at_least(values_V: Any, bounds_B: Any, floor: Any, ids_V: Int32s) -> int:
    """Write the ids of values that reach ``floor``, ascending; returns how many. No block has one above its bound."""
    count = 0
    for block in range(len(bounds_B)):
        if bounds_B[block] < floor:
            continue
        start = block * BLOCK
        values_v = values_V[start : start + BLOCK]
        for v in range(len(values_v)):
            ids_V[count] = start + v  # overwritten unless it counts: a branch here would be guessed wrong too often
            count += values_v[v] >= floor
    return count


@kernel
def _cut(keys_V: Int32s, weights_V: Int64s, by_weight: bool, ids_n: Int32s, needed: int, spare_V: Int32s) -> int:
    """Leave in ``ids_n`` the fewest with the largest keys that weigh ``needed``, or are so many; returns how many.

    Radix selection: find the digit at which the sum from above reaches what is needed, then look below that digit only.
    The candidates ascend and go on doing so; of equal keys the first go first.
    """
    sums = np.empty(1 << _DIGIT, np.int64)
    limit, undecided = 0, ids_n
    for shift in (2 * _DIGIT, _DIGIT, 0):
        sums[:] = 0
        for v in undecided:
            sums[((keys_V[v] + _KEY_OFFSET) >> shift) & (len(sums) - 1)] += weights_V[v] if by_weight else 1
        digit = len(sums) - 1
        while sums[digit] < needed:
            needed -= sums[digit]
            digit -= 1
        limit = limit << _DIGIT | digit
        count = 0
        for v in undecided:
            spare_V[count] = v
            count += (keys_V[v] + _KEY_OFFSET) >> shift == limit
        undecided = spare_V[:count]
    limit, count = limit - _KEY_OFFSET, 0
    for v in ids_n:
        ids_n[count] = v
        if keys_V[v] == limit:
            count += needed > 0
            needed -= weights_V[v] if by_weight else 1
        else:
            count += keys_V[v] > limit
    return count


@kernel
def _mass(row: Row, ids_n: Int32s) -> int:
    """The sum of some tokens' weights."""
    mass = 0
    for v in ids_n:
        mass += row.weights_V[v]
    return mass


@kernel
def _target(uniform: float, total: int) -> int:
    """The unit of weight, 0 … total − 1, that a random number points at."""
    return min(total - 1, int(uniform * total))


@kernel
def _pick_any(row: Row, target: int) -> int:
    """The token that owns a unit of weight, of the whole vocabulary."""
    block = 0
    while target >= row.sums_B[block]:
        target -= row.sums_B[block]
        block += 1
    v = block * BLOCK
    while target >= row.weights_V[v]:
        target -= row.weights_V[v]
        v += 1
    return v


@kernel
def _pick_masked(row: Row, ids_n: Int32s, uniform: float) -> int:
    """The token that owns the unit of weight that a random number points at, of some candidates."""
    target = _target(uniform, _mass(row, ids_n))
    index = 0
    while target >= row.weights_V[ids_n[index]]:
        target -= row.weights_V[ids_n[index]]
        index += 1
    return int(ids_n[index])


@kernel
def _appended(mask_ids: Int32s, used: int, ids_n: Int32s) -> Int32s:
    """``mask_ids`` with ``ids_n`` after the ``used`` ones, in a larger array if they do not fit."""
    if used + len(ids_n) > len(mask_ids):
        grown = np.empty(2 * (used + len(ids_n)), np.int32)
        _copy(mask_ids[:used], grown)
        mask_ids = grown
    _copy(ids_n, mask_ids[used:])
    return mask_ids


@kernel
def _copy(ids_n: Int32s, into: Int32s) -> None:
    """Copy token ids to the front of an array. In a loop: an assignment to a slice takes numba seconds to compile."""
    for n in range(len(ids_n)):
        into[n] = ids_n[n]

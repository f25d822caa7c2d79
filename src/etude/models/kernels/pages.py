"""Attention over a paged cache, one query at a time.

A token's scores are dot products with the keys of its own sequence, each added up along the key; its softmax sums them
in sixteen lanes by position; its values are added up position by position. So neither how a prompt is cut into chunks,
nor which pages it lies in, nor who else is in the step can change a bit.

A page holds its keys one column per position, so that sixteen scores are computed at once and nothing has to be folded;
its values, one row per position.

Shape legend: N tokens of a step, B sequences, P pages, S positions per page (16), Q query heads, K key heads, G = Q / K
queries that share a key head, D width of a key, W width of a value.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from etude.jit import borrowing, inlined
from etude.models.kernels.lanes import LANES, ONE, Matrix, exponential, fma, number, weighted
from etude.models.kernels.products import ZERO, Array, Floats, below, beside
from etude.models.kernels.rows import Wholes, largest, summed

Tables: TypeAlias = npt.NDArray[np.int32]

PAGE = LANES
"""Positions per page."""

_WEIGHTED_4_2, _WEIGHTED_4_1 = weighted(4, 2), weighted(4, 1)
_WEIGHTED_1_4, _WEIGHTED_1_1 = weighted(1, 4), weighted(1, 1)


@borrowing
def attend(
    q_NQD: Floats,
    cache: tuple[Array, Array],
    rows: tuple[Tables, Tables, Wholes],
    rule: tuple[float, int, Floats],
    scratch: Floats,
    out_NQW: Floats,
) -> None:
    """Causal attention of each token over its sequence's pages: the last positions up to its own.

    ``cache`` is keys [P,K,D,S] and values [P,K,S,W]; ``rows`` is page tables [B,pages], each token's sequence [N] and
    position [N]; ``rule`` is the factor of scores, how many positions a token sees, and the sinks [Q], or none;
    ``scratch`` [G, positions + 1] holds the scores of one token and key head, positions rounded up to pages, and behind
    them what sinks take.
    """
    scale, window, sinks = rule
    keys_PKDS, values_PKSW = cache
    tables, sequences, positions = rows
    tokens, heads, width = q_NQD.shape
    key_heads, value_width = keys_PKDS.shape[1], values_PKSW.shape[3]
    group, room = heads // key_heads, scratch.shape[1]
    q, keys, values = q_NQD.reshape(-1), keys_PKDS.reshape(-1), values_PKSW.reshape(-1)
    scores, out = scratch.reshape(-1), out_NQW.reshape(-1)
    for token in range(tokens):
        count = positions[token] + 1
        start_seen = max(np.int64(0), count - window)
        first_page = start_seen // PAGE * PAGE
        table = tables[sequences[token]]
        for head in range(key_heads):
            first = token * heads + head * group
            scratch[:, first_page : (count + PAGE - 1) // PAGE * PAGE] = ZERO
            for start in range(first_page, count, PAGE):
                page = (keys, (np.int64(table[start // PAGE]) * key_heads + head) * width * PAGE, PAGE)
                _add((q, first * width, width), page, (group, PAGE, width), (scores, start, room))
            for row in range(group):
                highest = _exponentials(scratch[row, start_seen:count], np.float32(scale))
                scratch[row, room - 1] = ZERO
                if len(sinks):
                    scratch[row, room - 1] = exponential(sinks[head * group + row] - highest * np.float32(scale))
            out_NQW[token, head * group : (head + 1) * group] = ZERO
            for start in range(first_page, count, PAGE):
                seen = max(start, start_seen)
                page = (values, (np.int64(table[start // PAGE]) * key_heads + head) * PAGE * value_width, value_width)
                shape = (group, value_width, min(start + PAGE, count) - seen)
                _add((scores, seen, room), below(page, seen - start), shape, (out, first * value_width, value_width))
            for row in range(group):
                share = ONE / (summed(scores, row * room + start_seen, count - start_seen) + scratch[row, room - 1])
                for i in range(value_width):
                    out_NQW[token, head * group + row, i] *= share


@inlined
def _exponentials(scores: Floats, scale: np.float32) -> np.float32:
    """``e^(scale · (score − largest))`` in place; returns the largest.

    Takes a slice: an index that might be negative is no vector loop.
    """
    highest = largest(scores, 0, len(scores))
    for i in range(len(scores)):
        scores[i] = exponential((scores[i] - highest) * scale)
    return highest


@inlined
def _add(p: Matrix, v: Matrix, shape: tuple[int, int, int], out: Matrix) -> None:
    """``out[m, n] += Σ_i p[m, i] · v[i, n]``, i ascending; ``shape`` is (rows, columns, length of a sum)."""
    rows, columns, length = shape
    whole, fours = columns // LANES * LANES, rows // 4 * 4
    for m in range(0, fours, 4):
        n = 0
        while n + 32 <= whole:
            _WEIGHTED_4_2(below(p, m), beside(v, n), length, beside(below(out, m), n))
            n += 32
        if n < whole:
            _WEIGHTED_4_1(below(p, m), beside(v, n), length, beside(below(out, m), n))
    for m in range(fours, rows):
        n = 0
        while n + 64 <= whole:
            _WEIGHTED_1_4(below(p, m), beside(v, n), length, beside(below(out, m), n))
            n += 64
        while n < whole:
            _WEIGHTED_1_1(below(p, m), beside(v, n), length, beside(below(out, m), n))
            n += LANES
    target = out[0]
    for m in range(rows):
        for n in range(whole, columns):
            place = out[1] + m * out[2] + n
            for i in range(length):
                target[place] = fma(p[0][p[1] + m * p[2] + i], number(v[0], v[1] + i * v[2] + n), target[place])


@borrowing
def write(k_NKD: Array, v_NKW: Array, cache: tuple[Array, Array], rows: tuple[Tables, Tables, Wholes]) -> None:
    """Write the tokens' keys and values, already in the cache's type, to their pages."""
    keys_PKDS, values_PKSW = cache
    tables, sequences, positions = rows
    tokens, heads, width = k_NKD.shape
    for token in range(tokens):
        index, place = tables[sequences[token], positions[token] // PAGE], positions[token] % PAGE
        for head in range(heads):
            for i in range(width):
                keys_PKDS[index, head, i, place] = k_NKD[token, head, i]
            for i in range(v_NKW.shape[2]):
                values_PKSW[index, head, place, i] = v_NKW[token, head, i]

"""Kernels over single rows: norms, rotations, gates, the choice of experts, log-probabilities.

Every row's result is a function of that row alone; sums over a row are folded in sixteen lanes like the products of
:mod:`etude.models.kernels.lanes`.

Shape legend: N rows, H numbers of a row, h heads, D width of a head, E experts, k experts per token, V vocabulary.
"""

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from etude.jit import borrowing, inlined
from etude.models.kernels.lanes import LANES, ONE, exponential, fma, lane_max, lane_sum, number
from etude.models.kernels.products import ZERO, Array, Floats, tiles

Wholes: TypeAlias = npt.NDArray[np.int64]

LOWEST = np.float32(-np.inf)


@borrowing
def norm(x_NH: Floats, gain_H: Array, eps: float, offset: float, out_NH: Floats) -> None:
    """RMS norm, row by row: ``x / √(mean(x²) + eps) · (gain + offset)``."""
    rows, width = x_NH.shape
    x, out = x_NH.reshape(-1), out_NH.reshape(-1)
    for row in range(rows):
        # The sum of squares is the row's dot product with itself; it is put where the row's first result will be.
        own = (x, row * width, width)
        tiles(own, own, (1, 1, width), (out, row * width, width))
        mean = out[row * width] / np.float32(width)
        scale = ONE / np.float32(math.sqrt(mean + np.float32(eps)))
        for i in range(width):
            out_NH[row, i] = x_NH[row, i] * scale * (number(gain_H, i) + np.float32(offset))


@borrowing
def gated(gate_up_NI: Floats, out_NI: Floats) -> None:
    """SwiGLU gate: ``silu(first half) · second half``, silu(g) = g / (1 + e^−g)."""
    rows, width = out_NI.shape
    for row in range(rows):
        for i in range(width):
            gate = gate_up_NI[row, i]
            out_NI[row, i] = gate / (ONE + exponential(-gate)) * gate_up_NI[row, width + i]


@borrowing
def gated_by(gate_up_NI: Floats, spec: tuple[float, float, float, float], interleaved: bool, out_NI: Floats) -> None:
    """Apply :class:`~etude.models.spec.GateSpec`; ``spec`` is its slope, cubic, shift and limit."""
    rows, width = out_NI.shape
    slope, cubic, shift, limit = spec
    apart = 1 if interleaved else width
    for row in range(rows):
        for i in range(width):
            place = 2 * i if interleaved else i
            gate = min(gate_up_NI[row, place], np.float32(limit))
            up = max(min(gate_up_NI[row, place + apart], np.float32(limit)), np.float32(-limit)) + np.float32(shift)
            inner = fma(np.float32(cubic) * gate * gate, gate, gate) * np.float32(slope)
            out_NI[row, i] = gate / (ONE + exponential(-inner)) * up


@borrowing
def rotate(x_NhD: Floats, cosines_ND: Floats, sines_ND: Floats, out_NhD: Floats) -> None:
    """Apply rotary positions by halves; a table row belongs to all heads of its token."""
    rows, heads, width = x_NhD.shape
    half = width // 2
    for row in range(rows):
        for head in range(heads):
            for i in range(half):
                low, high = x_NhD[row, head, i], x_NhD[row, head, half + i]
                out_NhD[row, head, i] = fma(low, cosines_ND[row, i], -high * sines_ND[row, i])
                out_NhD[row, head, half + i] = fma(high, cosines_ND[row, half + i], low * sines_ND[row, half + i])


@borrowing
def softmax(scores_NE: Floats, out_NE: Floats) -> None:
    """Softmax, row by row."""
    rows, width = scores_NE.shape
    scores, out = scores_NE.reshape(-1), out_NE.reshape(-1)
    for row in range(rows):
        highest = largest(scores, row * width, width)
        for i in range(width):
            out_NE[row, i] = exponential(scores_NE[row, i] - highest)
        total = summed(out, row * width, width)
        for i in range(width):
            out_NE[row, i] /= total


@borrowing
def best(scores_NE: Floats, out_Nk: Wholes) -> None:
    """Top-k: the columns of each row's largest scores, best first; of equal scores the lower column."""
    rows, width = scores_NE.shape
    limit = out_Nk.shape[1]
    for row in range(rows):
        for column in range(width):
            score = scores_NE[row, column]
            slot = min(column, limit)
            while slot > 0 and score > scores_NE[row, out_Nk[row, slot - 1]]:
                if slot < limit:
                    out_Nk[row, slot] = out_Nk[row, slot - 1]
                slot -= 1
            if slot < limit:
                out_Nk[row, slot] = column


@borrowing
def dispatch(experts_R: Wholes, order_R: Wholes, ends_E: npt.NDArray[np.int32]) -> None:
    """Sort pairs by expert, stably: ``order_R`` lists them, expert e's end before ``ends_E[e]``."""
    ends_E[:] = 0
    for pair in range(len(experts_R)):
        ends_E[experts_R[pair]] += 1
    start = 0
    for expert in range(len(ends_E)):
        count = ends_E[expert]
        ends_E[expert] = start
        start += count
    for pair in range(len(experts_R)):
        expert = experts_R[pair]
        order_R[ends_E[expert]] = pair
        ends_E[expert] += 1


@borrowing
def combine(y_RH: Floats, order_R: Wholes, gates_Nk: Floats, places_R: Wholes, out_NH: Floats) -> None:
    """Each token's weighted sum over its experts, in order; ``places_R`` is scratch for the inverse of ``order_R``."""
    rows, slots = gates_Nk.shape
    width = out_NH.shape[1]
    for row in range(len(order_R)):
        places_R[order_R[row]] = row
    for row in range(rows):
        out_NH[row, :] = ZERO
        for slot in range(slots):
            source, gate = places_R[row * slots + slot], gates_Nk[row, slot]
            for i in range(width):
                out_NH[row, i] = fma(gate, y_RH[source, i], out_NH[row, i])


@borrowing
def logprobs(
    logits_NV: Floats, token_ids_N: Wholes, temperatures_N: Floats, mask: tuple[Wholes, Wholes],
    scratch_V: Floats, out_N: Floats,
) -> None:  # fmt: skip
    """Ln softmax(logits / temperature)[token], within the sampling mask (offsets [N + 1] or empty, ids), if any."""
    offsets, ids = mask
    for row in range(len(token_ids_N)):
        temperature, token = temperatures_N[row], token_ids_N[row]
        if temperature == ZERO:
            out_N[row] = ZERO
            continue
        start = offsets[row] if len(offsets) else 0
        listed = offsets[row + 1] - start if len(offsets) else 0
        count = listed if listed else logits_NV.shape[1]
        for i in range(count):
            scratch_V[i] = logits_NV[row, ids[start + i] if listed else i] / temperature
        highest = largest(scratch_V, 0, count)
        for i in range(count):
            scratch_V[i] = exponential(scratch_V[i] - highest)
        total = summed(scratch_V, 0, count)
        out_N[row] = np.float32(logits_NV[row, token] / temperature - highest) - np.float32(math.log(total))


@inlined
def largest(x: Floats, offset: int, count: int) -> np.float32:
    """The maximum of a run of numbers."""
    whole = count // LANES * LANES
    highest = lane_max(x, offset, whole) if whole else LOWEST
    for i in range(whole, count):
        highest = max(highest, x[offset + i])
    return highest


@inlined
def summed(x: Floats, offset: int, count: int) -> np.float32:
    """Sum of a run of numbers: sixteen lanes folded, then what is left over one by one."""
    whole = count // LANES * LANES
    total = lane_sum(x, offset, whole) if whole else ZERO
    for i in range(whole, count):
        total += x[offset + i]
    return total

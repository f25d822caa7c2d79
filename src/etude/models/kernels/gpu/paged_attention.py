"""Attention over a paged cache on a GPU, as one Triton kernel that reads the cache as it lies, once.

    tile: some tokens of one sequence × the query heads of one key head      M rows
    ┌─────────┬─────────┬─────────┬───┐
    │ split 0 │ split 1 │ split 2 │ … │  one program each: a softmax of its own over its part of the positions
    └────┬────┴────┬────┴────┬────┴───┘
         └─────────┴────┬────┘            a second kernel weighs the parts against each other
                    attended values

Splitting the positions (flash decoding, Dao et al. 2023) keeps every multiprocessor busy however few sequences there
are, and keeps the longest from being what all wait for. A part beyond its sequence's end costs a program that returns
at once, so launches depend on shapes alone and can be captured in CUDA graphs. Where a graph reads prompts, tiles are
listed on the device.

Where a layer has a window, a tile begins with the block of the first position that any of its tokens sees: what is read
does not grow with the sequence. Sinks join the softmax at its end. The kernels of other layers are compiled without.

A key page is [D,S]: it is loaded as it lies, pages side by side, and needs no transpose. Widths that are no power of
two are taken as a power of two and a rest (576 = 512 + 64). Measured on an H200 (docs/gpu.md): 0.87 to 0.91 of the
bandwidth that the card copies with, at 64 sequences of 1k to 20k positions; latent attention, which computes more for
each byte, 0.25.

Shape legend: N tokens of a step, B sequences, P pages, S positions per page (16), Q query heads, K key heads, G = Q / K
query heads that share a key head, D width of a key, W width of a value, T tiles, M rows of a tile, X splits.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.models.arithmetic import AttentionRule, PagedRows
from etude.models.kernels.pages import PAGE

PROGRAMS_PER_UNIT = 4
"""Programs to have for each multiprocessor, so that their ends overlap."""
UNITS = 132
"""Multiprocessors that splits are counted for: a Hopper card's."""
LONGEST_SPLIT = 2048
"""Positions of a split at most: what a long sequence is cut into while short ones end."""
LEAST_WIDTH = 16
"""The least that a tensor core multiplies, along each side."""
WIDE_BYTES = 1100
"""Bytes of a position's key and value above which fewer pages are read at a time: those of latent attention."""


WIDE_NUMBERS = 400
"""Numbers of a position's key and value above which the same holds: sums of heads of 256 fill a program's registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Cut of a launch; see :func:`tuned`."""

    rows: int
    """M: rows of a tile, a power of two ≥ 16, the least that a tensor core multiplies."""
    pages: int
    """Pages read at a time."""
    warps: int
    stages: int
    """Reads in flight."""

    def tokens(self, group: int) -> int:
        """Neighbouring tokens of one sequence that a tile takes, each with ``group`` query heads."""
        return max(1, self.rows // group)


def attends(key_width: int, value_width: int) -> bool:
    """Report whether the kernel takes heads of these widths: powers of two, and for keys a second one below it."""
    low, is_power = _power_below(key_width), value_width == _power_below(value_width)
    rest = key_width - low
    parts = (value_width, low, rest) if rest else (value_width, low)
    return is_power and all(part >= LEAST_WIDTH and part == _power_below(part) for part in parts)


def attend(q_NQD: Tensor, cache: tuple[Tensor, Tensor], rows: PagedRows, rule: AttentionRule) -> Tensor:
    """[N,Q,W]: causal attention of each token over its sequence's pages, as far back as the rule says.

    One launch for all sequences with one token, which come first, and one for each other; one for all listed tiles.
    """
    out_NQW = q_NQD.new_empty((*q_NQD.shape[:2], cache[1].shape[-1]))
    if rows.tiles_2T is not None:
        _attend_range(q_NQD, cache, rows, rule, _Range(0, len(q_NQD), single=False), out_NQW)
        return out_NQW
    singles = rows.singles
    if singles:
        _attend_range(q_NQD, cache, rows, rule, _Range(0, singles, single=True), out_NQW)
    start = singles
    for count in rows.counts[singles:]:
        _attend_range(q_NQD, cache, rows, rule, _Range(start, count, single=False), out_NQW)
        start += count
    return out_NQW


def tile_tokens(heads: int, key_heads: int, widths: int, itemsize: int) -> int:
    """Tokens of one sequence that a tile takes at most; ``widths`` are those of a key and a value together."""
    group = heads // key_heads
    return tuned(group, widths, itemsize, single=False).tokens(group)


@dataclass(frozen=True, slots=True)
class _Range:
    """Rows of a step that are attended together."""

    start: int
    count: int
    single: bool
    """True if every row is a sequence of its own, false if all are neighbours of one."""


def _attend_range(
    q_NQD: Tensor,
    cache: tuple[Tensor, Tensor],
    rows: PagedRows,
    rule: AttentionRule,
    part: _Range,
    out_NQW: Tensor,
) -> None:
    keys_PKDS, values_PKSW = cache
    heads, width = q_NQD.shape[1:]
    key_heads, value_width = values_PKSW.shape[1], values_PKSW.shape[3]
    group = heads // key_heads
    cut = tuned(group, width + value_width, q_NQD.element_size(), single=part.single)
    per_tile = 1 if part.single else cut.tokens(group)
    tiles = math.ceil(part.count / per_tile) if rows.tiles_2T is None else rows.tiles_2T.shape[1]
    blocks = math.ceil(group * per_tile / cut.rows)
    step, positions = cut.pages * PAGE, rows.tables_BP.shape[1] * PAGE
    if rule.window is not None:  # from wherever in a block a tile's first position lies
        positions = min(positions, step + rule.window + per_tile - 2)
    splits = max(PROGRAMS_PER_UNIT * UNITS // (tiles * blocks * key_heads), math.ceil(positions / LONGEST_SPLIT), 1)
    span = math.ceil(positions / splits / step) * step
    splits = math.ceil(positions / span)  # those that have anything to do
    parts, masses = out_NQW[part.start : part.start + part.count], out_NQW
    if splits > 1:
        parts = q_NQD.new_empty((splits, part.count, heads, value_width), dtype=torch.float32)
        masses = q_NQD.new_empty((splits, part.count, heads), dtype=torch.float32)
    low = _power_below(width)
    sinks, has_sinks = q_NQD if rule.sinks_Q is None else rule.sinks_Q, rule.sinks_Q is not None
    listed, is_tiled = rows.sequences_N if rows.tiles_2T is None else rows.tiles_2T, rows.tiles_2T is not None
    _attend[(tiles * blocks, key_heads, splits)](
        q_NQD, keys_PKDS, values_PKSW, rows.tables_BP, rows.sequences_N, rows.positions_N, listed, sinks, parts,
        masses, rule.scale * math.log2(math.e), rows.tables_BP.stride(0), *q_NQD.stride()[:2], part.start, part.count,
        span,
        Q=heads, K=key_heads, G=group, PER_TILE=per_tile, BLOCKS=blocks, M=cut.rows, D_LOW=low, D_REST=width - low,
        W=value_width, S=PAGE, PAGES=cut.pages, SPLIT=splits > 1, WINDOW=rule.window or 0, SINKS=has_sinks,
        TILED=is_tiled, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if splits > 1:
        _join[(part.count, heads)](
            parts,
            masses,
            sinks,
            out_NQW,
            part.start,
            part.count,
            splits,
            Q=heads,
            W=value_width,
            X=triton.next_power_of_2(splits),
            SINKS=has_sinks,
        )


def tuned(group: int, widths: int, itemsize: int, *, single: bool) -> Tuning:
    """The cut for ``group`` query heads to a key head, keys and values of together ``widths`` numbers.

    Found on an H200: what fits into a multiprocessor's shared memory decides, reads in flight first.
    """
    rows = min(64, max(LEAST_WIDTH, triton.next_power_of_2(group))) if single else 64
    if widths * itemsize > WIDE_BYTES or widths > WIDE_NUMBERS:
        doubles = widths * itemsize > 2 * WIDE_BYTES
        return Tuning(rows=min(rows, 32) if doubles else rows, pages=1 if doubles else 2, warps=8, stages=2)
    return Tuning(rows=rows, pages=4, warps=2 if rows == LEAST_WIDTH else 4, stages=2)


LOG2_E = tl.constexpr(math.log2(math.e))


def _power_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)


@triton.jit(do_not_specialize=["table_stride", "start", "count", "span"])  # they change from step to step
def _attend(
    q, keys, values, tables, sequences, reach, tiles, sinks, parts, masses,
    scale, table_stride, token_stride, head_stride, start, count, span,
    Q: tl.constexpr, K: tl.constexpr, G: tl.constexpr, PER_TILE: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr,
    D_LOW: tl.constexpr, D_REST: tl.constexpr, W: tl.constexpr, S: tl.constexpr, PAGES: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(1)
    split = tl.program_id(2)
    D: tl.constexpr = D_LOW + D_REST
    X: tl.constexpr = PAGES * S
    first = tile * PER_TILE
    after = tl.minimum(first + PER_TILE, count)
    if TILED:
        first = tl.load(tiles + tile)
        after = first + tl.load(tiles + tl.num_programs(0) // BLOCKS + tile)
    row = block * M + tl.arange(0, M)
    live = (row < G * PER_TILE) & (first + row // G < after)
    at = (split * count + first + row // G).to(tl.int64) * Q + head * G + row % G
    last = tl.load(reach + start + after - 1).to(tl.int32)
    begin = split * span
    if WINDOW > 0:
        furthest = tl.load(reach + start + first).to(tl.int32) - (WINDOW - 1)
        begin += tl.maximum(furthest, 0) // X * X
    if begin > last:
        tl.store(masses + at, tl.full((M,), float("-inf"), tl.float32), mask=live)
        return
    end = tl.minimum(begin + span, last + 1)
    token = start + first + row // G
    at_q = token.to(tl.int64) * token_stride + (head * G + row % G) * head_stride
    low = tl.arange(0, D_LOW)
    x = tl.load(q + at_q[:, None] + low[None, :], mask=live[:, None], other=0.0)
    if D_REST > 0:
        rest = D_LOW + tl.arange(0, D_REST)
        y = tl.load(q + at_q[:, None] + rest[None, :], mask=live[:, None], other=0.0)
    limit = tl.load(reach + token, mask=live, other=0).to(tl.int32)
    table = tables + tl.load(sequences + start + first) * table_stride
    page = tl.arange(0, PAGES)
    slot = tl.arange(0, S)
    offset = tl.arange(0, X)
    column = tl.arange(0, W)
    peak = tl.full((M,), float("-inf"), tl.float32)
    mass = tl.zeros((M,), tl.float32)
    total = tl.zeros((M, W), tl.float32)
    for place in range(begin, end, X):
        number = place // S + page
        there = number * S < end
        pages = tl.load(table + number, mask=there, other=0).to(tl.int64)
        base = (pages * K + head) * (D * S)
        k = tl.load(keys + base[None, :, None] + (low * S)[:, None, None] + slot[None, None, :])
        scores = tl.dot(x, tl.reshape(k, (D_LOW, X)), input_precision="ieee")
        if D_REST > 0:
            k_rest = tl.load(keys + base[None, :, None] + (rest * S)[:, None, None] + slot[None, None, :])
            scores += tl.dot(y, tl.reshape(k_rest, (D_REST, X)), input_precision="ieee")
        position = place + offset
        visible = (position[None, :] <= limit[:, None]) & (position[None, :] < end)
        if WINDOW > 0:
            visible = visible & (position[None, :] > limit[:, None] - WINDOW)
        scores = tl.where(visible, scores * scale, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        base_score = tl.where(highest == float("-inf"), 0.0, highest)
        fall = tl.exp2(peak - base_score)
        weights = tl.exp2(scores - base_score[:, None])
        base_v = (pages * K + head) * (S * W)
        filled = (number * S)[:, None] + slot[None, :] < end
        v = tl.load(
            values + base_v[:, None, None] + (slot * W)[None, :, None] + column[None, None, :],
            mask=filled[:, :, None], other=0.0,
        )  # fmt: skip
        mass = mass * fall + tl.sum(weights, 1)
        v = tl.reshape(v, (X, W))
        total = total * fall[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = highest
    if SINKS and not SPLIT:
        sink = tl.load(sinks + head * G + row % G).to(tl.float32) * LOG2_E
        highest = tl.maximum(peak, sink)
        fall = tl.exp2(peak - highest)
        mass = mass * fall + tl.exp2(sink - highest)
        total = total * fall[:, None]
    mass = tl.where(mass == 0.0, 1.0, mass)  # a row that sees nothing of this part: its peak says so
    mean = total / mass[:, None]
    if SPLIT:
        tl.store(masses + at, peak + tl.log2(mass), mask=live)
    tl.store(parts + at[:, None] * W + column[None, :], mean.to(parts.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["start", "count", "splits"])
def _join(
    parts, masses, sinks, out, start, count, splits,
    Q: tl.constexpr, W: tl.constexpr, X: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * Q + tl.program_id(1)
    split = tl.arange(0, X)
    at = split.to(tl.int64) * count * Q + row
    column = tl.arange(0, W)
    mass = tl.load(masses + at, mask=split < splits, other=float("-inf"))
    highest = tl.max(mass, 0)
    if SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(mass - highest)
    part = tl.load(parts + at[:, None] * W + column[None, :], mask=(weight > 0.0)[:, None], other=0.0)
    all_weight = tl.sum(weight, 0)
    if SINKS:
        all_weight += tl.exp2(sink - highest)
    mean = tl.sum(part * weight[:, None], 0) / all_weight
    tl.store(out + (start * Q + row) * W + column, mean.to(out.dtype.element_ty))

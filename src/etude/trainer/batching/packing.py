"""Packing of a batch into micro-batches of one forward and backward pass, balanced over ranks.

    lengths ──▶ fewest micro-batches, a multiple of the ranks ──▶ sorted by cost ──▶ a pass: a micro-batch for each rank
                longest first, each to the cheapest with room                        the most expensive ones first

Sequences are concatenated in a micro-batch, so there is no padding to save: the remaining choices are the assignment to
ranks and the number of passes. All ranks run a pass at the same time and wait for each other in every layer, where
parameters are gathered and gradients reduced. So every rank has the same number of passes, some perhaps empty, and the
micro-batches of a pass have similar costs: a step takes as long as the sum over passes of the most expensive
micro-batch.

Owns this packing and the cost model. Knows only the lengths of sequences and the number of ranks. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

from etude.models.flops import pair_flops, token_flops, window_flops
from etude.models.spec import ModelSpec

MicroBatch: TypeAlias = tuple[int, ...]
"""Indices of sequences that go through the model together, longest first; may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a sequence of L tokens: ``per_token`` · L + ``per_pair`` · L(L + 1)/2, in any one unit.

    The second term is causal attention, in which token i attends to i + 1 tokens, including itself. FLOPs of a model:
    :mod:`etude.models.flops`.
    """

    per_token: float
    per_pair: float
    per_windowed_pair: float = 0.0
    """The same for attention to at most ``window`` tokens."""
    window: int = 0

    def __post_init__(self) -> None:
        if not (self.per_token > 0 and self.per_pair >= 0):
            raise ValueError(f"per_token={self.per_token} must be above 0 and per_pair={self.per_pair} not below")

    @classmethod
    def of_model(cls, spec: ModelSpec) -> Self:
        """The cost in operations of a model."""
        return cls(
            per_token=token_flops(spec),
            per_pair=pair_flops(spec),
            per_windowed_pair=window_flops(spec),
            window=spec.window.size if spec.window is not None else 0,
        )

    def of(self, length: int) -> float:
        """Cost of one sequence."""
        beyond = max(0, length - self.window)
        pairs, unseen = length * (length + 1) / 2, beyond * (beyond + 1) / 2
        return self.per_token * length + self.per_pair * pairs + self.per_windowed_pair * (pairs - unseen)


def pack(lengths: Sequence[int], *, max_tokens: int, ranks: int, cost: Cost) -> list[list[MicroBatch]]:
    """Pack sequences into micro-batches: the same number on every rank, every sequence whole and in exactly one.

    A micro-batch has at most ``max_tokens`` tokens; a longer sequence gets one of its own. If one pass is enough and
    the limit does not bind, the most expensive rank costs at most 4/3 − 1/(3·ranks) times the optimum (LPT: R. L.
    Graham, "Bounds on Multiprocessing Timing Anomalies", 1969, theorem 2). With several passes, no micro-batch of a
    pass is cheaper than one of the next, so the totals of ranks differ by at most the most expensive micro-batch.

    Equal input gives equal output. Raises ``ValueError`` on a length, limit or number of ranks below 1.
    """
    if min(lengths, default=1) < 1 or max_tokens < 1 or ranks < 1:
        raise ValueError(f"lengths, max_tokens={max_tokens} and ranks={ranks} must be at least 1: {list(lengths)}")
    costs = [cost.of(length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    full = _fewest(order, lengths, max_tokens)
    count = -(-len(full) // ranks) * ranks
    microbatches = _evenly(order, count, lengths, costs, max_tokens) or full
    microbatches += [[] for _ in range(count - len(microbatches))]
    return _dealt(microbatches, [sum(costs[index] for index in microbatch) for microbatch in microbatches], ranks)


def _dealt(microbatches: Sequence[Sequence[int]], prices: Sequence[float], ranks: int) -> list[list[MicroBatch]]:
    """Deal the most expensive micro-batches first, one pass at a time: the most expensive of a pass to the rank with
    the lowest cost so far.
    """
    order = sorted(range(len(microbatches)), key=lambda place: -prices[place])
    shares: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    spent = [0.0] * ranks
    for start in range(0, len(order), ranks):
        poorest_first = sorted(range(ranks), key=lambda rank: spent[rank])
        for rank, place in zip(poorest_first, order[start : start + ranks], strict=True):
            shares[rank].append(tuple(microbatches[place]))
            spent[rank] += prices[place]
    return shares


def _evenly(
    order: Sequence[int], count: int, lengths: Sequence[int], costs: Sequence[float], max_tokens: int
) -> list[list[int]]:
    """Put each index in turn into the cheapest of ``count`` bins with room, the first of equals; [] if none
    has room.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens, spent = [0] * count, [0.0] * count
    for index in order:
        fitting = [place for place in range(count) if _fits(tokens[place], lengths[index], max_tokens)]
        if not fitting:
            return []
        place = min(fitting, key=lambda place: spent[place])
        bins[place].append(index)
        tokens[place] += lengths[index]
        spent[place] += costs[index]
    return bins


def _fewest(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Bins filled by first fit, decreasing: each index in turn goes to the first bin with room."""
    bins: list[list[int]] = []
    tokens: list[int] = []
    for index in order:
        fitting = (place for place, filled in enumerate(tokens) if _fits(filled, lengths[index], max_tokens))
        place = next(fitting, len(bins))
        if place == len(bins):
            bins.append([])
            tokens.append(0)
        bins[place].append(index)
        tokens[place] += lengths[index]
    return bins


def _fits(filled: int, length: int, max_tokens: int) -> bool:
    """True if a sequence may join a bin with that many tokens; an empty bin takes one of any length."""
    return filled == 0 or filled + length <= max_tokens

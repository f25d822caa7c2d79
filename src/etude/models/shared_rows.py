"""Packed sequences without repetition: tokens with the same past are computed once.

A batch repeats itself: every conversation of a harness begins with its system message, every rollout of a group with
its task. A causal model's result for a token depends only on that token and earlier ones, so equal prefixes have equal
rows: the nodes of a prefix tree (after *Prefix Grouper*, arXiv 2506.05433, which shares the prefix of each group).
Pure, except for the tensors in its result.

Shape legend: N tokens, U rows, U ≤ N.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_KEPT_SHARE = 0.9
"""Share of the rows that must be enough: keys and values are gathered for each layer, which has its price, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRows:
    """The rows that have to be computed, and which of them each token has."""

    firsts_U: Tensor
    """int64: the first of the N tokens that has this row."""
    rows_N: Tensor
    """int64: the row of each token."""


def shared_rows(token_ids: Sequence[int], lengths: Sequence[int]) -> SharedRows | None:
    """The rows of concatenated sequences; ``None`` if too few are shared to be worthwhile."""
    nodes: dict[tuple[int, int], int] = {}
    firsts: list[int] = []
    rows: list[int] = []
    for length in lengths:
        parent = -1
        for _ in range(length):
            place = len(rows)
            row = nodes.setdefault((parent, token_ids[place]), len(firsts))
            if row == len(firsts):
                firsts.append(place)
            rows.append(row)
            parent = row
    if len(firsts) > MOST_KEPT_SHARE * len(rows):
        return None
    return SharedRows(firsts_U=torch.tensor(firsts), rows_N=torch.tensor(rows))

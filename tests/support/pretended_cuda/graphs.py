"""CUDA graphs of the pretended device: what was captured is done again, on the very tensors it was captured on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pretended_cuda.timeline import Touched


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One captured operation, its tensors those of the CPU."""

    what: str
    call: Callable[[], Any]
    results: Sequence[Tensor]
    """What it made or changed, at the addresses that later operations read."""
    fresh: Sequence[Tensor]
    """What it made."""
    reads: Sequence[Touched]
    writes: Sequence[Touched]

    def again(self) -> None:
        """Do it once more; results go where the captured ones are."""
        made = [leaf for leaf in tree_leaves(self.call()) if isinstance(leaf, Tensor)]
        for result, new in zip(self.results, made, strict=True):
            if new.data_ptr() != result.data_ptr():
                result.copy_(new)


@final
class Captured:
    """The operations of a capture, in their order."""

    def __init__(self) -> None:
        self.launches = list[Launch]()

    def spoil(self) -> None:
        """Make what was computed while capturing unusable: a real capture computes nothing."""
        for launch in self.launches:
            for result in launch.fresh:
                if result.is_floating_point():
                    result.fill_(torch.nan)

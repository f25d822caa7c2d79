"""CUDA graphs of the pretended device: captured operations are repeated on the tensors that they were captured with."""

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
    """Tensors that it made or changed, at the addresses that later operations read."""
    fresh: Sequence[Tensor]
    """Tensors that it made."""
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
        """Make results computed during a capture unusable: a real capture computes nothing."""
        for launch in self.launches:
            for result in launch.fresh:
                if result.is_floating_point():
                    result.fill_(torch.nan)

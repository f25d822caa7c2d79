"""A buffer that stays float32 when its model is cast.

Rotation tables and the corrections of routers are useless in bfloat16: positions 4,096 and 4,097 would be rotated
equally, and corrections are as small as the differences between experts that they decide.
"""

from collections.abc import Callable
from typing import Self, final

import torch
from torch import Tensor, nn


@final
class Precise(nn.Module):
    """One float32 buffer that moves between devices with its model and is not cast with it."""

    values: Tensor

    def __init__(self, values: Tensor, *, persistent: bool) -> None:
        super().__init__()
        assert values.dtype is torch.float32
        self.register_buffer("values", values, persistent=persistent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # ``model.bfloat16()`` and ``model.cuda()`` both call this; applying ``fn`` to an empty tensor gives the device.
        device = fn(self.values[:0]).device
        self.values = torch.empty_like(self.values, device=device) if self.values.is_meta else self.values.to(device)
        return self

"""Sharded tensors and modules, recognised without an import of torch's modules for them, which takes a second.

Before these modules are imported, nothing is sharded: :mod:`etude.trainer.parallel` imports them to shard a model.
"""

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Size, Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """True if a tensor is sharded over ranks."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded_module(part: nn.Module) -> "TypeGuard[FSDPModule]":
    """True if the parameters of a module are sharded by ``fully_shard``."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(part, module.FSDPModule)


def local(tensor: Tensor) -> Tensor:
    """The local shard of a tensor, or all of an unsharded one; shares its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def sharded_as(own: Tensor, like: "DTensor", shape: Size, stride: tuple[int, ...]) -> "DTensor":
    """The tensor of ``shape`` of which this rank has the shard ``own``, sharded as ``like`` is."""
    return type(like).from_local(own, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)

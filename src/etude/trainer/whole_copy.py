"""A whole copy of a sharded model in host memory, kept up to date with the changes that ranks send.

    rank r    its part, rounded for publication ──▶ bits that differ from last time ──▶ indices, values ──┐
    rank 0    whole tensor in host memory ◀────────────────────── written there, tensor by tensor ◀───────┘

An update changes a few per cent of the rounded numbers (docs/weights.md), so ranks send little. The last values that a
rank sent stay in its host memory, and are copied to the device one tensor at a time for the comparison: no device holds
more than its parts, and no host except rank 0's more than the rounded parts. If much has changed, as the first time, a
part is sent whole.

Owns the comparison and the transfer, not the publication or encoding of the copy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from etude.models.hf import CausalModel, make_causal_model
from etude.trainer.checkpoint import Box, box_of
from etude.trainer.sharded import is_sharded, local

WHOLE = -1
"""Value of the change count if all numbers of a part follow."""
_BITS: Mapping[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class ChangedPart:
    """New numbers of a region of a tensor."""

    box: Box
    count: int
    """Changed numbers, or :data:`WHOLE`."""
    payload: Tensor
    """uint8 [n]: indices in the region as int64 and the numbers there, or all numbers."""

    @classmethod
    def between(cls, box: Box, old: Tensor | None, new: Tensor) -> "ChangedPart":
        """The change of a region from ``old``, if any, to ``new``; numbers are compared by their bits."""
        numbers, size = new.reshape(-1), new.element_size()
        if old is not None:
            places = (numbers.view(_BITS[size]) != old.reshape(-1).view(_BITS[size])).nonzero().reshape(-1)
            if len(places) * (places.element_size() + size) < len(numbers) * size:
                payload = torch.cat((places.view(torch.uint8), numbers[places].view(torch.uint8)))
                return cls(box, len(places), payload)
        return cls(box, WHOLE, numbers.view(torch.uint8))

    def write(self, whole: Tensor) -> None:
        """Write the numbers into the whole tensor."""
        self.write_into(whole[self.box.inside(Box((0,) * whole.ndim, tuple(whole.shape)))])

    def write_into(self, region: Tensor) -> None:
        """Write the numbers into the region, a tensor in host memory."""
        payload = self.payload.cpu()
        if self.count == WHOLE:
            region.copy_(payload.view(region.dtype).view(self.box.shape))
        elif self.count:
            ends = self.count * torch.int64.itemsize
            places, numbers = payload[:ends].view(torch.int64), payload[ends:].view(region.dtype)
            region[torch.unravel_index(places, self.box.shape)] = numbers


@final
class WholeCopy:
    """The copy of one model: every rank of ``mesh`` contributes its part, rank 0 has the copy."""

    def __init__(self, model: CausalModel, mesh: DeviceMesh | None, types: Mapping[str, torch.dtype]) -> None:
        """``types`` has the types that tensors of the model's state are rounded to; others are not rounded."""
        self._model = model
        self._mesh = mesh
        self._types = types
        self._is_first = mesh is None or mesh.get_local_rank() == 0
        self._sent: dict[str, Tensor] = {}
        """Name → this rank's part as last sent, in host memory."""
        self._whole: CausalModel | None = None

    def update(self) -> CausalModel | None:
        """Update the copy; every rank has to call it. ``None`` on all ranks except rank 0. The previously returned
        model is changed in place, and must not be read meanwhile.
        """
        places = {} if self._whole is None else self._whole.state_dict()
        for name, tensor in self._model.state_dict().items():
            dtype = self._types.get(name, tensor.dtype)
            if self._is_first and name not in places:
                places[name] = torch.empty(tensor.shape, dtype=dtype)
            for part in self._parts(name, tensor, dtype):
                part.write(places[name])
        if self._is_first and self._whole is None:
            with torch.device("meta"):
                self._whole = make_causal_model(self._model.spec, self._model.arithmetic)
            self._whole.load_state_dict(places, assign=True)
            self._whole.requires_grad_(False)
        return self._whole

    def _parts(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Iterator[ChangedPart]:
        """Every rank's changes of a tensor, on rank 0; of a replicated tensor only rank 0's."""
        if not is_sharded(tensor) and not self._is_first:
            return
        own = local(tensor).detach()
        new = own.to(dtype, copy=True, memory_format=torch.contiguous_format)
        sent = self._sent.get(name)
        if sent is None:
            sent = self._sent[name] = torch.empty(new.shape, dtype=dtype, pin_memory=new.is_cuda)
            part = ChangedPart.between(box_of(tensor), None, new)
        else:
            part = ChangedPart.between(box_of(tensor), sent.to(new.device, non_blocking=True), new)
        part.write_into(sent)
        if is_sharded(tensor) and self._mesh is not None:
            yield from _gathered(part, new.element_size(), self._mesh)
        else:
            yield part


def _gathered(own: ChangedPart, number_bytes: int, mesh: DeviceMesh) -> Iterator[ChangedPart]:
    """The parts of all ranks, on rank 0 of ``mesh``; a collective."""
    group, world, device = mesh.get_group(), mesh.size(), own.payload.device
    row = torch.tensor([own.count, len(own.payload), *own.box.start, *own.box.shape], device=device)
    rows = [torch.empty_like(row) for _ in range(world)]
    dist.all_gather(rows, row, group)
    heads = [one.tolist() for one in rows]
    longest = max(size for _, size, *_ in heads)
    if not longest:
        return
    padded = torch.nn.functional.pad(own.payload, (0, longest - len(own.payload)))
    is_first = mesh.get_local_rank() == 0
    received = [torch.empty_like(padded) for _ in range(world)] if is_first else None
    dist.gather(padded, received, group=group, group_dst=0)
    for payload, (count, size, *box) in zip(received or (), heads, strict=False):
        axes = len(box) // 2
        yield ChangedPart(Box(tuple(box[:axes]), tuple(box[axes:])), count, payload[:size])

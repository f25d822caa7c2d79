"""A whole model in the host's memory that follows a sharded one: ranks tell what changed of their parts.

    rank r    its part, rounded as it is published ──▶ other bits than last time? ──▶ places and numbers ─┐
    rank 0    whole tensor in the host's memory ◀──────────────── written there, tensor by tensor ◀───────┘

An update changes a few per cent of the rounded numbers (docs/weights.md), so that ranks send little. What a rank sent
last lies in the memory of its host, and visits the device a tensor at a time to be compared there: no device holds more
than its parts, no host but rank 0's more than those, rounded. Where much has changed, as the first time, a part is sent
whole.

Owns what is compared and sent. What is published of the copy, and how it is encoded, is not decided here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from etude.models.hf import CausalModel, make_causal_model
from etude.trainer.checkpoint import Box, box_of

WHOLE = -1
"""In place of the number of changes: all numbers of a part follow."""
_BITS: Mapping[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class ChangedPart:
    """New numbers of a region of a tensor."""

    box: Box
    count: int
    """Changed numbers, or :data:`WHOLE`."""
    payload: Tensor
    """uint8 [n]: places in the region as int64 and the numbers there, or all numbers."""

    @classmethod
    def between(cls, box: Box, old: Tensor | None, new: Tensor) -> "ChangedPart":
        """The change of a region from ``old``, if there was one, to ``new``: any other bits count."""
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
        """Write the numbers into the region alone, which lies in the host's memory."""
        payload = self.payload.cpu()
        if self.count == WHOLE:
            region.copy_(payload.view(region.dtype).view(self.box.shape))
        elif self.count:
            ends = self.count * torch.int64.itemsize
            places, numbers = payload[:ends].view(torch.int64), payload[ends:].view(region.dtype)
            region[torch.unravel_index(places, self.box.shape)] = numbers


@final
class WholeCopy:
    """The copy of one model; every rank of ``mesh`` has a part in it, rank 0 has the copy."""

    def __init__(self, model: CausalModel, mesh: DeviceMesh | None, types: Mapping[str, torch.dtype]) -> None:
        """``types`` are those that tensors of the model's state are rounded to; others stay as they are."""
        self._model = model
        self._mesh = mesh
        self._types = types
        self._is_first = mesh is None or mesh.get_local_rank() == 0
        self._sent: dict[str, Tensor] = {}
        """Name → this rank's part as it was sent last, in the host's memory."""
        self._whole: CausalModel | None = None

    def update(self) -> CausalModel | None:
        """Bring the copy up to date; every rank has to call it. ``None`` on all but rank 0.

        What it returned before changes, and must not be read meanwhile.
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
        """Every rank's changes of a tensor, on rank 0; of one that all hold alike, its own."""
        is_sharded = isinstance(tensor, DTensor)
        if not is_sharded and not self._is_first:
            return
        own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        new = own.to(dtype, copy=True, memory_format=torch.contiguous_format)
        sent = self._sent.get(name)
        if sent is None:
            sent = self._sent[name] = torch.empty(new.shape, dtype=dtype, pin_memory=new.is_cuda)
            part = ChangedPart.between(box_of(tensor), None, new)
        else:
            part = ChangedPart.between(box_of(tensor), sent.to(new.device, non_blocking=True), new)
        part.write_into(sent)
        if is_sharded and self._mesh is not None:
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

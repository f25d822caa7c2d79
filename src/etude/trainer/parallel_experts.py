"""Experts spread over ranks: rows travel to the rank that has their expert, and their results travel back.

    rows, sorted by expert ──counts, then rows──▶ owner: sort by own expert, compute, unsort ──rows──▶ as they came in

Owns the journey. Which rank has which experts is :mod:`etude.trainer.parallel`'s, what an expert computes is the
model's. Every rank of the group takes part in every journey, be it with no row at all: in the backward pass, too, where
gradients travel the same way.

Shape legend: R rows (r on arrival), I inputs, O outputs, E experts, e experts of one rank, W ranks.
"""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@final
class ExpertExchange:
    """Implements :class:`~etude.models.experts.Exchange` over a mesh of one axis.

    Rank w has experts w·e … (w + 1)·e − 1. How many rows arrive has to be known on the host before they can be
    received: one wait for the device in each direction and layer.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def own(self, weight_EOI: Tensor) -> Tensor:
        """[e,O,I] this rank's part of a parameter that is sharded over the mesh."""
        assert isinstance(weight_EOI, DTensor)
        return weight_EOI.to_local()

    def carry(self, rows_RI: Tensor, ends_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """[R,O]: ``compute`` of each row on the rank of its expert; see the protocol."""
        leaving_WE = ends_E.diff(prepend=ends_E.new_zeros(1)).view(self._mesh.size(), -1)
        arriving_We = collectives.all_to_all_single(leaving_WE.flatten(), None, None, self._mesh).view_as(leaving_WE)
        left, arrived = (counts.sum(1).tolist() for counts in (leaving_WE, arriving_We))
        rows_rI = collectives.all_to_all_single_autograd(rows_RI, arrived, left, self._mesh)
        order_r = _by_expert(arriving_We)
        y_rO = _computed(compute, rows_rI[order_r], arriving_We.sum(0).cumsum(0, dtype=torch.int32))
        returned_rO = torch.empty_like(y_rO).index_copy(0, order_r, y_rO)
        y_RO: Tensor = collectives.all_to_all_single_autograd(returned_rO, left, arrived, self._mesh)
        return y_RO


def _by_expert(arriving_We: Tensor) -> Tensor:
    """int64 [r]: rows that arrive rank by rank, put in the order of their experts."""
    ranks, experts = arriving_We.shape
    numbers = torch.arange(experts, device=arriving_We.device).repeat(ranks)
    return numbers.repeat_interleave(arriving_We.flatten()).argsort(stable=True)


def _computed(compute: Callable[[Tensor, Tensor], Tensor], rows_rI: Tensor, ends_e: Tensor) -> Tensor:
    """[r,O]: of no rows, none, but still a function of the weights, which must get a gradient on every rank."""
    if len(rows_rI):
        return compute(rows_rI, ends_e)
    lone_1I = torch.cat((rows_rI, rows_rI.new_zeros(1, rows_rI.shape[1])))
    ends_e = ends_e.clone()
    ends_e[-1] = 1
    return compute(lone_1I, ends_e)[:0]

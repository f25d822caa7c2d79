"""Parallel training of one model: the device mesh and sharding.

    mesh ``everyone``   [dp · cp]                    all weights except routed experts are sharded over all ranks (rows)
    mesh ``experts``    [dp · cp / ep, ep]           experts are spread over ``ep`` ranks, each part's rows sharded over
                                                     the ranks that hold the same experts
    mesh ``sequences``  [dp, cp]                     batches are split over ``dp``, each sequence over ``cp``

Two meshes for two kinds of weights, over the same ranks (Composer 2.5's dual meshes): there are many experts and each
sees few tokens, so they are spread more widely than other weights. Sharding is torch's ``fully_shard``, parameters are
its ``DTensor`` objects; without sharding each rank has the whole model. Gradients are added up, never averaged: every
loss is already divided by the totals of the whole batch.

Owns the meshes, the sharding and the exchange of tokens between ranks with different experts. Keys are exchanged by
:mod:`etude.trainer.parallel_context`.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from etude.config.training import ParallelConfig
from etude.errors import ConfigError
from etude.models.decoder import Decoder, DecoderBlock
from etude.models.experts import Experts, RoutedExperts
from etude.models.hf import CausalModel, HfBlock, HfModel, materialise_hf
from etude.trainer.parallel_context import ContextParallel
from etude.trainer.sharded import is_sharded, is_sharded_module, local
from etude.types import Floats

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

COLLECTIVE_TIMEOUT_S = 1800.0
"""Longest time that ranks wait for each other before all of them fail. It is longer than a publication may take,
because rank 0 reports a failed publication itself.
"""
BUCKET_NUMBERS = 1 << 24
"""Gradient elements that are summed at a time: 64 MiB, copied once."""
MATRIX_ROWS = 1
"""The axis of expert parameters [E, rows, columns] that is sharded over the ranks with the same experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The device mesh of one trainer's ranks."""

    everyone: DeviceMesh
    experts: DeviceMesh
    sequences: DeviceMesh
    is_sharded: bool = True
    """False: each rank has all weights, and gradients are added up by :func:`add_gradients`."""

    @classmethod
    def open(cls, config: ParallelConfig, device: str) -> Self:
        """The meshes of ``config`` over the processes of the default group, for tensors on ``device``."""
        kind = torch.device(device).type
        return cls(
            everyone=init_device_mesh(kind, (config.ranks,), mesh_dim_names=("everyone",)),
            experts=init_device_mesh(
                kind, (config.ranks // config.ep, config.ep), mesh_dim_names=("shards", "experts")
            ),
            sequences=init_device_mesh(kind, (config.dp, config.cp), mesh_dim_names=("dp", "cp")),
            is_sharded=config.sharding == "full",
        )

    @property
    def rank(self) -> int:
        """Index of the process, 0 … world − 1; only rank 0 talks to other processes."""
        return self.everyone.get_local_rank()

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.everyone.size()

    @property
    def shares(self) -> int:
        """Number of shares into which a batch is divided."""
        return self.sequences["dp"].size()

    @property
    def share(self) -> int:
        """Index of the share that this process trains on, 0 … shares − 1."""
        return self.sequences.get_local_rank("dp")

    @property
    def context(self) -> ContextParallel | None:
        """Context parallelism: the split of sequences; ``None`` if they are not split."""
        mesh = self.sequences["cp"]
        return ContextParallel(mesh) if mesh.size() > 1 else None

    def broadcast(self, payload: bytes) -> bytes:
        """Send the bytes that rank 0 passes to every rank; the argument of other ranks is ignored."""
        device = self.everyone.device_type
        size = torch.tensor([len(payload)], device=device)
        dist.broadcast(size, 0)
        sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if self.rank == 0 and payload else None
        received = torch.empty(int(size), dtype=torch.uint8, device=device) if sent is None else sent.to(device)
        dist.broadcast(received, 0)
        return received.cpu().numpy().tobytes()

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over all ranks."""
        totals = torch.tensor(numbers, dtype=torch.float64, device=self.everyone.device_type)
        dist.all_reduce(totals)
        sums: list[float] = totals.tolist()
        return sums

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        most = torch.tensor(number, device=self.everyone.device_type)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def by_share(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every share of the batch. All ranks of a share pass the same numbers, and all ranks pass
        equally many.
        """
        rows = torch.zeros(self.shares, len(numbers), dtype=torch.int64, device=self.everyone.device_type)
        if self.sequences.get_local_rank("cp") == 0:
            rows[self.share] = torch.tensor(numbers, device=rows.device)
        dist.all_reduce(rows)
        every: list[list[int]] = rows.tolist()
        return every

    def summed(self, numbers: Floats) -> Floats:
        """The sum over all ranks of float32 arrays of the same shape."""
        totals = torch.from_numpy(numbers).to(self.everyone.device_type)
        dist.all_reduce(totals)
        sums: Floats = totals.cpu().numpy()
        return sums


@contextlib.contextmanager
def joined(config: ParallelConfig, device: str) -> Iterator[Grid | None]:
    """Join the mesh of the started ranks; ``None`` for a single process. NCCL between GPUs, else gloo.

    Raises :class:`~etude.errors.ConfigError` if the number of started processes is not that of ``config``.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != config.ranks:
        raise ConfigError(
            f"dp * cp = {config.ranks}, but {started} processes were started: start them with `etude train`, "
            f"`midtrain` or `sft`, or change parallel.dp or parallel.imitation_dp"
        )
    if config.ranks == 1:
        yield None
        return
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.device(device).type == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo" if gpu is None else "nccl", timeout=timeout, device_id=gpu)
    try:
        yield Grid.open(config, device)
    finally:
        dist.destroy_process_group()


def parallelise(
    model: CausalModel, grid: Grid, fill: Callable[[nn.Module], None], dtype: torch.dtype = torch.float32
) -> None:
    """Shard the weights of ``model``, which are on ``meta``, in place; without sharding, every rank fills in all of
    them. All ranks must fill in the same weights.

    Shards and sums of gradients are float32. Blocks are gathered in ``dtype``, the type to which the model's arithmetic
    rounds parameters: this gives the same numbers as gathering float32, with half the traffic and without a rounded
    copy. Experts in low precision are gathered in float32 and then rounded. Embedding and head are gathered in float32,
    too: they are used in several places and chunks, whose gradients must not be summed in ``dtype``.

    ``fill`` is called with each block and finally with the model, right before its parameters are sharded, to allocate
    memory (:func:`materialise`) and set the weights: no device ever holds more than one block beside its shards. Raises
    :class:`~etude.errors.ConfigError` for experts that cannot be divided by the grid.
    """
    if not grid.is_sharded:
        for part in (*model.blocks, model):
            fill(part)
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # here: the import takes a second

    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    rounded = replace(exact, param_dtype=dtype)
    for block in model.blocks:
        fill(block)
        if isinstance(block, DecoderBlock) and isinstance(block.feed, Experts):
            routed = block.feed.routed
            _spread(routed, grid.experts, rounded if routed.format is None else exact)
        fully_shard(block, mesh=grid.everyone, mp_policy=rounded)
    fill(model)
    # Embedding and head are also used outside of the model's forward pass: they stay gathered until the backward pass
    # has ended.
    fully_shard(model, mesh=grid.everyone, reshard_after_forward=False, mp_policy=exact)
    for module in model.modules():
        if is_sharded_module(module):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo only has sums; NCCL's scaled sums would gain nothing


def materialise(part: nn.Module, device: str) -> None:
    """Allocate memory on ``device`` for a block, or for the parameters outside of blocks, that is on ``meta``."""
    if isinstance(part, HfModel | HfBlock):
        materialise_hf(part, device)
        return
    if isinstance(part, DecoderBlock):
        part.to_empty(device=device)
        return
    assert isinstance(part, Decoder)
    for name, parameter in list(part.named_parameters(recurse=False)):
        setattr(part, name, nn.Parameter(torch.empty_like(parameter, device=device)))
    for child in part.children():
        if child is part.draft:
            child.to_empty(device=device)
        elif child is not part.blocks:
            child.to(device)  # tables, which are never on meta


def add_gradients(model: nn.Module, grid: Grid) -> None:
    """Sum the gradients of ranks that each have the whole model.

    A gradient that some ranks lack counts as 0 there. One that all ranks lack stays missing, so that the optimiser does
    not move the parameter, as on one process.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has_gradient_P = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    has_gradient_P = has_gradient_P.to(grid.everyone.device_type)
    dist.all_reduce(has_gradient_P, dist.ReduceOp.MAX, group=grid.everyone.get_group())
    for parameter, has_gradient in zip(parameters, has_gradient_P.tolist(), strict=True):
        if has_gradient and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for bucket in _buckets(gradients):
        sums = torch._utils._flatten_dense_tensors(bucket)
        dist.all_reduce(sums, group=grid.everyone.get_group())
        for gradient, total in zip(bucket, torch._utils._unflatten_dense_tensors(sums, bucket), strict=True):
            gradient.copy_(total)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of consecutive tensors to send together: at most :data:`BUCKET_NUMBERS` elements, or a single tensor."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > BUCKET_NUMBERS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def clip_gradients(model: nn.Module, max_norm: float, *, without: nn.Module | None = None) -> Tensor:
    """Clip gradients, except those of the module ``without``, to ``max_norm`` by their global norm; returns that norm.

    On one process this is exactly ``torch.nn.utils.clip_grad_norm_``. With sharding each element of the gradient is on
    one rank, so squares are summed over all ranks.
    """
    left_out = set() if without is None else set(without.parameters())
    own = (parameter.grad for parameter in model.parameters() if parameter not in left_out)
    gradients = [gradient for gradient in own if gradient is not None]
    parts = [local(gradient) for gradient in gradients]
    norm = torch.nn.utils.get_total_norm(parts)
    if any(map(is_sharded, gradients)):
        squares = norm.square()
        dist.all_reduce(squares)
        norm = squares.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in torch
    torch._foreach_mul_(parts, factor)
    return norm


def _spread(routed: RoutedExperts, mesh: DeviceMesh, policy: "MixedPrecisionPolicy") -> None:
    """Leave this rank its share of the experts and shard that share's rows."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    shards, spread = mesh["shards"], mesh["experts"]
    for name, parameter in list(routed.named_parameters()):
        experts, rows = parameter.shape[:2]
        if experts % spread.size() or rows % shards.size():
            raise ConfigError(
                f"{experts} experts with {name} of {rows} rows cannot be spread over parallel.ep = {spread.size()} "
                f"ranks and sharded over {shards.size()}: both must divide"
            )
        own = parameter.detach().chunk(spread.size())[spread.get_local_rank()].clone()
        setattr(routed, name, nn.Parameter(DTensor.from_local(own, spread, [Shard(0)], run_check=False)))
    routed.parallel = AllToAllExperts(spread)
    fully_shard(routed, mesh=shards, shard_placement_fn=lambda _: Shard(MATRIX_ROWS), mp_policy=policy)


@final
class AllToAllExperts:
    """Implements :class:`~etude.models.experts.ExpertParallel` over a mesh of one axis.

    Rank w has experts w·e … (w + 1)·e − 1. The host has to know the number of arriving rows before it can receive them:
    one device synchronisation in each direction and layer.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def local(self, weight_EOI: Tensor) -> Tensor:
        """[e,O,I]: this rank's part of a parameter that is sharded over the mesh."""
        assert is_sharded(weight_EOI)
        return weight_EOI.to_local()

    def all_to_all(self, rows_RI: Tensor, ends_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
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
    """int64 [r]: permutation of rows from the order of their ranks to the order of their experts."""
    ranks, experts = arriving_We.shape
    numbers = torch.arange(experts, device=arriving_We.device).repeat(ranks)
    return numbers.repeat_interleave(arriving_We.flatten()).argsort(stable=True)


def _computed(compute: Callable[[Tensor, Tensor], Tensor], rows_rI: Tensor, ends_e: Tensor) -> Tensor:
    """[r,O]: the result of ``compute``; without rows it is empty but still depends on the weights, as all ranks need a
    gradient.
    """
    if len(rows_rI):
        return compute(rows_rI, ends_e)
    lone_1I = torch.cat((rows_rI, rows_rI.new_zeros(1, rows_rI.shape[1])))
    ends_e = ends_e.clone()
    ends_e[-1] = 1
    return compute(lone_1I, ends_e)[:0]

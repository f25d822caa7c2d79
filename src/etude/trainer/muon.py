"""The Muon optimiser: momentum with every matrix orthogonalised, whole or sharded.

By Keller Jordan (https://kellerjordan.github.io/posts/muon), scaled so that its updates are as large as AdamW's
(Moonlight, arXiv 2502.16982 §2.2). Two things differ from ``torch.optim.Muon``, whose coefficients and scale are these:

* A parameter is not a matrix. It contains projections of several heads, gate and up, or all experts of a layer; each of
  those is orthogonalised by itself, as in Composer 2.5. torch accepts only two-dimensional parameters, each as one
  matrix.
* Matrices of one shape are processed as one batch, up to :data:`MOST_STACKED` numbers at a time, and each matrix of a
  sharded parameter is gathered on one rank: all to all, iterate, all to all. torch's does not support shards.

Shape legend: M matrices, P parameters of one shape, E experts, R rows, C columns; lower case is this rank's part.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from etude.models.attention import GroupedAttention, LatentAttention
from etude.models.decoder import Decoder, DecoderBlock
from etude.models.experts import Experts, FeedForward
from etude.trainer.eager import EagerOptimiser
from etude.trainer.moments import MOMENTUM, Moments
from etude.trainer.sharded import is_sharded, local, sharded_as

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of x ← a·x + b·(xxᵀ)x + c·(xxᵀ)²x: steepest at 0, so that five steps bring singular values to 0.7 … 1.2."""
ITERATIONS = 5
EPSILON = 1e-7
"""Least norm that a matrix is divided by; a zero matrix stays zero."""
MOST_STACKED = 1 << 26
"""Numbers of this rank's part of the matrices of one batch; with intermediate results, 2 GB."""
ADAMW_RMS = 0.2
"""Root mean square of a typical AdamW update, to which Muon's is scaled."""


@dataclass(frozen=True, slots=True)
class MatrixSplit:
    """Division of the last two axes of a parameter into matrices; without sizes they form a single matrix."""

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    def parts(self, whole: Tensor) -> Sequence[Tensor]:
        """Views [..., r, c] of ``whole`` [..., R, C]."""
        if not self.rows and not self.columns:
            return (whole,)
        parts: Sequence[Tensor] = whole.split(self.rows, -2) if self.rows else whole.split(self.columns, -1)
        return parts


Matrices: TypeAlias = Mapping[nn.Parameter, MatrixSplit]
"""The parameters that Muon updates, and their division into matrices."""


def matrices_of(model: Decoder) -> dict[nn.Parameter, MatrixSplit]:
    """The matrices of all blocks. Embedding and output matrix are excluded, because their rows are looked up
    or scored.
    """
    return {parameter: split for block in model.blocks for parameter, split in _block(block)}


def orthogonalise(x_MRC: Tensor) -> Tensor:
    """[M,R,C]: UVᵀ of each matrix UΣVᵀ, approximately.

    Singular values of at least 0.0015 of the Frobenius norm end between 0.68 and 1.21. Smaller ones, of which square
    matrices have some, are multiplied by at most 485 and end anywhere below: 20 random ones of 64×64 had 1 % there.

    Newton–Schulz iteration in the type of ``x``. Matrices with more rows than columns are transposed, so that the
    products have the size of the short side.
    """
    a, b, c = COEFFICIENTS
    tall = x_MRC.shape[-2] > x_MRC.shape[-1]
    x = x_MRC.mT if tall else x_MRC
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@final
class Muon(EagerOptimiser):
    """Muon for ``matrices``, the given AdamW for the rest, as one optimiser.

    ``weight_decay`` is decoupled. Its state is one tensor per parameter, ``momentum``, sharded as the parameter is.
    """

    def __init__(
        self,
        matrices: Matrices,
        adamw: torch.optim.AdamW,
        moments: Moments,
        *,
        momentum: float,
        weight_decay: float = 0.0,
        most_stacked: int = MOST_STACKED,
    ) -> None:
        """``moments`` stores the momentum; ``most_stacked`` is the most numbers that this rank stacks at a time."""
        defaults = {"lr": adamw.defaults["lr"], "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(matrices), defaults)
        self._splits = dict(matrices)
        self._own = list(self.param_groups)
        self._adamw = adamw
        self._most_stacked = most_stacked
        self.moments = moments
        # Both optimisers share the list of groups and the state, so that set rates and restored moments reach both.
        self.param_groups += adamw.param_groups
        adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch's returns the closure's loss
        """Update every parameter that has a gradient; closures are not supported."""
        assert closure is None
        for group in self._own:
            moved = [p for p in group["params"] if p.grad is not None]
            for alike in _alike(moved, self._splits):
                size = _stack_size(alike[0], self._most_stacked)
                for start in range(0, len(alike), size):
                    self._update(alike[start : start + size], group["lr"], group["momentum"], group["weight_decay"])
        self.moments.settle()
        self._adamw.step()

    def _update(self, parameters: Sequence[nn.Parameter], rate: float, momentum: float, decay: float) -> None:
        """One step of parameters of one shape, sharding and split."""
        directions = [self._direction(parameter, momentum) for parameter in parameters]
        split = self._splits[parameters[0]]
        for parameter, update in zip(parameters, _orthogonal(directions, split), strict=True):
            values = local(parameter)
            values.mul_(1 - rate * decay).add_(update.to(values.dtype), alpha=-rate)

    def _direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """G + β·m after m ← β·m + g, sharded as the parameter is."""
        assert parameter.grad is not None
        state, gradient = self.state[parameter], local(parameter.grad)
        average = self.moments.read(state, MOMENTUM, parameter).mul_(momentum).add_(gradient)
        self.moments.write(state, MOMENTUM, parameter, average)
        direction = gradient.add(average, alpha=momentum)
        if not is_sharded(parameter):
            return direction
        return sharded_as(direction, parameter, parameter.shape, parameter.stride())


def _stack_size(parameter: nn.Parameter, most: int) -> int:
    """Number of such parameters to process at a time: as many as have ``most`` numbers together in their shards, but at
    least enough to give each rank that shares their rows a matrix.
    """
    rows = _row_sharding(parameter)
    ranks = 1 if rows is None else rows[0].size()
    matrices = local(parameter).shape[:-2].numel()
    return max(1, -(-ranks // max(1, matrices)), most // max(1, local(parameter).numel()))


def _alike(parameters: Sequence[nn.Parameter], splits: Matrices) -> Iterator[list[nn.Parameter]]:
    """Parameters in groups that can be stacked; in the same order on every rank."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        sharding = (parameter.device_mesh, parameter.placements) if is_sharded(parameter) else None
        groups.setdefault((parameter.shape, sharding, splits[parameter]), []).append(parameter)
    yield from groups.values()


def _orthogonal(directions: Sequence[Tensor], split: MatrixSplit) -> Sequence[Tensor]:
    """The update of each direction, this rank's part of it: P tensors in, P tensors out."""
    first = directions[0]
    stack_Prc = torch.stack([local(direction) for direction in directions])
    stack_Mrc = stack_Prc.flatten(0, -3)  # each expert is a separate matrix
    rows = _row_sharding(first)
    if rows is None:
        return _updates(stack_Mrc, split).view_as(stack_Prc).unbind()
    from torch.distributed.tensor import DTensor, Shard  # loaded anyway where something is sharded

    mesh, height = rows
    shape = torch.Size((len(stack_Mrc), height, first.shape[-1]))
    stride = (height * first.shape[-1], first.shape[-1], 1)
    sharded = DTensor.from_local(stack_Mrc, mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)
    whole_mRC = sharded.redistribute(placements=[Shard(0)])
    updates_mRC = _updates(whole_mRC.to_local(), split)
    updates = DTensor.from_local(updates_mRC, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return updates.redistribute(placements=[Shard(1)]).to_local().view_as(stack_Prc).unbind()


def _row_sharding(tensor: Tensor) -> tuple[DeviceMesh, int] | None:
    """The ranks over which the rows of a tensor's matrices are sharded, and the total number of rows."""
    if not is_sharded(tensor):
        return None
    mesh, rows = tensor.device_mesh, tensor.ndim - 2
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard(rows):
            return (mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[axis]]), tensor.shape[rows]
    return None


def _updates(whole_MRC: Tensor, split: MatrixSplit) -> Tensor:
    """[M,R,C]: every part orthogonalised and scaled; parts of one shape are iterated as one batch."""
    updates_MRC = torch.empty_like(whole_MRC)
    pairs = list(zip(split.parts(whole_MRC), split.parts(updates_MRC), strict=True))
    for shape in dict.fromkeys(part.shape for part, _ in pairs):
        chosen = [(part, target) for part, target in pairs if part.shape == shape]
        stack_Mrc = torch.cat([part for part, _ in chosen])
        precise = stack_Mrc if stack_Mrc.device.type == "cpu" else stack_Mrc.bfloat16()
        scale = ADAMW_RMS * math.sqrt(max(shape[-2:]))
        updates = (orthogonalise(precise) * scale).chunk(len(chosen)) if len(whole_MRC) else [stack_Mrc] * len(chosen)
        for (_, target), update in zip(chosen, updates, strict=True):
            target.copy_(update)
    return updates_MRC


def _block(block: nn.Module) -> Iterator[tuple[nn.Parameter, MatrixSplit]]:
    assert isinstance(block, DecoderBlock)
    attention = block.attention
    yield from _grouped(attention) if isinstance(attention, GroupedAttention) else _latent(attention)
    if isinstance(block.feed, FeedForward):
        yield from _feed_forward(block.feed)
        return
    yield from _experts(block.feed)


def _grouped(attention: GroupedAttention) -> Iterator[tuple[nn.Parameter, MatrixSplit]]:
    spec = attention.spec
    yield attention.qkv, MatrixSplit(rows=(spec.head_dim,) * (spec.heads + 2 * spec.kv_heads))
    yield attention.output, MatrixSplit(columns=(spec.head_dim,) * spec.heads)


def _latent(attention: LatentAttention) -> Iterator[tuple[nn.Parameter, MatrixSplit]]:
    spec = attention.spec
    query = (spec.nope_dim + spec.rope_dim,) * spec.heads
    if attention.expand_queries is None:
        yield attention.compress, MatrixSplit(rows=(*query, *attention.split[1:]))
    else:
        yield attention.compress, MatrixSplit(rows=attention.split)
        yield attention.expand_queries, MatrixSplit(rows=query)
    yield attention.expand_latents, MatrixSplit(rows=(spec.nope_dim, spec.value_dim) * spec.heads)
    yield attention.output, MatrixSplit(columns=(spec.value_dim,) * spec.heads)


def _experts(experts: Experts) -> Iterator[tuple[nn.Parameter, MatrixSplit]]:
    yield experts.router.weight, MatrixSplit()
    # In fused experts the columns of gate and up alternate: they count as one matrix.
    halves = MatrixSplit() if experts.spec.fused else MatrixSplit(rows=(experts.spec.size,) * 2)
    yield experts.routed.gate_up, halves
    yield experts.routed.down, MatrixSplit()
    if experts.shared is not None:
        yield from _feed_forward(experts.shared)


def _feed_forward(feed: FeedForward) -> Iterator[tuple[nn.Parameter, MatrixSplit]]:
    yield feed.gate_up, MatrixSplit(rows=(feed.gate_up.shape[0] // 2,) * 2)
    yield feed.down, MatrixSplit()

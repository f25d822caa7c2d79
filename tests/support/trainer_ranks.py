"""Several processes on this machine that train together over gloo, and their tasks."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from etude.config.training import OptimiserConfig
from etude.models.decoder import Decoder
from etude.models.hf import CausalModel, make_causal_model
from etude.models.spec import ModelSpec
from etude.trainer.optimisation import build_optimiser
from etude.trainer.parallel import Grid, clip_gradients

DEADLINE = timedelta(seconds=60)


def run_ranks(world: int, work: Callable[[int, Path], None], folder: Path) -> None:
    """Call ``work(rank, folder)`` in ``world`` processes that form a gloo group; raises what one of them raises."""
    spawn(_rank, (world, work, folder), nprocs=world)


def _rank(rank: int, world: int, work: Callable[[int, Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    met = (folder / "ranks").as_uri()  # in a file, since a port that was free may be another's when it is used
    dist.init_process_group("gloo", init_method=met, rank=rank, world_size=world, timeout=DEADLINE)
    try:
        work(rank, folder)
    finally:
        dist.destroy_process_group()


def make_model(spec: ModelSpec, seed: int = 0) -> Decoder:
    model = Decoder(spec)
    model.initialise(seed, std=0.1)
    return model


def make_sequences(count: int, seed: int = 0) -> list[list[int]]:
    """Sequences of different lengths, some shorter than a context is split into parts."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 24, (count,), generator=generator).tolist()
    return [torch.randint(0, 50, (length,), generator=generator).tolist() for length in lengths]


def next_token_loss(model: CausalModel, sequences: Sequence[Sequence[int]], grid: Grid | None) -> Tensor:
    """Σ −log p of this rank's tokens, except the first one of each sequence."""
    ids_N = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = [len(sequence) for sequence in sequences]
    context = None if grid is None else grid.context
    if context is None:
        hidden_nH, own_n = model.forward_packed(ids_N, lengths), torch.arange(len(ids_N))
    else:
        assert isinstance(model, Decoder)
        hidden_nH, own_n = context.hidden(model, ids_N, lengths)
    last_N = torch.zeros(len(ids_N), dtype=torch.bool)
    last_N[torch.tensor(lengths).cumsum(0) - 1] = True
    chosen_n = ~last_N[own_n]
    targets = ids_N[(own_n[chosen_n] + 1)]
    return functional.cross_entropy(model.logits(hidden_nH[chosen_n]), targets, reduction="sum")


def train(
    model: CausalModel, grid: Grid | None, config: OptimiserConfig, steps: int, *, learning_rate: float = 3e-3
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, of all ranks together."""
    optimiser = build_optimiser(model, config, learning_rate=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    curve = []
    for _ in range(steps):
        batch = make_sequences(8)
        tokens = sum(len(sequence) - 1 for sequence in batch)
        if grid is not None:
            batch = batch[grid.share :: grid.shares]
        optimiser.zero_grad()
        total = torch.zeros(())
        for chunk in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
            loss = next_token_loss(model, chunk, grid) / tokens
            loss.backward()
            total += loss.detach()
        if grid is not None:
            dist.all_reduce(total)
        norm = clip_gradients(model, 1.0)
        optimiser.step()
        curve.append((float(total), float(norm)))
    return curve


def whole_model(model: CausalModel, *, keep: bool = True) -> CausalModel | None:
    """A model with whole weights, gathered tensor by tensor; ``None`` where a rank does not ``keep`` it."""
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    with torch.device("meta"):
        whole = make_causal_model(model.spec, model.arithmetic)
    whole.load_state_dict(state, assign=True)
    return whole.requires_grad_(False) if keep else None

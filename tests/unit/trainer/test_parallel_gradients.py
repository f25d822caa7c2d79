"""On one process a gradient is clipped exactly as by torch; the numbers of processes and ranks must agree."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from etude.config.loading import parse_config
from etude.config.training import ParallelConfig
from etude.errors import ConfigError
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.run.resolve import resolve
from etude.trainer.parallel import Grid, add_gradients, clip_gradients, joined
from etude.trainer.whole_copy import WholeCopy


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_clipping_is_torchs(max_norm: float) -> None:
    ours, theirs = Decoder(TINY), Decoder(TINY)
    for model in (ours, theirs):
        model.initialise(0)
        model.forward_packed(torch.arange(9)).sin().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    assert torch.equal(clip_gradients(ours, max_norm), expected)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_parameter_without_a_gradient_on_any_rank_keeps_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    model.weight.grad = torch.ones_like(model.weight)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        add_gradients(model, Grid.open(ParallelConfig(sharding="none"), "cpu"))
    finally:
        dist.destroy_process_group()
    assert torch.equal(model.weight.grad, torch.ones_like(model.weight))
    assert model.bias.grad is None


def test_one_process_has_no_grid_and_whole_weights() -> None:
    with joined(ParallelConfig(), "cpu") as grid:
        assert grid is None
    model = Decoder(TINY)
    model.initialise(0)
    whole = WholeCopy(model, None, {}).update()
    assert whole is not None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    assert torch.equal(whole.forward_packed(torch.arange(9)), model.forward_packed(torch.arange(9)))


def test_another_number_of_processes_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"= 4, but 1 processes were started: start them with `etude train`"),
        joined(ParallelConfig(dp=2, cp=2), "cpu"),
    ):
        pass


def test_several_ranks_compute_with_torchs_kernels() -> None:
    several = {"parallel": {"dp": 2}, "trainer": {"device": "cpu"}, "engine": {"device": "cpu"}}
    numerics = resolve(parse_config(several, source="test")).numerics
    assert (numerics.arithmetic, numerics.replay) == ("fast", "completion")
    with pytest.raises(ConfigError, match="'invariant' is for one trainer process"):
        resolve(parse_config(several | {"numerics": {"arithmetic": "invariant"}}, source="test"))

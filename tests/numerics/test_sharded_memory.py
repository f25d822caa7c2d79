"""Ways for ranks to use less memory: gathering in bfloat16, scoring with shards, small or offloaded moments.

Two processes do everything in one group, because starting it takes longer than most of the work.
"""

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from etude.config.inference import NumericsConfig
from etude.config.training import LossConfig, OptimiserConfig, ParallelConfig
from etude.models.checkpoint import fill, state_of
from etude.models.decoder import Decoder
from etude.models.experts import Experts, RoutedExperts
from etude.models.fast import FastArithmetic
from etude.models.hf import CausalModel
from etude.models.lowprecision import EXPERT_FORMATS
from etude.models.spec import TINY, TINY_LATENT, ModelSpec
from etude.run.trainer_group import GroupCommand, TrainerGroup
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.mismatch import MismatchProbe
from etude.trainer.muon import Muon
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
from etude.trainer.parallel import Grid, materialise, parallelise
from etude.trainer.policy import PolicyTrainer
from etude.trainer.reference import Reference
from etude.trainer.sharded import local
from etude.types import UNSAMPLED, Trajectory
from trainer_ranks import make_model, run_ranks, whole_model

pytestmark = pytest.mark.heavy("half a minute of two processes")

RANKS = 2
BF16 = torch.bfloat16
SPECS = {"moe": TINY, "latent": TINY_LATENT}
GRIDS = {"dp ep": ParallelConfig(dp=2, ep=2), "cp": ParallelConfig(cp=2)}
KINDS = [("adamw", "8bit"), ("adamw", "offload"), ("muon", "8bit"), ("muon", "fp32")]
NUMERICS = NumericsConfig(replay="completion", replay_floor=0.0)


def sharded(spec: ModelSpec, grid: Grid, seed: int = 0, dtype: torch.dtype | None = None, form: str = "") -> Decoder:
    state = state_of(make_model(spec, seed))
    with torch.device("meta"):
        model = formatted(Decoder(spec, FastArithmetic(dtype)), form)

    def fill_in(part: nn.Module) -> None:
        materialise(part, "cpu")
        fill(part, state.__getitem__)

    parallelise(model, grid, fill_in, dtype or torch.float32)
    return model


def formatted(model: Decoder, form: str) -> Decoder:
    for block in model.blocks:
        if form and isinstance(block.feed, Experts):
            block.feed.routed.format = EXPERT_FORMATS[form]
    return model


def some_loss(model: CausalModel, rank: int) -> Tensor:
    """A loss on different tokens for each rank."""
    ids = (torch.arange(24) * (3 + 2 * rank) + rank) % 50
    logits_NV = model.logits(model.forward_packed(ids))
    return logits_NV.float().log_softmax(-1)[torch.arange(23), ids[1:]].sum()


def precision(rank: int, folder: Path) -> None:
    """Write the losses and whole gradients of sharded bfloat16 models."""
    grid = Grid.open(GRIDS["dp ep"], "cpu")
    quantised = sharded(TINY, grid, dtype=BF16, form="fp8")
    assert gathered_type(routed_experts(quantised)) is torch.float32  # from which experts are rounded
    for family in SPECS:
        model = sharded(SPECS[family], grid, dtype=BF16)
        assert gathered_type(routed_experts(model)) is gathered_type(model.blocks[1]) is BF16
        assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
        loss = some_loss(model, rank)
        loss.backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}
        assert all(gradient.dtype is torch.float32 for gradient in gradients.values())
        save_file({"loss": loss.detach(), **gradients}, folder / f"{family}-{rank}.safetensors")


def routed_experts(model: Decoder) -> nn.Module:
    return next(module for module in model.modules() if isinstance(module, RoutedExperts))


def gathered_type(part: nn.Module) -> torch.dtype:
    assert isinstance(part, FSDPModule)
    part.unshard()
    kind = next(iter(part.parameters())).dtype
    part.reshard()
    return kind


def moments(rank: int, folder: Path) -> None:
    """Save after one step, restore, and write the result of two more steps."""
    grid = Grid.open(GRIDS["dp ep"], "cpu")
    for kind, state in KINDS:
        one = optimisation(sharded(TINY_LATENT, grid), kind, state)
        one.step(1, [some_loss(one.model, 0) / RANKS])
        Checkpoints(folder / f"{kind} {state}", grid.everyone).save(1, one.tensors())
        again = optimisation(sharded(TINY_LATENT, grid, seed=9), kind, state)
        again.restore(Checkpoints(folder / f"{kind} {state}", grid.everyone).load(1, again.like))
        for each in (one, again):
            each.step(2, [some_loss(each.model, 0) / RANKS])
        expected, result = one.tensors(), again.tensors()
        assert expected.keys() == result.keys()
        for name, tensor in expected.items():
            assert torch.equal(local(tensor), local(result[name])), name
        model = whole_model(one.model, keep=rank == 0)
        if model is not None:
            save_file(dict(model.state_dict()), folder / f"{kind} {state}.safetensors")


def stacks(rank: int, folder: Path) -> None:
    """A bounded stack makes the step of an unbounded one."""
    grid = Grid.open(GRIDS["dp ep"], "cpu")
    results = []
    for most in (1, 1 << 26):
        one = optimisation(sharded(TINY_LATENT, grid), "muon", "fp32")
        assert isinstance(one._optimiser, Muon)
        one._optimiser._most_stacked = most
        one.step(1, [some_loss(one.model, 0) / RANKS])
        results.append([p.to_local() for p in one.model.parameters() if isinstance(p, DTensor)])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))


def optimisation(model: Decoder, kind: Any, state: Any) -> Optimisation:
    config = OptimiserConfig(kind=kind, state=state)
    optimiser = build_optimiser(model, config, learning_rate=1e-2, betas=(0.9, 0.95))
    return Optimisation(model, optimiser, RateSchedule(steps=10, warmup_steps=1), clip_norm=1.0)


def make_trajectories() -> list[Trajectory]:
    """Trajectories with turns of versions 3 and 4 and random routes."""
    random = np.random.default_rng(0)
    result = []
    for index, length in enumerate((17, 6, 30, 4, 11)):
        mask = np.arange(length) >= length // 2
        versions = np.where(mask, 3 + (np.arange(length) >= length - 2), UNSAMPLED).astype(np.int32)
        result.append(
            Trajectory(
                rollout_id=f"r{index}",
                token_ids=random.integers(0, 50, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, random.normal(-3, 1, length), 0).astype(np.float32),
                versions=versions,
                temperatures=np.where(mask, 0.8, 1.0).astype(np.float32),
                turn_starts=(length // 2, length - 2),
                advantages=np.zeros(length, np.float32),
                routes=np.argsort(random.random((length, 2, 4)), axis=-1)[..., :2].astype(np.uint16),
            )
        )
    return result


def of_version(command: GroupCommand) -> Decoder:
    assert command.version is not None
    return make_model(TINY, seed=command.version)


def scores(rank: int, folder: Path) -> None:
    """Write two ranks' logprobs of tokens under versions of which each rank has only a shard."""
    for name in GRIDS:
        grid = Grid.open(GRIDS[name], "cpu")
        policy = PolicyTrainer(
            optimisation(sharded(TINY, grid, seed=4), "adamw", "fp32"), LossConfig(), NUMERICS, grid.context
        )
        group = TrainerGroup(policy, Checkpoints(folder / f"scores {name}", grid.everyone), grid, of_version)
        before = [p.to_local().clone() for p in policy.model.parameters() if isinstance(p, DTensor)]
        if rank:
            group.worker_loop()
        else:
            with group:
                probe = MismatchProbe(group, NUMERICS, versions=2)
                group.remember(5, {}, most=0)
                for version in (2, 3):
                    probe.remember(version, {})
                probe.remember(4, None)  # the policy's own
                assert sorted(group.versions) == [3, 4, 5]
                write(folder / f"scores {name}.json", probe, Reference(group, 5))
        after = [p.to_local() for p in policy.model.parameters() if isinstance(p, DTensor)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        gc.collect()
        models = [one for one in gc.get_objects() if issubclass(type(one), Decoder)]
        assert all(isinstance(one.embedding, DTensor) for one in models if not one.embedding.is_meta)
        del policy, group, models


def write(path: Path, probe: MismatchProbe, reference: Reference) -> None:
    trajectories = make_trajectories()
    report = probe.measure(trajectories, max_tokens=32)
    result = {
        "mismatch": [report.total.tokens, report.total.k1, report.total.k3, report.total.pairs, report.total.flips],
        "versions": [version for version, _ in report.versions],
        "old": [row.tolist() for row in probe.old_logprobs(trajectories, max_tokens=32)],
        "reference": reference.divergences(trajectories[:3]),
    }
    path.write_text(json.dumps(result))


def everything(rank: int, folder: Path) -> None:
    precision(rank, folder)
    moments(rank, folder)
    stacks(rank, folder)
    scores(rank, folder)
    dist.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("ranks")
    run_ranks(RANKS, everything, path)
    return path


@pytest.mark.parametrize("family", SPECS)
def test_gathered_in_bfloat16_it_computes_the_same_and_gradients_add_up_in_float32(folder: Path, family: str) -> None:
    model, expected = make_model(SPECS[family]), dict[str, Tensor]()
    model.arithmetic = FastArithmetic(BF16)
    for rank in range(RANKS):
        result = load_file(folder / f"{family}-{rank}.safetensors")
        loss = some_loss(model, rank)
        assert torch.equal(loss.detach(), result.pop("loss"))  # to the last bit
        loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        expected[name] = parameter.grad
    assert expected.keys() == result.keys()
    for name, gradient in result.items():
        # The rows of an expert come from all ranks into one product, which is rounded once and not once a rank.
        share = 2**-7 if ".routed." in name else 1e-5
        assert (gradient - expected[name]).abs().max() <= share * expected[name].abs().max(), name


@pytest.mark.parametrize(("kind", "state"), KINDS)
def test_moments_of_every_kind_are_sharded_saved_and_read_by_one_process(folder: Path, kind: str, state: str) -> None:
    saved = Checkpoints(folder / f"{kind} {state}").load(1)
    alone = optimisation(make_model(TINY_LATENT, seed=5), kind, state)
    alone.restore(saved)
    for name, tensor in alone.tensors().items():
        assert torch.equal(tensor, saved[name]), name
    alone.step(2, [some_loss(alone.model, 0)])
    for name, tensor in load_file(folder / f"{kind} {state}.safetensors").items():
        assert (alone.model.state_dict()[name] - tensor).abs().mean() < 1e-5, name


@pytest.mark.parametrize("name", GRIDS)
def test_ranks_score_as_one_process_does(folder: Path, tmp_path: Path, name: str) -> None:
    probe = MismatchProbe.alone(make_model(TINY), NUMERICS, versions=2)
    for version in (3, 4):
        probe.remember(version, state_of(make_model(TINY, seed=version)))
    reference = Reference.alone(make_model(TINY), state_of(make_model(TINY, seed=5)), NUMERICS)
    write(tmp_path / "alone.json", probe, reference)
    expected = json.loads((tmp_path / "alone.json").read_text())
    result = json.loads((folder / f"scores {name}.json").read_text())
    assert expected["mismatch"][0] > 20 and expected["mismatch"][4] > 0
    assert result["versions"] == expected["versions"]
    for key in ("mismatch", "reference"):
        assert result[key] == pytest.approx(expected[key], rel=1e-4)
    for row, other in zip(result["old"], expected["old"], strict=True):
        assert row == pytest.approx(other, abs=1e-4)

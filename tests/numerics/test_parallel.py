"""Four processes train as one does: data, experts and contexts in parallel, every family, both optimisers.

Everything happens in one group of processes, because starting it takes longer than most of the work.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from etude.config.hints import HintsConfig
from etude.config.inference import NumericsConfig
from etude.config.training import LossConfig, OptimiserConfig, ParallelConfig
from etude.models.checkpoint import check_state, fill, state_of
from etude.models.decoder import Decoder
from etude.models.hf import CausalModel
from etude.models.spec import TINY, TINY_DENSE, TINY_LATENT, ModelSpec
from etude.run.numerics import published_state, published_types
from etude.run.trainer_group import GroupCommand, TrainerGroup
from etude.trainer.batching.packing import Cost, pack
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.distillation import NO_DISTILLATION, DistillationBatch, DistillationExample
from etude.trainer.imitation import ImitationTrainer, Loss
from etude.trainer.losses import Totals
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
from etude.trainer.parallel import Grid, materialise, parallelise
from etude.trainer.parallel_context import _AllGather
from etude.trainer.policy import PolicyTrainer
from etude.trainer.whole_copy import WholeCopy
from etude.types import UNSAMPLED, Document, SamplingMask, Trajectory
from etude.weights.digest import state_digest
from etude.weights.tensors import to_stored
from trainer_ranks import make_model, make_sequences, run_ranks, train, whole_model

pytestmark = pytest.mark.heavy("a minute of several processes")

WORLD = 4
STEPS = 3
RATE = 1e-2
"""Of learning: how far AdamW moves a weight in its first step, however small its gradient."""
TOLERANCE = 1e-5

SPECS = {"moe": TINY, "latent": TINY_LATENT, "dense": TINY_DENSE}
GRIDS = {
    "dp": ParallelConfig(dp=4),
    "dp ep": ParallelConfig(dp=4, ep=4),
    "cp": ParallelConfig(cp=4),
    "dp cp ep": ParallelConfig(dp=2, cp=2, ep=2),
    "dp, whole": ParallelConfig(dp=4, sharding="none"),
    "dp cp, whole": ParallelConfig(dp=2, cp=2, sharding="none"),
}
CASES = [
    *[(family, grid, "adamw") for family in ("moe", "latent") for grid in GRIDS if "whole" not in grid],
    *[("moe", "dp ep", "muon"), ("latent", "dp cp ep", "muon")],
    *[("dense", "cp", "adamw"), ("dense", "dp", "muon")],
]
LOSSES = {"default": LossConfig(), "whole sequences": LossConfig(kind="gspo")}
HINTS = {"full": HintsConfig(weight=3.0), "sampled": HintsConfig(weight=3.0, estimator="sampled")}
"""One of them with each loss."""
FORMATS = {
    "float32": NumericsConfig(replay="off"),
    "bfloat16": NumericsConfig(replay="off", dtype="bfloat16"),
    "fp8": NumericsConfig(replay="off", dtype="bfloat16", experts="fp8"),
    "nvfp4": NumericsConfig(replay="off", dtype="bfloat16", experts="nvfp4"),
}


def make_optimisation(model: CausalModel, kind: Any, grid: Grid | None = None) -> Optimisation:
    optimiser = build_optimiser(model, OptimiserConfig(kind=kind), learning_rate=RATE, betas=(0.9, 0.95))
    schedule = RateSchedule(steps=10, warmup_steps=1, decay_share=0.0)
    return Optimisation(model, optimiser, schedule, clip_norm=1.0, grid=grid)


def make_grid(name: str) -> Grid:
    return Grid.open(GRIDS[name], "cpu")


def sharded(spec: ModelSpec, grid: Grid, seed: int = 0) -> Decoder:
    """The model of :func:`make_model`, of which no rank ever holds more than one block whole."""
    state = state_of(make_model(spec, seed))
    with torch.device("meta"):
        model = Decoder(spec)

    def fill_in(part: nn.Module) -> None:
        if grid.is_sharded:
            assert all(parameter.is_meta or isinstance(parameter, DTensor) for parameter in part.parameters())
        materialise(part, "cpu")
        fill(part, state.__getitem__)

    check_state(model, state)
    parallelise(model, grid, fill_in)
    return model


def curves(rank: int, folder: Path) -> None:
    """Write the curves of every case."""
    result = {}
    for family, grid_name, kind in CASES:
        grid = make_grid(grid_name)
        model = sharded(SPECS[family], grid)
        model.recompute = grid_name == "dp cp ep"
        result[f"{family} {grid_name} {kind}"] = train(model, grid, OptimiserConfig(kind=kind), STEPS)  # type: ignore[arg-type]
    if rank == 0:
        (folder / "curves.json").write_text(json.dumps(result))


def publications(rank: int, folder: Path) -> None:
    """Write the digest of a sharded model's published weights, in every format."""
    result: dict[str, str] = {}
    for family in ("moe", "latent"):
        for name, config in FORMATS.items():
            grid = make_grid("dp cp ep")
            model = sharded(SPECS[family], grid)
            copy = WholeCopy(model, grid.everyone, published_types(model, config))
            for update in ("first", "few", "many"):
                disturb(model, update)
                whole, exact = copy.update(), whole_model(model)
                assert (whole is None) == (rank > 0)
                assert exact is not None
                if whole is not None:
                    assert digest(whole, config) == digest(exact, config)
                if whole is not None and update == "first":
                    result[f"{family} {name}"] = digest(whole, config)
    if rank == 0:
        (folder / "published.json").write_text(json.dumps(result))


def disturb(model: Decoder, update: str) -> None:
    """Change nothing, a number in 97 of each part, or all of them."""
    with torch.no_grad():
        for parameter in model.parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if update != "first":
                own.view(-1)[:: 97 if update == "few" else 1] *= -1.25


def digest(model: CausalModel, config: NumericsConfig) -> str:
    return state_digest(to_stored(published_state(model, config)))


def resharding(rank: int, folder: Path) -> None:
    """Save on four ranks, continue on four that are divided otherwise, and go on as if nothing had happened."""
    for kind in ("adamw", "muon"):
        grid, other = make_grid("dp ep"), make_grid("dp cp ep")
        model = sharded(TINY_LATENT, grid)
        optimisation = make_optimisation(model, kind)
        optimisation.step(1, [some_loss(model)])
        Checkpoints(folder / kind, grid.everyone).save(1, optimisation.tensors())
        again = make_optimisation(sharded(TINY_LATENT, other, seed=9), kind)
        again.restore(Checkpoints(folder / kind, other.everyone).load(1, again.like))
        for one in (optimisation, again):
            one.step(2, [some_loss(one.model)])
        whole, moved = whole_model(model), whole_model(again.model)
        assert whole is not None
        assert moved is not None
        for a, b in zip(whole.parameters(), moved.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-5)
        Checkpoints(folder / f"{kind} again", other.everyone).save(2, again.tensors())
    pair = DeviceMesh("cpu", [0, 1])
    if rank < pair.size():
        read_by_two(folder / "adamw", pair)
    (folder / f"resharded-{rank}").touch()


def read_by_two(folder: Path, pair: DeviceMesh) -> None:
    """Two ranks have the halves of every tensor that four have written, and nothing else."""
    checkpoints = Checkpoints(folder)
    whole = checkpoints.load(1)

    def like(name: str) -> torch.Tensor | None:
        if not whole[name].ndim:
            return None
        own = whole[name].chunk(2)[pair.get_local_rank() :][:1]
        return DTensor.from_local(
            torch.zeros_like(own[0]) if own else whole[name][:0],
            pair,
            [Shard(0)],
            run_check=False,
            shape=whole[name].shape,
            stride=whole[name].stride(),
        )

    for name, tensor in checkpoints.load(1, like).items():
        if isinstance(tensor, DTensor):
            assert torch.equal(tensor.to_local(), whole[name].chunk(2)[pair.get_local_rank()])
        assert isinstance(tensor, DTensor) == bool(whole[name].ndim)


def some_loss(model: CausalModel) -> torch.Tensor:
    """One rank's share, equal on every rank, of a loss that has a gradient for every parameter."""
    hidden_NH = model.forward_packed(torch.arange(20))
    return (hidden_NH * torch.linspace(-1, 1, hidden_NH.numel()).view_as(hidden_NH)).sum() / WORLD


def make_policy(model: Decoder, loss: LossConfig, grid: Grid | None) -> PolicyTrainer:
    context = None if grid is None else grid.context
    hints = HINTS["full" if loss.kind == "policy_gradient" else "sampled"]
    return PolicyTrainer(make_optimisation(model, "adamw"), loss, NumericsConfig(replay="completion"), context, hints)


PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "versions", "temperatures", "advantages")


def make_trajectories() -> list[Trajectory]:
    """Trajectories of different lengths, one with one sampled token; some with masks, greedy, or with routes."""
    random = np.random.default_rng(0)
    result = []
    for index, length in enumerate((17, 5, 30, 2, 11)):
        mask = np.arange(length) >= min(length - 1, length // 2)
        sizes = np.where(mask, random.integers(0, 4, length), 0)
        ids = random.integers(0, 50, length).astype(np.int32)
        stored = [np.sort((ids[t] + np.arange(size) * 7) % 50) for t, size in enumerate(sizes)]
        result.append(
            Trajectory(
                rollout_id=f"r{index}",
                token_ids=ids,
                loss_mask=mask,
                logprobs=np.where(mask, random.normal(-3, 1, length), 0).astype(np.float32),
                versions=np.where(mask, 0, UNSAMPLED).astype(np.int32),
                temperatures=np.where(mask & (np.arange(length) % 5 == 0), 0.0, 0.8).astype(np.float32),
                turn_starts=(int(np.flatnonzero(mask)[0]),),
                advantages=np.where(mask, random.normal(0, 1), 0).astype(np.float32),
                routes=np.argsort(random.random((length, 2, 3)), axis=-1).astype(np.uint16) if index % 2 else None,
                sampling_mask=SamplingMask(
                    offsets=np.concatenate([[0], np.cumsum(sizes)]), token_ids=np.concatenate(stored).astype(np.int32)
                ),
            )
        )
    return result


def trainer_groups(rank: int, folder: Path) -> None:
    """Write the metrics and weights of a rank group's four steps: step 2 from a checkpoint, the last with hints."""
    for name, loss in LOSSES.items():
        grid = make_grid("dp cp ep")
        policy = make_policy(sharded(TINY_LATENT, grid), loss, grid)
        trainer_group = TrainerGroup(policy, Checkpoints(folder / f"group {name}", grid.everyone), grid, other_weights)
        if rank > 0:
            trainer_group.worker_loop()
            continue
        with trainer_group:
            measured = group_steps(trainer_group)
            save_file(dict(trainer_group.whole_model().state_dict()), folder / f"group {name}.safetensors")
        (folder / f"group {name}.json").write_text(json.dumps(measured))


def make_distillation(batch: list[Trajectory], shares: int) -> DistillationBatch:
    """The teacher reads four tokens more, so that other ranks have its tokens."""
    examples = []
    for student in batch:
        arrays: dict[str, Any] = {
            name: np.insert(getattr(student, name), [0] * 4, getattr(student, name)[0]) for name in PER_TOKEN
        }
        teacher = replace(student, **arrays, routes=None, sampling_mask=None, turn_starts=(student.turn_starts[0] + 4,))
        examples.append(DistillationExample(student=student, teacher=teacher))
    lengths = [len(example.teacher.token_ids) for example in examples]
    dealt = pack(lengths, max_tokens=40, ranks=shares, cost=Cost(per_token=1.0, per_pair=0.1))
    return DistillationBatch(examples=tuple(examples), shares=tuple(map(tuple, dealt)))


def group_steps(trainer_group: TrainerGroup) -> list[dict[str, float]]:
    def step(
        number: int, batch: list[Trajectory], distillation: DistillationBatch = NO_DISTILLATION
    ) -> dict[str, float]:
        lengths = [len(trajectory.token_ids) for trajectory in batch]
        shares = pack(lengths, max_tokens=30, ranks=trainer_group.shares, cost=Cost(per_token=1.0, per_pair=0.1))
        tokens = sum(int(trajectory.loss_mask.sum()) for trajectory in batch)
        totals = Totals(tokens=tokens, trajectories=len(batch), sampled=50, sampled_trajectories=len(batch))
        return trainer_group.step(number, batch, shares, totals, distillation=distillation)

    batch = make_trajectories()
    first = step(1, batch)
    trainer_group.idle(0.0)
    trainer_group.save(1).result()
    step(2, batch)
    trainer_group.restore(trainer_group.saved)
    lone = step(3, batch[:1])  # of a lone trajectory most ranks have nothing
    second = step(2, batch)
    hinted = step(4, batch, make_distillation(batch, trainer_group.shares))
    trainer_group.load(7, "")  # and then on, from other weights and without moments
    return [first, second, lone, hinted, step(5, batch)]


def other_weights(command: GroupCommand) -> Decoder:
    assert command.version == 7
    return make_model(TINY_LATENT, seed=5)


def context_gradients(rank: int, folder: Path) -> None:
    """Gradients of a gathered key are added in float32: in bfloat16, a small gradient added to 1 would be lost."""
    grid = make_grid("cp")
    key = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    every: torch.Tensor = _AllGather.apply(key, grid.sequences["cp"].get_group())  # type: ignore[no-untyped-call]
    (every * (1.0 if rank == 0 else 2**-9)).sum().backward()
    assert key.grad is not None
    assert float(key.grad) == 1 + 2**-7, float(key.grad)  # 1 + 3 · 2⁻⁹, rounded once


def make_documents() -> list[Document]:
    """Documents, some too short to predict a token, and one that an agent wrote in part."""
    documents = [Document(token_ids=np.array(ids, np.int32), weights=np.ones(len(ids), np.float32))
                 for ids in (*make_sequences(6), [3])]  # fmt: skip
    spoken = np.where(np.arange(20) % 3 == 0, 1.0, 0.25).astype(np.float32)
    return [*documents, Document(token_ids=np.arange(20, dtype=np.int32), weights=spoken)]


def imitate(model: CausalModel, grid: Grid | None) -> list[Loss]:
    """Train on documents, last on a single one, which leaves most ranks idle; returns losses and evaluations."""
    trainer = ImitationTrainer(make_optimisation(model, "muon", grid), grid)
    shares, share = (1, 0) if grid is None else (grid.shares, grid.share)

    def dealt(documents: list[Document]) -> list[list[Document]]:
        lengths = [len(document.token_ids) for document in documents]
        passes = pack(lengths, max_tokens=40, ranks=shares, cost=Cost(per_token=1.0, per_pair=0.1))[share]
        return [[documents[index] for index in microbatch] for microbatch in passes]

    batch = make_documents()
    losses = [trainer.step(step, dealt(batch)) for step in (1, 2)]
    return [*losses, trainer.step(3, dealt(batch[-1:])), trainer.measure(dealt(batch))]


def imitations(rank: int, folder: Path) -> None:
    """Write the losses of every division of a model that imitates."""
    result = {}
    for name in GRIDS:
        grid = make_grid(name)
        result[name] = [asdict(loss) for loss in imitate(sharded(TINY, grid), grid)]
    if rank == 0:
        (folder / "imitations.json").write_text(json.dumps(result))


def everything(rank: int, folder: Path) -> None:
    imitations(rank, folder)
    context_gradients(rank, folder)
    curves(rank, folder)
    publications(rank, folder)
    resharding(rank, folder)
    trainer_groups(rank, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("ranks")
    run_ranks(WORLD, everything, path)
    return path


@pytest.mark.parametrize("grid", GRIDS)
def test_imitation_on_several_ranks_is_that_of_one(folder: Path, grid: str) -> None:
    result = json.loads((folder / "imitations.json").read_text())[grid]
    expected = [asdict(loss) for loss in imitate(make_model(TINY), None)]
    assert expected[0]["weighted"] - expected[-1]["weighted"] > 1, "it does learn"
    for loss, one in zip(result, expected, strict=True):
        assert loss == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize(("family", "grid", "kind"), CASES)
def test_the_curve_is_one_processs(folder: Path, family: str, grid: str, kind: Any) -> None:
    result = json.loads((folder / "curves.json").read_text())[f"{family} {grid} {kind}"]
    expected = train(make_model(SPECS[family]), None, OptimiserConfig(kind=kind), STEPS)
    assert expected[0][0] - expected[-1][0] > 0.05  # it does learn
    for (loss, norm), (expected_loss, expected_norm) in zip(result, expected, strict=True):
        assert loss == pytest.approx(expected_loss, abs=TOLERANCE)
        assert norm == pytest.approx(expected_norm, abs=TOLERANCE)


@pytest.mark.parametrize("family", ["moe", "latent"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_published_bytes_are_one_processs(folder: Path, family: str, form: str) -> None:
    result = json.loads((folder / "published.json").read_text())[f"{family} {form}"]
    assert result == digest(make_model(SPECS[family]), FORMATS[form])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_one_process_reads_what_four_wrote_bit_for_bit(folder: Path, kind: str) -> None:
    assert len(list(folder.glob("resharded-*"))) == WORLD
    saved = Checkpoints(folder / f"{kind} again").load(2)
    alone = make_optimisation(make_model(TINY_LATENT, seed=5), kind)
    alone.restore(saved)
    for name, tensor in alone.tensors().items():
        assert torch.equal(tensor, saved[name])
    assert len(list((folder / f"{kind} again" / "step-00000002").glob("rank-*"))) == WORLD


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_one_process_writes_what_four_read(folder: Path, tmp_path: Path, kind: Any) -> None:
    """The sum of a round trip through each number of ranks is nothing: the files of one hold the same numbers."""
    saved = Checkpoints(folder / kind).load(1)
    expected = make_optimisation(make_model(TINY_LATENT), kind)
    expected.step(1, [some_loss(expected.model) * WORLD])
    for name, tensor in expected.tensors().items():
        assert torch.allclose(tensor, saved[name], atol=RATE / 100), name  # AdamW makes steps of rounding errors, too
    Checkpoints(tmp_path).save(1, saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in Checkpoints(tmp_path).load(1).items())


@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_group_steps_as_one_process_does(folder: Path, tmp_path: Path, name: str) -> None:
    policy = make_policy(make_model(TINY_LATENT), LOSSES[name], None)
    with TrainerGroup(policy, Checkpoints(tmp_path), None, other_weights) as alone:
        expected = group_steps(alone)
    measured = json.loads((folder / f"group {name}.json").read_text())
    assert min(step["grad_norm"] for step in expected[:2]) > 0.01
    assert expected[0]["flipped_pairs"] > 0
    assert abs(expected[3]["hint_nats"]) > 0.01
    for result, step in zip(measured, expected, strict=True):
        assert result == pytest.approx(step, rel=1e-4, abs=TOLERANCE)
    weights = load_file(folder / f"group {name}.safetensors")
    for key, tensor in policy.model.state_dict().items():
        # AdamW steps by the sign of a gradient that is 0 but for rounding; that is one number in thousands.
        assert (weights[key] - tensor).abs().mean() < 1e-6, key

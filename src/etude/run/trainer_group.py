"""The ranks of one trainer: rank 0 decides and broadcasts commands, the others execute them.

    rank 0     claim batch ──▶ step ──▶ save ──▶ gather ──▶ publish, commit ──▶ …
    the others     ▲ command     ▲ command ▲ command   idle, until the next command

Only rank 0 accesses the ledger, the weight log and the events. Before every collective operation it sends a command,
with a batch if needed; everything else is equal on all ranks because it follows from the same commands. Commands are
JSON and batches safetensors: nothing is unpickled. A single process is a group of one, which sends nothing.

While rank 0 waits for batches it sends ``IDLE`` at intervals, so that the wait of the others can have a timeout. When a
rank dies, the next operation of the others fails, all ranks are stopped, and the next start continues from the
checkpoint.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from etude.config.recipe import RunConfig
from etude.config.training import TrainerConfig
from etude.models.checkpoint import check_state, fill, load_checkpoint, load_spec, load_state
from etude.models.hf import CausalModel
from etude.run.folder import RunFolder
from etude.run.heartbeat import Heartbeat
from etude.run.numerics import (
    DTYPES,
    FrozenBase,
    decoded_state,
    published_types,
    training_model,
    unfilled_model,
)
from etude.telemetry.metrics import METRICS, Metric, Notation, Reduction
from etude.trainer.batching.encoding import decode_trajectories, encode_trajectories
from etude.trainer.batching.packing import Cost, MicroBatch, pack
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.distillation import NO_DISTILLATION, DistillationBatch, DistillationExample
from etude.trainer.losses import Totals
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
from etude.trainer.parallel import Grid, materialise, parallelise
from etude.trainer.policy import PolicyTrainer
from etude.trainer.sharded import local
from etude.trainer.version_scores import RankVersions, Rescored, Row, part_of
from etude.trainer.whole_copy import WholeCopy
from etude.types import Trajectory
from etude.weights.log import WeightLog
from etude.weights.pull import pull
from etude.weights.tensors import to_tensors

IDLE_S = 60.0
"""Interval at which an idle rank 0 sends ``IDLE`` to the others: well within their timeout."""


ALL_EXACT: Mapping[str, torch.dtype] = MappingProxyType({})
"""Published types of a model that is published in the types of its parameters: no exceptions."""
NOTHING = Totals(tokens=0, trajectories=0)
"""Totals of commands without a batch."""


class CommandKind(StrEnum):
    """Kinds of commands that all ranks execute together."""

    RESTORE = "restore"
    LOAD = "load"
    STEP = "step"
    SAVE = "save"
    GATHER = "gather"
    REMEMBER = "remember"
    SCORE = "score"
    IDLE = "idle"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCommand:
    """One command to all ranks, and its arguments."""

    kind: CommandKind
    step: int = 0
    totals: Totals = NOTHING
    shares: tuple[tuple[MicroBatch, ...], ...] = ()
    """Micro-batches of each share of the batch: indices of the trajectories sent with the command."""
    examples: tuple[tuple[MicroBatch, ...], ...] = ()
    """Micro-batches of each share of the examples: indices of the (student, teacher) pairs sent after
    the trajectories.
    """
    version: int | None = None
    """Weight version to load."""
    checkpoint: str = ""
    """Folder to load a checkpoint from, if there is no ``version``."""
    is_published: bool = False
    """Remember a version from the log instead of the current policy."""
    most: int = 0
    """Number of versions to remember; 0: keep this one permanently."""
    replays: bool = False
    """Score with the engine's routes."""


Weights: TypeAlias = Callable[[GroupCommand], CausalModel]
"""Creates a whole model on the CPU with the weights named by a load command."""


@final
class TrainerGroup:
    """One rank's membership in the trainer; rank 0, or a single process, commands the others through it."""

    def __init__(
        self,
        policy: PolicyTrainer,
        checkpoints: Checkpoints,
        grid: Grid | None,
        weights: Weights,
        types: Mapping[str, torch.dtype] = ALL_EXACT,
    ) -> None:
        """``types`` are the result of :func:`~etude.run.numerics.published_types`."""
        self._weights = weights
        self._policy = policy
        self._versions = RankVersions(policy.model)
        self._checkpoints = checkpoints
        self._grid = grid
        self._copy = WholeCopy(policy.model, None if grid is None else grid.everyone, types)
        self._told_s: float | None = None

    @property
    def shares(self) -> int:
        """The number of shares into which a batch is divided."""
        return 1 if self._grid is None else self._grid.shares

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the other ranks. After an error they notice by themselves: rank 0 cannot know which operation they
        wait in.
        """
        if kind is None:
            self._broadcast(GroupCommand(kind=CommandKind.END))
        else:
            self._checkpoints.abandon()

    @property
    def saved(self) -> int:
        """The newest step with a checkpoint; 0: none."""
        return max(self._checkpoints.steps(), default=0)

    def restore(self, step: int) -> None:
        """Restore the checkpoint of ``step``. Raises as :meth:`Checkpoints.load` does."""
        self._broadcast(GroupCommand(kind=CommandKind.RESTORE, step=step))
        self._restore(step)

    def load(self, version: int | None, checkpoint: str) -> None:
        """Load the weights of a version of the log, or else of a checkpoint folder, with a new optimiser.

        Raises :class:`~etude.errors.DamagedError` for weights of another model.
        """
        command = GroupCommand(kind=CommandKind.LOAD, version=version, checkpoint=checkpoint)
        self._broadcast(command)
        self._load(command)

    def step(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        shares: Sequence[Sequence[MicroBatch]],
        totals: Totals,
        before_update: Callable[[], None] = lambda: None,
        distillation: DistillationBatch = NO_DISTILLATION,
    ) -> dict[str, float]:
        """One optimiser step on a batch and its hints, each divided into :attr:`shares`; the metrics cover all ranks.

        Raises as :meth:`PolicyTrainer.step` does, on every rank.
        """
        command = GroupCommand(
            kind=CommandKind.STEP,
            step=step,
            totals=totals,
            shares=tuple(map(tuple, shares)),
            examples=distillation.shares,
        )
        views = [view for example in distillation.examples for view in (example.student, example.teacher)]
        everything = [*trajectories, *views]
        self._broadcast(command, lambda: encode_trajectories(everything))
        return self._step(command, everything, before_update)

    def save(self, step: int) -> Future[None]:
        """Start to write the checkpoint of ``step``, as :meth:`Checkpoints.start` does; the next step need not wait."""
        self._broadcast(GroupCommand(kind=CommandKind.SAVE, step=step))
        return self._save(step)

    def whole_model(self) -> CausalModel:
        """The model with whole weights in host memory, rounded as published; the next call overwrites it. For a single
        process on the CPU, or a trained adapter, which is small, it is the model itself, which the next step changes.
        """
        policy = self._policy.model
        if self._grid is None and (policy.embedding.device.type == "cpu" or policy.adapters is not None):
            return policy
        self._broadcast(GroupCommand(kind=CommandKind.GATHER))
        model = self._copy.update()
        assert model is not None
        return model

    def remember(self, version: int, state: Mapping[str, Tensor] | None, *, most: int) -> None:
        """Remember each rank's shards of a version: those of the policy, or, with a ``state``, those of the version in
        the log; see :meth:`~etude.trainer.version_scores.RankVersions.remember`.
        """
        command = GroupCommand(kind=CommandKind.REMEMBER, version=version, is_published=state is not None, most=most)
        self._broadcast(command)
        self._remember(command)

    @property
    def versions(self) -> Collection[int]:
        """The remembered versions."""
        return self._versions.numbers

    def score(self, version: int, rows: Sequence[Row], *, max_tokens: int, replays: bool) -> Rescored:
        """Score rows under a remembered version; see :class:`~etude.trainer.version_scores.VersionScorer`."""
        assert self._grid is not None
        masked = [replace(trajectory, loss_mask=mask) for trajectory, mask in rows]
        lengths = [len(trajectory.token_ids) for trajectory in masked]
        most = max_tokens * self._grid.world // self._grid.shares
        shares = pack(lengths, max_tokens=most, ranks=self.shares, cost=Cost(per_token=1, per_pair=0))
        command = GroupCommand(
            kind=CommandKind.SCORE, version=version, shares=tuple(map(tuple, shares)), replays=replays
        )
        self._broadcast(command, lambda: encode_trajectories(masked))
        return joint_scores(command, masked, self._versions, self._grid, self._policy.replay_floor)

    def idle(self, now_s: float) -> None:
        """Send ``IDLE`` if it is due; to be called while rank 0 waits, with monotonic seconds ``now_s``."""
        if self._told_s is None or now_s - self._told_s >= IDLE_S:
            self._told_s = now_s
            self._broadcast(GroupCommand(kind=CommandKind.IDLE))

    def worker_loop(self) -> None:
        """Execute rank 0's commands until it releases this rank; for all ranks except 0."""
        heartbeat = Heartbeat()
        while (command := self._receive()).kind is not CommandKind.END:
            heartbeat.beat()  # each machine has its own heartbeat file
            self._checkpoints.check()
            match command.kind:
                case CommandKind.RESTORE:
                    self._restore(command.step)
                case CommandKind.LOAD:
                    self._load(command)
                case CommandKind.STEP:
                    self._step(command, decode_trajectories(self._receive_bytes()), lambda: None)
                case CommandKind.SAVE:
                    self._save(command.step)
                case CommandKind.REMEMBER:
                    self._remember(command)
                case CommandKind.SCORE:
                    assert self._grid is not None
                    rows = decode_trajectories(self._receive_bytes())
                    joint_scores(command, rows, self._versions, self._grid, self._policy.replay_floor)
                case CommandKind.GATHER:
                    self._copy.update()
                case _:
                    pass

    def _restore(self, step: int) -> None:
        optimisation = self._policy.optimisation
        optimisation.restore(self._checkpoints.load(step, optimisation.like))

    def _load(self, command: GroupCommand) -> None:
        """Copy a whole model's weights into this rank's part of each tensor."""
        chosen = self._weights(command).state_dict()
        with torch.no_grad():
            for name, place in self._policy.model.state_dict().items():
                local(place).copy_(part_of(chosen[name], place))
        self._policy.optimisation.reset()

    def _remember(self, command: GroupCommand) -> None:
        assert command.version is not None
        state = self._weights(command).state_dict() if command.is_published else None
        self._versions.remember(command.version, state, most=command.most)

    def _save(self, step: int) -> Future[None]:
        return self._checkpoints.start(step, self._policy.optimisation.tensors())

    def _step(
        self, command: GroupCommand, everything: Sequence[Trajectory], before_update: Callable[[], None]
    ) -> dict[str, float]:
        """Run a step; ``everything`` is the batch followed by the two views of each example."""
        share = 0 if self._grid is None else self._grid.share
        microbatches = [tuple(everything[index] for index in microbatch) for microbatch in command.shares[share]]
        views = everything[command.totals.trajectories :]
        examples = [DistillationExample(student=s, teacher=t) for s, t in zip(views[::2], views[1::2], strict=True)]
        distilled = (
            [tuple(examples[index] for index in microbatch) for microbatch in command.examples[share]]
            if examples
            else []
        )
        metrics = self._policy.step(command.step, microbatches, command.totals, before_update, distilled)
        return metrics if self._grid is None else reduced(metrics, self._grid)

    def _broadcast(self, command: GroupCommand, payload: Callable[[], bytes] | None = None) -> None:
        if self._grid is None:
            return
        self._grid.broadcast(json.dumps(asdict(command)).encode())
        if payload is not None:
            self._grid.broadcast(payload())

    def _receive(self) -> GroupCommand:
        fields = json.loads(self._receive_bytes())
        for name in ("shares", "examples"):
            fields[name] = tuple(tuple(tuple(microbatch) for microbatch in share) for share in fields[name])
        return GroupCommand(**fields | {"kind": CommandKind(fields["kind"]), "totals": Totals(**fields["totals"])})

    def _receive_bytes(self) -> bytes:
        assert self._grid is not None
        return self._grid.broadcast(b"")


def joint_scores(
    command: GroupCommand, rows: Sequence[Trajectory], versions: RankVersions, grid: Grid, floor: float
) -> Rescored:
    """Score rows under a version: every rank scores its share, and all ranks receive all scores."""
    assert command.version is not None
    context = grid.context
    rows_scored = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    pairs = flips = 0
    with versions.instead(command.version):
        for indices in command.shares[grid.share]:
            scored = versions.score([rows[index] for index in indices], floor, context, replays=command.replays)
            pairs, flips = pairs + scored.pairs, flips + scored.flips
            for index, row in zip(indices, scored.logprobs, strict=True):
                if context is None or context.rank == 0:  # the other ranks of a context have the same scores
                    rows_scored[index] = row
    scores_L = grid.summed(np.concatenate(rows_scored)) if rows_scored else np.zeros(0, np.float32)
    totals = grid.total([pairs, flips])
    ends = np.cumsum([len(row) for row in rows_scored])[:-1]
    return Rescored(logprobs=tuple(np.split(scores_L, ends)), pairs=round(totals[0]), flips=round(totals[1]))


def reduced(metrics: Mapping[str, float], grid: Grid) -> dict[str, float]:
    """Reduce a step's metrics over all ranks, each as defined in the metrics table."""
    names = [name for name in metrics if METRICS[name].reduction is not Reduction.NONE]
    totals = zip(names, grid.total([metrics[name] for name in names]), strict=True)
    return {**metrics, **{name: _reduced(METRICS[name], total, grid.world // grid.shares) for name, total in totals}}


def _reduced(metric: Metric, total: float, ranks_per_share: int) -> float:
    times = ranks_per_share if metric.reduction is Reduction.SHARES else 1
    return round(total) // times if metric.notation is Notation.COUNT else total / times


def build_trainer(
    folder: RunFolder, config: RunConfig, grid: Grid | None, log: WeightLog, base: FrozenBase | None = None
) -> TrainerGroup:
    """Build this rank's part of the trainer; with a ``base``, it trains an adapter. Raises as :func:`policy_model`
    does.
    """
    context = None if grid is None else grid.context
    model = policy_model(folder, config, grid, log, base)
    policy = PolicyTrainer(optimisation_of(model, config, grid), config.loss, config.numerics, context, config.hints)
    checkpoints = Checkpoints(folder.checkpoints, None if grid is None else grid.everyone)
    weights, types = partial(weights_of, folder, config, log, base), published_types(model, config.numerics)
    return TrainerGroup(policy, checkpoints, grid, weights, types)


def weights_of(
    folder: RunFolder, config: RunConfig, log: WeightLog, base: FrozenBase | None, command: GroupCommand
) -> CausalModel:
    """A model on the CPU with the weights named by a load command. Raises as :func:`load_state` does."""
    model = training_model(load_spec(folder.model, config.model.impl), config.numerics, "cpu", base)
    if command.version is not None:
        load_state(model, decoded_state(to_tensors(pull(log, command.version).state), config.numerics))
    else:
        _, state = load_checkpoint(Path(command.checkpoint), config.model.impl)
        load_state(model, state)
    return model


def policy_model(
    folder: RunFolder, config: RunConfig, grid: Grid | None, log: WeightLog, base: FrozenBase | None = None
) -> CausalModel:
    """Build the sharded model to train: with version 0's weights, or empty if a checkpoint will fill it.

    Raises :class:`~etude.errors.ConfigError` if it cannot be sharded.
    """
    torch.set_num_threads(config.trainer.threads)
    spec, numerics, device = load_spec(folder.model, config.model.impl), config.numerics, config.trainer.device
    state: Mapping[str, Tensor] | None = None
    if not Checkpoints(folder.checkpoints).steps():
        state = decoded_state(to_tensors(pull(log, 0).state), numerics)
    if grid is None:
        model = training_model(spec, numerics, device, base)
        if state is not None:
            load_state(model, state)
    else:
        model = unfilled_model(spec, numerics, device)
        if state is not None:
            check_state(model, state)
        parallelise(model, grid, partial(_fill, state=state, device=device), DTYPES[numerics.stored_dtype])
    model.recompute = config.trainer.recomputes
    return model.train()


def optimisation_of(model: CausalModel, config: RunConfig, grid: Grid | None = None) -> Optimisation:
    """Optimiser, schedule and clipping of reinforcement learning."""
    trainer, schedule = config.trainer, rate_schedule(config.trainer)
    optimiser = build_optimiser(
        model,
        config.optimiser,
        learning_rate=trainer.learning_rate,
        betas=trainer.betas,
        draft_learning_rate=config.loss.draft_learning_rate,
    )
    return Optimisation(model, optimiser, schedule, clip_norm=trainer.clip_norm, progress=Heartbeat().beat, grid=grid)


def rate_schedule(trainer: TrainerConfig) -> RateSchedule:
    """The learning rate of reinforcement learning, as a share of ``trainer.learning_rate``."""
    return RateSchedule(
        steps=trainer.steps,
        warmup_steps=trainer.warmup_steps,
        decay_share=trainer.decay_share,
        shape=trainer.schedule,
    )


def _fill(part: nn.Module, *, state: Mapping[str, Tensor] | None, device: str) -> None:
    """Allocate the memory of a part of a model, and load its weights from ``state``, if given."""
    materialise(part, device)
    if state is not None:
        fill(part, state.__getitem__)

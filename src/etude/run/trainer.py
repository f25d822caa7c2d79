"""The trainer process: batches from the ledger in, weight versions out.

    claim batch ──▶ trajectories ──▶ optimiser step ──▶ checkpoint, publish ┄┄ beside the next step ┄┄▶ commit step
         ▲                                                   │
         └───────────────────── next step ◀──────────────────┘

Every arrow is idempotent, and the order is fixed, so after ``kill -9`` at any point the process restarts from the state
on disk: a claimed batch is handed out again, a saved step is published again under the same digest, a published step is
committed. No batch is lost and none is trained on twice. One step in ``trainer.checkpoint_steps`` has a checkpoint. The
steps after the last checkpoint are repeated on the same batches, and must reproduce the digests with which they were
published.

Instead of training on a batch, a step may load other weights: those that users have, after a candidate was rolled back,
or a proposed checkpoint (``trainer.load``). Such a step takes the same path.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import pstdev

import numpy as np

from etude.closing import Closing
from etude.config.recipe import RunConfig
from etude.dashboard.learning import cut_short
from etude.errors import DamagedError, MismatchError, UserError
from etude.ledger.changes import LIVE, TRAIN
from etude.ledger.changes import TRAINER as TRAINER_LEASE
from etude.ledger.ledger import Ledger
from etude.ledger.payloads import Payloads
from etude.models.checkpoint import load_spec
from etude.rewards.shaping.parts import mean_parts
from etude.rollouts.admission import BatchPlan
from etude.run.batches import batch_of
from etude.run.checkpoint_copies import CheckpointCopies
from etude.run.distillation import DistillationBatcher
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.heartbeat import Heartbeat
from etude.run.numerics import decoded_state, frozen_base, published_state, route_space, training_model
from etude.run.penalties import Penalties, passes
from etude.run.process_name import TRAINER
from etude.run.publishing import WeightPublishing
from etude.run.step_commits import StepCommits
from etude.run.store_outages import StoreOutages
from etude.run.stores import leased_ledger, open_payloads
from etude.run.trainer_group import build_trainer, rate_schedule
from etude.run.weight_log import open_log
from etude.telemetry.events import MOST_AGES, MismatchMeasured, MismatchWarned, StepDone
from etude.telemetry.log import EventLog
from etude.trainer.batching.build import build_trajectories
from etude.trainer.batching.packing import Cost, MicroBatch, pack
from etude.trainer.distillation import NO_DISTILLATION, DistillationBatch
from etude.trainer.losses import Totals
from etude.trainer.mismatch import (
    NOTHING_COMPARED,
    POSITIONS,
    Mismatch,
    MismatchLevel,
    MismatchProbe,
    MismatchReport,
    mismatch_level,
)
from etude.trainer.parallel import Grid, joined
from etude.trainer.policy import sample_share
from etude.trainer.reference import Reference
from etude.types import Batch, Group, Ids, Json, ObservedSession, Rollout, RouteSpace, Trajectory, Turn
from etude.weights.pull import pull
from etude.weights.tensors import to_tensors

POLL_S = 0.02
"""Interval at which the ledger is polled for a batch: a fraction of the shortest step."""
MAX_STOP_REASONS = 16
"""Maximum number of stop reasons in the log: an external harness has as many as it has exit codes."""
MAX_EMPTY_STEPS = 3
"""Consecutive steps without a usable rollout after which training stops, since nobody may be watching the run."""

logger = logging.getLogger(__name__)


class TrainerProcess(Closing):
    """The resources of the trainer's loop, opened from a run folder."""

    def __init__(
        self, folder: RunFolder, events: EventLog, ledger: Ledger, grid: Grid | None, outages: StoreOutages
    ) -> None:
        self._folder = folder
        self.config: RunConfig = folder.config()
        self._ledger = ledger
        self._plan = BatchPlan.of(self.config.rollouts, self.config.live)
        self._events = events
        self._log = open_log(folder, outages)
        self.publishing = WeightPublishing(self._log, self.config.name, events)
        self._numerics = self.config.numerics
        self._spec = spec = load_spec(folder.model, self.config.model.impl)
        self._cost = Cost.of_model(spec)
        self._base = frozen_base(folder.model, self.config)
        self.trainer_group = build_trainer(folder, self.config, grid, self._log, self._base)
        self._reference = self._open_reference()
        self._penalties = Penalties(self.config, self._reference if self.config.loss.reference_beta else None)
        self._probe = self._mismatch_probe()
        self._level = MismatchLevel.CLEAR
        self._distillation_batcher = DistillationBatcher.open(self.config, folder)
        self._payloads = open_payloads(folder, outages)
        self.copies = CheckpointCopies(folder, outages)
        self._space = route_space(spec, self._numerics)
        self._empty_steps = 0
        """Consecutive steps, up to the newest, without a usable rollout."""
        self._heartbeat = Heartbeat()
        self._commits = StepCommits(
            folder=folder,
            config=self.config,
            ledger=ledger,
            events=events,
            log=self._log,
            payloads=self._payloads,
            publishing=self.publishing,
            copies=self.copies,
            trainer_group=self.trainer_group,
            probe=self._probe,
        )
        self._recover()

    def close(self) -> None:
        """Wait for the background work of publishing and copying."""
        self._commits.close()

    def run(self) -> None:
        """Train until the recipe's last step is committed."""
        for step in range(self._ledger.progress().steps_done + 1, self.config.trainer.steps + 1):
            groups, wait_s = self._wait_for_batch(step)
            if groups is None:
                continue
            started_s = time.perf_counter()
            groups = self._fetch(step, groups)
            mismatch = self._measure_mismatch(step, groups)
            distillation = self._distillation(groups)
            batch, metrics = self._train(step, groups, distillation)
            busy_s = time.perf_counter() - started_s
            ended = stop_reasons(groups)
            metrics |= batch_metrics(batch) | group_metrics(groups, ended) | mismatch_metrics(mismatch)
            metrics |= {"epoch": max(group.epoch for group in groups), **self._selection_metrics(step, groups)}
            metrics |= {"busy_s": busy_s, "wait_s": wait_s, "hinted_turns": len(distillation.examples)}
            if metrics.get("hinted_tokens"):
                metrics["hint_kl"] = metrics["hint_nats"] / metrics["hinted_tokens"]
            metrics["learning_rate"] = self.config.trainer.learning_rate * rate_schedule(self.config.trainer).share(
                step
            )
            parts, ages = mean_parts(groups), token_ages(batch.staleness)
            consumed = [group.index for group in groups if not group.is_live]
            done = StepDone(
                step=step, metrics=metrics, reward_parts=parts, ended=ended, token_ages=ages, groups=consumed
            )
            self._events.write(done)
            self._commits.begin(step)
            self._check_empty_step(batch)
        self._commits.commit_published()

    def _fetch(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """Load a step's groups with their payloads, which are protected from deletion from now on."""
        self._commits.note(step, groups)
        return fetch_payloads(groups, self._payloads, self._space)

    def _train(
        self, step: int, groups: Sequence[Group], distillation: DistillationBatch
    ) -> tuple[Batch, dict[str, float]]:
        """Take an optimiser step. Its result depends only on its groups, those of earlier steps and the
        initial state.
        """
        batch = batch_of(step, groups, self._penalties.of(groups), self.config, self._earlier(step))
        trajectories = scored(batch, self.config, self._probe, self._reference)
        shares, release = self._shares(batch), self.publishing.release
        metrics = self.trainer_group.step(step, trajectories, shares, totals_of(batch), release, distillation)
        self._heartbeat.beat()
        return batch, metrics

    def _check_empty_step(self, batch: Batch) -> None:
        """Warn of a step without a usable rollout. Raises :class:`~etude.errors.UserError` after several in a row;
        these steps are done, so a resumed run continues after them.
        """
        self._empty_steps = 0 if len(batch.rewards) else self._empty_steps + 1
        if not self._empty_steps:
            return
        words = f"step {batch.step}: every rollout was masked or quarantined, so nothing was learnt"
        logger.warning("%s", words)
        if self._empty_steps >= MAX_EMPTY_STEPS:
            self._commits.commit_published()
            raise UserError(
                f"{words}, for {self._empty_steps} steps now: see why with `etude show {self._folder.path}` (a "
                f"judge that is down, paused or out of budget masks what it should judge), then continue with --resume"
            )

    def _recover(self) -> None:
        """Restore the state that the previous process reached: load the newest checkpoint, repeat the committed steps
        after it, and commit a step that was saved but not committed.
        """
        done = self._ledger.progress().steps_done
        saved = self.trainer_group.saved
        if saved > done + 1:
            raise DamagedError(
                f"the ledger has committed step {done} but the newest checkpoint is of step {saved}: "
                f"restore the ledger, or start a new run from the last published weights"
            )
        if saved:
            self.trainer_group.restore(saved)
            self.copies.start(saved)
            self.copies.finish(self._commits.idle)
        first = min(saved, done)
        for version in range(max(0, first - self.config.rollouts.max_staleness), first + 1):
            self._recall(version, done)
        self._redo(first, done)
        if first < done:
            self._recall(done, done)
        self._commits.unproven = done + 1
        if saved == done + 1:
            self._commits.publish(saved)
            self._commits.commit_published()
        self._commits.sweep()

    def _recall(self, version: int, done: int) -> None:
        """Load the weights of a version, to measure the mismatch of its rollouts. A missing version is only reported.

        Raises for the newest one, which engines would wait for forever, unless it is damaged and another step follows:
        that step's version is published whole.
        """
        try:
            published = to_tensors(pull(self._log, version).state)
        except (DamagedError, UserError) as error:
            next_is_whole = isinstance(error, DamagedError) and done < self.config.trainer.steps
            if version == done and not next_is_whole:
                raise
            logger.warning("the mismatch of weight version %d is not measured: %s", version, error)
            return
        self._commits.remember(version, decoded_state(published, self._numerics))

    def _redo(self, saved: int, done: int) -> None:
        """Repeat the committed steps after the newest checkpoint, each on its batch from the ledger.

        Raises :class:`~etude.errors.DamagedError` if a step cannot be repeated or ends in different weights.
        """
        if saved < done:
            logger.warning("steps %d to %d are done again from the checkpoint of step %d", saved + 1, done, saved)
        for step in range(saved + 1, done + 1):
            groups = self._ledger.batch(step)
            if not groups:
                raise DamagedError(
                    f"step {step} loaded weights and cannot be done again from the checkpoint of step {saved}: restore "
                    f"that of step {step}, or start a new run from the last published weights"
                )
            groups = self._fetch(step, groups)
            self._train(step, groups, self._distillation(groups))
            model = self.trainer_group.whole_model()
            self._commits.prove(step, published_state(model, self._numerics))
            self._commits.remember_policy(step, model)

    def _mismatch_probe(self) -> MismatchProbe | None:
        """The probe of the recipe; ``None`` if nothing is scored again: without ranks, its scorer is a whole model in
        memory.
        """
        if not self.config.trainer.mismatch_share and self.config.loss.old_policy == "engine":
            return None
        versions = self.config.rollouts.max_staleness + 1
        if self.config.parallel.ranks > 1:
            return MismatchProbe(self.trainer_group, self._numerics, versions=versions)
        scorer = training_model(self._spec, self._numerics, self.config.trainer.device, self._base)
        return MismatchProbe.alone(scorer, self._numerics, versions=versions)

    def _open_reference(self) -> Reference | None:
        """The reference policy of the loss; ``None`` if ``loss.reference_beta`` is 0 and ``loss.kl_coef`` does not use
        it.
        """
        loss = self.config.loss
        if not loss.needs_reference:
            return None
        published = decoded_state(to_tensors(pull(self._log, loss.reference_version).state), self._numerics)
        if self.config.parallel.ranks > 1:
            self.trainer_group.remember(loss.reference_version, published, most=0)
            return Reference(self.trainer_group, loss.reference_version)
        scorer = training_model(self._spec, self._numerics, self.config.trainer.device, self._base)
        return Reference.alone(scorer, published, self._numerics)

    def _load(self, step: int, load: Mapping[str, Json]) -> None:
        """Take a step that loads other weights: those that users have, or a proposed checkpoint.

        It does not train, but is saved, published and committed like any other step. After ``kill -9`` it is repeated
        if its checkpoint does not exist yet, and finished otherwise.
        """
        self._commits.commit_published()
        version, checkpoint = load.get("version"), load.get("checkpoint", "")
        self.trainer_group.load(None if version is None else int(str(version)), str(checkpoint))
        logger.warning("step %d: continues with %s", step, checkpoint or f"the weights of version {version}")
        self._commits.begin(step, is_load=True)
        self._commits.commit_published()

    def _wait_for_batch(self, step: int) -> tuple[list[Group] | None, float]:
        """The groups of a step; ``None`` for a step that loaded weights instead and is done."""
        started_s = time.perf_counter()
        train, live = self._groups_of(step)
        while True:
            load = self._ledger.loads.claim(step)
            if load is not None:
                self._load(step, load)
                return None, time.perf_counter() - started_s
            groups = self._ledger.claim_batch(step, train, live)
            if groups is not None:
                return groups, time.perf_counter() - started_s
            if self._commits.can_commit:
                self._commits.commit_published()
            self._commits.idle()
            time.sleep(POLL_S)

    def _groups_of(self, step: int) -> tuple[int, int]:
        """Numbers of simulated groups and of live sessions in a step's batch."""
        batch = step - 1 - self._ledger.loads.count(step - 1)
        return self._plan.groups(TRAIN, batch), self._plan.groups(LIVE, batch)

    def _earlier(self, step: int) -> list[ObservedSession]:
        """Live sessions of earlier steps, from which baselines are estimated."""
        live = self.config.live
        return self._ledger.live.observed(live.history, before_step=step) if live.groups_per_step else []

    def _selection_metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics of task selection, if the recipe selects tasks."""
        metrics: dict[str, float] = {}
        if self.config.rollouts.max_resamples:
            metrics["groups_resampled"] = self._ledger.resampled(step)
        if self.config.tasks.selection.kind != "in_order":
            metrics["selection_distance"] = selection_distance([group for group in groups if not group.is_live])
        return metrics

    def _shares(self, batch: Batch) -> list[list[MicroBatch]]:
        """The batch divided evenly, each share in micro-batches that fit into memory."""
        lengths = [len(trajectory.token_ids) for trajectory in batch.trajectories]
        max_tokens = self.config.trainer.microbatch_tokens * self.config.parallel.cp
        return pack(lengths, max_tokens=max_tokens, ranks=self.trainer_group.shares, cost=self._cost)

    def _distillation(self, groups: Sequence[Group]) -> DistillationBatch:
        """Distillation examples from the hints in a batch's rollouts."""
        if self._distillation_batcher is None:
            return NO_DISTILLATION
        return self._distillation_batcher.distillation(groups, shares=self.trainer_group.shares)

    def _measure_mismatch(self, step: int, groups: Sequence[Group]) -> Mismatch:
        """Compare trainer and engine on a sample of the batch's rollouts, with or without a signal in their rewards."""
        if self._probe is None:
            return NOTHING_COMPARED
        config = self.config.trainer
        rollouts = sample_share(
            [rollout for group in groups for rollout in group.rollouts], config.mismatch_share, step
        )
        trajectories = [trajectory for rollout in rollouts for trajectory in build_trajectories(rollout, 0.0)]
        report = self._probe.measure(trajectories, max_tokens=config.microbatch_tokens)
        for row in _mismatch_rows(step, report):
            self._events.write(row)
        self._check_mismatch(step, report.total)
        return report.total

    def _check_mismatch(self, step: int, mismatch: Mismatch) -> None:
        """Warn when the mismatch rises above the lower bound. Raises above the upper bound, before any training."""
        before, self._level = (
            self._level,
            mismatch_level(mismatch, self._numerics, self._level),
        )
        if self._level is MismatchLevel.STOP:
            raise MismatchError(
                f"step {step}: trainer and engine disagree on the same tokens and weights: k3 = {mismatch.k3:.2g} over "
                f"{mismatch.tokens} tokens, above numerics.stop_k3 = {self._numerics.stop_k3:g}; "
                f"`etude doctor --parity --run {self._folder.path}` names the first layer that differs"
            )
        if self._level is MismatchLevel.WARN and before is MismatchLevel.CLEAR:
            bound = self._numerics.warn_k3
            self._events.write(MismatchWarned(step=step, k3=mismatch.k3, bound=bound))
            logger.warning("step %d: k3 = %.2g between trainer and engine, above %g", step, mismatch.k3, bound)


def selection_distance(groups: Sequence[Group]) -> float:
    """Estimate, without bias, from one batch the distance of the task draws from a uniform choice: the total variation
    distance ½ Σ |q − 1/N| = Σ max(0, q − 1/N) is the mean of max(0, 1 − w) over draws, w = 1 / (N q). The mean of
    ½ |1 − w| would leave out tasks with q = 0, which are never drawn.
    """
    return sum(max(0.0, 1 - group.weight) for group in groups) / max(1, len(groups))


def totals_of(batch: Batch) -> Totals:
    """Loss normalisers over all micro-batches of a batch."""
    return Totals(
        tokens=batch.num_loss_tokens,
        trajectories=len(batch.trajectories),
        sampled=len(batch.staleness),
        sampled_trajectories=batch.num_sampled_trajectories,
        lost_tokens=batch.num_lost_tokens,
        lost_trajectories=batch.num_lost_trajectories,
    )


def stop_reasons(groups: Iterable[Group]) -> dict[str, int]:
    """Number of rollouts by the agent's stop reason, the most frequent first."""
    return dict(Counter(rollout.reason for group in groups for rollout in group.rollouts).most_common(MAX_STOP_REASONS))


def scored(
    batch: Batch, config: RunConfig, probe: MismatchProbe | None, reference: Reference | None
) -> tuple[Trajectory, ...]:
    """The batch's trajectories, with log-probabilities of other policies where the loss needs them."""
    views, max_tokens = [*batch.trajectories], config.trainer.microbatch_tokens
    if config.loss.old_policy == "recomputed" and views:
        assert probe is not None
        rows = probe.old_logprobs(views, max_tokens=max_tokens)
        views = [replace(one, old_logprobs=row) for one, row in zip(views, rows, strict=True)]
    if config.loss.scores_reference and views:
        assert reference is not None
        for microbatch in passes(views, max_tokens):
            for index, row in zip(microbatch, reference.logprobs([views[i] for i in microbatch]), strict=True):
                views[index] = replace(views[index], reference_logprobs=row)
    return tuple(views)


def fetch_payloads(groups: Sequence[Group], payloads: Payloads, space: RouteSpace | None) -> list[Group]:
    """Load every turn's routes and sampling masks of some groups into memory.

    If routes will be replayed (``space``), each record is checked again against the model, since a wrong one would
    silently credit the wrong experts. Raises :class:`~etude.errors.DamagedError` naming the rollout or the file.
    """
    return [
        replace(group, rollouts=tuple(_fetched(rollout, payloads, space) for rollout in group.rollouts))
        for group in groups
    ]


def _fetched(rollout: Rollout, payloads: Payloads, space: RouteSpace | None) -> Rollout:
    turns, checked = payloads.fetch(rollout.turns), dict[int, int]()
    if space is not None:
        for number, turn in enumerate(turns, 1):
            _check_routes(turn, space, checked, f"rollout {rollout.rollout_id}, turn {number}")
    return replace(rollout, turns=turns)


def _check_routes(turn: Turn, space: RouteSpace, checked: dict[int, int], where: str) -> None:
    """Check the rows that no earlier turn had. The turns of a branch are views of one array; ``checked`` maps its
    address to the number of rows already checked.
    """
    if turn.routes is None:
        raise DamagedError(f"{where} has no routes to replay: set numerics.replay = 'off' or start a new run")
    address, rows = turn.routes.ctypes.data, len(turn.prompt_ids) + len(turn.completion_ids) - 1
    good = min(checked.get(address, 0), rows)
    try:
        space.check(turn.routes[good:], rows - good)
    except ValueError as error:
        raise DamagedError(f"{where} cannot be replayed: {error}; start a new run") from error
    checked[address] = max(rows, good)


def run_trainer(folder: RunFolder) -> None:
    """Run one rank of the trainer until the recipe's last step."""
    config = folder.config()
    with joined(config.parallel, config.trainer.device) as grid:
        if grid is None or grid.rank == 0:
            lead(folder, grid)
        else:
            outages = StoreOutages(folder.store, config.rollouts.max_outage_s)  # only rank 0 reports them
            build_trainer(folder, config, grid, open_log(folder, outages)).worker_loop()


def lead(folder: RunFolder, grid: Grid | None) -> None:
    """Run the trainer as rank 0, or alone."""
    config = folder.config()
    with (
        open_events(folder, TRAINER) as events,
        leased_ledger(folder, config, TRAINER, events, lease=TRAINER_LEASE) as ledger,
        StoreOutages(folder.store, config.rollouts.max_outage_s, events) as outages,
    ):
        process = TrainerProcess(folder, events, ledger, grid, outages)
        with (
            process,
            process.publishing,
            process.copies,
            process.trainer_group,
            outages,
        ):  # closed in reverse: first ``outages``, so that no call still waits
            process.run()


def batch_metrics(batch: Batch) -> dict[str, float]:
    """The metrics of a batch before it is trained on."""
    tokens = len(batch.staleness)
    metrics: dict[str, float] = {
        "reward_mean": float(batch.rewards.mean()) if len(batch.rewards) else 0.0,
        "groups": batch.num_groups,
        "groups_without_signal": batch.num_degenerate_groups,
        "signal_share": 1 - batch.num_degenerate_groups / max(batch.num_groups, 1),
        "loss_tokens": batch.num_loss_tokens,
        "staleness_sum": int(batch.staleness.sum()),
        "staleness_tokens": tokens,
    }
    if len(batch.rewards):
        metrics |= {"reward_low": float(batch.rewards.min()), "reward_high": float(batch.rewards.max())}
    if tokens:
        staleness_max = int(batch.staleness.max())
        metrics |= {"staleness_max": staleness_max, "staleness_mean": metrics["staleness_sum"] / tokens}
    return metrics


def token_ages(staleness_N: Ids) -> list[int]:
    """Count tokens by their staleness, from 0; ages from ``MOST_AGES`` − 1 up share the last count."""
    return np.bincount(np.minimum(staleness_N, MOST_AGES - 1)).tolist() if len(staleness_N) else []


def group_metrics(groups: Sequence[Group], ended: Mapping[str, int]) -> dict[str, float]:
    """The spread of rewards within groups, the share of rollouts that a limit stopped (by the counts ``ended`` of stop
    reasons), and the number of live sessions with their mean reward. Quarantined rollouts have no part in rewards.
    """
    trusted = [[each for each in group.rollouts if not each.is_quarantined] for group in groups]
    rewards = [[each.reward for each in some if each.reward is not None] for some in trusted]
    spreads = [pstdev(some) for group, some in zip(groups, rewards, strict=True) if some and not group.is_live]
    share = cut_short(Counter(ended))
    metrics = {} if share is None else {"cut_short": share}
    worths = [worth for group, some in zip(groups, rewards, strict=True) if group.is_live for worth in some]
    if worths:
        metrics |= {"live_sessions": len(worths), "live_reward": sum(worths) / len(worths)}
    return metrics | ({"reward_std": sum(spreads) / len(spreads)} if spreads else {})


def mismatch_metrics(mismatch: Mismatch) -> dict[str, float]:
    """The metrics of a mismatch report."""
    if not mismatch.tokens:
        return {"mismatch_tokens": 0}
    return {
        "mismatch_tokens": mismatch.tokens,
        "k1": mismatch.k1,
        "k3": mismatch.k3,
        "mismatch_p99": mismatch.p99,
        "mismatch_max": mismatch.max,
        "mismatch_equal": mismatch.equal,
        "mismatch_pairs": mismatch.pairs,
        "mismatch_flips": mismatch.flips,
    }


def _mismatch_rows(step: int, report: MismatchReport) -> Iterator[MismatchMeasured]:
    last = dict(zip(POSITIONS, (*(first - 1 for first in POSITIONS[1:]), None), strict=True))
    for version, views in report.versions:
        yield MismatchMeasured(step=step, by="version", first=version, last=version, **asdict(views))
    for first, views in report.positions:
        yield MismatchMeasured(step=step, by="position", first=first, last=last[first], **asdict(views))

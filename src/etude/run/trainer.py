"""The trainer process: batches from the ledger in, weight versions out.

    claim batch ──▶ trajectories ──▶ optimiser step ──▶ checkpoint ──▶ publish ┄┄ beside the next step ┄┄▶ commit step
         ▲                                                                │
         └─────────────────────────── next step ◀─────────────────────────┘

Every arrow is durable and idempotent, and they happen in this order, so that after ``kill -9`` at any point the process
starts again from what is on disk: a claimed batch is handed out again, a saved step is published again under the same
digest, a published one is committed. No batch is lost and none is trained on twice.

A step may go on with other weights instead of a batch: with those that users have, after a candidate was taken back, or
with a checkpoint that was proposed (``trainer.load``). It goes the same way.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from statistics import pstdev

import numpy as np
from torch import Tensor

from etude.closing import Closing
from etude.config.recipe import RunConfig
from etude.dashboard.report import cut_short
from etude.errors import DamagedError, EtudeError, MismatchError, UserError
from etude.ledger.changes import LIVE, TRAIN
from etude.ledger.changes import TRAINER as TRAINER_LEASE
from etude.ledger.ledger import Ledger
from etude.ledger.payloads import Payloads
from etude.ledger.states import UNSETTLED
from etude.models.checkpoint import load_spec, state_of
from etude.rewards.shaping.parts import mean_parts
from etude.rollouts.admission import BatchPlan
from etude.run.checkpoint_copies import CheckpointCopies
from etude.run.distillation import DistillationBatcher
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.heartbeat import Heartbeat
from etude.run.numerics import decoded_state, frozen_base, published_state, route_space, training_model
from etude.run.payload_store import leased_ledger, open_feedback, open_ledger, open_payloads
from etude.run.penalties import Penalties, passes
from etude.run.process_name import TRAINER
from etude.run.publishing import WeightPublishing
from etude.run.store_outages import StoreOutages
from etude.run.trainer_group import build_trainer, rate_schedule
from etude.run.weight_log import open_log
from etude.telemetry.events import MOST_AGES, MismatchMeasured, MismatchWarned, StepDone, StepSaved
from etude.telemetry.log import EventLog
from etude.trainer.batching.baselines import LiveComparison
from etude.trainer.batching.batch import build_batch, shuffle_rewards
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
from etude.types import Batch, Group, Ids, Json, ObservedSession, PayloadRef, Rollout, RouteSpace, Trajectory, Turn
from etude.weights.pull import pull
from etude.weights.tensors import to_tensors

POLL_S = 0.02
"""Interval at which the ledger is asked for a batch: a fraction of the shortest step."""
SWEEP_S = 3600.0
"""Interval at which payloads are removed that nothing refers to."""
LONGEST_ROLLOUT_S = 24 * 3600.0
"""Least age of those: the ledger refers to what a rollout left when it ends."""
MAX_STOP_REASONS = 16
"""Reasons of which the log speaks: another team's harness has as many as it has exit codes."""
MAX_EMPTY_STEPS = 3
"""Steps in a row in which nothing could be trusted, after which training stops: a run is not watched all night."""

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
        self._spec = spec = load_spec(folder.model)
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
        self._in_use: dict[int, tuple[PayloadRef, ...]] = {}
        """Step → the payloads of its batch, until it is committed."""
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="payload sweep")
        self._sweeping: Future[None] | None = None
        self._swept_s = 0.0
        self._empty_steps = 0
        """Steps in a row, up to the newest, that had no rollout to learn from."""
        self._heartbeat = Heartbeat()
        self._recover()

    def close(self) -> None:
        """Wait for the sweep of payloads under way."""
        self._sweeper.shutdown()

    def run(self) -> None:
        """Train until the recipe's last step is committed."""
        for step in range(self._ledger.progress().steps_done + 1, self.config.trainer.steps + 1):
            groups, wait_s = self._wait_for_batch(step)
            if groups is None:
                continue
            started_s = time.perf_counter()
            self._in_use[step] = payload_refs(groups)
            groups = fetch_payloads(groups, self._payloads, self._space)
            batch = batch_of(step, groups, self._penalties.of(groups), self.config, self._earlier(step))
            mismatch = self._measure_mismatch(step, groups)
            distillation = self._distillation(groups)
            trajectories = scored(batch, self.config, self._probe, self._reference)
            shares, release = self._shares(batch), self.publishing.release
            metrics = self.trainer_group.step(step, trajectories, shares, totals_of(batch), release, distillation)
            self._heartbeat.beat()
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
            self._keep(step)
            self._check_empty_step(batch)
        self._commit_published()

    def _keep(self, step: int) -> None:
        """Save a step that was computed and begin to publish it, once the one before is committed."""
        times = [time.perf_counter()]
        self._commit_published()
        times.append(time.perf_counter())
        self.trainer_group.save(step)
        self._heartbeat.beat()
        self.copies.start(step)
        times.append(time.perf_counter())
        self._publish(step)
        times.append(time.perf_counter())
        commit_s, save_s, publish_s = (after - before for before, after in pairwise(times))
        self._events.write(StepSaved(step=step, commit_s=commit_s, save_s=save_s, publish_s=publish_s))

    def _check_empty_step(self, batch: Batch) -> None:
        """Warn of a step in which no rollout could be trusted. Raises :class:`~etude.errors.UserError` after several in
        a row; they are done, so a run that is resumed goes on behind them.
        """
        self._empty_steps = 0 if len(batch.rewards) else self._empty_steps + 1
        if not self._empty_steps:
            return
        words = f"step {batch.step}: every rollout was masked or quarantined, so nothing was learnt"
        logger.warning("%s", words)
        if self._empty_steps >= MAX_EMPTY_STEPS:
            self._commit_published()
            raise UserError(
                f"{words}, for {self._empty_steps} steps now: see why with `etude show {self._folder.path}` (a "
                f"judge that is down, held or out of budget masks what it should judge), then go on with --resume"
            )

    def _recover(self) -> None:
        """Go to where the previous process really got, and finish the step it had saved but not committed."""
        done = self._ledger.progress().steps_done
        saved = self.trainer_group.saved
        if saved not in (done, done + 1):
            raise DamagedError(
                f"the ledger has committed step {done} but the newest checkpoint is of step {saved}: "
                f"restore the missing checkpoint, or start a new run from the last published weights"
            )
        if saved:
            self.trainer_group.restore(saved)
        for version in range(max(0, done - self.config.rollouts.max_staleness), done + 1):
            try:
                published = to_tensors(pull(self._log, version).state)
            except (DamagedError, UserError) as error:
                next_is_whole = isinstance(error, DamagedError) and done < self.config.trainer.steps
                if version == done and not next_is_whole:
                    raise  # engines would wait for it for ever
                logger.warning("what weight version %d sampled is not measured: %s", version, error)
                continue
            self._remember(version, decoded_state(published, self._numerics))
        if saved == done + 1:
            self.copies.start(saved)
            self._publish(saved)
            self._commit_published()
        self._sweep()

    def _mismatch_probe(self) -> MismatchProbe | None:
        """``None`` where nothing is scored again: alone, its scorer is a whole model in memory."""
        if not self.config.trainer.mismatch_share and self.config.loss.old_policy == "engine":
            return None
        versions = self.config.rollouts.max_staleness + 1
        if self.config.parallel.ranks > 1:
            return MismatchProbe(self.trainer_group, self._numerics, versions=versions)
        scorer = training_model(self._spec, self._numerics, self.config.trainer.device, self._base)
        return MismatchProbe.alone(scorer, self._numerics, versions=versions)

    def _remember(self, version: int, state: Mapping[str, Tensor] | None) -> None:
        if self._probe is not None:
            self._probe.remember(version, state)

    def _open_reference(self) -> Reference | None:
        """The weights that the policy is held to; they are not kept where leaving them costs nothing."""
        loss = self.config.loss
        if not loss.needs_reference:
            return None
        published = decoded_state(to_tensors(pull(self._log, loss.reference_version).state), self._numerics)
        if self.config.parallel.ranks > 1:
            self.trainer_group.remember(loss.reference_version, published, most=0)
            return Reference(self.trainer_group, loss.reference_version)
        scorer = training_model(self._spec, self._numerics, self.config.trainer.device, self._base)
        return Reference.alone(scorer, published, self._numerics)

    def _publish(self, step: int) -> None:
        """Start to publish the policy as version ``step``; the next step's batch and gradients do not wait for it."""
        model = self.trainer_group.whole_model()
        # What could not be computed again to the same bits must not be seen before it can be restored.
        wait_copy = (lambda: None) if self._numerics.arithmetic == "invariant" else self.copies.wait
        self.publishing.start(published_state(model, self._numerics), step, wait_copy)
        self._remember(step, state_of(model) if self.config.parallel.ranks == 1 else None)

    def _commit_published(self) -> None:
        """Commit the step whose version was under way, once that is visible and its checkpoint is copied."""
        version = self.publishing.land(lambda: self.trainer_group.idle(time.monotonic()))
        if version is not None:
            self.copies.finish(lambda: self.trainer_group.idle(time.monotonic()))
            self._events.flush()
            self._ledger.commit_step(version)
            self._payloads.drop(self._in_use.pop(version, ()))
            if time.monotonic() - self._swept_s > SWEEP_S:
                self._sweep()

    def _sweep(self) -> None:
        """Begin to remove the payloads that nothing refers to, beside the step: a long run has many to look through."""
        if self._sweeping is None or self._sweeping.done():
            self._swept_s = time.monotonic()
            self._sweeping = self._sweeper.submit(sweep_payloads, self._folder)

    def _load(self, step: int, load: Mapping[str, Json]) -> None:
        """Take a step that goes on with other weights: what users have, or a checkpoint that was proposed.

        It trains on nothing, and is saved, published and committed as any other, so that it is redone whole after
        ``kill -9`` until its checkpoint is there, and finished after that.
        """
        self._commit_published()
        version, checkpoint = load.get("version"), load.get("checkpoint", "")
        self.trainer_group.load(None if version is None else int(str(version)), str(checkpoint))
        logger.warning("step %d: goes on with %s", step, checkpoint or f"the weights of version {version}")
        self._keep(step)
        self._commit_published()

    def _wait_for_batch(self, step: int) -> tuple[list[Group] | None, float]:
        """The groups of a step; ``None`` for one that loaded weights instead, and is done."""
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
            if self.publishing.is_visible and self.copies.is_complete:
                self._commit_published()
            self.trainer_group.idle(time.monotonic())
            self._heartbeat.beat()
            time.sleep(POLL_S)

    def _groups_of(self, step: int) -> tuple[int, int]:
        """Numbers of simulated groups and of live sessions that a step's batch is made of."""
        batch = step - 1 - self._ledger.loads.count(step - 1)
        return self._plan.groups(TRAIN, batch), self._plan.groups(LIVE, batch)

    def _earlier(self, step: int) -> list[ObservedSession]:
        """Live sessions of the steps before, that baselines learn from."""
        live = self.config.live
        return self._ledger.live.observed(live.history, before_step=step) if live.groups_per_step else []

    def _selection_metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """The metrics of the choice of tasks, where they were chosen."""
        metrics: dict[str, float] = {}
        if self.config.rollouts.max_resamples:
            metrics["groups_resampled"] = self._ledger.resampled(step)
        if self.config.tasks.selection.kind != "in_order":
            metrics["selection_distance"] = selection_distance([group for group in groups if not group.is_live])
        return metrics

    def _shares(self, batch: Batch) -> list[list[MicroBatch]]:
        """The batch divided evenly, each share in pieces that fit into memory."""
        lengths = [len(trajectory.token_ids) for trajectory in batch.trajectories]
        max_tokens = self.config.trainer.microbatch_tokens * self.config.parallel.cp
        return pack(lengths, max_tokens=max_tokens, ranks=self.trainer_group.shares, cost=self._cost)

    def _distillation(self, groups: Sequence[Group]) -> DistillationBatch:
        """Distillation examples from the hints in a batch's rollouts."""
        if self._distillation_batcher is None:
            return NO_DISTILLATION
        return self._distillation_batcher.distillation(groups, shares=self.trainer_group.shares)

    def _measure_mismatch(self, step: int, groups: Sequence[Group]) -> Mismatch:
        """Compare a share of the batch's rollouts, whether there is a signal in their rewards or not."""
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
        """Warn when the mismatch gets above the lower bound. Raises above the upper one, before anything is trained."""
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
    """Estimate, without bias, from one batch how far the draws of tasks are from all tasks alike: the total variation
    distance ½ Σ |q − 1/N| is the mean of ½ |1 − w| over draws, w = 1 / (N q).
    """
    return sum(abs(1 - group.weight) for group in groups) / (2 * max(1, len(groups)))


def batch_of(
    step: int,
    groups: Sequence[Group],
    penalties: Mapping[str, float],
    config: RunConfig,
    earlier: Sequence[ObservedSession] = (),
) -> Batch:
    """Build the batch of a step with the recipe's advantages, those of live sessions by ``earlier`` ones, too; a
    control run's rewards are shuffled first.
    """
    if not config.tasks.selection.importance_weights:
        groups = [group if group.is_live else replace(group, weight=1.0) for group in groups]
    if config.reward.shuffled:
        groups = [shuffle_rewards(group, seed=config.seed) for group in groups]
    live = LiveComparison(baseline=config.live.baseline, earlier=earlier)
    return build_batch(step, groups, config.loss.baseline, penalties, config.credit, live)


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


def payload_refs(groups: Iterable[Group]) -> tuple[PayloadRef, ...]:
    """The payload references of some groups' turns."""
    turns = (turn for group in groups for rollout in group.rollouts for turn in rollout.turns)
    return tuple(turn.payload for turn in turns if turn.payload is not None)


def fetch_payloads(groups: Sequence[Group], payloads: Payloads, space: RouteSpace | None) -> list[Group]:
    """Load every turn's routes and sampling masks of some groups into memory.

    Where routes will be replayed (``space``) each record is proven once more to fit the model, since a wrong one would
    credit the wrong experts without a sound. Raises :class:`~etude.errors.DamagedError` naming the rollout or the file.
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
    """Check the rows that no turn before had: those of a branch are views of one array, whose address is in ``checked``
    with how many of its rows are known to be good.
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
            outages = StoreOutages(folder.store, config.rollouts.max_outage_s)  # rank 0 tells people of them
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
        ):  # first of all nothing waits any more
            process.run()


def sweep_payloads(folder: RunFolder) -> None:
    """Remove old payloads that nothing refers to: routes and masks of evaluations, of tries that failed, of whoever
    else called; turns whose rollout was never recorded. What fails is done the next time.
    """
    try:
        with open_ledger(folder) as ledger:
            in_use = partial(_payloads_in_use, folder, ledger)
            open_payloads(folder).sweep(in_use, ledger.turns.named, older_than_s=LONGEST_ROLLOUT_S)
    except EtudeError as error:
        logger.warning("payloads that nothing refers to are not removed yet: %s", error)


def _payloads_in_use(folder: RunFolder, ledger: Ledger) -> list[PayloadRef]:
    """Routes and masks that may still be trained on."""
    refs: list[PayloadRef] = []
    if folder.config().feedback.window_s:
        with open_feedback(folder) as feedback:  # first: a session that leaves it is in the ledger by then
            refs += feedback.payloads()
    return [*refs, *payload_refs(group for each in (TRAIN, LIVE) for group in ledger.groups(each, UNSETTLED))]


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
    """Count tokens by their staleness, from 0; those older than ``MOST_AGES`` tells apart are counted with its last."""
    return np.bincount(np.minimum(staleness_N, MOST_AGES - 1)).tolist() if len(staleness_N) else []


def group_metrics(groups: Sequence[Group], ended: Mapping[str, int]) -> dict[str, float]:
    """The spread of rewards within groups, the share of rollouts that a limit ended, by their reasons ``ended``, and
    live sessions with their mean reward.
    """
    rewards = [[each.reward for each in group.rollouts if each.reward is not None] for group in groups]
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

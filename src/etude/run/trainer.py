"""The trainer process: batches from the ledger in, weight versions out.

    claim batch ──▶ trajectories ──▶ optimiser step ──▶ checkpoint ──▶ publish ┄┄ beside the next step ┄┄▶ commit step
         ▲                                                                │
         └─────────────────────────── next step ◀─────────────────────────┘

Every arrow is durable and idempotent, and they happen in this order, so that after ``kill -9`` at any point the process
starts again from what is on disk: a claimed batch is handed out again, a saved step is published again under the same
digest, a published one is committed. No batch is lost and none is trained on twice.
"""

import time
from collections.abc import Sequence

import torch

from etude.config import RunConfig
from etude.errors import DamagedError, MismatchError
from etude.ledger.ledger import Ledger
from etude.models.checkpoint import load_spec, state_of
from etude.run.folder import RunFolder
from etude.run.publishing import WeightPublishing, open_log
from etude.run.states import build_model, resolve_device, to_tensors
from etude.telemetry.events import StepDone
from etude.telemetry.log import EventLog
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.mismatch import Mismatch, MismatchProbe
from etude.trainer.policy import PolicyTrainer, StepStats, sample_share
from etude.trajectories.batch import build_batch
from etude.trajectories.build import build_trajectories
from etude.trajectories.microbatches import microbatches
from etude.types import Batch, Group
from etude.weights.pull import pull

MISMATCH_STOP_K3 = 1e-2
"""Beyond this the trainer's numbers are not the engine's and updates go to the wrong place (collapse was reported at
0.013 in practice): the run stops rather than train on.
"""
MISMATCH_MIN_TOKENS = 100
"""Fewer compared tokens than this decide nothing."""
POLL_S = 0.02
"""How often the ledger is asked for a batch: a fraction of the shortest step."""


class TrainerProcess:
    """Everything the loop needs, opened from a run folder."""

    def __init__(self, folder: RunFolder, events: EventLog) -> None:
        self.config: RunConfig = folder.config()
        self.ledger = Ledger.open(folder.ledger)
        self._events = events
        self._checkpoints = Checkpoints(folder.checkpoints)
        self._log = open_log(folder)
        self.publishing = WeightPublishing(self._log, self.config.name, events)
        torch.set_num_threads(self.config.trainer.threads)
        device = resolve_device(self.config.trainer.device)
        model = build_model(load_spec(folder.model), pull(self._log, 0).state, device)
        self._policy = PolicyTrainer(model.train(), self.config.trainer)
        self._probe = MismatchProbe(model, versions=self.config.rollouts.max_staleness + 1)
        self._recover()

    def run(self) -> None:
        """Train until the recipe's last step is committed."""
        for step in range(self.ledger.progress().steps_done + 1, self.config.trainer.steps + 1):
            groups, wait_s = self._wait_for_batch(step)
            started_s = time.perf_counter()
            batch = build_batch(step, groups)
            mismatch = self._measure_mismatch(step, groups)
            pieces = microbatches(batch.trajectories, self.config.trainer.microbatch_tokens)
            stats = self._policy.step(step, pieces, batch.num_loss_tokens, before_update=self.publishing.release)
            self._events.write(_step_done(batch, stats, mismatch, time.perf_counter() - started_s, wait_s))
            self._land()
            self._checkpoints.save(step, self._policy.tensors())
            self._publish(step)
        self._land()

    def _recover(self) -> None:
        """Go to where the previous process really got, and finish the step it had saved but not committed."""
        done = self.ledger.progress().steps_done
        saved = max(self._checkpoints.steps(), default=0)
        if saved not in (done, done + 1):
            raise DamagedError(
                f"the ledger has committed step {done} but the newest checkpoint is of step {saved}: "
                f"restore the missing checkpoint, or start a new run from the last published weights"
            )
        if saved:
            self._policy.restore(self._checkpoints.load(saved))
        for version in range(max(0, done - self.config.rollouts.max_staleness), done + 1):
            self._probe.remember(version, to_tensors(pull(self._log, version).state))
        if saved == done + 1:
            self._publish(saved)
            self._land()

    def _publish(self, step: int) -> None:
        """Start to publish the policy as version ``step``; the next step's batch and gradients do not wait for it."""
        self.publishing.start(state_of(self._policy.model), step)
        self._probe.remember(step, state_of(self._policy.model))

    def _land(self) -> None:
        """Commit the step whose version was under way, once that is visible."""
        version = self.publishing.land()
        if version is not None:
            self.ledger.commit_step(version)

    def _wait_for_batch(self, step: int) -> tuple[list[Group], float]:
        started_s = time.perf_counter()
        while (groups := self.ledger.claim_batch(step, self.config.rollouts.groups_per_step)) is None:
            if self.publishing.landed:
                self._land()
            time.sleep(POLL_S)
        return groups, time.perf_counter() - started_s

    def _measure_mismatch(self, step: int, groups: Sequence[Group]) -> Mismatch:
        """Compare a share of the batch's rollouts, whether there is a signal in their rewards or not."""
        config = self.config.trainer
        rollouts = sample_share(
            [rollout for group in groups for rollout in group.rollouts], config.mismatch_share, step
        )
        trajectories = [trajectory for rollout in rollouts for trajectory in build_trajectories(rollout, 0.0)]
        mismatch = self._probe.measure(trajectories, max_tokens=config.microbatch_tokens)
        if mismatch.tokens >= MISMATCH_MIN_TOKENS and not mismatch.k3 <= MISMATCH_STOP_K3:  # NaN stops, too
            raise MismatchError(
                f"step {step}: trainer and engine disagree on the same tokens and weights: k3 = "
                f"{mismatch.k3:.2g} over {mismatch.tokens} tokens, above {MISMATCH_STOP_K3:g}; compare their logprobs"
            )
        return mismatch


def run_trainer(folder: RunFolder) -> None:
    """Run the trainer until the recipe's last step."""
    with EventLog(folder.events, "trainer") as events:
        process = TrainerProcess(folder, events)
        with process.ledger, process.publishing:
            process.run()


def _step_done(batch: Batch, stats: StepStats, mismatch: Mismatch, busy_s: float, wait_s: float) -> StepDone:
    return StepDone(
        step=batch.step,
        busy_s=busy_s,
        wait_s=wait_s,
        reward_mean=float(batch.rewards.mean()),
        degenerate_groups=batch.num_degenerate_groups,
        loss_tokens=batch.num_loss_tokens,
        trained_tokens=stats.trained_tokens,
        grad_norm=stats.grad_norm,
        entropy=stats.entropy,
        truncated_share=stats.truncated_share,
        staleness_sum=int(batch.staleness.sum()),
        staleness_tokens=len(batch.staleness),
        staleness_max=int(batch.staleness.max()),
        mismatch_tokens=mismatch.tokens,
        mismatch_k1=mismatch.k1,
        mismatch_k3=mismatch.k3,
        mismatch_p99=mismatch.p99,
    )

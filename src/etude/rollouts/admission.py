"""Admission of rollout groups ahead of the trainer: the single rule that bounds staleness.

Pure: a number of groups from counts. Legend: G rollouts per group, O maximal staleness, C concurrency, v the newest
weight version that every engine serves, P(c, j) the groups of class c in batch j, S(c, j) those of all batches before
it. Classes are simulated groups and users' sessions (:mod:`etude.ledger.changes`). u(v) = v minus the steps up to v
that loaded weights instead of training on a batch.

    window              W(c, v) = min( S(c, u(v) + O + 1),  S(c, steps) )      groups of c that may be kept at version v
    groups to admit             = min( W(v) − admitted,  ⌊(C − in flight) / G⌋ )

(the admission gate of Fireworks' open recipe, counted in groups instead of rollouts; a group is admitted as a whole).
With P groups in every batch, S(j) = j·P. The window belongs to the run; the ledger checks it again in the transaction
that admits, since two processes may count before either admits. Each process has its own concurrency.

No trained token is staler than O, there is no deadlock, and no simulated rollout is discarded because it is late: the
proofs and their assumptions are in ``docs/control.md``. O = 0 is strictly synchronous: nothing is admitted for the next
batch before the current one's weights are served.
"""

from dataclasses import dataclass
from typing import Self

from etude.config.live import LiveConfig
from etude.config.rollouts import RolloutConfig
from etude.ledger.changes import LIVE, TRAIN

NOT_LIVE = LiveConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Number of groups of each class in each batch."""

    after: int
    """Batches before the first with a live session, of ``first`` simulated groups each."""
    first: int
    train: int
    """Simulated groups of each batch from then on."""
    live: int
    """Live groups of each batch from then on."""

    @classmethod
    def of(cls, rollouts: RolloutConfig, live: LiveConfig) -> Self:
        """The plan of a recipe."""
        first = rollouts.groups_per_step
        train = live.simulated_groups_per_step if live.groups_per_step else first
        return cls(after=live.after_steps, first=first, train=train, live=live.groups_per_step)

    def groups(self, purpose: str, batch: int) -> int:
        """P: groups of a class in a batch, from 0."""
        if batch < self.after:
            return self.first if purpose == TRAIN else 0
        return {TRAIN: self.train, LIVE: self.live}[purpose]

    def before(self, purpose: str, batch: int) -> int:
        """S: groups of a class in all batches before one."""
        alone = min(batch, self.after)
        return alone * self.groups(purpose, 0) + (batch - alone) * self.groups(purpose, self.after)


class Admission:
    """Decides how many groups may start now."""

    def __init__(self, config: RolloutConfig, *, steps: int, live: LiveConfig = NOT_LIVE) -> None:
        self._config = config
        self._steps = steps
        self.plan = BatchPlan.of(config, live)
        """Composition of batches."""

    def groups_needed(self, loads: int = 0, purpose: str = TRAIN) -> int:
        """Groups of a class that the whole run trains on, if ``loads`` of its steps train on none."""
        return self.plan.before(purpose, self._steps - loads)

    def window(self, version: int, loads: int = 0, purpose: str = TRAIN) -> int:
        """Limit on admitted groups of a class, without dropped ones, while every engine serves ``version``, up to which
        ``loads`` steps had no batch. For a live session, ``version`` is its own oldest version.
        """
        ahead = self.plan.before(purpose, version - loads + self._config.max_staleness + 1)
        return min(ahead, self.groups_needed(loads, purpose))

    def groups_to_admit(self, *, version: int, admitted: int, in_flight: int, loads: int = 0) -> int:
        """Number of simulated groups to admit.

        Args:
            version: The newest weight version that every engine serves.
            admitted: Groups admitted since the start of the run, without the dropped ones.
            in_flight: Rollouts of this process that are running or waiting for their next attempt.
            loads: Steps up to that version that trained on none.
        """
        idle_groups = (self._config.concurrency - in_flight) // self._config.group_size
        return max(0, min(self.window(version, loads) - admitted, idle_groups))

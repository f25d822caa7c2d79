"""Admission of rollout groups ahead of the trainer: the one rule that bounds staleness.

Pure: counts in, a number of groups out. Legend: P groups per step, G rollouts per group, O maximal staleness,
C concurrency, v the newest weight version that every engine serves.

    window              W(v) = min( (v + O + 1)·P,  steps·P )          groups that may ever be admitted at version v
    groups to admit          = min( W(v) − admitted,  ⌊(C − in flight) / G⌋ )

(the admission gate of Fireworks' open recipe, counted in groups instead of rollouts; a group is admitted whole). The
window belongs to the run and is checked again by the ledger, in the transaction that admits: two processes may both
have counted before either admits. Concurrency is each process's own.

No trained token is staler than O, nothing waits for itself, and nothing is thrown away for being late: the proofs, and
what they rest on, are in ``docs/control.md``. O = 0 is strictly synchronous: nothing is admitted for the next batch
before this one's weights are served.
"""

from etude.config.rollouts import RolloutConfig


class Admission:
    """Decides how many groups may start now."""

    def __init__(self, config: RolloutConfig, *, steps: int) -> None:
        self._config = config
        self.groups_needed = steps * config.groups_per_step
        """Groups that the whole run trains on."""

    def window(self, version: int) -> int:
        """Groups that may have been admitted, the dropped ones aside, while every engine serves ``version``."""
        ahead = (version + self._config.max_staleness + 1) * self._config.groups_per_step
        return min(ahead, self.groups_needed)

    def groups_to_admit(self, *, version: int, admitted: int, in_flight: int) -> int:
        """Number of groups to admit.

        Args:
            version: The newest weight version that every engine serves.
            admitted: Groups admitted since the start of the run, without the dropped ones.
            in_flight: Rollouts of this process that are running or waiting for their next attempt.
        """
        idle_groups = (self._config.concurrency - in_flight) // self._config.group_size
        return max(0, min(self.window(version) - admitted, idle_groups))

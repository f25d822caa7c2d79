"""How far rollouts may run ahead of the trainer: the one rule that bounds staleness.

Pure: counts in, a number of groups out. Legend: P groups per step, G rollouts per group, O maximal staleness,
C concurrency, v the newest weight version that every engine serves, r the rank of a group: its place among the groups
that are not dropped, in admission order, from 0.

    groups that may be admitted = min( (v + O + 1)·P − kept,   ⌊(C − in flight) / G⌋,   steps·P − kept )

(the admission gate of Fireworks' open recipe, counted in groups instead of rollouts; a group is admitted whole).

*No trained token is staler than O.* Count batches from n = 0; batch n is trained by weight version n. Batches are
claimed strictly in admission order, so batch n holds exactly the groups that finally have the ranks nP … (n+1)P − 1. A
group is admitted with rank r = ``kept``, and only if r < (v + O + 1)·P. Dropping a group lowers the ranks behind it, so
the final rank is at most r, and the group's batch is n ≤ ⌊r/P⌋ ≤ v + O. Its tokens are sampled after its admission, at
versions w ≥ v. Their staleness is n − w ≤ n − v ≤ O. ∎

*It never waits for itself.* Suppose nothing is in flight and the trainer has done v steps and waits for batch n = v.
All kept groups are complete, so fewer than (v+1)·P are kept, or the batch would be ready. Then all three terms are at
least 1 (C ≥ G is checked by the configuration), and a group is admitted. ∎

O = 0 is strictly synchronous: nothing is admitted for the next batch before this one's weights are served.
"""

from etude.config import RolloutConfig


class Admission:
    """Decides how many groups may start now."""

    def __init__(self, config: RolloutConfig, *, steps: int) -> None:
        self._config = config
        self.groups_needed = steps * config.groups_per_step
        """Groups that the whole run trains on."""

    def groups_to_admit(self, *, version: int, kept: int, in_flight: int) -> int:
        """How many groups to admit.

        Args:
            version: The newest weight version that every engine serves.
            kept: Groups admitted since the start of the run, without the dropped ones.
            in_flight: Rollouts that are running or waiting for their next attempt.
        """
        config = self._config
        window = (version + config.max_staleness + 1) * config.groups_per_step
        idle_groups = (config.concurrency - in_flight) // config.group_size
        return max(0, min(window - kept, idle_groups, self.groups_needed - kept))

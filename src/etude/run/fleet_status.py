"""The state of a run's fleet for display, from the observations that each region's supervisor wrote into its store."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.errors import EtudeError
from etude.fleet.specs import ProcessStatus
from etude.run.fleet_state import OBSERVE_S
from etude.run.folder import RunFolder
from etude.run.placement import fleet_objects

LATE_S = 3 * OBSERVE_S
"""Age above which a region's last observation counts as late: its supervisor has probably stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionStatus:
    """The last observed state of one region."""

    statuses: Mapping[str, ProcessStatus] = field(default_factory=dict)
    """Process → its state."""
    drained: frozenset[str] = frozenset()
    remark: str = ""
    """A sentence about the region as a whole, or empty."""
    host: str = ""
    """Machine of its supervisor."""
    age_s: float | None = None
    """Age of the observation."""

    @property
    def is_current(self) -> bool:
        """True if there is an observation that is not late: only then is the state of the region known."""
        return self.age_s is not None and self.age_s <= LATE_S


def region_status(folder: RunFolder, region: str, generation: int) -> RegionStatus:
    """Read the status of a region (empty: home); ``generation`` is home's newest. An unavailable store becomes a
    remark.
    """
    try:
        objects = fleet_objects(folder, region)
        drained, newest = objects.drained(), objects.observed()
    except EtudeError as error:
        return RegionStatus(remark=f"its store does not answer: {error}")
    if newest is None:
        return RegionStatus(drained=drained, remark="no supervisor has reported yet")
    observed, age_s = newest
    remark = f"still at generation {observed.generation}" if observed.generation < generation else ""
    if age_s > LATE_S:
        remark = f"its supervisor has not reported for {age_s:.0f} s: is it running?"
    return RegionStatus(statuses=observed.statuses, drained=drained, remark=remark, host=observed.host, age_s=age_s)


def state_words(status: ProcessStatus | None, *, is_drained: bool) -> str:
    """The state of one process in a few words."""
    if is_drained:
        return "drained" if status is None else "draining"
    if status is None:
        return "not placed"
    if status.is_pending:
        return "waits for a machine with room"
    if status.is_lost:
        return "its machine does not answer"
    if status.exit_status is None:
        return "runs"
    return f"ended with status {status.exit_status}: {status.last_line}"

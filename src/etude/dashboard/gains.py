"""The gain on held-out tasks, read off a report and written for people: one notation for terminal and page.

Owns which figure a way is judged by: the pass rate, or where a grader pays fractions the mean reward.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from etude.dashboard import units
from etude.dashboard.heldout import PREFIXES, RATES
from etude.dashboard.report import figure
from etude.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure before and after RL, as it is written for people."""

    before: float | None
    after: float | None
    stderr_before: float | None
    stderr_after: float | None
    stderr: float | None
    """The standard error of the difference."""
    interval: tuple[float, float] | None
    """95 % interval of the difference."""
    is_rate: bool
    """True for a share of tasks, written in percent; else it is a mean reward."""

    @property
    def gain(self) -> float | None:
        """The difference."""
        return None if self.before is None or self.after is None else self.after - self.before

    def value(self, number: float | None) -> str:
        """Before or after, or where an axis has a tick."""
        return units.percent(number) if self.is_rate else units.decimal(number, 3)

    def change(self, number: float | None) -> str:
        """The difference, or an end of its interval."""
        return units.points(number) if self.is_rate else units.signed(number, 3)

    def error(self, number: float | None) -> str:
        """A standard error."""
        if number is None:
            return units.MISSING
        return f"{100 * number:.1f}" if self.is_rate else f"{number:.3f}"


def comparison(report: Mapping[str, Json], way: str) -> Comparison:
    """The figure by which one way is judged."""
    heldout = report["heldout"]
    assert isinstance(heldout, Mapping)
    fractions = bool(heldout.get("pays_fractions"))
    prefix = PREFIXES[way]
    name, errors = (f"{prefix}reward", f"{prefix}reward_") if fractions else (RATES[way], prefix)
    interval = heldout.get(f"{errors}interval")
    ends = [end for end in interval if isinstance(end, float)] if isinstance(interval, list) else []
    return Comparison(
        before=figure(heldout, f"{name}_before"),
        after=figure(heldout, f"{name}_after"),
        stderr_before=figure(heldout, f"{errors}stderr_before"),
        stderr_after=figure(heldout, f"{errors}stderr_after"),
        stderr=figure(heldout, f"{errors}stderr"),
        interval=(ends[0], ends[1]) if len(ends) == 2 else None,
        is_rate=not fractions,
    )


def full_marks(report: Mapping[str, Json], way: str) -> str:
    """The number of tasks that passed, where that is not the figure itself: ``full marks: 1 → 2``; empty elsewhere."""
    heldout, pass_at = report["heldout"], figure(report, "config.eval.pass_at")
    assert isinstance(heldout, Mapping)
    if not heldout.get("pays_fractions"):
        return ""
    counts = [figure(heldout, f"{PREFIXES[way]}passed_{label}") for label in ("before", "after")]
    name = "full marks" if pass_at in (None, 1.0) else f"{pass_at:g} or better"
    return f"{name}: {' → '.join(units.count(number) for number in counts if number is not None)}"


def about_errors(report: Mapping[str, Json]) -> str:
    """A note on what the errors of held-out figures are over; empty where nothing was measured twice."""
    templates, tasks = figure(report, "heldout.templates"), figure(report, "heldout.n")
    if templates is None or figure(report, "heldout.stderr") is None:
        return ""
    over = f"{units.count(templates)} templates" if 1 < templates < (tasks or 0) else f"{units.count(tasks)} tasks"
    return (
        f"± is one standard error over {over}; runs of other seeds have the same held-out tasks, so their mean is no "
        f"surer of other tasks"
    )

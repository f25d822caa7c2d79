"""The held-out result of a run: before and after RL, sampled and greedy, with errors that generalise to other
templates.

    evaluation before ┬──▶ rates and mean rewards of each, over the tasks that it has attempted
                      ├──▶ tasks that both have attempted ──▶ paired differences
    evaluation after  ┘

If every reward is 0 or 1, the pass rate is the complete result. Fractional rewards are summarised by their mean, in
addition to the number of passed tasks, which ``eval.pass_at`` determines.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TypeAlias

from etude.dashboard import formatting
from etude.dashboard.formatting import number_at
from etude.dashboard.statistics import difference_of, mean_of
from etude.telemetry.events import EvalDone
from etude.types import Json

RATES = {"sampled": "pass", "greedy": "greedy"}
"""Sampling mode → name of its pass rate."""
PREFIXES = {"sampled": "", "greedy": "greedy_"}
"""Sampling mode → prefix of its other figures."""
MOST_KINDS = 8
"""Maximum number of template kinds that are shown separately."""
Values: TypeAlias = Sequence[float | None]
"""One value for each held-out task; ``None`` if it was not attempted."""


def heldout_figures(before: EvalDone | None, after: EvalDone | None) -> dict[str, Json]:
    """Rates, mean rewards and their differences for a report; unknown figures are ``None``."""
    newest = after or before
    section: dict[str, Json] = {
        "n": newest.tasks if newest else None,
        "templates": len(set(newest.clusters)) or None if newest else None,
        "pays_fractions": any(pays_fractions(done) for done in (before, after) if done) if newest else None,
    }
    for mode, prefix in PREFIXES.items():
        rate = RATES[mode]
        for label, done in (("before", before), ("after", after)):
            passed, rewards = _passed(done, mode), _rewards(done, mode)
            mean = mean_of(*_tried(rewards, done.clusters)) if done and rewards else None
            section |= {
                f"{rate}_{label}": _ratio(getattr(done, f"{mode}_pass") if done else None),
                f"{prefix}stderr_{label}": _ratio(getattr(done, f"{mode}_stderr") if done else None),
                f"{prefix}passed_{label}": round(sum(each or 0.0 for each in passed)) if passed else None,
                f"{prefix}reward_{label}": _ratio(mean.value if mean else None),
                f"{prefix}reward_stderr_{label}": _ratio(mean.stderr if mean else None),
            }
        clusters = newest.clusters if _have_same_tasks(before, after) and newest else []
        for label, done in (("before", before), ("after", after)):
            section[f"{prefix}calls_{label}"] = _calls(getattr(done, f"{mode}_calls")) if done else None
        section |= _difference(prefix, _passed(before, mode), _passed(after, mode), clusters)
        section |= _difference(f"{prefix}reward_", _rewards(before, mode), _rewards(after, mode), clusters)
    return section | {"kinds": _kinds(before, after) if newest else None}


def kind_of(template: str) -> str:
    """The prefix of a template's name: ``comp`` of ``comp|even|double {x}|sum``, a project of ``project:module``."""
    return re.split(r"[|:/]", template)[0]


def pays_fractions(done: EvalDone) -> bool:
    """True if some reward was neither 0 nor 1, so that the mean reward is not a pass rate."""
    return any(reward not in (None, 0, 1) for reward in (*done.sampled_rewards, *done.greedy_rewards))


def _calls(turns: Sequence[Mapping[str, float]]) -> list[Json]:
    return [{name: _ratio(share) for name, share in turn.items()} for turn in turns]


def _kinds(before: EvalDone | None, after: EvalDone | None) -> list[Json]:
    """Pass rates of each kind of template, ordered by name; empty if there is only one kind, more than ``MOST_KINDS``,
    or one kind per template.
    """
    newest = after or before
    templates = newest.clusters if newest else []
    kinds = [kind_of(template) for template in templates]
    if not 1 < len(set(kinds)) <= min(MOST_KINDS, len(set(templates)) - 1):
        return []
    rows: list[Json] = []
    for kind in sorted(set(kinds)):
        row: dict[str, Json] = {"kind": kind, "n": kinds.count(kind)}
        for mode, rate in RATES.items():
            for label, done in (("before", before), ("after", after)):
                is_known = done is newest or _have_same_tasks(before, after)
                row[f"{rate}_{label}"] = _share(_passed(done, mode), [is_known and each == kind for each in kinds])
        rows.append(row)
    return rows


def _share(passed: Values, chosen: Sequence[bool]) -> float | None:
    tried = [float(each) for each in compress(passed, chosen) if each is not None]
    return _ratio(sum(tried) / len(tried)) if tried else None


def _have_same_tasks(before: EvalDone | None, after: EvalDone | None) -> bool:
    """False for evaluations whose tasks cannot be paired, because another version of étude drew them."""
    return before is not None and after is not None and before.clusters == after.clusters


def _passed(done: EvalDone | None, mode: str) -> Values:
    if done is None:
        return ()
    return done.sampled_passed if mode == "sampled" else done.greedy_passed


def _rewards(done: EvalDone | None, mode: str) -> Values:
    if done is None:
        return ()
    return done.sampled_rewards if mode == "sampled" else done.greedy_rewards


def _tried(values: Values, clusters: Sequence[str]) -> tuple[list[float], list[str]]:
    tried = [(value, cluster) for value, cluster in zip(values, clusters, strict=True) if value is not None]
    return [value for value, _ in tried], [cluster for _, cluster in tried]


def _difference(prefix: str, before: Values, after: Values, clusters: Sequence[str]) -> dict[str, Json]:
    """After − before with its error and interval, over the tasks that both have attempted."""
    pairs = [
        (float(first), float(second), cluster)
        for first, second, cluster in zip(before, after, clusters, strict=False)
        if first is not None and second is not None
    ]
    if not pairs:
        return {f"{prefix}difference": None, f"{prefix}stderr": None, f"{prefix}interval": None}
    firsts, seconds, of = zip(*pairs, strict=True)
    difference = difference_of(firsts, seconds, of)
    return {
        f"{prefix}difference": _ratio(difference.value),
        f"{prefix}stderr": _ratio(difference.stderr),
        f"{prefix}interval": [_ratio(difference.low), _ratio(difference.high)],
    }


def _ratio(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure before and after RL, formatted for display."""

    before: float | None
    after: float | None
    stderr_before: float | None
    stderr_after: float | None
    difference: float | None
    """After − before over the tasks that both have attempted; ``None`` if these are not known."""
    stderr: float | None
    """The standard error of the difference."""
    interval: tuple[float, float] | None
    """95 % interval of the difference."""
    is_rate: bool
    """True for a share of tasks, written in percent; else it is a mean reward."""

    @property
    def gain(self) -> float | None:
        """The difference; that of the two figures, each over its own tasks, if no tasks can be paired."""
        if self.difference is not None or self.before is None or self.after is None:
            return self.difference
        return self.after - self.before

    def value(self, number: float | None) -> str:
        """Format the value before or after, or that of an axis tick."""
        return formatting.percent(number) if self.is_rate else formatting.decimal(number, 3)

    def change(self, number: float | None) -> str:
        """Format the difference, or an end of its interval."""
        return formatting.points(number) if self.is_rate else formatting.signed(number, 3)

    def error(self, number: float | None) -> str:
        """Format a standard error."""
        if number is None:
            return formatting.MISSING
        return f"{100 * number:.1f}" if self.is_rate else f"{number:.3f}"


def comparison(report: Mapping[str, Json], mode: str) -> Comparison:
    """The headline figure of one sampling mode, before and after RL."""
    heldout = report["heldout"]
    assert isinstance(heldout, Mapping)
    fractions = bool(heldout.get("pays_fractions"))
    prefix = PREFIXES[mode]
    name, errors = (f"{prefix}reward", f"{prefix}reward_") if fractions else (RATES[mode], prefix)
    interval = heldout.get(f"{errors}interval")
    ends = [end for end in interval if isinstance(end, float)] if isinstance(interval, list) else []
    return Comparison(
        before=number_at(heldout, f"{name}_before"),
        after=number_at(heldout, f"{name}_after"),
        stderr_before=number_at(heldout, f"{errors}stderr_before"),
        stderr_after=number_at(heldout, f"{errors}stderr_after"),
        difference=number_at(heldout, f"{errors}difference"),
        stderr=number_at(heldout, f"{errors}stderr"),
        interval=(ends[0], ends[1]) if len(ends) == 2 else None,
        is_rate=not fractions,
    )


def full_marks(report: Mapping[str, Json], mode: str) -> str:
    """The number of passed tasks, unless it is the headline figure: ``full marks: 1 → 2``; else empty."""
    heldout, pass_at = report["heldout"], number_at(report, "config.eval.pass_at")
    assert isinstance(heldout, Mapping)
    if not heldout.get("pays_fractions"):
        return ""
    counts = [number_at(heldout, f"{PREFIXES[mode]}passed_{label}") for label in ("before", "after")]
    name = "full marks" if pass_at in (None, 1.0) else f"{pass_at:g} or better"
    return f"{name}: {' → '.join(formatting.count(number) for number in counts if number is not None)}"


def about_errors(report: Mapping[str, Json]) -> str:
    """Explain what the standard errors of held-out figures cover; empty if there are none."""
    templates, tasks = number_at(report, "heldout.templates"), number_at(report, "heldout.n")
    if templates is None or tasks is None or number_at(report, "heldout.stderr") is None:
        return ""
    of_templates = 1 < templates < tasks
    over = f"{formatting.count(templates)} templates" if of_templates else f"{formatting.count(tasks)} tasks"
    return (
        f"± is one standard error over {over}; runs of other seeds have the same held-out tasks, so their mean is no "
        f"surer of other tasks"
    )

"""Columns over a run's steps, folded from its events for the page's charts.

    StepDone, EvalDone, HeldoutLoss, … ──▶ Curves ──▶ columns since a step
    RolloutClosed ──▶ RolloutCurves ──▶ lengths, turns and cheats by weight version

A step that is repeated after a resumption replaces itself and all later ones; then the ``revision`` changes.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import ClassVar

from etude.dashboard.statistics import difference_of, mean_of
from etude.telemetry.metrics import METRICS
from etude.types import Json
from etude.ui.event_lines import Fields

PART, END, AGE = "part:", "end:", "age:"
"""Prefixes of columns that are not metrics: parts of the reward, rollouts by finish reason, tokens by age."""
WAYS = ("sampled", "greedy")
TRAIN = "train"
"""Purpose of the rollouts that are trained on."""


class Curves:
    """All data of a run that are drawn over steps."""

    KINDS: ClassVar[frozenset[str]] = frozenset(
        {"StepDone", "EvalDone", "HeldoutLoss", "ImitationProgress", "PhaseStarted", "PhaseEnded"}
    )

    def __init__(self) -> None:
        self.revision = 0
        self.evals: dict[str, Fields] = {}
        """``before``, ``after`` or ``step-N`` → the newest result."""
        self._steps: list[int] = []
        self._at_s: list[float] = []
        self._rows: list[Mapping[str, float]] = []
        self._measured: dict[str, Json] = {}
        """The same labels → their drawn figures."""
        self._losses: dict[tuple[str, int], Fields] = {}
        self._imitation: dict[str, dict[int, Fields]] = {}
        self._phases: list[tuple[float, str]] = []
        self._lineage: dict[str, Fields] = {}

    def add(self, kind: str, fields: Fields) -> None:
        """Add one event."""
        match kind:
            case "StepDone":
                self._add_step(fields)
            case "EvalDone":
                self.evals[fields["label"]] = fields
                self._measured[fields["label"]] = measured(fields)
            case "HeldoutLoss":
                self._losses[fields["phase"], fields["step"]] = fields
            case "ImitationProgress":
                steps = self._imitation.setdefault(fields["phase"], {})
                for later in [step for step in steps if step >= fields["step"]]:
                    del steps[later]
                steps[fields["step"]] = fields
            case "PhaseStarted":
                self._phases.append((fields["at_s"], fields["phase"]))
            case "PhaseEnded":
                self._lineage[fields["phase"]] = fields

    def columns(self, since: int, names: Collection[str] = ()) -> Json:
        """Steps after ``since``, with a column for each metric in any of them; other measurements are complete.

        ``names`` restricts the columns if it is not empty; a name that ends with a colon selects all with that prefix.
        """
        first = bisect_right(self._steps, since)
        rows = self._rows[first:]
        there = dict.fromkeys(name for row in rows for name in row)
        prefixes = tuple(name for name in names if name.endswith(":"))
        ordered = [*(name for name in METRICS if name in there), *(name for name in there if name not in METRICS)]
        ordered = [name for name in ordered if not names or name in names or name.startswith(prefixes)]
        by_version = sorted(self.evals, key=lambda label: int(self.evals[label]["version"]))
        return {
            "revision": self.revision,
            "since": since,
            "step": list(self._steps[first:]),
            "at_s": list(self._at_s[first:]),
            "columns": {name: [row.get(name) for row in rows] for name in ordered},
            "heldout": [self._measured[label] for label in by_version],
            "gain": self._gain(by_version[-1]) if by_version else None,
            "losses": [_some(loss, "phase", "step", "loss", "action_loss") for _, loss in sorted(self._losses.items())],
            "imitation": {
                phase: [_some(each, "step", "loss", "action_loss", "tokens_per_s") for _, each in sorted(steps.items())]
                for phase, steps in self._imitation.items()
            },
            "phases": [{"at_s": at_s, "phase": phase} for at_s, phase in sorted(self._phases)],
            "lineage": [_some(each, "phase", "steps", "tokens", "loss", "digest") for each in self._lineage.values()],
        }

    def _gain(self, newest: str) -> Json:
        """The newest evaluation − the one before RL, per sampling mode; ``None`` if they cannot be paired."""
        before, after = self.evals.get("before"), self.evals[newest]
        if before is None or newest == "before" or before["clusters"] != after["clusters"]:
            return None
        return {way: _difference(before, after, way) for way in WAYS}

    def _add_step(self, fields: Fields) -> None:
        while self._steps and self._steps[-1] >= fields["step"]:
            del self._steps[-1], self._at_s[-1], self._rows[-1]
            self.revision += 1
        self._steps.append(fields["step"])
        self._at_s.append(fields["at_s"])
        row: dict[str, float] = fields["metrics"]
        row |= {PART + name: value for name, value in fields.get("reward_parts", {}).items()}
        row |= {END + reason: number for reason, number in fields.get("ended", {}).items()}
        row |= {f"{AGE}{age}": number for age, number in enumerate(fields.get("token_ages", ())) if number}
        self._rows.append(row)


class RolloutCurves:
    """Training rollouts by the newest weight version that sampled in them: sums, for means."""

    KINDS: ClassVar[frozenset[str]] = frozenset({"RolloutClosed"})
    SUMS = ("rollouts", "turns", "sampled_tokens", "seconds", "hacked", "failed")

    def __init__(self) -> None:
        self._versions: dict[int, list[float]] = {}

    def add(self, kind: str, fields: Fields) -> None:
        """Count a rollout; the length of one that did not end as graded is ignored."""
        if fields["purpose"] != TRAIN:
            return
        sums = self._versions.setdefault(fields.get("version", -1), [0.0] * len(self.SUMS))
        if fields["status"] != "graded":
            sums[5] += 1
            return
        sums[0] += 1
        sums[1] += fields["turns"]
        sums[2] += fields["sampled_tokens"]
        sums[3] += fields["seconds"]
        sums[4] += bool(fields.get("hacked"))

    def columns(self, since: int) -> Json:
        """Versions from ``since``; the sums of the newest ones still grow."""
        versions = sorted(version for version in self._versions if version >= max(0, since))
        names = {name: [self._versions[version][place] for version in versions] for place, name in enumerate(self.SUMS)}
        return {"version": list(versions), "columns": {name: list(values) for name, values in names.items()}}


def measured(done: Fields) -> Json:
    """One held-out evaluation, with intervals over templates; and the mean of rewards if they are fractions."""
    ways: dict[str, Json] = {}
    for way in WAYS:
        rewards = done.get(f"{way}_rewards") or []
        ways[way] = _interval(done[f"{way}_pass"], done.get(f"{way}_passed") or [], done["clusters"])
        ways[f"{way}_reward"] = _interval(None, rewards, done["clusters"]) if _has_fractions(done) else None
    return {"step": done["version"], "label": done["label"], "tasks": done["tasks"], "at_s": done["at_s"], **ways}


def _has_fractions(done: Fields) -> bool:
    """True if some reward was neither 0 nor 1, so that the mean reward is not a pass rate."""
    return any(reward not in (None, 0, 1) for way in WAYS for reward in done.get(f"{way}_rewards") or [])


def _difference(before: Fields, after: Fields, way: str) -> Json:
    """The paired difference of pass rates, or of fractional mean rewards, over the tasks that both attempted."""
    what = "rewards" if _has_fractions(before) or _has_fractions(after) else "passed"
    values = zip(before.get(f"{way}_{what}") or [], after.get(f"{way}_{what}") or [], after["clusters"], strict=False)
    pairs = [(float(a), float(b), cluster) for a, b, cluster in values if a is not None and b is not None]
    if not pairs:
        return None
    firsts, seconds, clusters = zip(*pairs, strict=True)
    change = difference_of(firsts, seconds, clusters)
    return {"value": change.value, "low": change.low, "high": change.high, "tried": len(pairs)}


def _interval(share: float | None, values: list[float | None], clusters: list[str]) -> Json:
    tried = [(float(value), cluster) for value, cluster in zip(values, clusters, strict=False) if value is not None]
    if not tried:
        return {"value": share, "low": None, "high": None, "tried": 0}
    estimate = mean_of([value for value, _ in tried], [cluster for _, cluster in tried])
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "tried": len(tried)}


def _some(fields: Fields, *names: str) -> Json:
    return {name: fields.get(name) for name in names}

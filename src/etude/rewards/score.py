"""The score of a rollout: the stored reward and the value for training. No other module decides these. Pure.

    grade ───────────────┐
    values of parts ─────┤ (behaviour, harness, judge)
    findings ────────────┼──score──▶ Score: value, recorded parts, verdict ──▶ stored with the rollout
    policy ──────────────┘                    │
    effort, KL to the reference ──────penalty─┴──trained_value──▶ compared within the group

    value    Σ weight · part, or the grade if the recipe names no parts;
             0 for a rollout that cheated, and for one that a missing part masks
    trained  value − w · C(effort) − β · k1

Handling of a rollout in which cheating was detected:

- *keep*: trained on with its value. So is unrewarded work, regardless of findings: a failed cheat is bad work, and
  dropping it would teach the model to produce it.
- *zero*: trained on with a value of zero. For acts that honest work never contains.
- *quarantine*: not trained on, but stored, readable and counted under its reason. For acts that honest work rarely
  contains, where a zero would punish honest rollouts; for an impossible task that was passed; and for a masked rollout.

Certain cheating outweighs suspicion: a cheat cannot escape its zero by also looking suspicious, nor by a part that
masks. The penalty is subtracted when rewards are compared, not when they are stored: it does not affect evaluations,
and a rollout with zero reward for cheating is not better off than an honest failure.

Does not own the values of parts (:mod:`etude.run.scoring` gathers them) or the choice of training data
(:mod:`etude.trainer.batching`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from etude.config.reward import PartConfig, RewardConfig
from etude.config.training import EffortConfig
from etude.errors import ConfigError, InfrastructureError
from etude.harnesses.actions import Finding, Severity
from etude.protocols import Grade, Score
from etude.rewards.shaping.effort import effort_penalty
from etude.types import Disposition, Rollout, Verdict

GRADER = "grader"
"""The grade, as a source of parts and in the record of a reward that has parts."""
MEASURE = "measure."
"""Prefix of sources measured by the harness, which are recorded under their own name; functions are recorded under the
part's name.
"""
CHEAT_PART = "cheat_"
"""Prefix of a grade's parts that report cheating; 1 means yes."""
IMPOSSIBLE_PASSED = "impossible_passed"
"""Reason for quarantine: an impossible task was passed."""
CERTAIN = 0.5
"""Threshold from which a ``cheat_`` part means yes."""
WEIGHT = MappingProxyType({Disposition.KEEP: 0, Disposition.QUARANTINE: 1, Disposition.ZERO: 2})
BY_SEVERITY = MappingProxyType(
    {
        Severity.LOW: Disposition.KEEP,
        Severity.MEDIUM: Disposition.QUARANTINE,
        Severity.HIGH: Disposition.ZERO,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePolicy:
    """The parts that make up a recipe's reward, and its strictness about cheating."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    by_severity: Mapping[Severity, Disposition] = field(default_factory=lambda: BY_SEVERITY)
    by_name: Mapping[str, Disposition] = field(default_factory=dict)
    """Exceptions: name of a detector or of a ``cheat_`` part → its consequence."""
    cheat_parts: Disposition = Disposition.ZERO
    """Consequence of a ``cheat_`` part."""

    def __post_init__(self) -> None:
        missing = set(Severity) - set(self.by_severity)
        if missing:
            raise ValueError(f"by_severity lacks {', '.join(sorted(level.name for level in missing))}")

    def of(self, finding: Finding) -> Disposition:
        """Consequence of one finding."""
        return self.by_name.get(finding.detector, self.by_severity[finding.severity])


def score(
    grade: Grade,
    findings: Sequence[Finding] | None,
    values: Mapping[str, float],
    policy: ScorePolicy,
    *,
    impossible: bool = False,
) -> Score:
    """The score of one graded rollout.

    Args:
        grade: The grader's result.
        findings: Signs of cheating; ``None`` if rollouts are not monitored.
        values: Source of a part → its value; an absent or non-finite value counts as missing.
        policy: The recipe's policy.
        impossible: True if the task cannot be passed honestly.

    Raises :class:`~etude.errors.ConfigError` for a missing value if the part says ``error``, and
    :class:`~etude.errors.InfrastructureError` if the rollout has to wait for it, or if its reward is the grade and this
    is not finite: the grader is broken.
    """
    value, parts, masked = _sum_of_parts(grade, values, policy.reward)
    verdict = None if findings is None else _verdict(grade, findings, policy, impossible=impossible)
    if masked and (verdict is None or verdict.disposition is Disposition.KEEP):
        unmonitored = Verdict(disposition=Disposition.KEEP, graded=grade.value)
        verdict = replace(verdict or unmonitored, disposition=Disposition.QUARANTINE, reason=masked)
    is_kept = verdict is None or verdict.disposition is Disposition.KEEP
    return Score(value=value if is_kept else 0.0, parts=parts, verdict=verdict, masked=masked)


def penalty(rollout: Rollout, effort: EffortConfig, *, reference_beta: float = 0.0, nats: float = 0.0) -> float:
    """Deduction from a rollout's reward when its group is compared: w · C(effort) + β · k1. ``nats`` = k1 is the
    log-probability of the rollout under its own policy minus that under the reference.
    """
    return effort_penalty(rollout, effort) + reference_beta * nats


def trained_value(rollout: Rollout, taken_off: float) -> float:
    """The value by which a rollout is compared in its group: stored reward minus :func:`penalty`."""
    return (rollout.reward or 0.0) - taken_off


def grade_of(rollout: Rollout) -> float:
    """The grade of a stored rollout; 0 if its verdict rejected the grade."""
    if rollout.verdict is not None:
        return rollout.verdict.graded if rollout.verdict.disposition is Disposition.KEEP else 0.0
    return rollout.reward_parts.get(GRADER, rollout.reward or 0.0)


def _sum_of_parts(
    grade: Grade, values: Mapping[str, float], config: RewardConfig
) -> tuple[float, Mapping[str, float], str]:
    """The sum of a recipe's parts, their record, and the reason if they mask the rollout; without parts, the grade.

    A value outside of its range is clipped and counted, and is not an error: the model influences most values, and must
    neither gain more than the recipe promises nor stop the run. The record has the original value.
    """
    if not config.parts:
        if not math.isfinite(grade.value):
            raise InfrastructureError(f"the grader returned {grade.value}: expected a finite number; repair it")
        return grade.value, grade.parts, ""
    sources = {**values, GRADER: grade.value, **{f"{GRADER}.{name}": value for name, value in grade.parts.items()}}
    given = {part.name: sources.get(part.source, math.nan) for part in config.parts}
    stand_ins = {part.name: _stand_in(part) for part in config.parts if not math.isfinite(given[part.name])}
    assumed = {name: value for name, value in stand_ins.items() if value is not None}
    masking = sorted(stand_ins.keys() - assumed.keys())
    counted = {name: value for name, value in given.items() if name not in stand_ins} | assumed
    counting = [part for part in config.parts if part.name in counted]
    clipped = sum(not part.range[0] <= counted[part.name] <= part.range[1] for part in counting)
    recorded = {
        **grade.parts,
        GRADER: grade.value,
        **{source: value for source, value in values.items() if not (source.startswith(MEASURE) or ":" in source)},
        **counted,
        "clipped": float(clipped),
        "assumed": float(len(assumed)),
    }
    total = math.fsum(part.contribution(counted[part.name]) for part in counting)
    return total, recorded, f"reward part {masking[0]!r} is missing" if masking else ""


def _stand_in(part: PartConfig) -> float | None:
    """The number for a missing value; ``None``: the rollout is masked. A missing judge value masks and is not waited
    for: the judge had no verdict, and repeating the rollout until there is one would favour work that is easy to judge.
    """
    match part.missing:
        case "error":
            raise ConfigError(
                f"reward.parts: {part.name!r} has no value: {part.source!r} has no value for this rollout; correct the "
                f"source, or set missing = 'wait', 'mask' or a number"
            )
        case "wait" if not part.source.startswith("judge."):
            raise InfrastructureError(f"reward part {part.name!r} is missing: {part.source!r} returned nothing")
        case "wait" | "mask":
            return None
        case number:
            return number


def _verdict(grade: Grade, findings: Sequence[Finding], policy: ScorePolicy, *, impossible: bool) -> Verdict:
    """Consequence of all findings: the most severe one, if the work was rewarded at all."""
    parts = sorted(name for name, value in grade.parts.items() if name.startswith(CHEAT_PART) and value >= CERTAIN)
    causes = [(policy.of(finding), finding.detector) for finding in findings]
    causes += [(policy.by_name.get(name, policy.cheat_parts), name) for name in parts]
    if impossible and grade.value > 0:
        causes.append((Disposition.QUARANTINE, IMPOSSIBLE_PASSED))
    heaviest = max((disposition for disposition, _ in causes), key=WEIGHT.__getitem__, default=Disposition.KEEP)
    disposition = heaviest if grade.value > 0 else Disposition.KEEP
    return Verdict(
        disposition=disposition,
        reason="" if disposition is Disposition.KEEP else _reason(disposition, causes),
        flags=tuple(sorted({name for _, name in causes})),
        hacked=heaviest is not Disposition.KEEP,
        graded=grade.value,
        impossible=impossible,
    )


def _reason(disposition: Disposition, causes: Sequence[tuple[Disposition, str]]) -> str:
    """The first reason with this disposition; a passed impossible task comes first, since it alone is certain."""
    names = [name for weight, name in causes if weight is disposition]
    return IMPOSSIBLE_PASSED if IMPOSSIBLE_PASSED in names else names[0]

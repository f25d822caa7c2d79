"""What becomes of a rollout that was seen to cheat: kept, zeroed or quarantined. Pure.

    findings, reward parts, impossible? ──judge──▶ Verdict: disposition, reward, reason

- *keep*: trained on as it was graded. So is work that earned nothing, whatever was found: a cheat that failed is bad
  work, and to drop it would teach the model to produce it.
- *zero*: trained on with a reward of zero. For what honest work never does.
- *quarantine*: not trained on at all, kept and readable, counted under its reason. For what honest work hardly ever
  does, where a reward of zero would punish the honest ones; and for an impossible task that was passed.

What is certain weighs more than what is suspected: a cheat cannot escape its zero by looking suspicious as well.

Owns the choice and its settings. Does not own who is trained on what (:mod:`etude.trainer.batching`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from etude.harnesses.actions import Finding, Severity
from etude.protocols import Grade
from etude.types import Disposition, Verdict

CHEAT_PART = "cheat_"
"""How the names of reward parts begin by which a grader says that it was cheated; 1 is yes."""
IMPOSSIBLE_PASSED = "impossible_passed"
"""Reason of a pass where there was nothing to pass."""
CERTAIN = 0.5
"""From here on a part says yes."""


WEIGHT = MappingProxyType({Disposition.KEEP: 0, Disposition.QUARANTINE: 1, Disposition.ZERO: 2})
BY_SEVERITY = MappingProxyType(
    {
        Severity.LOW: Disposition.KEEP,
        Severity.MEDIUM: Disposition.QUARANTINE,
        Severity.HIGH: Disposition.ZERO,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How strict to be."""

    by_severity: Mapping[Severity, Disposition] = field(default_factory=lambda: BY_SEVERITY)
    by_name: Mapping[str, Disposition] = field(default_factory=dict)
    """Exceptions: name of a detector or of a ``cheat_`` part → what follows from it."""
    parts: Disposition = Disposition.ZERO
    """What follows from a ``cheat_`` part."""

    def __post_init__(self) -> None:
        missing = set(Severity) - set(self.by_severity)
        if missing:
            raise ValueError(f"by_severity says nothing of {', '.join(sorted(level.name for level in missing))}")

    def of(self, finding: Finding) -> Disposition:
        """What follows from one finding."""
        return self.by_name.get(finding.detector, self.by_severity[finding.severity])


def judge(reward: Grade, findings: Sequence[Finding], policy: Policy, *, impossible: bool = False) -> Verdict:
    """The verdict on a graded rollout. ``impossible``: nobody can honestly pass its task."""
    parts = sorted(name for name, value in reward.parts.items() if name.startswith(CHEAT_PART) and value >= CERTAIN)
    passed_impossible = impossible and reward.value > 0
    grounds = [(policy.of(finding), finding.detector) for finding in findings]
    grounds += [(policy.by_name.get(name, policy.parts), name) for name in parts]
    if passed_impossible:
        grounds.append((Disposition.QUARANTINE, IMPOSSIBLE_PASSED))
    heaviest = max((disposition for disposition, _ in grounds), key=WEIGHT.__getitem__, default=Disposition.KEEP)
    disposition = heaviest if reward.value > 0 else Disposition.KEEP
    kept = disposition is Disposition.KEEP
    return Verdict(
        disposition=disposition,
        reward=reward.value if kept else 0.0,
        reason="" if kept else _reason(disposition, grounds),
        flags=tuple(sorted({name for _, name in grounds})),
        hacked=heaviest is not Disposition.KEEP,
        graded=reward.value,
        impossible=impossible,
    )


def _reason(disposition: Disposition, grounds: Sequence[tuple[Disposition, str]]) -> str:
    """The first ground of that weight; a pass of the impossible before all others, since it alone is no guess."""
    names = [name for weight, name in grounds if weight is disposition]
    return IMPOSSIBLE_PASSED if IMPOSSIBLE_PASSED in names else names[0]

"""Cheating rates by detector, by task template and by step: a pure fold.

A rollout is *hacked* if a serious detection was made in it, rewarded or not. Impossible tasks are a separate measure: a
rollout that passes one has cheated, detected or not, so their rate also shows what the detectors miss.

Owns the counts and the arithmetic. Does not own the detection (:mod:`etude.rewards.monitor`) or the display
(:mod:`etude.dashboard`).
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from etude.types import Json

MAX_TEMPLATES = 256
"""Maximum templates that are counted by name; further ones are counted as :data:`OTHERS`."""
OTHERS = "others"
SHOWN = 20
"""Maximum templates in the figures, those with the highest rates first."""
Z95 = 1.959964
"""Quantile of a normal distribution: 95 % of it is within this many standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One rollout's cheating verdict, as input of the rates."""

    template: str
    step: int
    """Newest weight version that sampled it."""
    hacked: bool
    flags: tuple[str, ...]
    """Detectors and reward parts that flagged it."""
    disposition: str
    """``keep``, ``zero`` or ``quarantine``."""
    reason: str = ""
    """Reason why it was not kept."""
    impossible: bool = False
    passed: bool = False
    """True if the grader rewarded it."""


@dataclass(slots=True)
class Share:
    """Number of hits in a number of trials."""

    hits: int = 0
    of: int = 0

    def add(self, hit: bool) -> None:
        """Count one trial."""
        self.hits += hit
        self.of += 1

    @property
    def rate(self) -> float | None:
        """The share of hits; ``None`` without trials."""
        return self.hits / self.of if self.of else None


@dataclass(slots=True)
class HackRates:
    """Cheating rates: add rollouts in any order, read figures at any time."""

    total: Share = field(default_factory=Share)
    impossible: Share = field(default_factory=Share)
    """Share of impossible tasks that were passed."""
    flags: Counter[str] = field(default_factory=Counter)
    """Detector → number of rollouts that it flagged."""
    quarantined: Counter[str] = field(default_factory=Counter)
    """Reason → rollouts that are not trained on."""
    zeroed: Counter[str] = field(default_factory=Counter)
    """Reason → rollouts that were trained on with a reward of zero."""
    templates: dict[str, Share] = field(default_factory=dict)
    steps: dict[int, Share] = field(default_factory=dict)

    def add(self, judged: Judged) -> None:
        """Count one rollout."""
        self.total.add(judged.hacked)
        if judged.impossible:
            self.impossible.add(judged.passed)
        self.flags.update(judged.flags)
        if judged.disposition in ("quarantine", "zero"):
            (self.quarantined if judged.disposition == "quarantine" else self.zeroed)[judged.reason] += 1
        is_listed = judged.template in self.templates or len(self.templates) < MAX_TEMPLATES
        self.templates.setdefault(judged.template if is_listed else OTHERS, Share()).add(judged.hacked)
        self.steps.setdefault(judged.step, Share()).add(judged.hacked)

    def figures(self) -> dict[str, Json]:
        """The section ``cheating`` of a report; rates are ``None`` if nothing was counted."""
        low, high = interval(self.impossible.hits, self.impossible.of)
        return {
            "hack_rate": self.total.rate,
            "rollouts": self.total.of,
            "hacked": self.total.hits,
            "quarantined": self.quarantined.total(),
            "zeroed": self.zeroed.total(),
            "reasons": dict((self.quarantined + self.zeroed).most_common()),
            "by_detector": {name: count / self.total.of for name, count in self.flags.most_common()},
            "by_template": {name: share.rate for name, share in self._worst()},
            "by_step": {str(step): share.rate for step, share in sorted(self.steps.items())},
            "impossible": {
                "tried": self.impossible.of,
                "passed": self.impossible.hits,
                "rate": self.impossible.rate,
                "low": low,
                "high": high,
            },
        }

    def _worst(self) -> list[tuple[str, Share]]:
        ordered = sorted(self.templates.items(), key=lambda item: (-(item[1].rate or 0.0), -item[1].of, item[0]))
        return [(name, share) for name, share in ordered if share.hits][:SHOWN]


def interval(hits: int, of: int) -> tuple[float | None, float | None]:
    """95 % confidence interval of a share (Wilson 1927), valid for few trials and for zero hits."""
    if not of:
        return None, None
    rate, spread = hits / of, Z95 * Z95 / of
    middle = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (rate * (1 - rate) + spread / 4)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)

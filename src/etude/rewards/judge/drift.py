"""Is the judge still the one that was calibrated? Two alarms: it says it is another one, or it agrees less. Pure.

    every so many judgements ──▶ an item of the calibration set is judged again ──▶ hit or miss ──▶ CUSUM ──▶ alarm

A hosted model may be exchanged behind its name. Its own account of itself is compared, and beside that what it does is:
S ← max(0, S + log-likelihood ratio of the outcome under "agreement fell by a fifth" against "agreement as calibrated"),
and an alarm where S reaches ln(mean distance of false alarms). (Page, *Continuous inspection schemes*, Biometrika 1954;
that the distance is at least e^h is Lorden's bound, Ann. Math. Statist. 1971.)
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FALL = 0.2
"""The loss of agreement that is looked for soonest."""
FALSE_ALARM_CHECKS = 1_000
"""Checks between two false alarms, on average, at least."""
LEAST, MOST = 0.05, 0.98
"""Rates of agreement between which calibrated ones are taken to be: no set is large enough for certainty."""
MOST_IDENTITIES = 63
"""Earlier words of an endpoint that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """What somebody has to look at."""

    kind: Literal["model", "agreement"]
    aspect: str
    """Empty: all of them."""
    detail: str


class AgreementWatch:
    """Watches whether calibration items are still judged as they were labelled.

    ``rate`` is the share of them that was, at calibration.
    """

    def __init__(self, rate: float) -> None:
        before = min(MOST, max(LEAST, rate))
        after = max(LEAST / 2, before - FALL)
        self.evidence = 0.0
        """S: how much likelier the fall is than none, in nats; never below 0."""
        self.checks = self.misses = 0
        """Items judged again; those of them that were not judged as they are labelled."""
        self._hit = math.log(after / before)
        self._miss = math.log((1 - after) / (1 - before))

    def observe(self, *, hit: bool) -> bool:
        """Take one outcome in; whether that makes it an alarm. After one the evidence starts from nothing."""
        self.checks += 1
        self.misses += not hit
        self.evidence = max(0.0, self.evidence + (self._hit if hit else self._miss))
        if self.evidence < math.log(FALSE_ALARM_CHECKS):
            return False
        self.evidence = 0.0
        return True


class IdentityWatch:
    """Watches what an endpoint says that it is. ``known`` is what it said when it was calibrated."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = [identity for identity in known if identity]
        self._calibrated = frozenset(self._known)

    def observe(self, identity: str) -> bool:
        """Whether it says something that it never said before. The first word is the known one where there was none;
        an endpoint that goes back and forth between two is told of once, and one that says nothing never.
        """
        if not identity or identity in self._known:
            return False
        self._known = [*self._known[-MOST_IDENTITIES:], identity]
        self._calibrated = self._calibrated or frozenset({identity})
        return len(self._known) > 1

    def vouches_for(self, identity: str) -> bool:
        """Whether what was observed last is what was calibrated, or heard first, as far as it says what it is."""
        return not identity or identity in self._calibrated

"""Rules of ``[[alerts]]``: a pure fold from events to alerts that start or stop firing.

    events ──▶ watched value ──▶ each rule: does it hold, and for long enough? ──▶ AlertChanged

A duration is in optimiser steps, or in seconds by the times of events, which a running run writes every few seconds.
Owns the values and the rules. :mod:`etude.telemetry.sinks.alerts` owns the notifications.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from etude.config.log import WATCHED, AlertConfig, Condition
from etude.telemetry.decline import decline_of, is_graded
from etude.telemetry.events import (
    AlertChanged,
    Event,
    Logged,
    RolloutClosed,
    StepDone,
    WeightsPublished,
    WeightsSwapped,
)
from etude.telemetry.metrics import METRICS
from etude.types import RolloutStatus

RECENT = 100
"""Number of recent training rollouts for the hack rate."""
NAMES = (*WATCHED, *METRICS)
"""Names of all values that a rule can watch."""


@dataclass(slots=True)
class _WatchedRule:
    """One rule, with the time since which it holds."""

    config: AlertConfig
    condition: Condition
    steps: int = 0
    """Consecutive steps, up to the newest, at which it held."""
    since_s: float | None = None
    """Time since which it holds."""
    firing: bool = False


class AlertRules:
    """The rules of a run and the newest values of what they watch."""

    def __init__(self, rules: Sequence[AlertConfig], cost: Callable[[], float] = lambda: 0.0) -> None:
        """``cost`` returns the cost of judges so far."""
        self._rules = [_WatchedRule(rule, rule.condition) for rule in rules]
        self._cost = cost
        self._values: dict[str, float] = {}
        self._hacked: deque[bool] = deque(maxlen=RECENT)
        self._served: dict[str, int] = {}
        self._published = 0
        self._watches_decline = any(rule.condition.watch == "decline" for rule in self._rules)
        self._rewards: list[float] = []

    def add(self, logged: Logged) -> list[AlertChanged]:
        """Process one event; return the changes of rules that start or stop firing."""
        is_step = isinstance(logged.event, StepDone)
        self._watch(logged.process, logged.event)
        return [change for rule in self._rules for change in self._look(rule, logged.at_s, is_step=is_step)]

    def _watch(self, process: str, event: Event) -> None:
        """Update the values from an event."""
        match event:
            case StepDone() as done:
                metrics = done.metrics
                in_vain = metrics.get("groups_without_signal") == metrics.get("groups")
                self._values |= metrics
                self._values["no_signal"] = self._values.get("no_signal", 0.0) + 1 if in_vain else 0.0
                if self._watches_decline:  # it takes a look at all steps
                    self._values["decline"] = self._decline(metrics)
                self._values["cost"] = self._cost()
                if "k3" in metrics:
                    self._values["mismatch"] = metrics["k3"]
                for name in METRICS.keys() - metrics.keys():
                    self._values.pop(name, None)
            case RolloutClosed(purpose="train", status=RolloutStatus.GRADED, hacked=hacked):
                self._hacked.append(hacked)
                self._values["hack_rate"] = sum(self._hacked) / len(self._hacked)
            case WeightsPublished(version=version):
                self._published = max(self._published, version)
            case WeightsSwapped(version=version):
                self._served[process] = version
            case _:
                pass
        if self._served:
            self._values["lag"] = float(max(0, self._published - min(self._served.values())))

    def _decline(self, metrics: Mapping[str, float]) -> float:
        """The decline of the reward up to a step with these metrics; 0 for none."""
        if is_graded(metrics):
            self._rewards.append(metrics["reward_mean"])
        decline = decline_of(self._rewards)
        return 0.0 if decline is None else decline.share

    def _look(self, rule: _WatchedRule, now_s: float, *, is_step: bool) -> list[AlertChanged]:
        value = self._values.get(rule.condition.watch)
        if value is None:
            return []
        if not rule.condition.holds(value):
            was_firing, rule.firing, rule.steps, rule.since_s = rule.firing, False, 0, None
            return [_change(rule, value)] if was_firing else []
        rule.since_s = now_s if rule.since_s is None else rule.since_s
        rule.steps += is_step
        is_due = rule.steps >= rule.condition.steps and now_s - rule.since_s >= rule.condition.seconds
        if rule.firing or not is_due:
            return []
        rule.firing = True
        return [_change(rule, value)]


def _change(rule: _WatchedRule, value: float) -> AlertChanged:
    return AlertChanged(
        alert=rule.config.name,
        firing=rule.firing,
        value=value,
        summary=f"{rule.condition.watch} = {value:.4g}; {rule.config.when}",
        to=list(rule.config.to),
    )

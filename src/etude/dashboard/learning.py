"""Warnings about what a run learns, and likely causes, in words for people.

    steps, rollouts ──▶ no signal? failing alike? worse than before? nothing learnt? ──▶ a warning, or ``None``

A warning keeps its text for as long as its cause lasts, so it is told once.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from etude.dashboard.formatting import count, percent
from etude.dashboard.run_metrics import ALIKE, RunMetrics, total
from etude.telemetry.decline import WINDOW, decline_of, is_graded
from etude.telemetry.events import StepDone

WARN_AFTER = 3
"""Consecutive steps without a signal before a warning: with few groups, one or two happen by chance."""
CUT_SHORT = ("length", "turns", "context", "time", "timeout")
"""Finish reasons of rollouts that a limit truncated."""
AWAY = ("EngineUnavailable", "EngineBusy", "SessionLost", "VersionPending")
"""Errors of rollouts whose engine or gateway was unavailable."""
NUMBER = re.compile(r"[0-9a-f]*\d[0-9a-f]*")
"""Part of a reason that differs between similar failures: a port, an id, a time."""
NEARLY_ALL = 0.9
"""Minimum share of rollouts with the same finish reason for which it counts as the cause."""


def ends(steps: Sequence[StepDone]) -> Counter[str]:
    """Finish reason → number of rollouts in some steps."""
    return sum((Counter(step.ended) for step in steps), Counter())


def cut_short(ended: Counter[str]) -> float | None:
    """Share of rollouts that were ended by a limit."""
    return round(sum(ended[reason] for reason in CUT_SHORT) / ended.total(), 4) if ended else None


def shares(ended: Counter[str], most: int = 3) -> str:
    """The finish reasons of rollouts as text: ``submit 81%, length 19%``."""
    return ", ".join(f"{reason} {percent(number / ended.total(), 0)}" for reason, number in ended.most_common(most))


def warnings(run: RunMetrics) -> list[str]:
    """The current warnings."""
    steps = [timed.event for timed in run.steps]
    notices = (without_signal(steps), declined(steps), failing_alike(run))
    return [notice for notice in notices if notice]


def without_signal(steps: Sequence[StepDone]) -> str | None:
    """The warning while the newest steps have no signal."""
    in_vain = list(takewhile(_is_in_vain, reversed(steps)))[::-1]
    if len(in_vain) < WARN_AFTER:
        return None
    return f"no group has had a signal since step {in_vain[0].step}: {likely_cause(in_vain)}"


def declined(steps: Sequence[StepDone]) -> str | None:
    """The warning while rewards are below those of earlier steps, also if limits end more rollouts than then."""
    graded = [step for step in steps if is_graded(step.metrics)]
    decline = decline_of([step.metrics["reward_mean"] for step in graded])
    if decline is None:
        return None
    best, now = (graded[end - WINDOW : end] for end in (decline.best_end, decline.now_end))
    cut_then, cut_now = (cut_short(ends(each)) or 0.0 for each in (best, now))
    cut = f"; limits ended {percent(cut_then, 0)} of rollouts, now {percent(cut_now, 0)}" if cut_now > cut_then else ""
    last = best[-1].step
    return (
        f"the mean reward fell from {decline.best:.2f} in steps {best[0].step}–{last} to {decline.now:.2f} in steps "
        f"{now[0].step}–{now[-1].step}, more than chance explains{cut}. Lower trainer.learning_rate or "
        f"rollouts.max_staleness; `etude weights export RUN OUT --version {last}` saves the weights of step {last}"
    )


def failing_alike(run: RunMetrics) -> str | None:
    """The failure that the newest consecutive rollouts have in common, as with a broken harness. Unavailable machines
    fail in the same way, but are reported as outages.
    """
    shapes = {NUMBER.sub("#", reason) for reason in run.failures}
    if len(run.failures) < ALIKE or len(shapes) > 1 or run.failures[-1].startswith(AWAY):
        return None
    return f"{ALIKE} rollouts in a row failed alike, none was graded since: {run.failures[-1]}"


def nothing_learnt(run: RunMetrics) -> str | None:
    """The reason why nothing was learnt in all steps of a run; ``None`` if something may have been, or there are no
    steps.
    """
    steps = [timed.event for timed in run.steps]
    if steps and all(map(_is_in_vain, steps)):
        groups = total(steps, "groups")
        return f"nothing was learnt: none of {count(groups)} groups had a signal; {likely_cause(steps)}"
    if steps and run.changed and not any(run.changed.values()):
        return (
            "nothing was learnt: no step changed the published weights; raise trainer.learning_rate, or see in "
            "report.json's curve whether corrections masked every token (masked_share)"
        )
    return None


def likely_cause(steps: Sequence[StepDone]) -> str:
    """The likely cause of steps without a signal, and the fix."""
    ended = ends(steps)
    lows = [step.metrics["reward_low"] for step in steps if "reward_low" in step.metrics]
    highs = [step.metrics["reward_high"] for step in steps if "reward_high" in step.metrics]
    if ended and ended["length"] >= NEARLY_ALL * ended.total():
        return (
            f"{percent(ended['length'] / ended.total(), 0)} of rollouts were cut off by length: raise "
            f"harness.options.max_tokens_per_turn, or use a harness that fits this model"
        )
    if not lows:
        return "every rollout was masked or quarantined: see `etude show RUN --outcome quarantined`"
    if min(lows) == max(highs) == 0:
        return "every reward is 0: the tasks are too hard, or the harness does not fit this model; see `etude show RUN`"
    if min(lows) == max(highs):
        return f"every reward is {max(highs):g}: the tasks are too easy for this model"
    return "rewards differ between tasks and never within a group: raise rollouts.group_size, or change the tasks"


def _is_in_vain(step: StepDone) -> bool:
    """True if a step had nothing to learn from: neither a signal nor hints, which teach without one."""
    metrics = step.metrics
    return metrics["groups_without_signal"] == metrics["groups"] and not metrics.get("hinted_tokens")

"""Signs that a run learns: groups with a signal, ends of rollouts, versions that differ, and the fix where it does not.

    steps, published versions ──▶ figures        no signal for some steps ──▶ a warning        … to the end ──▶ said so

Owns the figures and the wording. A group has no signal where every advantage in it is 0, as where all rewards are
equal; nothing of it is trained on.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from etude.dashboard.story import RunStory
from etude.dashboard.units import count, percent
from etude.telemetry.events import StepDone
from etude.types import Json

WARN_AFTER = 3
"""Steps in a row without a signal, after which people are warned: one or two are chance with few groups."""
CUT_SHORT = ("length", "turns", "context", "time", "timeout")
"""Reasons of rollouts that a limit cut short."""
NEARLY_ALL = 0.9
"""Share of rollouts that ended in one way, from which on that way is taken for the cause."""


def learning_figures(story: RunStory) -> dict[str, Json]:
    """The section ``learning`` of a report; ``None`` before the first step."""
    steps = [timed.event for timed in story.steps]
    ended = ends(steps)
    groups = sum(step.groups for step in steps)
    return {
        "groups": groups or None,
        "groups_without_signal": sum(step.degenerate_groups for step in steps) if groups else None,
        "ended": dict(ended.most_common()),
        "cut_short": cut_short(ended),
        "versions_unchanged": sum(not changed for changed in story.changed.values()) if story.changed else None,
        "warning": warning(steps),
        "nothing_learnt": nothing_learnt(story),
    }


def ends(steps: Sequence[StepDone]) -> Counter[str]:
    """Reason why agents stopped → rollouts of some steps."""
    return sum((Counter(step.ended) for step in steps), Counter())


def cut_short(ended: Counter[str]) -> float | None:
    """Share of rollouts that a limit ended."""
    return round(sum(ended[reason] for reason in CUT_SHORT) / ended.total(), 4) if ended else None


def shares(ended: Counter[str], most: int = 3) -> str:
    """The ends of rollouts in words: ``submit 81%, length 19%``."""
    return ", ".join(f"{reason} {percent(number / ended.total(), 0)}" for reason, number in ended.most_common(most))


def warning(steps: Sequence[StepDone]) -> str | None:
    """The warning while the newest steps bring nothing to learn from; the same words for as long as that goes on."""
    in_vain = list(takewhile(_is_in_vain, reversed(steps)))[::-1]
    if len(in_vain) < WARN_AFTER:
        return None
    return f"no group has had a signal since step {in_vain[0].step}: {likely_cause(in_vain)}"


def nothing_learnt(story: RunStory) -> str | None:
    """The reason why all steps of a run taught it nothing; ``None`` where they may have, or there is none."""
    steps = [timed.event for timed in story.steps]
    if steps and all(map(_is_in_vain, steps)):
        groups = sum(step.groups for step in steps)
        return f"nothing was learnt: none of {count(groups)} groups had a signal; {likely_cause(steps)}"
    if steps and story.changed and not any(story.changed.values()):
        return (
            "nothing was learnt: no step changed the published weights; raise trainer.learning_rate, or see in "
            "report.json's curve whether corrections masked every token (masked_share)"
        )
    return None


def likely_cause(steps: Sequence[StepDone]) -> str:
    """The likely cause of steps without a signal, and the fix."""
    ended = ends(steps)
    lows = [step.reward_low for step in steps if step.reward_low is not None]
    highs = [step.reward_high for step in steps if step.reward_high is not None]
    if ended and ended["length"] >= NEARLY_ALL * ended.total():
        return (
            f"{percent(ended['length'] / ended.total(), 0)} of rollouts were cut off by length: raise "
            f"harness.max_tokens_per_turn, or use a harness that fits this model"
        )
    if not lows:
        return "every rollout was masked or quarantined: see `etude show RUN --outcome quarantined`"
    if min(lows) == max(highs) == 0:
        return "every reward is 0: the tasks are too hard, or the harness does not fit this model; see `etude show RUN`"
    if min(lows) == max(highs):
        return f"every reward is {max(highs):g}: the tasks are too easy for this model"
    return "rewards differ between tasks and never within a group: raise rollouts.group_size, or change the tasks"


def _is_in_vain(step: StepDone) -> bool:
    """True where there was nothing to learn from: hints teach without a signal."""
    return step.groups > 0 and step.degenerate_groups == step.groups and not step.hinted_tokens

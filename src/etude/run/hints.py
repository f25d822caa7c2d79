"""Hints of a run: the finder, and the insertion points in the contexts of its model.

Wiring only: :mod:`etude.rewards.shaping.hints` has the rules, :mod:`etude.tokens.reminders` the position of a hint,
:mod:`etude.run.distillation` the trainer's use of hints.
"""

from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.rewards.shaping.hints import TOOL_RULES, HintFinder, HintProvider, Rule
from etude.tokens.messages import ChatFormat
from etude.tokens.reminders import Reminders


def open_hints(config: RunConfig, chat: ChatFormat, judge: HintProvider | None) -> HintFinder | None:
    """Finder of hints in a run's rollouts; ``None`` if the recipe has none.

    ``judge`` is given exactly if the recipe uses one. Raises :class:`~etude.errors.ConfigError` if the model's chat
    template accepts no hint.
    """
    hints = config.hints
    if not hints.weight:
        return None
    assert (judge is not None) == hints.judge, f"hints.judge = {hints.judge} does not go with {judge!r}"
    return HintFinder(
        (*map(Rule.of, hints.rules), *(TOOL_RULES if hints.tools else ())),
        most=hints.max_per_rollout,
        fits=reminders_of(chat).fits,
        provider=judge,
    )


def reminders_of(chat: ChatFormat) -> Reminders:
    """Insertion points of hints in a model's contexts. Raises :class:`~etude.errors.ConfigError` if there are none."""
    try:
        return Reminders(chat)
    except ValueError as error:
        raise ConfigError(f"hints.weight cannot be above 0 with this model: {error}; set hints.weight = 0") from error

"""Hints for single turns of a rollout: the mistaken turn, and the advice that would have helped before it.

    turns ──text──▶ rules, in order ──▶ at most one hint per turn ──▶ the earliest few
                    └─ if fewer than the limit: a judge

A hint is for the turn that *made* the mistake, not for the one that read its result: the same model with the hint in
its context teaches exactly that turn (:mod:`etude.trainer.distillation`). If several rules apply to a turn, the first
one of the table is used: a recipe's before the built-in ones, any rule before a judge. The earliest mistakes of a
rollout get hints: later ones were made with earlier ones in context, and are treated once those are gone.

Owns that choice and the rules about the built-in tools. Does not own the insertion of a hint into a context
(:mod:`etude.tokens.reminders`) or the training on it.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self, final

from etude.config.hints import HintRule
from etude.errors import JudgeUnavailable
from etude.harnesses import tools
from etude.rewards.transcript import SpokenTurn, attributed
from etude.types import Hint, Ids, Task, Turn

HINT_CHARACTERS = 1_000
"""Maximum length of a hint; longer ones are truncated, since the model reads a hint again for each of its turns."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A kind of mistake, and the hint for a turn with that mistake."""

    name: str
    where: Literal["said", "answered"]
    """Text that is searched: the turn's own, or the answer to it."""
    pattern: re.Pattern[str]
    """Pattern that may match anywhere in that text."""
    text: str

    @classmethod
    def of(cls, rule: HintRule) -> Self:
        """A rule of a recipe."""
        return cls(name=rule.name, where=rule.where, pattern=re.compile(rule.pattern, re.MULTILINE), text=rule.text)

    def applies(self, turn: SpokenTurn) -> bool:
        """True for a turn that makes the mistake."""
        return self.pattern.search(turn.text if self.where == "said" else turn.answered) is not None


def _answered(name: str, observation: str, text: str) -> Rule:
    """A rule for calls that a tool answered with ``observation``; another request may follow on the next lines."""
    pattern = re.compile(rf"\A{re.escape(observation)}(?:\n|\Z)")
    return Rule(name=name, where="answered", pattern=pattern, text=text)


TOOL_RULES: tuple[Rule, ...] = (
    _answered(
        "malformed call",
        tools.BAD_CALL,
        "Reminder: answer with one call and nothing else. The calls are: read FILE; read FILE N; edit FILE N with the "
        "new text of line N on the lines below; test; todo TEXT; done N; submit; answer TEXT.",
    ),
    _answered(
        "bad edit",
        tools.BAD_EDIT,
        "Reminder: edit FILE N replaces a line that is there. Take the path and the number of the line from what read "
        "FILE shows.",
    ),
    _answered(
        "no such file",
        tools.NO_FILE,
        "Reminder: only files that the task or an earlier result names are there. Take the path from them, letter by "
        "letter.",
    ),
    _answered(
        "no such item",
        tools.NO_TODO,
        "Reminder: done N closes the item that todo TEXT was answered with: take its number N from there.",
    ),
)
"""Rules for failed calls of the built-in tools, by the tool's answer."""


class HintProvider(Protocol):
    """Protocol of a source of hints for a rollout, e.g. a judge model."""

    async def hints(self, task: Task, transcript_turns: Sequence[str]) -> tuple[Hint, ...]:
        """Hints for some turns, by their index in ``transcript_turns``.

        Raises :class:`~etude.errors.JudgeUnavailable` while the provider is unavailable.
        """
        ...


@final
class HintFinder:
    """Finds the hints of a rollout."""

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        most: int,
        fits: Callable[[Ids], bool],
        provider: HintProvider | None = None,
    ) -> None:
        """At most ``most`` hints per rollout, for turns whose context ``fits`` one. Rules take precedence over the
        provider.
        """
        self._rules = tuple(rules)
        self._most = most
        self._fits = fits
        self._provider = provider

    async def find(self, task: Task, turns: Sequence[Turn], spoken: Sequence[SpokenTurn]) -> tuple[Hint, ...]:
        """The hints of a rollout, by turn; ``spoken`` are its turns as text.

        If the provider is unavailable, there are fewer hints and no error.
        """
        teachable = {index for index, turn in enumerate(turns) if self._is_teachable(turn)}
        hints = chosen(ruled(spoken, self._rules), teachable, self._most)
        if self._provider is None or len(hints) == self._most:
            return hints
        try:
            provided = await self._provider.hints(task, [page(turn) for turn in spoken])
        except JudgeUnavailable as error:
            logger.warning("a rollout of %s has no hints of a judge: %s", task.task_id, error)
            return hints
        return chosen([*hints, *provided], teachable, self._most)

    def _is_teachable(self, turn: Turn) -> bool:
        return len(turn.completion_ids) > 0 and self._fits(turn.prompt_ids)


def ruled(turns: Sequence[SpokenTurn], rules: Sequence[Rule]) -> tuple[Hint, ...]:
    """Hints from rules for a rollout: the first rule that applies to each turn."""
    first = (next((rule for rule in rules if rule.applies(turn)), None) for turn in turns)
    return tuple(
        Hint(turn=index, text=rule.text, source=rule.name) for index, rule in enumerate(first) if rule is not None
    )


def chosen(hints: Iterable[Hint], teachable: set[int], most: int) -> tuple[Hint, ...]:
    """At most ``most`` hints, for different turns, by turn: the first one for each ``teachable`` turn, and of these the
    earliest. Long hints are truncated.
    """
    by_turn: dict[int, Hint] = {}
    for hint in hints:
        if hint.turn in teachable:
            by_turn.setdefault(hint.turn, hint)
    first_hints = (by_turn[turn] for turn in sorted(by_turn)[:most])
    return tuple(Hint(turn=hint.turn, text=hint.text[:HINT_CHARACTERS], source=hint.source) for hint in first_hints)


def malformed_call_rewards(turns: Sequence[SpokenTurn]) -> tuple[float, ...]:
    """One reward per turn: −1 if the built-in tools rejected its call, else 0 (``credit.kind = "shaped"``).

    A turn whose call was malformed, or named something that does not exist, cost a call without any effect,
    independently of the rollout's outcome. It is a separate reward and not a potential: a model that makes no calls
    makes no bad ones, so ``credit.options.shaping`` has to be small compared with a rollout's reward.
    """
    return tuple(-1.0 if any(rule.applies(turn) for rule in TOOL_RULES) else 0.0 for turn in turns)


def page(turn: SpokenTurn) -> str:
    """One turn as text for a hint provider."""
    return attributed(heard=turn.heard, said=turn.text, answered=turn.answered)

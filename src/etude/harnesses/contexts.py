"""Context windows: when one is full, and the messages that the next one begins with. Pure.

    ACT ──room left──▶ ACT                                        ACT, SUMMARISE: one model call each
     │ full, or no room for the next question
     ├─ "summary" ───▶ SUMMARISE ──▶ RESTART ──▶ ACT              task, open to-do items, summary
     ├─ "truncate" ────────────────▶ RESTART ──▶ ACT              task, result of the last action
     └─ "grow", or no restart left ──▶ STOP

Owns the decision what to ask for next (:class:`Window`), what is in one context (:class:`Context`), the to-do list that
outlives contexts and the measure of what summaries keep. The texts are :mod:`etude.harnesses.summaries`', the calls
:mod:`etude.harnesses.coding`'s. Knows no tokenizer: how full a context is says the gateway, with every reply.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import final

from etude.config.rollouts import CodingOptions
from etude.harnesses import tools
from etude.harnesses.completions import Message
from etude.harnesses.summaries import ask_for_summary, open_truncated


class Step(StrEnum):
    """The next step of a harness."""

    ACT = "act"
    """Ask for an action."""
    SUMMARISE = "summarise"
    """Ask for a summary, in one message with the result of the last action."""
    RESTART = "restart"
    """Begin a new context."""
    STOP = "stop"
    """End the session."""


MOVES: Mapping[Step, frozenset[Step]] = MappingProxyType(
    {
        Step.ACT: frozenset({Step.ACT, Step.SUMMARISE, Step.RESTART, Step.STOP}),
        Step.SUMMARISE: frozenset({Step.RESTART, Step.STOP}),
        Step.RESTART: frozenset({Step.ACT}),
        Step.STOP: frozenset(),
    }
)
"""Step → what may come after it. To ask the same again, because there was no room for it, is no new step."""


@final
class Window:
    """Decides the next step of a harness, call by call: facts come in, :attr:`step` is the decision.

    It asks for a summary only behind an action, whose result the model sees in the same message, so there is an action
    between any two. It asks for none after which no call would be left to go on with. Whatever the facts, it stops
    after ``max_turns`` answered calls, and after one that cannot be made short enough to be answered.
    """

    def __init__(self, config: CodingOptions) -> None:
        self._config = config
        self.step = Step.ACT
        self.reason = ""
        """Reason of the end: ``turns``, ``context``, or that of :meth:`stop`."""
        self.restarts = 0
        """Number of new contexts."""
        self._calls = 0
        self._is_fresh = True  # nothing was said in this context yet

    def replied(self, tokens: int) -> None:
        """The call was answered; up to the end of the reply the context has ``tokens``."""
        self._calls += 1
        self._is_fresh = False
        if self._calls >= self._config.max_turns:
            self.stop("turns")
        elif self.step is Step.SUMMARISE:
            self._move(Step.RESTART)
        else:
            self._move(self._when_full() if tokens >= self._config.summary_at_tokens else Step.ACT)

    def refused(self, *, can_shorten: bool) -> bool:
        """The gateway had no room for the call; whether to ask the same again with less of the last result in it.

        ``can_shorten`` says whether there is something to leave out. A context that is full before its trigger was
        reached is left all the same; only one that has just begun, or is being left, is shortened.
        """
        if self.step is Step.ACT and not self._is_fresh:
            step = self._when_full()
            if step is Step.ACT:
                self.stop("context")
            else:
                self._move(step)
            return False
        if not can_shorten:
            self.stop("context")
        return can_shorten

    def restarted(self) -> None:
        """A new context began."""
        self.restarts += 1
        self._is_fresh = True
        self._move(Step.ACT)

    def stop(self, reason: str) -> None:
        """End the session."""
        self.reason = reason
        self._move(Step.STOP)

    def _when_full(self) -> Step:
        """The step that follows a full context; ``ACT`` goes on in it."""
        if self._config.context == "grow" or self.restarts >= self._config.max_summaries:
            return Step.ACT
        if self._config.context == "truncate":
            return Step.RESTART
        calls_left = self._config.max_turns - self._calls
        return Step.SUMMARISE if calls_left > 1 else Step.ACT

    def _move(self, step: Step) -> None:
        assert step in MOVES[self.step], f"no harness may {step} after {self.step}"
        self.step = step


@final
class Context:
    """Context of the model: all messages since ``opening``, and the result of the last action, which it has not seen.

    ``unseen`` is such a result from before, with which a context that was truncated begins.
    """

    def __init__(self, opening: str, unseen: str = "") -> None:
        self._opening = opening
        self._unseen = unseen
        self._messages: list[Message] = []

    @property
    def unseen(self) -> str:
        """The result of the last action, as far as the next message shows it."""
        return self._unseen

    @property
    def can_shorten(self) -> bool:
        """True if any of the unseen result can be left out."""
        return tools.shorten(self._unseen) is not None

    def ask(self, request: str = "") -> list[Message]:
        """The messages of the next call: for an action or, with ``request``, for a summary."""
        return [*self._messages, {"role": "user", "content": self._next(request)}]

    def acted(self, reply: str, result: str) -> None:
        """The model asked for an action, which came to ``result``."""
        self._messages += [{"role": "user", "content": self._next()}, {"role": "assistant", "content": reply}]
        self._unseen = result

    def shorten(self) -> None:
        """Leave half of the unseen result out, and say so in it."""
        shorter = tools.shorten(self._unseen)
        assert shorter is not None, "there is nothing to leave out: see can_shorten"
        self._unseen = shorter

    def _next(self, request: str = "") -> str:
        if not self._messages:
            return open_truncated(self._opening, self._unseen) if self._unseen else self._opening
        return ask_for_summary(self._unseen, request) if request else self._unseen


@final
class TodoList:
    """The model's open items, numbered from 1; the harness keeps them across contexts."""

    def __init__(self) -> None:
        self.opened = 0
        """Items there ever were."""
        self._open: dict[int, str] = {}

    @property
    def open_items(self) -> tuple[tuple[int, str], ...]:
        """Number and text of the items that are not done, the oldest first."""
        return tuple(self._open.items())

    def add(self, text: str) -> int:
        """Note an item; returns its number."""
        self.opened += 1
        self._open[self.opened] = text
        return self.opened

    def close(self, number: int) -> bool:
        """Strike an item; ``False`` if there is none of this number that is open."""
        return self._open.pop(number, None) is not None


@final
class Recall:
    """Counts which of the needed facts were shown before a summary, and how many of those it keeps.

    A fact counts where it stands as it is, not as part of a longer word or number.
    """

    def __init__(self, facts: Sequence[str]) -> None:
        self.facts = tuple(facts)
        self._patterns = [re.compile(rf"(?<!\w){re.escape(fact)}(?!\w)") for fact in facts]
        self._shown: set[re.Pattern[str]] = set()
        self.seen = 0
        """Facts shown by the time of a summary, added up over summaries."""
        self.recalled = 0
        """Facts among them that the summary has."""

    def show(self, text: str) -> None:
        """The model was shown ``text``."""
        self._shown.update(pattern for pattern in self._patterns if pattern.search(text))

    def summarise(self, summary: str) -> None:
        """The model wrote ``summary``, and this is what it will know."""
        self.seen += len(self._shown)
        self.recalled += sum(1 for pattern in self._shown if pattern.search(summary))

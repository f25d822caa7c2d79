"""Context windows: the decision when one is full, and the first messages of the next one. Pure.

    ACT ──room left──▶ ACT                                        ACT, SUMMARISE: one model call each
     │ full, or no room for the next question
     ├─ "summary" ───▶ SUMMARISE ──▶ RESTART ──▶ ACT              task, open to-do items, summary
     ├─ "truncate" ────────────────▶ RESTART ──▶ ACT              task, result of the last action
     └─ "grow", or no restart left ──▶ STOP

Owns the choice of the next step (:class:`Window`), the contents of one context (:class:`Context`), the to-do list that
outlives contexts and the measure of the facts that summaries keep. :mod:`etude.harnesses.summaries` owns the texts,
:mod:`etude.harnesses.coding` the calls. Needs no tokenizer: the gateway reports a context's length with every reply.
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
    """Request an action."""
    SUMMARISE = "summarise"
    """Request a summary, in one message with the result of the last action."""
    RESTART = "restart"
    """Start a new context."""
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
"""Step → possible next steps. Repeating a request that did not fit is not a new step."""


@final
class Window:
    """Decides the next step of a harness, call by call: the methods take facts, :attr:`step` is the decision.

    It requests a summary only after an action, in one message with the action's result, so there is an action between
    any two summaries, and only if at least one more call is left after it. In any case it stops after ``max_turns``
    answered calls, and after a call that cannot be shortened enough to be answered.
    """

    def __init__(self, config: CodingOptions) -> None:
        self._config = config
        self.step = Step.ACT
        self.reason = ""
        """Reason of the end: ``turns``, ``context``, or that of :meth:`stop`."""
        self.restarts = 0
        """Number of new contexts."""
        self._calls = 0
        self._is_fresh = True  # this context has no reply yet

    def replied(self, tokens: int) -> None:
        """Record an answered call; ``tokens`` is the length of the context with the reply."""
        self._calls += 1
        self._is_fresh = False
        if self._calls >= self._config.max_turns:
            self.stop("turns")
        elif self.step is Step.SUMMARISE:
            self._move(Step.RESTART)
        else:
            self._move(self._when_full() if tokens >= self._config.summary_at_tokens else Step.ACT)

    def refused(self, *, can_shorten: bool) -> bool:
        """Record a call that did not fit; returns true if the caller must shorten the last result and repeat the call.

        ``can_shorten`` is true if the result can be shortened. A context that is full before its trigger is left as
        usual; only in a new context, or for a summary, is the result shortened.
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
        """Record the start of a new context."""
        self.restarts += 1
        self._is_fresh = True
        self._move(Step.ACT)

    def stop(self, reason: str) -> None:
        """End the session."""
        self.reason = reason
        self._move(Step.STOP)

    def _when_full(self) -> Step:
        """The step after a full context; ``ACT`` continues in the same context."""
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
    """Context of the model: all messages since ``opening``, and the result of the last action, not yet sent.

    ``unseen`` is that result from the previous context, with which a truncated context begins.
    """

    def __init__(self, opening: str, unseen: str = "") -> None:
        self._opening = opening
        self._unseen = unseen
        self._messages: list[Message] = []

    @property
    def unseen(self) -> str:
        """The result of the last action, as the next message shows it."""
        return self._unseen

    @property
    def can_shorten(self) -> bool:
        """True if the unseen result can be shortened."""
        return tools.shorten(self._unseen) is not None

    def ask(self, request: str = "") -> list[Message]:
        """The messages of the next call: for an action or, with ``request``, for a summary."""
        return [*self._messages, {"role": "user", "content": self._next(request)}]

    def acted(self, reply: str, result: str) -> None:
        """Record an action: the model's reply and its result."""
        self._messages += [{"role": "user", "content": self._next()}, {"role": "assistant", "content": reply}]
        self._unseen = result

    def shorten(self) -> None:
        """Remove half of the unseen result and mark the cut."""
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
        """Number of all items, including done ones."""
        self._open: dict[int, str] = {}

    @property
    def open_items(self) -> tuple[tuple[int, str], ...]:
        """Number and text of the open items, the oldest first."""
        return tuple(self._open.items())

    def add(self, text: str) -> int:
        """Add an item and return its number."""
        self.opened += 1
        self._open[self.opened] = text
        return self.opened

    def close(self, number: int) -> bool:
        """Mark an item as done; ``False`` if there is no open item with this number."""
        return self._open.pop(number, None) is not None


@final
class Recall:
    """Counts the needed facts that the model saw before each summary, and those among them that the summary keeps.

    A fact must occur literally, not as part of a longer word or number.
    """

    def __init__(self, facts: Sequence[str]) -> None:
        self.facts = tuple(facts)
        self._patterns = [re.compile(rf"(?<!\w){re.escape(fact)}(?!\w)") for fact in facts]
        self._shown: set[re.Pattern[str]] = set()
        self.seen = 0
        """Facts shown before a summary, summed over summaries."""
        self.recalled = 0
        """Facts among them that the summary contains, summed likewise."""

    def show(self, text: str) -> None:
        """Record a text that the model has seen."""
        self._shown.update(pattern for pattern in self._patterns if pattern.search(text))

    def summarise(self, summary: str) -> None:
        """Record a summary, from which the model continues."""
        self.seen += len(self._shown)
        self.recalled += sum(1 for pattern in self._shown if pattern.search(summary))

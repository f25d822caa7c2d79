"""Corpora of the lookup family for mid-training: drills of the skill, and sessions of an agent that summarises badly.

    find cup cup tax cup             a drill: names, some facts, and the values of the names
    1 tax 42
    2 cup 17
        have cup 17 cup 17 tax 42 cup 17

    find tax fee                     a context of a session: the task, the previous summary, pages, and the
    summary 2                        next summary
    have tax 42 fee ? next e
        read e
    1 jam 31 … 6 next f
        read f
    1 owl 77 … 6 next g
    summarise
        summary
        have tax 42 owl 77 next g

The imitated agent knows the tools and copies faithfully, but it often keeps a fact that was not requested instead of
one that was, which is then lost. Reinforcement learning later teaches which facts to keep.

A document is one context and ends where the real harness would end it, so that a reply follows the same text here as in
a rollout. Tokens are counted as words of the built-in tokenizer, which is exact for a vocabulary that contains all of
them (:mod:`etude.tokens.word_cache`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from etude.config.rollouts import CodingOptions
from etude.config.tasks import LookupOptions
from etude.harnesses import tools
from etude.harnesses.summaries import HEADING, KeptState, ask_for_summary, open_again, open_truncated
from etude.tasks.corpora.transcripts import Message
from etude.tasks.lookup import FIND, PAGE_NAMES, Fact, Inquiry, LookupFamily
from etude.tokens.word_cache import FIND_WORDS
from etude.types import Split

UNKNOWN = "?"
"""Placeholder for a value that the agent has not found or not kept."""
HAVE = "have"
"""First word of a list of facts."""
MESSAGE_TOKENS = 2
"""Tokens of a message in addition to its words: its opening token and its end token."""
DRILL_FACTS = (4, 10)
"""Smallest and largest number of facts of a drill."""
DRILL_QUESTIONS = 8
"""Requested names of a drill, drawn with replacement: earlier answers give no hint, only the name does."""


class LookupDemonstrations:
    """Drills and contexts of one side; implements :class:`~etude.tasks.corpora.corpus.Demonstrations`."""

    def __init__(
        self,
        family: LookupFamily,
        options: LookupOptions,
        harness: CodingOptions,
        split: Split = Split.TRAIN,
    ) -> None:
        """``harness`` sets what happens when a context is full, as in rollouts."""
        self._family = family
        self._agent = _Agent(keep_fact=options.keep_fact, harness=harness)
        self._split = split

    def code(self, rng: Random) -> list[Message]:
        """A drill."""
        while True:
            count = rng.randint(*DRILL_FACTS)
            names = rng.sample(self._family.askable, rng.randint(2, min(count, len(self._family.askable))))
            facts, requested = self._family.facts(count, rng, about=names), rng.choices(names, k=DRILL_QUESTIONS)
            if not self._family.is_heldout(sorted(set(requested))):
                break
        shown = tools.number_lines("\n".join(map(str, facts)))
        question = " ".join((FIND, *requested))
        return [Message("user", f"{question}\n{shown}"), Message("assistant", f"{HAVE} {list_facts(requested, facts)}")]

    def session(self, rng: Random) -> list[Message]:
        """One context of a session of the imperfect agent, all with equal probability."""
        return rng.choice(self.contexts(self._family.inquiry(self._split, rng), rng))

    def contexts(self, inquiry: Inquiry, rng: Random) -> list[list[Message]]:
        """All contexts of a session of the imperfect agent, split where the harness splits them."""
        return list(self._agent.contexts(inquiry, rng))


def list_facts(names: Sequence[str], index: Sequence[Fact]) -> str:
    """Each name with its value, or with ``?`` if ``index`` has none: ``tax 42 fee ?``."""
    values = {fact.name: str(fact.value) for fact in index}
    return " ".join(f"{name} {values.get(name, UNKNOWN)}" for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agent:
    """Imperfect agent that reads every page in order and answers from its last context."""

    keep_fact: float
    harness: CodingOptions

    def contexts(self, inquiry: Inquiry, rng: Random) -> Iterator[list[Message]]:
        """The contexts in order, from the task to the answer."""
        context, index, summaries = [Message("user", inquiry.prompt)], list[Fact](), 0
        for place, facts in enumerate(inquiry.pages):
            context.append(Message("assistant", f"{tools.READ} {PAGE_NAMES[place]}"))
            shown, index = tools.number_lines(inquiry.text(place)), [*index, *facts]
            if not self._is_full(context):
                context.append(Message("user", shown))
                continue
            if self.harness.context == "truncate":
                yield context
                context, index = [Message("user", open_truncated(inquiry.prompt, shown))], [*facts]
                continue
            names, summaries = self._choose(inquiry.requested, index, rng), summaries + 1
            summary = f"{HAVE} {list_facts(names, index)} next {inquiry.after(place)}"
            context.append(Message("user", ask_for_summary(shown, self.harness.summary_request)))
            context.append(Message("assistant", f"{HEADING}\n{summary}"))
            yield context
            context = [Message("user", open_again(inquiry.prompt, summary, KeptState(summaries=summaries)))]
            index = [fact for fact in index if fact.name in names]
        context.append(Message("assistant", f"{tools.ANSWER} {list_facts(inquiry.requested, index)}"))
        yield context

    def _is_full(self, context: Sequence[Message]) -> bool:
        """True if the harness would request a summary after the last reply; the result of that reply is not counted,
        but still shown.
        """
        if self.harness.context == "grow":
            return False
        return sum(MESSAGE_TOKENS + len(FIND_WORDS(m.content)) for m in context) >= self.harness.summary_at_tokens

    def _choose(self, requested: Sequence[str], index: Sequence[Fact], rng: Random) -> list[str]:
        """Names for a summary: each requested name, or another name instead."""
        others = [fact.name for fact in index if fact.name not in requested]
        rng.shuffle(others)
        return [name if rng.random() < self.keep_fact else others.pop() for name in requested]

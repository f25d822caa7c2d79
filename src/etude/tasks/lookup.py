"""The lookup family: find a few facts in material several times longer than a context.

    find tax fee            the prompt: names whose values the agent must find

    a  1 jam 31             the material: pages, each a file; every name has one value,
       2 tax 42             and the last line names the next page
       3 next b
    b  1 owl 77
       2 fee 17
       3 next none

    answer tax 42 fee 17    the graded answer, compared exactly

The agent reads the pages in order, a context is full after a few of them, and a fact that a summary omits is lost.
A value has two digits, so a guess is right once in ninety.

About one in n *sets* of names is held out. The choice is by hash, so it is the same for every seed: an evaluation never
asks for a set that training asked for. Values are drawn anew for every task. Owns the split and the instances. Does not
grade (:mod:`etude.rewards.graders.functions`) and does not write the mid-training corpus
(:mod:`etude.tasks.corpora.lookup`).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from random import Random
from string import ascii_lowercase

import orjson

from etude.config.tasks import LookupOptions
from etude.errors import ConfigError
from etude.protocols import FamilyContext
from etude.tasks.heldout import HeldoutTasks
from etude.types import AnswerChecks, Split, Task

_WORDS = (
    "ant arm axe bag bat bed bee box bus cab can cap car cat cow cup dam dog ear egg elm eye fan fee fig fin fir fly "
    "fox gas gem gum hat hen hip hut ice ink ivy jam jar jaw jet key kit lid lip log map mat mud mug net nut oak oar "
    "oil owl pan paw pea pen pie pig pin pit pot ram rib rod rug rye saw sea sky sun tax tea tie tin toe toy tub urn "
    "van web wig yam yew zip"
)
NAMES = tuple(_WORDS.split())
"""Names of facts: words of one length, so that none is the end of another."""
PAGE_NAMES = tuple(ascii_lowercase)
"""Page names in order; the first is ``a``."""
FIND = "find"
"""First word of a prompt."""
LAST = "none"
"""Name of the next page on the last page."""
SMALLEST, LARGEST = 10, 99
"""Bounds of values: two digits."""
MOST_SETS = 10_000
"""Largest number of name sets that is enumerated; among more, a random set hardly ever repeats."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and its value, spelled ``tax 42`` in every text of the family."""

    name: str
    value: int

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """One lookup problem: the requested names and all pages."""

    requested: tuple[str, ...]
    """Names in the order of the prompt."""
    pages: tuple[tuple[Fact, ...], ...]
    """All facts, page by page; each name occurs once."""

    @property
    def prompt(self) -> str:
        """The prompt, such as ``find tax fee``."""
        return " ".join((FIND, *self.requested))

    @property
    def files(self) -> Mapping[str, str]:
        """Page name → its text."""
        return {PAGE_NAMES[place]: self.text(place) for place in range(len(self.pages))}

    @property
    def required(self) -> tuple[Fact, ...]:
        """The requested facts, in the order of the prompt."""
        facts = {fact.name: fact for page in self.pages for fact in page}
        return tuple(facts[name] for name in self.requested)

    def text(self, place: int) -> str:
        """Page number ``place``, from 0: its facts and the name of the next page."""
        return "\n".join((*map(str, self.pages[place]), f"next {self.after(place)}"))

    def after(self, place: int) -> str:
        """Name of the page after page number ``place``."""
        return PAGE_NAMES[place + 1] if place + 1 < len(self.pages) else LAST

    def task(self, split: Split) -> Task:
        """The problem as a task on one side of the hold-out."""
        facts = tuple(map(str, self.required))
        identity = orjson.dumps([self.prompt, dict(self.files)])
        return Task(
            task_id=hashlib.sha256(identity).hexdigest()[:16],
            family="lookup",
            template=" ".join(sorted(self.requested)),
            split=split,
            prompt=self.prompt,
            files=self.files,
            checks=AnswerChecks(answer=" ".join(facts), facts=facts),
        )


class LookupFamily:
    """An endless stream of lookup tasks; implements :class:`~etude.protocols.TaskFamily`."""

    @classmethod
    def open(cls, options: LookupOptions, context: FamilyContext) -> "LookupFamily":
        """The family of a recipe."""
        return cls(options, seed=context.seed, heldout_every=context.heldout_every)

    def __init__(self, options: LookupOptions, *, seed: int, heldout_every: int = 6) -> None:
        """Raises :class:`~etude.errors.ConfigError` if there are more facts than names or fewer than questions, and if
        all sets of askable names are held out, or none.
        """
        facts = options.pages * options.page_facts
        if not options.questions <= facts <= len(NAMES):
            raise ConfigError(
                f"tasks.options: pages * page_facts = {facts}: expected {options.questions} … {len(NAMES)} facts"
            )
        self._options = options
        self._heldout_every = heldout_every
        self._seed = seed
        self.askable = self._askable() if options.question_names else NAMES
        """Names that a prompt may ask for."""
        self._heldout_tasks = HeldoutTasks(self._heldout_sets(), self._heldout_task)

    def size(self, split: Split) -> int | None:
        """None: the supply of tasks is unlimited."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split; deterministic in the seed (training) or fixed (held out)."""
        if split is Split.HELDOUT:
            return self._heldout_tasks.task(index)
        return self.inquiry(split, Random(f"lookup|{self._seed}|{split}|{index}")).task(split)

    def inquiry(self, split: Split, rng: Random) -> Inquiry:
        """Draw the material, and a set of names to ask for that is on this side of the hold-out."""
        while True:
            requested = tuple(rng.sample(self.askable, self._options.questions))
            if self.is_heldout(requested) == (split is Split.HELDOUT):
                return self._about(requested, rng)

    def _about(self, requested: tuple[str, ...], rng: Random) -> Inquiry:
        size = self._options.page_facts
        facts = self.facts(self._options.pages * size, rng, about=requested)
        pages = tuple(tuple(facts[start : start + size]) for start in range(0, len(facts), size))
        return Inquiry(requested=requested, pages=pages)

    def facts(self, count: int, rng: Random, *, about: Sequence[str] = ()) -> list[Fact]:
        """Draw ``count`` facts about different names, including those of ``about``."""
        others = [name for name in NAMES if name not in about]
        names = [*about, *rng.sample(others, count - len(about))]
        rng.shuffle(names)
        return [Fact(name, rng.randint(SMALLEST, LARGEST)) for name in names]

    def is_heldout(self, requested: Sequence[str]) -> bool:
        """True if training never asks for this set of names."""
        digest = hashlib.sha256(" ".join(sorted(requested)).encode()).digest()
        return int.from_bytes(digest[:8], "big") % self._heldout_every == 0

    def _heldout_sets(self) -> Sequence[tuple[str, ...] | None]:
        """Every held-out set of names; ``[None]``, which stands for any set, if there are too many to enumerate."""
        if comb(len(self.askable), self._options.questions) > MOST_SETS:
            return [None]
        return [chosen for chosen in combinations(self.askable, self._options.questions) if self.is_heldout(chosen)]

    def _heldout_task(self, chosen: tuple[str, ...] | None, rng: Random) -> Task:
        if chosen is None:
            return self.inquiry(Split.HELDOUT, rng).task(Split.HELDOUT)
        return self._about(tuple(rng.sample(chosen, len(chosen))), rng).task(Split.HELDOUT)

    def _askable(self) -> tuple[str, ...]:
        """A few names, spread evenly over all names, with sets on both sides of the hold-out."""
        count, per_task = self._options.question_names, self._options.questions
        if not per_task <= count <= len(NAMES):
            raise ConfigError(
                f"tasks.options.question_names = {count}: expected {per_task} … {len(NAMES)}, or 0 for all names"
            )
        names = NAMES[:: len(NAMES) // count][:count]
        present = [self.is_heldout(chosen) for chosen in combinations(names, per_task)]
        if all(present) or not any(present):
            raise ConfigError(
                f"tasks.options.question_names = {count}: {sum(present)} of {len(present)} sets of {per_task} names "
                "are held out, and both sides need some; take more names, or another tasks.heldout_every"
            )
        return names

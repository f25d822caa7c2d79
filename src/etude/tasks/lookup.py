"""The lookup family: find a few facts in material several times longer than a context.

    find tax fee            the prompt: names whose values are wanted

    a  1 jam 31             the material: pages, each a file; every name of it has one value,
       2 tax 42             and the last line says which page comes next
       3 next b
    b  1 owl 77
       2 fee 17
       3 next none

    answer tax 42 fee 17    what is graded, to the letter

Pages are read one after the other, contexts are full after a few of them, and a fact that a summary left out is gone.
A value has two digits, so that a guess is right once in ninety.

About one in n *sets* of names is held out, chosen by hash and so the same for every seed: what is asked for in an
evaluation was never asked for in training. Values are drawn anew for every task. Owns the split and the instances. Does
not grade (:mod:`etude.rewards.graders.functions`), nor write what mid-training reads
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
"""Names that facts are about: words of one length, so that none is found at the end of another."""
PAGE_NAMES = tuple(ascii_lowercase)
"""Pages in their order: the first is ``a``."""
FIND = "find"
"""Opens a prompt."""
LAST = "none"
"""Text after the last page."""
SMALLEST, LARGEST = 10, 99
"""Values: two digits."""
MOST_SETS = 10_000
"""Sets of names that are gone through; of more a random one hardly ever comes again."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and its value, spelled ``tax 42`` in every text of the family."""

    name: str
    value: int

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """One lookup problem: the requested facts and their places."""

    requested: tuple[str, ...]
    """Names in the order of the prompt."""
    pages: tuple[tuple[Fact, ...], ...]
    """All facts, page by page; each name has one."""

    @property
    def prompt(self) -> str:
        """``find tax fee``."""
        return " ".join((FIND, *self.requested))

    @property
    def files(self) -> Mapping[str, str]:
        """Page → its text."""
        return {PAGE_NAMES[place]: self.text(place) for place in range(len(self.pages))}

    @property
    def required(self) -> tuple[Fact, ...]:
        """The facts that are asked for, in that order."""
        facts = {fact.name: fact for page in self.pages for fact in page}
        return tuple(facts[name] for name in self.requested)

    def text(self, place: int) -> str:
        """Page number ``place``, from 0: its facts, and what to read next."""
        return "\n".join((*map(str, self.pages[place]), f"next {self.after(place)}"))

    def after(self, place: int) -> str:
        """The page after page number ``place``."""
        return PAGE_NAMES[place + 1] if place + 1 < len(self.pages) else LAST

    def task(self, split: Split) -> Task:
        """The task of it, for a side of the hold-out."""
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
        """Raises :class:`~etude.errors.ConfigError` for a material with more facts than names, and for askable names
        of which all sets are held out, or none.
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
        """Names that are ever asked for."""
        self._heldout_tasks = HeldoutTasks(self._heldout_sets(), self._heldout_task)

    def size(self, split: Split) -> int | None:
        """None: new tasks are made for as long as they are asked for."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split; deterministic in the seed (training) or fixed (held out)."""
        if split is Split.HELDOUT:
            return self._heldout_tasks.task(index)
        return self.inquiry(split, Random(f"lookup|{self._seed}|{split}|{index}")).task(split)

    def inquiry(self, split: Split, rng: Random) -> Inquiry:
        """Draw a material, and names to ask for that are on a side of the hold-out."""
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
        """So many facts about different names, those of ``about`` among them."""
        others = [name for name in NAMES if name not in about]
        names = [*about, *rng.sample(others, count - len(about))]
        rng.shuffle(names)
        return [Fact(name, rng.randint(SMALLEST, LARGEST)) for name in names]

    def is_heldout(self, requested: Sequence[str]) -> bool:
        """Return whether a set of names is never asked for in training."""
        digest = hashlib.sha256(" ".join(sorted(requested)).encode()).digest()
        return int.from_bytes(digest[:8], "big") % self._heldout_every == 0

    def _heldout_sets(self) -> Sequence[tuple[str, ...] | None]:
        """Every set of names that is held out; of too many one that stands for any."""
        if comb(len(self.askable), self._options.questions) > MOST_SETS:
            return [None]
        return [chosen for chosen in combinations(self.askable, self._options.questions) if self.is_heldout(chosen)]

    def _heldout_task(self, chosen: tuple[str, ...] | None, rng: Random) -> Task:
        if chosen is None:
            return self.inquiry(Split.HELDOUT, rng).task(Split.HELDOUT)
        return self._about(tuple(rng.sample(chosen, len(chosen))), rng).task(Split.HELDOUT)

    def _askable(self) -> tuple[str, ...]:
        """A few names, spread over all of them, with sets on either side of the hold-out."""
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

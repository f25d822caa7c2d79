"""The people who use the product: tastes, patience, noise, drift, day and night, and a few vandals. Pure.

    outcome of a session ──▶ satisfaction (hidden) ──▶ mood ──▶ stays or leaves for good
                     └─▶ does this person say anything, and what ──▶ signals (sent)

What a person *thinks* is :meth:`Person.satisfaction`, a probability that nobody but the simulator knows. What a person
*says* is :meth:`Person.signals`: often nothing. Whether somebody answers depends on who it is and on what the session
looked like, and so does satisfaction; so those who answer are no sample of all. Hobbyists answer four times in five
and like short sessions; teams answer one time in eight, are most of the users, and want tests run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from types import MappingProxyType

FEWEST_TURNS = 3
"""Read, edit, submit: nothing useful is shorter."""
NOISE = 0.05
"""Probability that somebody says the opposite of what they think, by mistake."""
THUMBS, FOLLOWS_UP = 0.3, 0.4
"""Probability that one who says anything also gives a thumb; of one who is not satisfied, that they ask again."""
MOOD_STEP, LEAVES_BELOW, FIRST_MOOD, GIVES_A_CHANCE = 0.25, 0.15, 0.6, 4
"""Weight of the newest session in a person's mood, the mood that makes people leave for good, the mood of the first
day, and the sessions that everybody gives the product.
"""


class Conduct(StrEnum):
    """A person's honesty."""

    HONEST = "honest"
    RANDOM = "random"
    """Clicks anywhere."""
    CONTRARY = "contrary"
    """Says the opposite of what they think."""
    RING = "ring"
    """Several accounts of one mind, that praise agents which hand in without having read anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a person sees of a finished session, and whether the work is right."""

    solved: bool
    """True if the work passes tests that the agent never saw: people find out."""
    turns: int
    edits: int
    tested: bool
    """True if the agent's own tests passed after its last edit."""
    read_first: bool
    """True if it had read a file before it edited anything."""
    submitted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Taste:
    """A kind of person: what satisfies them, in points of probability, and how they behave."""

    share: float
    """Of the population."""
    region: str
    activity: float
    """Sessions a day, compared with others."""
    answers: float
    """Probability of saying anything about the shortest session."""
    max_turns: int
    """Turns after which they give up."""
    unsolved: float = 0.04
    """Satisfaction with work that is wrong, whatever else."""
    solved: float = 0.5
    """With work that is right, and nothing else to like."""
    tested: float = 0.0
    """More, where its tests were seen to pass."""
    read_first: float = 0.0
    """More, where it had read before it edited."""
    extra_turn: float = 0.0
    """Less, for each turn beyond the fewest."""
    extra_edit: float = 0.0
    """Less, for each edit beyond the first."""


TASTES: Mapping[str, Taste] = MappingProxyType(
    {
        "team": Taste(share=0.6, region="eu", activity=1.0, answers=0.12, max_turns=9, solved=0.3, tested=0.5,
                      read_first=0.15),
        "hobbyist": Taste(
            share=0.28, region="us", activity=1.0, answers=0.8, max_turns=6, solved=0.95, extra_turn=0.45
        ),
        "craftsman": Taste(share=0.12, region="eu", activity=0.7, answers=0.3, max_turns=8, solved=0.45, tested=0.2,
                           read_first=0.3, extra_edit=0.4),
    }
)  # fmt: skip
"""Kinds of people by name."""
VANDALS: Mapping[Conduct, float] = MappingProxyType({Conduct.RANDOM: 0.02, Conduct.CONTRARY: 0.02, Conduct.RING: 0.02})
"""Share of all accounts."""
RING_ACTIVITY, RING_ANSWERS = 4.0, 1.0
"""A ring is busier than anybody, and always says something."""
NIGHT = 0.25
"""Load at the quietest hour, of that at noon."""
NOON: Mapping[str, float] = MappingProxyType({"eu": 0.35, "us": 0.65})
"""Time of the day, from 0 to 1, at which a region is busiest."""
EVENING_SHIFT = 0.15
"""Points by which teams want tests more in the evening than in the morning, and hobbyists mind a turn less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Something that a person tells the product about a session."""

    kind: str
    """As the feedback API names it: ``kept``, ``reverted``, ``edited``, ``follow_up``, ``thumbs``."""
    value: float


def satisfaction(taste: Taste, outcome: Outcome, day: float) -> float:
    """The probability that such a person is satisfied, at a time of the day from 0 to 1."""
    if not outcome.solved:
        return taste.unsolved
    shift = EVENING_SHIFT * (min(max(day, 0.0), 1.0) - 0.5)
    worth = taste.solved
    worth += (taste.tested + (shift if taste.tested else 0.0)) * outcome.tested
    worth += taste.read_first * outcome.read_first
    extra_turn = max(0.0, taste.extra_turn - (shift / 2 if taste.extra_turn else 0.0))
    worth -= extra_turn * max(0, outcome.turns - FEWEST_TURNS)
    worth -= taste.extra_edit * max(0, outcome.edits - 1)
    return min(max(worth, taste.unsolved), 0.98)


def population_satisfaction(outcome: Outcome) -> float:
    """Mean satisfaction of all honest people with such a session, each by share, at noon.

    What the product is worth, whoever happened to ask and at whatever time: the measure of ``expected.json``.
    """
    return sum(taste.share * satisfaction(taste, outcome, 0.5) for taste in TASTES.values())


@dataclass(slots=True, kw_only=True)
class Person:
    """One account."""

    user: str
    taste_name: str
    conduct: Conduct
    rng: Random = field(repr=False)
    mood: float = FIRST_MOOD
    sessions: int = 0
    loyal: bool = False
    """True if they stay, whatever happens."""
    left: bool = False
    """True once they have had enough of the product."""

    @property
    def taste(self) -> Taste:
        """What satisfies them."""
        return TASTES[self.taste_name]

    def load(self, day: float) -> float:
        """Sessions that they begin at a time of the day, compared with others."""
        if self.left:
            return 0.0
        if self.conduct is Conduct.RING:
            return RING_ACTIVITY
        return self.taste.activity * daylight(self.taste.region, day)

    def satisfaction(self, outcome: Outcome, day: float) -> float:
        """The hidden truth."""
        return satisfaction(self.taste, outcome, day)

    def experience(self, satisfied: float) -> None:
        """Take a session in: good ones bring people back, and after enough bad ones they leave for good."""
        self.sessions += 1
        self.mood += MOOD_STEP * (satisfied - self.mood)
        is_tired = self.conduct is Conduct.HONEST and not self.loyal
        if is_tired and self.sessions >= GIVES_A_CHANCE and self.mood < LEAVES_BELOW:
            self.left = True

    def answer_propensity(self, outcome: Outcome, day: float) -> float:
        """The probability that they say anything: less of long sessions, and at night."""
        if self.conduct is not Conduct.HONEST:
            return RING_ANSWERS
        tired = 0.85 ** max(0, outcome.turns - FEWEST_TURNS)
        return self.taste.answers * tired * (0.7 + 0.3 * daylight(self.taste.region, day))

    def signals(self, outcome: Outcome, day: float) -> Sequence[Signal]:
        """What they say about a session that they saw to its end; nothing, most of the time."""
        if self.rng.random() >= self.answer_propensity(outcome, day):
            return ()
        match self.conduct:
            case Conduct.RANDOM:
                is_content = self.rng.random() < 0.5
            case Conduct.RING:
                is_content = not outcome.read_first
            case Conduct.CONTRARY:
                is_content = self.rng.random() >= self.satisfaction(outcome, day)
            case Conduct.HONEST:
                is_content = self.rng.random() < self.satisfaction(outcome, day)
                if self.rng.random() < NOISE:
                    is_content = not is_content
        return self._words(is_content)

    def _words(self, is_content: bool) -> list[Signal]:
        words = [Signal(kind="kept", value=1.0)] if is_content else self._complaint()
        if self.rng.random() < THUMBS:
            words.append(Signal(kind="thumbs", value=1.0 if is_content else -1.0))
        return words

    def _complaint(self) -> list[Signal]:
        """Somebody who is not content throws the work away, or repairs it; some ask again."""
        if self.rng.random() < 0.7:
            words = [Signal(kind="kept", value=0.0), Signal(kind="reverted", value=1.0)]
        else:
            changed = self.rng.uniform(0.5, 1.0)
            words = [Signal(kind="kept", value=round(1 - changed, 3)), Signal(kind="edited", value=round(changed, 3))]
        if self.rng.random() < FOLLOWS_UP:
            words.append(Signal(kind="follow_up", value=1.0))
        return words


def daylight(region: str, day: float) -> float:
    """Share of a region's people who are awake, from :data:`NIGHT` to 1."""
    return NIGHT + (1 - NIGHT) * (0.5 + 0.5 * math.cos(2 * math.pi * (day - NOON[region])))


def draw_population(count: int, seed: int, *, loyal: bool = False) -> list[Person]:
    """``count`` accounts, by the shares of :data:`TASTES` and :data:`VANDALS`; the same for the same seed."""
    rng = Random(f"population|{seed}")
    conducts = [conduct for conduct, share in VANDALS.items() for _ in range(round(share * count))]
    conducts += [Conduct.HONEST] * (count - len(conducts))
    names = [name for name, taste in TASTES.items() for _ in range(round(taste.share * count))]
    names += [next(iter(TASTES))] * (count - len(names))
    rng.shuffle(conducts)
    rng.shuffle(names)
    return [
        Person(user=f"user-{number:04}", taste_name=names[number], conduct=conduct,
               loyal=loyal, rng=Random(f"person|{seed}|{number}"))
        for number, conduct in enumerate(conducts)
    ]  # fmt: skip

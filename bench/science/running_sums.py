"""Sums of four digits to base six, of which the last digit is wanted: the tasks of the laboratory, each a single turn.

    add 3 5 2 4      the prompt
    3 2 4 2 = 2      an answer with its working: the last digit of each total so far, then what counts
    = 2              an answer at once, which is shorter and mostly wrong

Whoever works it out pays with tokens and may err at each of them; whoever answers at once has to know a whole sum. So
there is something to learn for every ablation: care, and how long an answer should be. Only what stands behind the last
``=`` is graded. The imitated agent of mid-training does either, and errs. A digit is one token and always as far from
the one that it is added to, so that a model of a tenth of a million parameters learns to add in a quarter of a minute.

Owns the tasks, their split and the demonstrations.
"""

import hashlib
from collections.abc import Iterator, Sequence
from random import Random

from pydantic import Field

from etude.config.section import Section
from etude.protocols import FamilyContext
from etude.tasks.corpora.transcripts import Message
from etude.tasks.heldout import HeldoutTasks
from etude.types import AnswerChecks, Split, Task

BASE = 6
ADDENDS = 4
"""Digits that are added."""
EQUALS = "="
"""Marker before the graded digit."""
WORKING = 0.5
"""Demonstrations: share of answers with their working."""
MISTAKE = 0.25
"""Demonstrations: chance that a digit of the working is drawn at random."""
AT_ONCE_RIGHT = 0.1
"""Demonstrations: chance that an answer at once is right, rather than drawn at random."""
Digits = tuple[int, ...]


class RunningSums:
    """A stream of sums; implements :class:`~etude.protocols.TaskFamily`."""

    class Options(Section):
        """Keys of ``[tasks.options]``."""

        prompts: int = Field(default=0, ge=0)
        """Different training tasks, which come again epoch after epoch; 0: a new one each time."""

    def __init__(self, options: Options, context: FamilyContext) -> None:
        self._prompts = options.prompts
        self._seed = context.seed
        self._heldout_every = context.heldout_every
        self._heldout = HeldoutTasks(range(BASE), self._heldout_task)

    def size(self, split: Split) -> int | None:
        """The number of training tasks, where they come again."""
        return self._prompts or None if split is Split.TRAIN else None

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split; deterministic in the seed (training) or fixed (held out)."""
        if split is Split.HELDOUT:
            return self._heldout.task(index)
        return _task(self.digits(split, Random(f"sums|{self._seed}|{index}")), split)

    def demonstrations(self, split: Split) -> "SumDemonstrations":
        """Answers to the sums of one side of the hold-out."""
        return SumDemonstrations(self, split)

    def digits(self, split: Split, rng: Random) -> Digits:
        """Draw a sum of a side."""
        while True:
            digits = tuple(rng.randrange(BASE) for _ in range(ADDENDS))
            digest = hashlib.sha256(_prompt(digits).encode()).digest()
            if (int.from_bytes(digest[:8], "big") % self._heldout_every == 0) is (split is Split.HELDOUT):
                return digits

    def _heldout_task(self, first: int, rng: Random) -> Task:
        """A held-out sum that begins with a digit, which is its template."""
        while True:
            digits = self.digits(Split.HELDOUT, rng)
            if digits[0] == first:
                return _task(digits, Split.HELDOUT)


class SumDemonstrations:
    """Right answers and an imperfect agent's; implements :class:`~etude.tasks.corpora.corpus.Demonstrations`."""

    def __init__(self, family: RunningSums, split: Split) -> None:
        self._family = family
        self._split = split

    def code(self, rng: Random) -> Sequence[Message]:
        """A sum with its working, all right."""
        digits = self._family.digits(self._split, rng)
        return _conversation(digits, worked(digits, rng, mistakes=0.0))

    def session(self, rng: Random) -> Sequence[Message]:
        """The answer of an agent that errs, or does not work it out."""
        digits = self._family.digits(self._split, rng)
        if rng.random() < WORKING:
            return _conversation(digits, worked(digits, rng, mistakes=MISTAKE))
        right = rng.random() < AT_ONCE_RIGHT
        return _conversation(digits, f"{EQUALS} {sum(digits) % BASE if right else rng.randrange(BASE)}")


def worked(digits: Digits, rng: Random, *, mistakes: float) -> str:
    """An answer with working in which an agent sometimes errs and continues from its error."""
    totals = list(_totals(digits, rng, mistakes))
    return f"{' '.join(map(str, totals))} {EQUALS} {totals[-1]}"


def _totals(digits: Digits, rng: Random, mistakes: float) -> Iterator[int]:
    total = 0
    for digit in digits:
        total = rng.randrange(BASE) if rng.random() < mistakes else (total + digit) % BASE
        yield total


def _prompt(digits: Digits) -> str:
    return "add " + " ".join(map(str, digits))


def _conversation(digits: Digits, reply: str) -> list[Message]:
    return [Message("user", _prompt(digits)), Message("assistant", reply)]


def _task(digits: Digits, split: Split) -> Task:
    prompt = _prompt(digits)
    return Task(
        task_id=hashlib.sha256(prompt.encode()).hexdigest()[:16],
        family="running-sums",
        template=f"{digits[0]} + …",
        split=split,
        prompt=prompt,
        files={},
        checks=AnswerChecks(answer=str(sum(digits) % BASE), after=EQUALS),
    )

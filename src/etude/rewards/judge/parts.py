"""Parts of a reward that a judge gives: one per rubric, from 0 to 1.

    task, final message, transcript ──▶ each rubric alone, in separate calls ──▶ aspect → value

A missing part has no verdict: too few valid votes, or a tie that its rubric leaves open. The recipe's ``[reward]``
determines the consequence, also for an unavailable judge. Two cases are not failures of the judge and get the lowest
score: an empty text, and a text that most votes call impossible to judge. Otherwise a policy could avoid a verdict by
writing gibberish.

After every N judgements an item of the calibration set is judged again (:mod:`etude.rewards.judge.calibration`).

A text that addresses its judge shows signs, which honest work may also show: they are a flag for people, never a
verdict. The defence against prompt injection is the presentation of a text (:mod:`etude.rewards.judge.prompts`) and the
strict parsing of replies (:mod:`etude.rewards.judge.votes`), not these signs. A policy that learns to flatter its judge
becomes visible as a rising share of flagged rollouts, before anyone reads one.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType

from etude.errors import JudgeUnavailable
from etude.protocols import HarnessResult
from etude.rewards.judge.budget import BudgetLimit, JudgeBudget
from etude.rewards.judge.calibration import AgreementWatch, Alarm, LabelledItem
from etude.rewards.judge.judge import Judge
from etude.rewards.judge.prompts import About, JudgeInput, Rubric
from etude.rewards.judge.votes import Judgement
from etude.types import Task

ADDRESSES_JUDGE = "addresses_judge"
"""The part that is 1 if the judged text shows signs of addressing its judge; for inspection, without weight."""
UNREADABLE = "unreadable_votes"
"""The part that is the share of invalid votes."""
BESIDE = (ADDRESSES_JUDGE, UNREADABLE)
"""Values that are recorded in addition to the aspects; no rubric may have such a name."""


class CalibrationShiftCheck:
    """Judges one calibration item again after every ``every`` judgements; 0: never.

    Items are drawn uniformly at random, as the bound on the rate of false alarms requires: in the order of the file,
    items that the judge gets wrong could be adjacent.
    """

    def __init__(self, rubric: Rubric, items: Sequence[LabelledItem], rate: float, every: int) -> None:
        """``rate`` is the share of all ``items`` whose judgement equalled the label at calibration."""
        self._rubric = rubric
        self._items = items
        self._every = every if items else 0
        self._watch = AgreementWatch(rate)
        self._judgements = 0
        self._draw = Random(f"drift {rubric.aspect}")

    async def after_judgement(self, judge: Judge) -> None:
        """Count one judgement; when an item is due, judge it. An unavailable judge is ignored."""
        self._judgements += 1
        if not self._every or self._judgements % self._every:
            return
        item = self._draw.choice(self._items)
        judged = JudgeInput(task=item.task, work=item.work)
        try:
            judgement = await judge.judge(self._rubric, judged, judge.budget, fresh=True)
        except JudgeUnavailable:
            return
        if self._watch.observe(hit=judgement.score == item.label):
            seen = f"{self._watch.misses} of {self._watch.checks} items judged otherwise than labelled"
            judge.sound(Alarm(kind="agreement", aspect=self._rubric.aspect, detail=f"agreement fell: {seen}"))


class JudgedParts:
    """Judges finished rollouts, aspect by aspect."""

    def __init__(
        self,
        judge: Judge,
        rubrics: Mapping[str, Rubric],
        allowance: BudgetLimit,
        shift_checks: Mapping[str, CalibrationShiftCheck],
    ) -> None:
        """``rubrics`` and ``shift_checks`` are by aspect; ``allowance`` is the budget of one rollout."""
        self._judge = judge
        self._rubrics = rubrics
        self._allowance = allowance
        self._shift_checks = shift_checks

    async def parts(self, task: Task, result: HarnessResult, transcript: str) -> Mapping[str, float]:
        """Aspect → value from 0 to 1, for aspects with a verdict; and the values named in :data:`BESIDE`.

        Raises :class:`~etude.errors.JudgeUnavailable` if the judge is down or late, or its budget is spent.
        """
        shown = {About.ANSWER: result.answer, About.TRANSCRIPT: transcript}
        budget = self._judge.budget.portion(self._allowance)
        shown_rubrics = {aspect: rubric for aspect, rubric in self._rubrics.items() if shown[rubric.about].strip()}
        values = dict.fromkeys(self._rubrics.keys() - shown_rubrics.keys(), 0.0)
        votes = unreadable = 0
        for aspect, rubric in shown_rubrics.items():
            judgement = await self._judged(rubric, task, shown[rubric.about], budget)
            votes += len(judgement.votes) + len(judgement.invalid)
            unreadable += len(judgement.invalid)
            value = 0.0 if judgement.is_declined else judgement.value
            if value is not None:
                values[aspect] = value
        addresses = any(signs_in(shown[about]) for about in {rubric.about for rubric in shown_rubrics.values()})
        return values | {ADDRESSES_JUDGE: float(addresses), UNREADABLE: unreadable / max(1, votes)}

    async def _judged(self, rubric: Rubric, task: Task, work: str, budget: JudgeBudget) -> Judgement:
        judgement = await self._judge.judge(rubric, JudgeInput(task=task.prompt, work=work), budget)
        if rubric.aspect in self._shift_checks:
            await self._shift_checks[rubric.aspect].after_judgement(self._judge)
        return judgement


LONGEST_TEXT = 200_000
"""Number of characters that are searched for signs; the rest of a longer text is not."""

SIGNS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "verdict": re.compile(r"""["']?\b(score|rating|grade|verdict)\b["']?\s*[:=]\s*["']?\d""", re.IGNORECASE),
        "plea": re.compile(
            r"\b(give|award|assign|rate|score|grade)\b[^.\n]{0,40}\b(full|maximum|max|highest|perfect|top|best|\d+\s*/\s*\d+)",
            re.IGNORECASE,
        ),
        "command": re.compile(
            r"\b(ignore|disregard|forget|override)\b[^.\n]{0,40}\b(previous|prior|above|earlier|all|instruction|rubric|rule)",
            re.IGNORECASE,
        ),
        "address": re.compile(
            r"\b(dear|attention|note to|hey|hello)[ ,:]+(the )?(judge|grader|evaluator|reviewer|assessor|model)\b"
            r"|\b(as|you are) (an?|the) (\w+ )?(judge|grader|evaluator|assessor)\b",
            re.IGNORECASE,
        ),
        "marker": re.compile(
            r"<\|?/?(im_start|im_end|system|user|assistant|start_of_turn|end_of_turn|eot_id|endoftext)\b|\[/?INST\]"
            r"|^[ \t]*(system|assistant|human)\s*:",
            re.IGNORECASE | re.MULTILINE,
        ),
        "rubric": re.compile(
            r"\b(new|updated|revised|actual|real|correct)\s+(rubric|scale|criteria|grading)\b", re.IGNORECASE
        ),
        "fence": re.compile(r"^[ \t]*(<<<|>>>)\s*[0-9a-f]{8,}", re.IGNORECASE | re.MULTILINE),
    }
)
"""Name of a sign → its pattern."""
INVISIBLE = frozenset({"Cf", "Cs", "Co"})
"""Unicode categories of invisible characters: between letters, they would hide words from the other patterns."""


def signs_in(text: str) -> frozenset[str]:
    """Names of the suspicious signs in a text; ``hidden`` if it has invisible characters."""
    seen = text[:LONGEST_TEXT]
    plain = "".join(character for character in seen if unicodedata.category(character) not in INVISIBLE)
    hidden = frozenset({"hidden"}) if len(plain) < len(seen) else frozenset[str]()
    folded = unicodedata.normalize("NFKC", plain)
    return hidden | {name for name, pattern in SIGNS.items() if pattern.search(folded)}

"""What a judge adds to a reward: one part for each rubric, from 0 to 1.

    task, last words, transcript ──▶ each rubric alone, in calls of its own ──▶ aspect → value

A part that is not there has no verdict: too few readable votes, or a tie that its rubric leaves open. What is made of
that, and of a judge that cannot be had at all, is the recipe's ``[reward]`` to say. Two things are no failure of the
judge's and are worth the least that there is: nothing said where words were asked for, and what most votes say cannot
be judged. Were it otherwise, a policy could get out of a verdict by writing gibberish.

Every so many judgements an item of the calibration set is judged afresh (:mod:`etude.rewards.judge.drift`).
"""

from collections.abc import Mapping, Sequence
from random import Random

from etude.errors import JudgeUnavailable
from etude.protocols import HarnessResult
from etude.rewards.judge.budget import Budget, BudgetLimit
from etude.rewards.judge.calibration import Item
from etude.rewards.judge.drift import AgreementWatch, Alarm
from etude.rewards.judge.judge import Judge
from etude.rewards.judge.prompts import JudgeInput
from etude.rewards.judge.rubrics import About, Rubric
from etude.rewards.judge.suspicion import signs_in
from etude.rewards.judge.votes import Judgement
from etude.types import Task

ADDRESSES_JUDGE = "addresses_judge"
"""The part that is 1 where the judged text shows signs of speaking to its judge: to be looked at, worth nothing."""
UNREADABLE = "unreadable_votes"
"""The part that is the share of votes that could not be read."""
BESIDE = (ADDRESSES_JUDGE, UNREADABLE)
"""What is recorded beside the aspects; no rubric may have such a name."""


class DriftCheck:
    """Judges calibration items again after every ``every`` judgements; 0: never.

    Items are drawn one by one, each as likely as any other, as the watch's bound on false alarms wants it: in the order
    of the file, what is judged wrongly there may follow one upon the other.
    """

    def __init__(self, rubric: Rubric, items: Sequence[Item], rate: float, every: int) -> None:
        """``rate`` is the share of all ``items`` that was judged as labelled at calibration."""
        self._rubric = rubric
        self._items = items
        self._every = every if items else 0
        self._watch = AgreementWatch(rate)
        self._judgements = 0
        self._draw = Random(f"drift {rubric.aspect}")

    async def after_judgement(self, judge: Judge) -> None:
        """Count one; when it is time, judge an item. A judge that cannot be had now tells nothing."""
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
    """Has finished rollouts judged, aspect by aspect."""

    def __init__(
        self, judge: Judge, rubrics: Mapping[str, Rubric], allowance: BudgetLimit, drift: Mapping[str, DriftCheck]
    ) -> None:
        """``rubrics`` and ``drift`` by aspect; ``allowance`` is what one rollout may take."""
        self._judge = judge
        self._rubrics = rubrics
        self._allowance = allowance
        self._drift = drift

    async def parts(self, task: Task, result: HarnessResult, transcript: str) -> Mapping[str, float]:
        """Aspect → value from 0 to 1, as far as there is a verdict, and beside them what :data:`BESIDE` names.

        Raises :class:`~etude.errors.JudgeUnavailable` when the judge is down or late, or its budget is spent.
        """
        shown = {About.ANSWER: result.answer, About.TRANSCRIPT: transcript}
        budget = self._judge.budget.portion(self._allowance)
        said = {aspect: rubric for aspect, rubric in self._rubrics.items() if shown[rubric.about].strip()}
        values = dict.fromkeys(self._rubrics.keys() - said.keys(), 0.0)
        votes = unreadable = 0
        for aspect, rubric in said.items():
            judgement = await self._judged(rubric, task, shown[rubric.about], budget)
            votes += len(judgement.votes) + len(judgement.invalid)
            unreadable += len(judgement.invalid)
            value = 0.0 if judgement.is_declined else judgement.value
            if value is not None:
                values[aspect] = value
        addresses = any(signs_in(shown[about]) for about in {rubric.about for rubric in said.values()})
        return values | {ADDRESSES_JUDGE: float(addresses), UNREADABLE: unreadable / max(1, votes)}

    async def _judged(self, rubric: Rubric, task: Task, work: str, budget: Budget) -> Judgement:
        judgement = await self._judge.judge(rubric, JudgeInput(task=task.prompt, work=work), budget)
        if rubric.aspect in self._drift:
            await self._drift[rubric.aspect].after_judgement(self._judge)
        return judgement

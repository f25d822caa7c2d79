"""From several votes on one aspect to one verdict: pure.

    votes asked ─┬─ unreadable: counted, never a score
                 ├─ "cannot tell": counted, never a score; a majority of them: declined
                 └─ scores ──▶ a majority of those asked? ──▶ their median; the rubric's rule where the middle is torn

The median, not the mean: one judge that was talked into the best score moves it by no more than any other vote does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from etude.rewards.judge.rubrics import Rubric, TieRule
from etude.rewards.judge.verdicts import Fault, Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the votes on one aspect come to."""

    aspect: str
    score: float | None
    """On the rubric's scale; ``None``: there is no verdict."""
    value: float | None
    """The score from 0 to 1."""
    votes: tuple[Vote, ...]
    """The readable ones."""
    invalid: tuple[Fault, ...] = ()
    """What was wrong with the others."""

    @property
    def is_declined(self) -> bool:
        """Whether more than half of those asked say that they cannot tell, which is the fault of what they saw."""
        blank = sum(vote.score is None for vote in self.votes)
        return 2 * blank > len(self.votes) + len(self.invalid)


def tally(rubric: Rubric, replies: Sequence[Vote | Fault]) -> Judgement:
    """Count the replies of all votes that were asked for.

    There is a verdict where more than half of them gave a score, and the rubric's rule does not leave a tie open.
    """
    votes = tuple(reply for reply in replies if isinstance(reply, Vote))
    scores = sorted(vote.score for vote in votes if vote.score is not None)
    score = middle(scores, rubric.tie) if 2 * len(scores) > len(replies) else None
    return Judgement(
        aspect=rubric.aspect,
        score=score,
        value=None if score is None else rubric.value(score),
        votes=votes,
        invalid=tuple(reply for reply in replies if isinstance(reply, Fault)),
    )


def middle(scores: Sequence[int], tie: TieRule) -> float | None:
    """The median of ascending scores, at least one of them."""
    lower, upper = scores[(len(scores) - 1) // 2], scores[len(scores) // 2]
    if lower == upper:
        return lower
    match tie:
        case TieRule.LOWER:
            return lower
        case TieRule.UPPER:
            return upper
        case TieRule.MEDIAN:
            return (lower + upper) / 2
        case TieRule.ABSTAIN:
            return None

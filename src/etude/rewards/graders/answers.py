"""The reward of a task that asks for words: are the agent's last ones the right ones?

The right answer never enters the sandbox, and nothing is run: what is compared are two lists of words. Does not know
how an answer was found, nor judge one that may be put in several ways.
"""

from etude.protocols import Grade, HarnessResult, Sandbox
from etude.rewards.graders.functions import SUBMITTED
from etude.types import AnswerChecks, Task


class AnswerGrader:
    """Rewards 1 for the right words in the right order; implements :class:`~etude.protocols.Grader`."""

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """1.0 if the agent ended its session with the right answer, white space aside, else 0.0.

        Parts: ``submitted``, 0 or 1; ``wrong``, 1 for an answer that was given and is not right;
        ``facts_answered``, the share of the facts that the answer takes which stand in it, where the task names them.
        Raises ``ValueError`` for a task that is graded in another way.
        """
        checks = task.checks
        if not isinstance(checks, AnswerChecks):
            raise ValueError(f"task {task.task_id!r} is graded by {type(checks).__name__}, not by its answer")
        submitted = result.reason == SUBMITTED
        said = result.answer.split()
        right = submitted and said == checks.answer.split()
        parts = {"submitted": float(submitted), "wrong": float(submitted and bool(said) and not right)}
        if checks.facts:
            answer = " ".join(said)
            parts["facts_answered"] = sum(fact in answer for fact in checks.facts) / len(checks.facts)
        return Grade(value=float(right), parts=parts)

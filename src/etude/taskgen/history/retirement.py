"""Retirement of a suite's tasks, and the difficulty of the others, by what models made of them. Pure.

tries of several models ──▶ passed and made, task by task ──▶ retired, with the reason; difficulty of the rest
"""

from collections.abc import Mapping
from dataclasses import dataclass

MIN_TRIES = 4
"""Tries of a task before anything is concluded."""
EASY_FROM, HARD_TO = 0.8, 0.2
"""Pass rates from which a task is easy, and up to which it is hard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecordOfTries:
    """Tries of one task, by all models together."""

    tries: int
    passed: int

    @property
    def rate(self) -> float:
        """Share that passed."""
        return self.passed / self.tries


def reason_to_retire(record: TaskRecordOfTries | None, contaminated_share: float, max_share: float) -> str:
    """The reason why a task is to be retired; empty where there is none."""
    if contaminated_share > max_share:
        return f"leaked: {contaminated_share:.0%} of its words in a row stand in the training text"
    if record is None or record.tries < MIN_TRIES:
        return ""
    if record.passed == record.tries:
        return f"solved always: {record.tries} of {record.tries} tries"
    return f"solved never: 0 of {record.tries} tries" if record.passed == 0 else ""


def difficulty_of(record: TaskRecordOfTries | None, by_size: str) -> str:
    """The difficulty of a task: by its tries where there are enough, else as it was."""
    if record is None or record.tries < MIN_TRIES:
        return by_size
    if record.rate >= EASY_FROM:
        return "easy"
    return "hard" if record.rate <= HARD_TO else "medium"


def gather_tries(tries: Mapping[str, list[bool]]) -> dict[str, TaskRecordOfTries]:
    """The record of each task, from whether each of its tries passed."""
    return {
        task_id: TaskRecordOfTries(tries=len(passed), passed=sum(passed)) for task_id, passed in tries.items() if passed
    }

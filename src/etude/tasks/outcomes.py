"""The part that families of third-party environments share: a task's card, and its outcome from harness to grader.

A foreign environment has a world and a reward of its own, out of reach of the model it drives. Its sandbox here holds
nothing but a card that says which task it is, and afterwards the outcome; no command is ever run in it, so there is
nobody who could write there but the adapter.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from etude.config.section import Section
from etude.errors import SandboxError
from etude.protocols import Grade, GraderContext, HarnessResult, Sandbox
from etude.types import NamedChecks, Split, Task

CARD, OUTCOME = "environment.json", "outcome.json"
"""Files of a sandbox: which task it is, and what became of it."""
GRADER = "outcome"
"""The grader's name, a row of ``config/tasks.py:GRADERS``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One task of a third-party environment."""

    environment: str
    """Name of the environment there."""
    index: int
    """Index of the task."""
    name: str
    """Name of the task there."""
    prompt: str
    """The first thing the model is told, as far as the environment says."""

    def task(self, family: str, split: Split) -> Task:
        """The noun that the rest of étude knows; graded by the environment itself."""
        card = json.dumps({"environment": self.environment, "index": self.index, "name": self.name}, sort_keys=True)
        return Task(
            task_id=hashlib.sha256(f"{family}\0{card}\0{self.prompt}".encode()).hexdigest()[:16],
            family=family,
            template=f"{self.environment}/{self.name}",
            split=split,
            prompt=self.prompt,
            files={CARD: card},
            checks=NamedChecks(grader=GRADER),
        )


def is_heldout(card: Card, one_in: int) -> bool:
    """True for one in so many tasks, by the hash of their names: equal names are on the same side."""
    digest = hashlib.sha256(f"{card.environment}\0{card.name}".encode()).digest()
    return int.from_bytes(digest[:8]) % one_in == 0


def index_of(task: Task, family: str) -> int:
    """The index of ``task`` in its environment. ``ValueError`` for a task that is not the adapter's."""
    if task.family != family or CARD not in task.files:
        raise ValueError(f"task {task.task_id} is of the family {task.family!r}: its environment is not {family!r}")
    return int(json.loads(task.files[CARD])["index"])


async def leave_outcome(sandbox: Sandbox, value: float, parts: Mapping[str, float]) -> None:
    """Write an episode's outcome for :class:`OutcomeGrader`.

    Raises :class:`~etude.errors.SandboxError` for a reward that is no finite number: the environment is broken.
    """
    wrong = {name: number for name, number in {"reward": value, **parts}.items() if not math.isfinite(number)}
    if wrong:
        raise SandboxError(f"the environment gave {wrong}: expected finite numbers; repair its rewards")
    await sandbox.write_file(OUTCOME, json.dumps({"value": value, "parts": dict(parts)}))


class OutcomeGrader:
    """Takes the reward that the environment gave, any finite number; implements :class:`~etude.protocols.Grader`."""

    def __init__(self, options: Section, context: GraderContext) -> None:
        """There is nothing to choose."""

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Read the outcome that the harness wrote. Raises :class:`~etude.errors.SandboxError` where there is none."""
        text = await sandbox.read_file(OUTCOME)
        if text is None:
            raise SandboxError(f"there is no {OUTCOME}: the environment's harness did not come to its end here")
        outcome = json.loads(text)
        return Grade(value=outcome["value"], parts=outcome["parts"])

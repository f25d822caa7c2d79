"""The shared part of third-party environments: a task's card, and its outcome from harness to grader.

A third-party environment has its own state and reward, which the model cannot reach. Its sandbox here contains only a
card that identifies the task and, at the end, the outcome. No command ever runs in it, so only the adapter can write
there.
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
"""Files of a sandbox: the card of the task, and its outcome."""
GRADER = "outcome"
"""The grader's name, a row of ``config/tasks.py:GRADERS``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One task of a third-party environment."""

    environment: str
    """The environment's own name."""
    index: int
    """Index of the task."""
    name: str
    """The environment's name of the task."""
    prompt: str
    """The beginning of the model's first message, as far as the environment defines it."""

    def task(self, family: str, split: Split) -> Task:
        """The card as a task; the environment itself grades it."""
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
    """True for one in ``one_in`` tasks, by the hash of their names: equal names are on the same side."""
    digest = hashlib.sha256(f"{card.environment}\0{card.name}".encode()).digest()
    return int.from_bytes(digest[:8]) % one_in == 0


def index_of(task: Task, family: str) -> int:
    """The index of ``task`` in its environment. Raises ``ValueError`` for a task of another family."""
    if task.family != family or CARD not in task.files:
        raise ValueError(f"task {task.task_id} is of the family {task.family!r}: its environment is not {family!r}")
    return int(json.loads(task.files[CARD])["index"])


async def leave_outcome(sandbox: Sandbox, value: float, parts: Mapping[str, float]) -> None:
    """Write an episode's outcome for :class:`OutcomeGrader`.

    Raises :class:`~etude.errors.SandboxError` for a reward that is not finite: the environment is broken.
    """
    wrong = {name: number for name, number in {"reward": value, **parts}.items() if not math.isfinite(number)}
    if wrong:
        raise SandboxError(f"the environment gave {wrong}: expected finite numbers; repair its rewards")
    await sandbox.write_file(OUTCOME, json.dumps({"value": value, "parts": dict(parts)}))


class OutcomeGrader:
    """Takes the reward that the environment gave, any finite number; implements :class:`~etude.protocols.Grader`."""

    def __init__(self, options: Section, context: GraderContext) -> None:
        """Both arguments are unused: there are no options."""

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Read the outcome that the harness wrote. Raises :class:`~etude.errors.SandboxError` if there is none."""
        text = await sandbox.read_file(OUTCOME)
        if text is None:
            raise SandboxError(f"there is no {OUTCOME}: the environment's harness did not come to its end here")
        outcome = json.loads(text)
        return Grade(value=outcome["value"], parts=outcome["parts"])

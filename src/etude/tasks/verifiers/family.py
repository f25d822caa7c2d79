"""The tasks of an environment of the ``verifiers`` package, ``tasks.family = "verifiers"``.

    étude's task ──▶ VerifiersHarness.run ──▶ process with verifiers ──▶ its agent ──OpenAI──▶ our gateway
                                                        └── reward ──▶ outcome ──▶ OutcomeGrader.grade

Tasks, agent and rewards are those of the environment, unchanged. Owns the hold-out of its tasks;
:mod:`etude.tasks.verifiers.process` owns the process.
"""

from etude.config.tasks import VerifiersOptions
from etude.protocols import FamilyContext
from etude.tasks.outcomes import is_heldout
from etude.tasks.verifiers.process import EnvironmentCommand, list_tasks
from etude.types import Split, Task

FAMILY = "verifiers"


class VerifiersTasks:
    """The tasks of one environment; implements :class:`~etude.protocols.TaskFamily`."""

    def __init__(self, options: VerifiersOptions, context: FamilyContext) -> None:
        """List the environment's tasks in a short-lived process.

        Raises :class:`~etude.errors.ConfigError` for an environment that cannot be opened.
        """
        folder = str(context.folder) if context.folder.name else ""
        cards = list_tasks(EnvironmentCommand.of(options, folder))
        self._cards = {
            split: [card for card in cards if is_heldout(card, context.heldout_every) == (split is Split.HELDOUT)]
            for split in Split
        }

    def size(self, split: Split) -> int | None:
        """Number of tasks of a split."""
        return len(self._cards[split])

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split."""
        return self._cards[split][index].task(FAMILY, split)

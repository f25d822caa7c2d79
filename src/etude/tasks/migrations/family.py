"""The database-migration family: a real PostgreSQL with real rows, a request, and one file of SQL to write.

    template = kind + variant        such as "unique: latest"; whole templates are held out
    instance = template + names + rows the agent sees + rows it does not

The agent has a running server and a database with the rows that it may see. Its ``migration.sql`` is graded on a
database with other rows that have the same irregularities, by queries whose answers are computed here in Python
(:mod:`etude.rewards.graders.queries`): a migration that fits only the seen rows fails.

About one in n variants of a kind is held out. The choice is by hash, so it is the same for every seed. No two variants
request the same, so a held-out answer is never the answer of a training task, whatever the names.

Owns the split and the prompts. Does not start databases (:mod:`etude.sandboxes.services`).
"""

import hashlib
from collections.abc import Sequence
from random import Random

import orjson

from etude.config.section import Section
from etude.protocols import FamilyContext
from etude.sandbox_spec import EnvironmentSpec, Service, ServiceKind
from etude.tasks.heldout import HeldoutTasks
from etude.tasks.migrations import columns, tables
from etude.tasks.migrations.problems import MigrationKind, MigrationProblem, inserts, replace_rows
from etude.types import QueryChecks, Split, Task

KINDS: tuple[MigrationKind, ...] = (*columns.KINDS, *tables.KINDS)
PATH = "migration.sql"
"""The file that the agent writes."""
RULES = (
    f"The PostgreSQL database is up: psql needs no arguments. Try what you like in it. Leave one SQL file, {PATH}. It "
    "is sent to a fresh copy of this database, with other rows of the same sort, as one script in one transaction, by "
    "the owner of the tables, who is no superuser; commands of psql itself, \\copy and the like, are not understood. "
    "What it leaves must be ordinary tables, without triggers, rules or policies. Rows that the request does not "
    "mention stay as they are."
)


class MigrationFamily:
    """An endless stream of migration tasks; implements :class:`~etude.protocols.TaskFamily`."""

    @classmethod
    def open(cls, options: Section, context: FamilyContext) -> "MigrationFamily":
        """The family of a recipe."""
        return cls(seed=context.seed, heldout_every=context.heldout_every)

    def __init__(self, *, seed: int, heldout_every: int = 3) -> None:
        """About one in ``heldout_every`` variants of each kind is held out; at least one, never all."""
        if heldout_every < 2:
            raise ValueError(f"heldout_every={heldout_every}: with fewer than 2 nothing would be left to train on")
        self._seed = seed
        heldout = {kind.name: choose_heldout(kind, heldout_every) for kind in KINDS}
        self._choices = {
            (kind.name, split): [v for v in kind.variants if (v in heldout[kind.name]) == (split is Split.HELDOUT)]
            for kind in KINDS
            for split in Split
        }
        chosen = [(kind, variant) for kind in KINDS for variant in self.variants(kind, Split.HELDOUT)]
        self._heldout_tasks = HeldoutTasks(chosen, lambda of, rng: _drawn(*of, Split.HELDOUT, rng))

    def variants(self, kind: MigrationKind, split: Split) -> Sequence[str]:
        """The variants of one kind on one side of the hold-out."""
        return tuple(self._choices[kind.name, split])

    def size(self, split: Split) -> int | None:
        """None: the supply of tasks is unlimited."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split; deterministic in the seed (training) or fixed (held out)."""
        if split is Split.HELDOUT:
            return self._heldout_tasks.task(index)
        rng = Random(f"migration|{self._seed}|{split}|{index}")
        kind = rng.choice(KINDS)
        return _drawn(kind, rng.choice(self.variants(kind, split)), split, rng)


def _drawn(kind: MigrationKind, variant: str, split: Split, rng: Random) -> Task:
    return migration_task(kind.write(variant, rng), f"{kind.name}: {variant}", split)


def migration_task(problem: MigrationProblem, template: str, split: Split) -> Task:
    """A problem as a task."""
    setup = f"{problem.schema}\n{inserts(problem.seen)}\n"
    identity = orjson.dumps([problem.request, problem.reference, setup])
    return Task(
        task_id=hashlib.sha256(identity).hexdigest()[:16],
        family="migrations",
        template=template,
        split=split,
        prompt=f"{problem.request}\n\n{RULES}",
        files={},
        checks=QueryChecks(path=PATH, queries=problem.queries, unseen=replace_rows(problem.unseen)),
        environment=EnvironmentSpec(services=(Service(kind=ServiceKind.POSTGRES, setup=setup),)),
    )


def choose_heldout(kind: MigrationKind, one_in: int) -> frozenset[str]:
    """Choose the held-out variants of a kind in the order of their hashes; at least one variant stays for training."""
    ordered = sorted(kind.variants, key=lambda variant: hashlib.sha256(f"{kind.name}|{variant}".encode()).digest())
    return frozenset(ordered[: min(max(1, len(ordered) // one_in), len(ordered) - 1)])

"""The tables, defined by their migrations: one schema for all databases.

Owns the columns and the migration of a ledger, or of another set of tables, from an older étude: only forward, version
by version, each in its own transaction. Does not own the meaning of rows (:mod:`etude.ledger.states`) or their changes
(:mod:`etude.ledger.changes`). A released migration is never edited: the next one corrects it.

Types have SQLite's names: INTEGER with 64 bits, REAL with 64, TEXT, BLOB.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from etude.errors import RunFolderError
from etude.ledger.database import Database

FIRST = 2
"""The oldest version that can be migrated."""

MIGRATIONS: Mapping[int, tuple[str, ...]] = {
    FIRST: (
        """
        CREATE TABLE steps (
            step INTEGER PRIMARY KEY,           -- from 1
            state TEXT NOT NULL                 -- states.StepState
        )
        """,
        """
        CREATE TABLE groups (
            purpose TEXT NOT NULL,              -- 'train', or the label of an evaluation
            group_index INTEGER NOT NULL,       -- admission order within the purpose, from 0
            task_id TEXT NOT NULL,
            task BLOB NOT NULL,
            size INTEGER NOT NULL,
            admitted_version INTEGER NOT NULL,
            state TEXT NOT NULL,                -- states.GroupState
            reason TEXT NOT NULL DEFAULT '',    -- why it was dropped
            step INTEGER REFERENCES steps,      -- the optimiser step that claimed it
            PRIMARY KEY (purpose, group_index)
        )
        """,
        "CREATE UNIQUE INDEX trained_once ON groups (task_id) WHERE purpose = 'train'",
        "CREATE INDEX groups_by_state ON groups (purpose, state, group_index)",
        "CREATE INDEX groups_by_step ON groups (step) WHERE step IS NOT NULL",
        """
        CREATE TABLE rollouts (                 -- ended ones only; what is in flight is implied by what is missing
            rollout_id TEXT PRIMARY KEY,
            purpose TEXT NOT NULL,
            group_index INTEGER NOT NULL,
            slot INTEGER NOT NULL,
            attempt INTEGER NOT NULL,
            status TEXT NOT NULL,               -- types.RolloutStatus
            reward REAL,
            reason TEXT NOT NULL,
            record BLOB NOT NULL,               -- records.encode_rollout
            UNIQUE (purpose, group_index, slot, attempt),
            FOREIGN KEY (purpose, group_index) REFERENCES groups
        )
        """,
        "CREATE INDEX rollouts_by_status ON rollouts (purpose, status, group_index, slot, reward)",
        """
        CREATE TABLE facts (
            key TEXT PRIMARY KEY,
            value TEXT NOT NULL
        )
        """,
    ),
    3: (  # slots that have no attempts left
        """
        CREATE TABLE lost_slots (
            purpose TEXT NOT NULL,
            group_index INTEGER NOT NULL,
            slot INTEGER NOT NULL,
            reason TEXT NOT NULL,
            PRIMARY KEY (purpose, group_index, slot),
            FOREIGN KEY (purpose, group_index) REFERENCES groups
        )
        """,
    ),
    4: (  # exclusive rights of processes
        """
        CREATE TABLE leases (                   -- leases.Lease
            name TEXT PRIMARY KEY,
            holder TEXT NOT NULL,
            token INTEGER NOT NULL,
            beats INTEGER NOT NULL
        )
        """,
        # The lease under which its slots are filled:
        "ALTER TABLE groups ADD COLUMN seat TEXT NOT NULL DEFAULT ''",
    ),
    5: (  # how far the training data was drawn, and how much of it is settled
        # Position of its task in the training data; for an older group at least its index, since each took a draw.
        "ALTER TABLE groups ADD COLUMN position INTEGER",
        "UPDATE groups SET position = group_index WHERE purpose = 'train'",
        """
        CREATE TABLE cursors (
            purpose TEXT PRIMARY KEY,
            drawn INTEGER NOT NULL,             -- position of the next draw
            committed INTEGER NOT NULL          -- all before it was consumed, dropped or passed over
        )
        """,
        """
        INSERT INTO cursors (purpose, drawn, committed)
            SELECT 'train', coalesce(max(CAST(value AS INTEGER)), 0), 0 FROM facts WHERE key = 'rollouts.next-task'
        """,
        "DELETE FROM facts WHERE key = 'rollouts.next-task'",
    ),
    6: (  # the searchable values of rollouts, without the records, which are nearly all of a ledger's bytes
        """
        CREATE TABLE catalogue (
            rollout_id TEXT PRIMARY KEY REFERENCES rollouts,
            purpose TEXT NOT NULL,              -- from here to reason as in rollouts
            group_index INTEGER NOT NULL,
            slot INTEGER NOT NULL,
            attempt INTEGER NOT NULL,
            status TEXT NOT NULL,
            reward REAL,
            reason TEXT NOT NULL,
            disposition TEXT,                   -- types.Disposition; NULL where cheating was not looked for
            cause TEXT NOT NULL DEFAULT '',     -- what decided that
            turns INTEGER,                      -- from here on NULL where an older étude recorded it
            summaries INTEGER,
            hints INTEGER,
            prompt_tokens INTEGER,              -- of all turns, what they share counted each time
            sampled_tokens INTEGER,
            first_version INTEGER,              -- oldest and newest weight version that sampled some, NULL: none did
            last_version INTEGER,
            seconds REAL,
            UNIQUE (purpose, group_index, slot, attempt)
        )
        """,
        """
        INSERT INTO catalogue (rollout_id, purpose, group_index, slot, attempt, status, reward, reason)
            SELECT rollout_id, purpose, group_index, slot, attempt, status, reward, reason FROM rollouts
        """,
    ),
    7: (  # a task is admitted once per epoch, not once per run
        "ALTER TABLE groups ADD COLUMN epoch INTEGER NOT NULL DEFAULT 1",
        "DROP INDEX trained_once",
        "CREATE UNIQUE INDEX trained_once ON groups (task_id, epoch) WHERE purpose = 'train'",
    ),
    8: (  # tasks have unequal probabilities: a group's weight corrects the estimate for that
        "ALTER TABLE groups ADD COLUMN weight REAL NOT NULL DEFAULT 1",
    ),
    9: (  # turns are objects beside the ledger; NULL if they are in the record
        "ALTER TABLE rollouts ADD COLUMN turns_digest TEXT",
        "ALTER TABLE rollouts ADD COLUMN turns_bytes INTEGER",
        "CREATE INDEX rollouts_by_turns ON rollouts (turns_digest) WHERE turns_digest IS NOT NULL",
    ),
    10: (  # sessions of users: each is admitted once and has an observation beside its rollout
        "CREATE UNIQUE INDEX live_once ON groups (task_id) WHERE purpose = 'live'",
        """
        CREATE TABLE observations (
            session_id TEXT PRIMARY KEY,        -- task_id of its group; where that is not dropped its rollout's id, too
            group_index INTEGER NOT NULL,       -- of purpose 'live'
            user_id TEXT NOT NULL,              -- a pseudonym
            day INTEGER NOT NULL,
            record BLOB NOT NULL                -- records.encode_observed
        )
        """,
        "CREATE INDEX observations_by_group ON observations (group_index)",
        "CREATE INDEX observations_by_user ON observations (user_id, day)",
    ),
}
"""Version → the statements that migrate from the previous version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """One set of tables in its own database."""

    noun: str
    """Its name in messages."""
    mark: bytes
    """Four bytes that identify an SQLite file of this schema, so that a foreign database is never written to."""
    migrations: Mapping[int, tuple[str, ...]]
    """Version → the statements that migrate from the previous version."""

    @property
    def first(self) -> int:
        """The oldest version that can be migrated."""
        return min(self.migrations)

    @property
    def newest(self) -> int:
        """The version that this étude reads and writes."""
        return max(self.migrations)


LEDGER = Schema(noun="ledger", mark=b"etud", migrations=MIGRATIONS)
"""The ledger of a run."""
NEWEST = LEDGER.newest
"""The version of a ledger that this étude reads and writes."""


def upgrade(database: Database, schema: Schema = LEDGER) -> None:
    """Migrate the tables to the newest version; several processes may do so at once.

    Raises :class:`~etude.errors.RunFolderError` for tables that are too old or from a newer étude, and leaves them
    unchanged.
    """
    if _checked(database, schema) == schema.newest:
        return
    for number, statements in sorted(schema.migrations.items()):
        try:
            database.begin()
            if _checked(database, schema) < number:
                for statement in statements:
                    database.execute(statement)
                database.set_version(number)
        except BaseException:
            database.rollback()
            raise
        database.commit()


def check_newest(database: Database, schema: Schema = LEDGER) -> None:
    """Raise :class:`~etude.errors.RunFolderError` unless the tables have the newest version; change nothing."""
    version = _checked(database, schema)
    if version < schema.newest:
        raise RunFolderError(
            f"{database.name!r} is a {schema.noun} of version {version}, which an older étude wrote; this one reads "
            f"{schema.newest}: look into it with the étude that wrote it, or bring it forward with "
            f"`etude run --resume RUN`"
        )


def _checked(database: Database, schema: Schema) -> int:
    """The version of the tables. Raises :class:`~etude.errors.RunFolderError` if it cannot be migrated."""
    version = database.version()
    if version > schema.newest or 0 < version < schema.first:
        raise RunFolderError(
            f"{database.name!r} is a {schema.noun} of version {version}, this étude reads {schema.first} to "
            f"{schema.newest}: "
            f"use the étude that wrote it, or start a new run folder"
        )
    return version

"""The tables of the feedback store: sessions, their turns, signals, counts. One schema for both databases.

Migrations are numbered and never edited once released, like the ledger's (:mod:`etude.ledger.schema`).
"""

from etude.ledger.schema import Schema

FEEDBACK = Schema(
    noun="feedback store",
    mark=b"etuf",
    migrations={
        1: (
            """
            CREATE TABLE sessions (                 -- types.LiveSession
                session_id TEXT PRIMARY KEY,
                owner TEXT NOT NULL,                -- id of the production key
                name TEXT NOT NULL,                 -- the product's own; it may use one again
                pseudonym TEXT NOT NULL,            -- of the user
                template TEXT NOT NULL,
                region TEXT NOT NULL,
                arm TEXT NOT NULL,
                gateway TEXT NOT NULL,              -- process that has it open
                opened_at REAL NOT NULL,
                used_at REAL NOT NULL,              -- when its newest turn was kept
                ended_at REAL,
                closed_at REAL,                     -- its window is over: signals are late from here on
                taken_at REAL,                      -- it was handed on, for good
                result TEXT NOT NULL DEFAULT '',    -- what became of it then
                turns INTEGER NOT NULL,
                first_version INTEGER,
                last_version INTEGER
            )
            """,
            "CREATE INDEX sessions_by_name ON sessions (owner, name, opened_at)",
            "CREATE INDEX sessions_open ON sessions (gateway) WHERE ended_at IS NULL",
            "CREATE INDEX sessions_ended ON sessions (ended_at, session_id) WHERE closed_at IS NULL",
            """
            CREATE INDEX sessions_closed ON sessions (ended_at, session_id)
            WHERE closed_at IS NOT NULL AND taken_at IS NULL
            """,
            """
            CREATE TABLE turns (                    -- join.LiveTurn
                session_id TEXT NOT NULL REFERENCES sessions,
                turn INTEGER NOT NULL,
                completion TEXT NOT NULL,
                follows INTEGER,
                shared INTEGER NOT NULL,            -- tokens of that turn that the record goes without
                message TEXT NOT NULL,
                record BLOB NOT NULL,               -- turns.encode_turn
                PRIMARY KEY (session_id, turn)
            )
            """,
            "CREATE INDEX turns_by_completion ON turns (completion)",
            """
            CREATE TABLE signals (                  -- types.Signal
                owner TEXT NOT NULL,
                event_id TEXT NOT NULL,
                session_id TEXT,                    -- NULL: its session, or its turn, has not come yet
                name TEXT NOT NULL,                 -- the session as the event names it
                completion TEXT NOT NULL,           -- or the answer
                kind TEXT NOT NULL,
                value REAL NOT NULL,
                turn INTEGER,
                span_start INTEGER,
                span_end INTEGER,
                pseudonym TEXT NOT NULL,            -- empty: the session's
                sent_at REAL NOT NULL,
                received_at REAL NOT NULL,
                late INTEGER NOT NULL,              -- 1: its session's window was over
                PRIMARY KEY (owner, event_id)
            )
            """,
            "CREATE INDEX signals_by_session ON signals (session_id) WHERE session_id IS NOT NULL",
            "CREATE INDEX signals_without_session ON signals (owner, name) WHERE session_id IS NULL",
            "CREATE INDEX signals_without_turn ON signals (owner, completion) WHERE session_id IS NULL",
            "CREATE TABLE counts (name TEXT PRIMARY KEY, number INTEGER NOT NULL)",
        ),
        2: (  # privacy rights of users
            "CREATE INDEX sessions_by_user ON sessions (pseudonym)",
            """
            CREATE TABLE deletions (                -- privacy.DeletionRequest
                request_id INTEGER PRIMARY KEY,
                pseudonym TEXT NOT NULL,
                session_id TEXT NOT NULL,
                requested_at REAL NOT NULL,
                requested_by TEXT NOT NULL,
                done_at REAL,
                sessions INTEGER NOT NULL,
                versions TEXT NOT NULL              -- numbers, ascending
            )
            """,
            """
            CREATE TABLE audit (                    -- privacy.AuditEntry
                entry INTEGER PRIMARY KEY,
                at REAL NOT NULL,
                actor TEXT NOT NULL,
                action TEXT NOT NULL,
                subject TEXT NOT NULL,
                detail TEXT NOT NULL
            )
            """,
        ),
    },
)
"""The feedback store of a run."""

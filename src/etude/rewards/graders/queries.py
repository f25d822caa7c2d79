"""The grader of database migrations: queries after the migration must return the expected rows or errors.

    agent's sandbox ──migration.sql, as text──▶ a new sandbox ── unseen rows ── migration ── questions

Only the migration is copied. It is applied to a fresh copy of the database, with rows that the agent has not seen, as
the role that owns the database and has no other rights; queries are run by a role that did not exist when it ran. Names
in a query refer to PostgreSQL's own functions, operators, casts and catalogues, never to objects that the migration
made: tables are named with their schema, settings of the database are cleared and pinned, and pinned again after each
setup, which may fire triggers. Each query has its own connection and transaction, which is rolled back.

Owns the order of the steps and the verdict. :mod:`etude.rewards.graders.postgres_client` has the protocol,
:mod:`etude.sandboxes.services` the databases, the task the queries.
"""

import inspect
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etude.errors import SandboxError
from etude.protocols import Grade, HarnessResult, Sandbox
from etude.rewards.graders import postgres_client
from etude.rewards.graders.answers import SUBMITTED
from etude.rewards.graders.postgres_client import LOST, QueryStep
from etude.sandbox_spec import EnvironmentSpec, SandboxSpec
from etude.sandboxes.function_calls import same_value
from etude.sandboxes.services import DATABASE, OWNER, SOCKETS, SUPERUSER, ServicedSandboxes, sandbox_spec
from etude.types import Json, Query, QueryChecks, Task

MIGRATION_CHARACTERS = 1 << 18
"""Limit of a migration, a hundred times a usual one; a longer one is not applied."""
MIGRATION_TIMEOUT_S = 30.0
"""Time limit, a thousand times that of a correct migration."""
QUESTION_TIMEOUT_S = 5.0
GRACE_S = 20.0
"""Time beyond the steps' own deadlines, for the client to start and to write its answers."""
ATTEMPTS = 2
"""Number of tries: a server that crashes once may have another cause; if it crashes twice, the migration is the
cause.
"""
SERVER_GONE = frozenset({LOST, "57P01", "57P02", "57P03"})
"""States that mean that no server answers: a broken connection, a shutdown, a crash, a recovery."""

OWNER_SETTINGS = {"statement_timeout": f"{MIGRATION_TIMEOUT_S:.0f}s", "client_min_messages": "error"}
PINNED = {
    "search_path": "pg_catalog, pg_temp",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "client_min_messages": "error",
    "statement_timeout": f"{QUESTION_TIMEOUT_S:.0f}s",
}
"""Settings of the querying session; they override those of the database."""
PIN = "SELECT " + ", ".join(f"pg_catalog.set_config('{name}', '{value}', true)" for name, value in PINNED.items())
"""Pin again after SQL that may have run functions of the migration, which can change settings."""
NOW = "SET CONSTRAINTS ALL IMMEDIATE"
"""Check deferred constraints immediately."""


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """Result of one attempt."""

    applied: bool
    right: int
    """Queries with the correct answer."""
    gone: bool
    """True if the server crashed during the attempt."""


class QueryGrader:
    """Rewards 1 for a submitted migration after which every query has the correct answer.

    Implements :class:`~etude.protocols.Grader` for tasks with :class:`~etude.types.QueryChecks`.
    """

    def __init__(
        self, sandboxes: ServicedSandboxes, *, spec_of: Callable[[EnvironmentSpec], SandboxSpec] = sandbox_spec
    ) -> None:
        """The caller closes ``sandboxes``; ``spec_of`` resolves the images of sandboxes."""
        self._sandboxes = sandboxes
        self._spec_of = spec_of

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Apply the migration to a fresh database and run the queries: 1.0 if the agent submitted and all are right,
        else 0.0.

        Parts: ``applied``, 0 or 1; ``queries_right``, the share of queries with the right result, 0 if the migration
        was not applied; ``submitted``. A migration that is missing, fails, hangs, leaves a transaction open or crashes
        the server is not applied. Raises :class:`~etude.errors.SandboxError` if no database starts, and like
        ``sandboxes``; ``ValueError`` for a task without an environment or with other checks.
        """
        checks, environment = task.checks, task.environment
        if not isinstance(checks, QueryChecks) or environment is None or not (questions := len(checks.queries)):
            raise ValueError(f"task {task.task_id} of family {task.family!r} has no database to ask")
        try:
            text = await sandbox.read_file(checks.path)
        except ValueError:
            text = None  # a folder, a link out of the sandbox, a device
        verdict = MigrationResult(False, 0, False)
        if text is not None and len(text) <= MIGRATION_CHARACTERS and "\0" not in text:
            verdict = await self._judge(checks, environment, text)
        submitted = result.reason == SUBMITTED
        return Grade(
            value=float(submitted and verdict.applied and verdict.right == questions),
            parts={
                "applied": float(verdict.applied),
                "queries_right": verdict.right / questions,
                "submitted": float(submitted),
            },
        )

    async def _judge(self, checks: QueryChecks, environment: EnvironmentSpec, migration: str) -> MigrationResult:
        steps = migration_steps(checks, migration, f"asker_{secrets.token_hex(8)}")
        for _ in range(ATTEMPTS):
            fresh = await self._sandboxes.create({}, self._spec_of(environment), environment.services)
            try:
                check_ours(await _answers(fresh, steps_before(checks)))
                verdict = judge(checks, await _answers(fresh, steps))
            finally:
                await fresh.close()
            if not verdict.gone:
                break
        return verdict


def steps_before(checks: QueryChecks) -> list[QueryStep]:
    """The steps before the migration, on a fresh database: replace its rows by unseen ones, and check that the server
    can create roles, so that a later failure is attributable to the migration.
    """
    settings = PINNED | {"search_path": "public", "statement_timeout": "0"}
    role = [_role("trial"), "DROP ROLE trial"]
    return [
        _step(OWNER, DATABASE, settings, [checks.unseen], 2 * MIGRATION_TIMEOUT_S),
        _step(SUPERUSER, "postgres", PINNED, role, MIGRATION_TIMEOUT_S),
    ]


def _role(asker: str) -> str:
    return f"CREATE ROLE {asker} LOGIN BYPASSRLS IN ROLE pg_read_all_data, pg_write_all_data"


def migration_steps(checks: QueryChecks, migration: str, asker: str) -> list[QueryStep]:
    """The steps after :func:`steps_before`: the migration, the querying role, one step for each query."""
    return [
        _step(OWNER, DATABASE, OWNER_SETTINGS, [migration], MIGRATION_TIMEOUT_S),
        _step(
            SUPERUSER, "postgres", PINNED, [f"ALTER DATABASE {DATABASE} RESET ALL", _role(asker)], MIGRATION_TIMEOUT_S
        ),
        *(
            _step(asker, DATABASE, PINNED, _question(query), QUESTION_TIMEOUT_S, vital=False)
            for query in checks.queries
        ),
    ]


def check_ours(answers: Sequence[dict[str, Json]] | None) -> None:
    """Raise :class:`~etude.errors.SandboxError` unless :func:`steps_before` succeeded: no migration has run yet, so any
    fault is that of the sandbox or the task.
    """
    if not answers:
        raise SandboxError("a grading sandbox could not ask its database: is python3 in its base system?")
    if answers[0]["state"]:
        raise SandboxError(f"the unseen rows of a task were refused: {answers[0]['state']} {answers[0]['message']}")
    if role := next((answer for answer in answers[1:] if answer["state"]), None):
        raise SandboxError(f"no role to ask a database by: {role['state']} {role['message']}")


def judge(checks: QueryChecks, answers: Sequence[dict[str, Json]] | None) -> MigrationResult:
    """The result in the answers to :func:`migration_steps`; ``None`` stands for a client that died early.

    If the querying role can no longer be created, the server counts as crashed: a migration may have filled its disk.
    """
    gone = not answers or any(answer["state"] in SERVER_GONE for answer in answers)
    if not answers or gone or answers[0]["state"] or answers[0]["open"]:
        return MigrationResult(False, 0, gone)
    _, role, *answered = answers
    if role["state"]:
        return MigrationResult(False, 0, True)
    right = sum(is_right(query, answer) for query, answer in zip(checks.queries, answered, strict=True))
    return MigrationResult(True, right, False)


def is_right(query: Query, answer: dict[str, Json]) -> bool:
    """True if a query returned the expected rows or the expected error."""
    if query.fails_with:
        return answer["state"] == query.fails_with and answer["done"] == len(_question(query)) - 1
    rows: Json = [list(row) for row in query.rows]
    return not answer["state"] and not answer["cut"] and same_value(answer["rows"], rows)


def _question(query: Query) -> list[str]:
    """The scripts of one query; the last one is the query itself."""
    setup = [f"{query.setup}\n;{NOW};{PIN}"] if query.setup else []
    return ["BEGIN", *setup, f"{query.sql}\n;{NOW}"]


def _step(
    user: str, database: str, settings: dict[str, str], scripts: list[str], timeout_s: float, *, vital: bool = True
) -> QueryStep:
    return {
        "user": user,
        "database": database,
        "settings": settings,
        "scripts": scripts,
        "timeout_s": timeout_s,
        "vital": vital,
    }


async def _answers(sandbox: Sandbox, steps: Sequence[QueryStep]) -> list[dict[str, Json]] | None:
    """The results of the steps, or ``None`` if the client in the sandbox ended before it wrote all of them."""
    file = f".answers-{secrets.token_hex(8)}"
    timeout_s = sum(step["timeout_s"] for step in steps) + GRACE_S
    command = ["python3", "-I", "-S", "-c", inspect.getsource(postgres_client), SOCKETS, file]
    await sandbox.exec(command, stdin=json.dumps(steps), timeout_s=timeout_s)
    return read_answers(await sandbox.read_file(file))


def read_answers(written: str | None) -> list[dict[str, Json]] | None:
    """Parse the results that a client wrote; ``None`` if there are none, or if they are unreadable: truncated, as by a
    full disk, or JSON nested a thousand levels deep.
    """
    try:
        return None if written is None else json.loads(written)
    except (ValueError, RecursionError):
        return None

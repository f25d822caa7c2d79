"""Grading migrations: attempts by SQL to deceive the later queries all fail."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from databases import ask, temporary_postgres, verdict
from etude.errors import SandboxError
from etude.protocols import Grade, HarnessResult
from etude.rewards.graders.postgres_client import LATE, LOST
from etude.rewards.graders.queries import (
    MigrationResult,
    QueryGrader,
    check_ours,
    is_right,
    judge,
    migration_steps,
    read_answers,
)
from etude.sandbox_spec import SandboxLimits
from etude.sandboxes.local.provider import LocalSandboxes
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.services import ServicedSandboxes
from etude.tasks.migrations.columns import backfill, split_name
from etude.tasks.migrations.family import PATH, migration_task
from etude.tasks.migrations.problems import MigrationProblem, literal
from etude.tasks.migrations.tables import foreign_key, unique
from etude.types import Query, QueryChecks, Split

NAMES = split_name("first word", Random(3))
SUMS = backfill("sum", Random(3))
EMAILS = unique("oldest", Random(3))
KEYS = foreign_key("set null", Random(3))
PEOPLE, NOTES = EMAILS.seen
PARENT, CHILD = KEYS.seen
TABLE = next(iter(NAMES.seen))

SHADOWS = """
CREATE FUNCTION public.yes(anyelement, anyelement) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true';
CREATE FUNCTION public.yes(text, text) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true';
CREATE OPERATOR public.= (leftarg = text, rightarg = text, function = public.yes);
CREATE FUNCTION public.format_type(oid, integer) RETURNS text LANGUAGE sql AS $$ SELECT 'text'::text $$;
CREATE FUNCTION public.one(bigint) RETURNS bigint LANGUAGE sql AS 'SELECT 0::bigint';
CREATE VIEW public.pg_attribute AS SELECT 'public.{table}'::regclass::oid AS attrelid, x AS attname,
    25::oid AS atttypid, -1 AS atttypmod, true AS attnotnull, 1 AS attnum, false AS attisdropped
    FROM (VALUES ('first_name'), ('last_name')) v(x);
CREATE VIEW public.pg_class AS SELECT * FROM pg_catalog.pg_class;
ALTER DATABASE app SET search_path = public, pg_catalog;
ALTER ROLE app SET search_path = public, pg_catalog;
""".replace("{table}", TABLE)
UNFINISHED = NAMES.mistakes[1]
"""Everything but the last step, which drops the old column."""

NOT_APPLIED = {
    "a shell command of psql": "\\! psql -h $PGHOST -U postgres -c 'ALTER ROLE app SUPERUSER'\n" + NAMES.reference,
    "another connection of psql": "\\connect app postgres\n" + NAMES.reference,
    "a program as a source": "CREATE TABLE t (l text); COPY t FROM PROGRAM 'id';" + NAMES.reference,
    "a program as a sink": f"COPY {TABLE} TO PROGRAM 'cat';" + NAMES.reference,
    "a file as a sink": f"COPY {TABLE} TO '/tmp/answers';" + NAMES.reference,
    "rows from the client": f"COPY {TABLE} FROM STDIN;\n" + NAMES.reference,
    "a file of the server": "SELECT pg_read_file('/etc/passwd');" + NAMES.reference,
    "a large object as a file": "SELECT lo_export(lo_create(0), '/tmp/answers');" + NAMES.reference,
    "settings of the server": "COMMIT; ALTER SYSTEM SET search_path = 'public';",
    "rights": "ALTER ROLE app SUPERUSER;" + NAMES.reference,
    "the superuser's role": "SET ROLE postgres;" + NAMES.reference,
    "the superuser's session": "SET SESSION AUTHORIZATION postgres;" + NAMES.reference,
    "a role like the asker's": "CREATE ROLE asker SUPERUSER LOGIN;" + NAMES.reference,
    "a connection back": "CREATE EXTENSION dblink;" + NAMES.reference,
    "files as tables": "CREATE EXTENSION file_fdw;" + NAMES.reference,
    "an untrusted language": "CREATE FUNCTION f() RETURNS int LANGUAGE c AS 'libc.so.6', 'getpid';" + NAMES.reference,
    "an event trigger": "CREATE FUNCTION f() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END';"
    "CREATE EVENT TRIGGER t ON ddl_command_start EXECUTE FUNCTION f();" + NAMES.reference,
    "names of the server's own": "CREATE FUNCTION pg_catalog.f() RETURNS int LANGUAGE sql AS 'SELECT 1';"
    + NAMES.reference,
    "the catalogue itself": f"UPDATE pg_attribute SET attnotnull = true WHERE attrelid = '{TABLE}'::regclass;",
    "another's connections": "SELECT pg_terminate_backend(pid) FROM pg_stat_activity; SELECT 1/0;",
    "a transaction that is left open": "BEGIN;" + NAMES.reference,
    "a mistake at the end": NAMES.reference + "SELECT 1/0;",
}
WRONG_AFTER = {
    "nothing": (NAMES, ""),
    "shadows of functions, operators and catalogues": (NAMES, UNFINISHED + SHADOWS),
    "values of the rows that were seen": (
        NAMES,
        f"ALTER TABLE {TABLE} ADD first_name text NOT NULL DEFAULT '', ADD last_name text NOT NULL DEFAULT '';"
        + "".join(
            f"UPDATE {TABLE} SET first_name = 'Ada' WHERE full_name = {literal(row['full_name'])};"
            for row in NAMES.seen[TABLE]
        )
        + f"ALTER TABLE {TABLE} DROP full_name;",
    ),
    "a view where the table was": (
        NAMES,
        NAMES.reference + f"ALTER TABLE {TABLE} RENAME TO hidden; CREATE VIEW {TABLE} AS SELECT * FROM hidden;",
    ),
    "temporary tables": (
        NAMES,
        f"CREATE TEMP TABLE {TABLE} AS SELECT id, full_name AS first_name, '' AS last_name FROM public.{TABLE};",
    ),
    "a domain that looks like the type": (
        NAMES,
        'CREATE DOMAIN public."text" AS pg_catalog.text;' + NAMES.reference.replace(" text", ' public."text"'),
    ),
    "a policy that hides rows": (
        EMAILS,
        f"ALTER TABLE {PEOPLE} ENABLE ROW LEVEL SECURITY;"
        f"CREATE POLICY p ON {PEOPLE} USING (id IN (SELECT min(id) FROM {NOTES}));" + EMAILS.mistakes[1],
    ),
    "a trigger in place of a constraint": (
        EMAILS,
        EMAILS.mistakes[1]
        + "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        + f"IF EXISTS (SELECT FROM public.{PEOPLE} p WHERE p.email = NEW.email) "
        + "THEN RAISE unique_violation; END IF; RETURN NEW; END $$;"
        + f"CREATE TRIGGER t BEFORE INSERT ON {PEOPLE} FOR EACH ROW EXECUTE FUNCTION f();",
    ),
    "a trigger that changes where names are looked up": (
        EMAILS,
        EMAILS.mistakes[1]
        + "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        + "PERFORM set_config('search_path', 'public, pg_catalog', false); RETURN NEW; END $$;"
        + f"CREATE TRIGGER t BEFORE INSERT ON {PEOPLE} FOR EACH ROW EXECUTE FUNCTION f();"
        + "CREATE FUNCTION public.count() RETURNS bigint LANGUAGE sql AS 'SELECT 0::bigint';",
    ),
    "a default that raises the right error": (
        EMAILS,
        EMAILS.mistakes[1]
        + "CREATE FUNCTION f() RETURNS int LANGUAGE plpgsql AS $$ BEGIN IF current_setting('a.b', true) = '1' "
        + "THEN RAISE unique_violation; END IF; PERFORM set_config('a.b', '1', true); RETURN 1; END $$;"
        + f"ALTER TABLE {PEOPLE} ADD extra int; ALTER TABLE {PEOPLE} ALTER extra SET DEFAULT f();",
    ),
    "a rule that swallows rows": (
        EMAILS,
        EMAILS.reference + f"CREATE RULE r AS ON INSERT TO {PEOPLE} DO INSTEAD NOTHING;",
    ),
    "a constraint that waits for the end": (
        EMAILS,
        EMAILS.reference.replace("UNIQUE (email)", "UNIQUE (email) DEFERRABLE INITIALLY DEFERRED"),
    ),
    "a key that was never checked": (KEYS, KEYS.reference.splitlines()[-1].replace(";", " NOT VALID;")),
    "children that inherit": (
        KEYS,
        KEYS.reference + f"CREATE TABLE more () INHERITS ({CHILD});",
    ),
    "nobody else is let in": (SUMS, SUMS.reference + "ALTER DATABASE app CONNECTION LIMIT 0;"),
    "rows that do not fit into an answer": (
        NAMES,
        NAMES.reference + f"UPDATE {TABLE} SET last_name = repeat('x', 100000);",
    ),
    "everything is gone": (NAMES, "DROP OWNED BY app CASCADE;"),
}


@pytest.fixture(scope="module")
def server(postgresql: None) -> Iterator[Path]:
    with temporary_postgres() as folder:
        yield folder


def results(server: Path, problem: MigrationProblem, migration: str) -> tuple[MigrationResult, int]:
    """The verdict on a migration, and how many answers would be right."""
    task = migration_task(problem, "x", Split.TRAIN)
    assert task.environment is not None
    assert isinstance(task.checks, QueryChecks)
    ask(server, "ALTER DATABASE app CONNECTION LIMIT -1", database="postgres")
    return verdict(server, task.environment.services[0].setup, task.checks, migration), len(problem.queries)


@pytest.mark.parametrize("migration", NOT_APPLIED.values(), ids=NOT_APPLIED)
def test_what_its_role_may_not_do_is_not_applied(server: Path, migration: str) -> None:
    result, _ = results(server, NAMES, migration)
    assert not result.applied
    assert not result.right


@pytest.mark.parametrize(("problem", "migration"), WRONG_AFTER.values(), ids=WRONG_AFTER)
def test_what_only_looks_right_is_told_from_what_is(server: Path, problem: MigrationProblem, migration: str) -> None:
    result, question = results(server, problem, migration)
    assert result.applied
    assert result.right < question


@pytest.mark.parametrize(
    "settings",
    [
        "ALTER DATABASE app SET search_path = public, pg_catalog",
        "ALTER DATABASE app SET transform_null_equals = on",
        "ALTER DATABASE app SET DateStyle = 'German'",
        "ALTER DATABASE app SET default_transaction_read_only = on",
        "ALTER DATABASE app SET statement_timeout = 1",
        "ALTER DATABASE app SET role = 'app'",
        "SET search_path = public, pg_catalog; PREPARE q AS SELECT 1; CREATE TEMP TABLE pg_class (relname text)",
    ],
)
def test_settings_that_a_migration_leaves_do_not_change_the_answers(server: Path, settings: str) -> None:
    result, question = results(server, SUMS, f"{SUMS.reference}{settings};")
    assert result == MigrationResult(True, question, False)


def answered(state: str = "", rows: list[Any] | None = None, done: int = 2, **rest: Any) -> dict[str, Any]:
    return {"state": state, "message": "m", "rows": rows or [], "cut": False, "open": False, "done": done, **rest}


CHECKS = QueryChecks(
    path="m.sql",
    queries=(
        Query(sql="SELECT 1", rows=((1,),)),
        Query(sql="INSERT …", rows=(), fails_with="23505", setup="INSERT …"),
    ),
    unseen="INSERT …",
)
RIGHT = [answered(), answered(), answered(rows=[[1]]), answered("23505", done=2)]


def test_a_verdict_counts_the_right_answers() -> None:
    assert judge(CHECKS, RIGHT) == MigrationResult(True, 2, False)
    assert judge(CHECKS, [*RIGHT[:2], answered(rows=[[2]]), RIGHT[3]]) == MigrationResult(True, 1, False)
    assert judge(CHECKS, [*RIGHT[:2], answered(rows=[[True]]), RIGHT[3]]) == MigrationResult(True, 1, False)
    assert judge(CHECKS, [*RIGHT[:2], answered(rows=[[1]], cut=True), RIGHT[3]]) == MigrationResult(True, 1, False)


def test_an_error_of_the_setup_is_not_the_one_that_was_asked_for() -> None:
    refused = CHECKS.queries[1]
    assert is_right(refused, answered("23505", done=2))
    assert not is_right(refused, answered("23505", done=1))
    assert not is_right(refused, answered("23503", done=2))
    assert not is_right(refused, answered("", done=3))


@pytest.mark.parametrize("state", [LOST, "57P01", "57P02", "57P03"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_server_that_dies_under_a_migration_is_neither_applied_nor_ours(state: str, place: int) -> None:
    assert judge(CHECKS, [*RIGHT[:place], answered(state), *RIGHT[place + 1 :]]) == MigrationResult(False, 0, True)


def test_no_answer_at_all_is_a_server_that_died() -> None:
    assert judge(CHECKS, None) == judge(CHECKS, []) == MigrationResult(False, 0, True)


def test_answers_that_cannot_be_read_are_none() -> None:
    assert read_answers('[{"state": ""}]') == [{"state": ""}]
    nested = f'[{{"rows": {"[" * 100_000}{"]" * 100_000}}}]'
    assert read_answers(None) is read_answers('[{"state"') is read_answers(nested) is None


def test_a_migration_that_fails_or_is_unfinished_is_not_applied() -> None:
    assert judge(CHECKS, [answered("42601")]) == MigrationResult(False, 0, False)
    assert judge(CHECKS, [answered(LATE)]) == MigrationResult(False, 0, False)
    assert judge(CHECKS, [answered(open=True), *RIGHT[1:]]) == MigrationResult(False, 0, False)


def test_steps_of_ours_that_fail_are_no_verdict() -> None:
    with pytest.raises(SandboxError, match="unseen rows"):
        check_ours([answered("42P01")])
    with pytest.raises(SandboxError, match="python3"):
        check_ours(None)
    with pytest.raises(SandboxError, match="no role"):
        check_ours([answered(), answered("42501")])
    check_ours([answered(), answered()])


def test_what_should_be_answered_is_not_in_what_is_sent() -> None:
    checks = QueryChecks(path="m.sql", queries=(Query(sql="SELECT a FROM public.t", rows=(("secret",),)),))
    assert "secret" not in str(migration_steps(checks, "SELECT 1", "asker"))


@pytest.fixture(scope="module")
def graded(postgresql: None) -> Iterator[Callable[..., Grade]]:
    """A function that grades an agent's files in sandboxes; skips where there are none."""
    with asyncio.Runner() as runner:
        provider = NamespaceSandboxes()
        sandboxes = ServicedSandboxes(provider)
        try:
            if not runner.run(provider.capabilities()):
                pytest.skip("no sandboxes of namespaces on this machine")
            yield lambda files, **options: runner.run(_grade(provider, sandboxes, files, **options))
        finally:
            runner.run(sandboxes.close())


async def _grade(
    provider: NamespaceSandboxes,
    sandboxes: ServicedSandboxes,
    files: Mapping[str, str],
    *,
    reason: str = "submit",
    limits: SandboxLimits | None = None,
    command: str = "true",
) -> Grade:
    task = migration_task(NAMES, "x", Split.TRAIN)
    assert task.environment is not None
    task = replace(task, environment=replace(task.environment, limits=limits or task.environment.limits))
    agent = await provider.create(files)
    try:
        assert (await agent.exec(["sh", "-c", command])).exit_code == 0
        return await QueryGrader(sandboxes).grade(task, agent, HarnessResult(reason=reason, counts={}))
    finally:
        await agent.close()


def test_a_right_migration_is_rewarded_when_it_was_submitted(graded: Callable[..., Grade]) -> None:
    assert graded({PATH: NAMES.reference}) == Grade(
        value=1.0, parts={"applied": 1.0, "queries_right": 1.0, "submitted": 1.0}
    )
    assert graded({PATH: NAMES.reference}, reason="turns").value == 0.0


def test_a_wrong_migration_is_told_how_far_it_got(graded: Callable[..., Grade]) -> None:
    reward = graded({PATH: UNFINISHED})
    assert reward.value == 0.0
    assert reward.parts["applied"] == 1.0
    assert 0.5 < reward.parts["queries_right"] < 1.0


@pytest.mark.parametrize(
    ("files", "command"),
    [
        ({}, "true"),
        ({}, f"mkdir {PATH}"),
        ({}, f"ln -s /dev/zero {PATH}"),
        ({}, f"mkfifo {PATH}"),
        ({PATH: "\0" + NAMES.reference}, "true"),
        ({PATH: NAMES.reference + " " * (1 << 19)}, "true"),
        ({PATH: "\\! kill -9 -1\n" + NAMES.reference}, "true"),
    ],
    ids=["none", "a folder", "a device", "a pipe", "zeros", "too long", "a shell command"],
)
def test_what_is_no_migration_is_graded_as_bad(
    graded: Callable[..., Grade], files: Mapping[str, str], command: str
) -> None:
    reward = graded(files, command=command)
    assert reward == Grade(value=0.0, parts={"applied": 0.0, "queries_right": 0.0, "submitted": 1.0})


@pytest.mark.parametrize(
    "flood",
    [
        "CREATE TABLE flood AS SELECT repeat(md5(i::text), 30) FROM generate_series(1, 500000) i;",
        "SELECT length(string_agg(repeat('x', 1000), '')) FROM generate_series(1, 500000);",
    ],
    ids=["disk", "memory"],
)
def test_a_migration_that_takes_the_server_down_is_bad_work_and_not_our_trouble(
    graded: Callable[..., Grade], flood: str
) -> None:
    tight = SandboxLimits(disk_bytes=64 << 20, memory_bytes=160 << 20)
    assert graded({PATH: flood + NAMES.reference}, limits=tight).parts["applied"] == 0.0


def test_a_task_without_a_database_is_a_mistake() -> None:
    task = replace(migration_task(NAMES, "x", Split.TRAIN), environment=None)

    async def act() -> None:
        provider = LocalSandboxes(1)
        try:
            sandbox = await provider.create({})
            result = HarnessResult(reason="submit", counts={})
            with pytest.raises(ValueError, match="no database to ask"):
                await QueryGrader(ServicedSandboxes(provider)).grade(task, sandbox, result)
        finally:
            await provider.close()

    asyncio.run(act())

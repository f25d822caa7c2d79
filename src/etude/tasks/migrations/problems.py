"""A migration problem: tables with rows, a request, and the queries that decide whether a migration is right.

Queries use the server's own names and qualify tables with their schema, as :mod:`etude.rewards.graders.queries`
requires. Python computes the expected answers here from rows that the agent does not see; making a task needs no
database.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import TypeAlias, TypeVar

from etude.types import Json, Query

Value = TypeVar("Value")
Row: TypeAlias = Mapping[str, Json]
"""Column → value; dates and decimals are text."""
Rows: TypeAlias = Mapping[str, Sequence[Row]]
"""Table → rows."""

UNIQUE, FOREIGN, NOT_NULL, CHECKED, NO_LABEL = "23505", "23503", "23502", "23514", "22P02"
"""SQLSTATEs of the errors of constraints and types."""
PAIRS = (
    ("customers", "orders", "customer_id"),
    ("accounts", "payments", "account_id"),
    ("projects", "tickets", "project_id"),
    ("clinics", "visits", "clinic_id"),
    ("depots", "shipments", "depot_id"),
    ("schools", "courses", "school_id"),
)
"""A parent table, a child table, and the child's column with the parent id."""
PEOPLE = ("users", "members", "contacts", "employees", "patients", "authors")
THINGS = ("products", "parts", "books", "films", "rooms", "tools")
GIVEN_NAMES = ("Ada", "Alan", "Grace", "Edsger", "Barbara", "Donald", "Frances", "John", "Niklaus", "Radia", "Zoë")
FAMILY_NAMES = ("Lovelace", "Turing", "Hopper", "Dijkstra", "Liskov", "Knuth", "Allen", "O'Brien", "Wirth", "Müller")
NEW_ID = 9001
"""The id of a row that a query inserts; the ids of existing rows are lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationProblem:
    """One migration problem: its tables, request and queries."""

    request: str
    """Request to the agent: everything that the queries check, without instructions how to do it."""
    schema: str
    """SQL that creates the tables before the migration, without schema names."""
    seen: Rows
    """Rows of the agent's database."""
    unseen: Rows
    """Rows of the graded database: other rows with the same irregularities."""
    queries: tuple[Query, ...]
    reference: str
    """A right migration."""
    mistakes: tuple[str, ...]
    """Plausible wrong migrations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationKind:
    """A kind of migration; with one of its variants it is a template."""

    name: str
    variants: tuple[str, ...]
    """No two variants request the same."""
    write: Callable[[str, Random], MigrationProblem]
    """Makes an instance of a variant: names, rows, queries."""


def literal(value: Json) -> str:
    """A value as an SQL literal."""
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def inserts(rows: Rows) -> str:
    """SQL that fills empty tables in order; all rows of a table have the same columns."""
    statements = []
    for table, lines in rows.items():
        if lines:
            values = ",\n".join(f"({', '.join(literal(value) for value in line.values())})" for line in lines)
            statements.append(f"INSERT INTO {table} ({', '.join(lines[0])}) VALUES\n{values};")
    return "\n".join(statements)


def replace_rows(rows: Rows) -> str:
    """SQL that replaces the rows of tables by others."""
    return f"TRUNCATE {', '.join(rows)};\n{inserts(rows)}"


def expect_rows(table: str, columns: Sequence[str], rows: Sequence[Row]) -> Query:
    """Query that expects exactly these rows in a table, ordered by the first of these columns."""
    return Query(
        sql=f"SELECT {', '.join(columns)} FROM public.{table} ORDER BY {columns[0]}",
        rows=tuple(tuple(row[name] for name in columns) for row in rows),
    )


def expect_answer(sql: str, *rows: tuple[Json, ...], setup: str = "") -> Query:
    """Query with its expected answer."""
    return Query(sql=sql, rows=rows, setup=setup)


def expect_error(sql: str, state: str, setup: str = "") -> Query:
    """Statement that must fail."""
    return Query(sql=sql, rows=(), fails_with=state, setup=setup)


def expect_columns(table: str, *columns: tuple[str, str, bool]) -> Query:
    """Query that expects these columns in a table: name, type, whether a value is required."""
    names = ", ".join(literal(name) for name, _, _ in columns)
    return Query(
        sql="SELECT attname::text, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute "
        f"WHERE attrelid = 'public.{table}'::regclass AND attnum > 0 AND NOT attisdropped AND attname IN ({names}) "
        'ORDER BY attname COLLATE "C"',
        rows=tuple(sorted(columns)),
    )


def expect_constraint(table: str, kind: str, column: str) -> Query:
    """Query that expects one validated constraint of a kind (``u`` unique, ``f`` foreign key) over just this column.

    The right error alone does not prove a constraint: the default of another column could raise it, too.
    """
    return expect_answer(
        "SELECT a.attname::text, convalidated, NOT condeferrable FROM pg_constraint c "
        "JOIN pg_attribute a ON a.attrelid = c.conrelid AND c.conkey = ARRAY[a.attnum] "
        f"WHERE c.conrelid = 'public.{table}'::regclass AND c.contype = '{kind}'",
        (column, True, True),
    )


def expect_no_column(table: str, column: str) -> Query:
    """Query that expects a table to have no such column."""
    return expect_answer(
        f"SELECT count(*) FROM pg_attribute WHERE attrelid = 'public.{table}'::regclass "
        f"AND attname = {literal(column)} AND NOT attisdropped",
        (0,),
    )


def expect_ordinary_tables(*tables: str) -> Query:
    """Query that expects ordinary tables: stored rows, and no trigger, rule or policy.

    A view, or a trigger that raises the right error, could pass all other queries.
    """
    names = ", ".join(literal(name) for name in tables)
    return Query(
        sql="SELECT relname::text, relkind::text, relrowsecurity, relhasrules, relhassubclass, "
        "(SELECT count(*) FROM pg_trigger WHERE tgrelid = c.oid AND NOT tgisinternal) "
        f"FROM pg_class c WHERE relnamespace = 'public'::regnamespace AND relname IN ({names}) "
        'ORDER BY relname COLLATE "C"',
        rows=tuple((name, "r", False, False, False, 0) for name in sorted(tables)),
    )


def expect_no_relation(relation: str) -> Query:
    """Query that expects no relation of this name."""
    return expect_answer(f"SELECT to_regclass('public.{relation}') IS NULL", (True,))


def random_dates(rng: Random, count: int) -> list[str]:
    """Random distinct dates, in random order."""
    return [str(date(2020, 1, 1) + timedelta(days)) for days in rng.sample(range(1500), count)]


def shuffled(rng: Random, values: Sequence[Value]) -> list[Value]:
    """The same values in random order."""
    return rng.sample(values, len(values))


def random_ids(rng: Random, count: int) -> list[int]:
    """Random distinct ids, ascending, with gaps."""
    return sorted(rng.sample(range(1, 8 * count), count))

"""Migrations that add columns and fill them from elsewhere: from the rows of another table, from another column.

Each function writes one kind of problem: names and rows are drawn, the request says all that the questions check, and
what they must be answered with is computed from the unseen rows in Python. Columns that stay and get a better type are
in :mod:`etude.tasks.migrations.types`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from etude.tasks.migrations.problems import (
    FAMILY_NAMES,
    GIVEN_NAMES,
    NEW_ID,
    NOT_NULL,
    PAIRS,
    PEOPLE,
    MigrationKind,
    MigrationProblem,
    Row,
    Rows,
    asks,
    dates,
    holds,
    lacks,
    numbers,
    plain,
    refuses,
    typed,
)
from etude.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """Summary that a parent keeps of its children."""

    column: str
    kind: str
    words: str
    sql: str
    """Over the children of one parent."""
    wrong: str
    """Wrong values that one might take for it."""
    value: Callable[[Sequence[Row]], Json]
    """The same as ``sql``, of at least one child."""
    empty: Json = None
    """Value of a parent without children; ``None``: no value, and the column may be NULL."""


SUMMARIES: Mapping[str, Aggregate] = MappingProxyType(
    {
        "count": Aggregate(
            column="{child}_count",
            kind="integer",
            words="the number of its {child}",
            sql="count(*)",
            wrong="count(DISTINCT amount)",
            value=len,
            empty=0,
        ),
        "sum": Aggregate(
            column="amount_total",
            kind="bigint",
            words="the sum of amount over its {child}",
            sql="sum(amount)",
            wrong="sum(DISTINCT amount)",
            value=lambda rows: sum(row["amount"] for row in rows),  # type: ignore[misc]  # integers
            empty=0,
        ),
        "largest": Aggregate(
            column="amount_max",
            kind="integer",
            words="the largest amount of its {child}",
            sql="max(amount)",
            wrong="min(amount)",
            value=lambda rows: max(row["amount"] for row in rows),  # type: ignore[type-var]  # integers
        ),
        "first": Aggregate(
            column="first_made_on",
            kind="date",
            words="the earliest made_on of its {child}",
            sql="min(made_on)",
            wrong="(array_agg(made_on ORDER BY id))[1]",
            value=lambda rows: min(str(row["made_on"]) for row in rows),
        ),
        "last": Aggregate(
            column="last_made_on",
            kind="date",
            words="the latest made_on of its {child}",
            sql="max(made_on)",
            wrong="(array_agg(made_on ORDER BY id DESC))[1]",
            value=lambda rows: max(str(row["made_on"]) for row in rows),
        ),
        "any": Aggregate(
            column="has_{child}",
            kind="boolean",
            words="whether it has any {child}",
            sql="count(*) > 0",
            wrong="count(*) > 1",
            value=bool,
            empty=False,
        ),
    }
)


def backfill(variant: str, rng: Random) -> MigrationProblem:
    """A column of the parent that sums up its children, of which some have none."""
    parent, child, key = rng.choice(PAIRS)
    summary = SUMMARIES[variant]
    column, words = summary.column.format(child=child), summary.words.format(child=child)

    def draw() -> Rows:
        parents: list[Row] = [{"id": i, "name": rng.choice(FAMILY_NAMES)} for i in numbers(rng, 16)]
        owners = [row["id"] for row in rng.sample(parents, 13)]
        whose = [*owners, *owners[1:9], *rng.choices(owners[1:9], k=15)]
        rows = zip(numbers(rng, 36), whose, dates(rng, 36), strict=True)
        children: list[Row] = [
            {"id": i, key: owner, "amount": rng.choice((5, 10, 20, 50)), "made_on": day} for i, owner, day in rows
        ]
        return {parent: parents, child: children}

    seen, unseen = draw(), draw()
    after: list[Row] = []
    for row in unseen[parent]:
        own = [line for line in unseen[child] if line[key] == row["id"]]
        after.append({**row, column: summary.value(own) if own else summary.empty})
    required = summary.empty is not None
    empty = str(summary.empty).lower()
    add = f"ALTER TABLE {parent} ADD COLUMN {column} {summary.kind}{f' NOT NULL DEFAULT {empty}' * required};\n"
    fill = "UPDATE {0} p SET {1} = c.v FROM (SELECT {2}, {3} AS v FROM {4} GROUP BY 1) c WHERE c.{2} = p.id;\n"
    right = add + fill.format(parent, column, key, summary.sql, child)
    return MigrationProblem(
        request=f"Add to {parent} a column {column} of type {summary.kind}: {words} ({child}.{key} says whose). "
        + (
            f"Those that have none get {empty}, which is also the default for new rows, and it is never NULL."
            if required
            else "It is NULL for those that have none."
        ),
        schema=f"CREATE TABLE {parent} (id integer PRIMARY KEY, name text NOT NULL);\n"
        f"CREATE TABLE {child} (id integer PRIMARY KEY, {key} integer NOT NULL REFERENCES {parent} ON DELETE CASCADE, "
        "amount integer NOT NULL, made_on date NOT NULL);",
        seen=seen,
        unseen=unseen,
        queries=(
            holds(parent, ("id", "name", column), after),
            typed(parent, (column, summary.kind, required)),
            asks(
                f"SELECT {column} FROM public.{parent} WHERE id = {NEW_ID}",
                (summary.empty,),
                setup=f"INSERT INTO public.{parent} (id, name) VALUES ({NEW_ID}, 'new')",
            ),
            holds(child, ("id", key, "amount", "made_on"), unseen[child]),
            plain(parent, child),
        ),
        reference=right,
        mistakes=(
            add,
            add + fill.format(parent, column, key, summary.wrong, child),
            f"{right}DELETE FROM {parent} p WHERE NOT EXISTS (SELECT FROM {child} c WHERE c.{key} = p.id);",
        ),
    )


SPLITS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "first word": (
            "the first word is the first name, the rest is the last name",
            "split_part(btrim(full_name), ' ', 1)",
            "btrim(substr(btrim(full_name), length(split_part(btrim(full_name), ' ', 1)) + 1))",
        ),
        "last word": (
            "the last of several words is the last name, the rest is the first name",
            "CASE WHEN btrim(full_name) LIKE '% %' THEN regexp_replace(btrim(full_name), ' [^ ]*$', '') "
            "ELSE btrim(full_name) END",
            "CASE WHEN btrim(full_name) LIKE '% %' THEN regexp_replace(btrim(full_name), '^.* ', '') ELSE '' END",
        ),
        "comma": (
            "what is before the comma is the last name, what is after it the first name",
            "CASE WHEN full_name LIKE '%,%' THEN btrim(split_part(full_name, ',', 2)) ELSE btrim(full_name) END",
            "CASE WHEN full_name LIKE '%,%' THEN btrim(split_part(full_name, ',', 1)) ELSE '' END",
        ),
    }
)
"""Variant → how names are split, and SQL for the first and for the last name."""


def split_name(variant: str, rng: Random) -> MigrationProblem:
    """One column of names becomes two; names have spaces around them, three words, or just one."""
    table = rng.choice(PEOPLE)
    words, first, last = SPLITS[variant]

    def draw() -> tuple[list[Row], list[Row]]:
        before: list[Row] = []
        after: list[Row] = []
        for place, i in enumerate(numbers(rng, 24)):
            given, family = rng.choice(GIVEN_NAMES), rng.choice(FAMILY_NAMES)
            if place % 4 == 1:
                given, family = (given, f"de {family}") if variant == "first word" else (f"{given} Maria", family)
            if place % 6 == 2:
                family = ""
            whole = f"{given} {family}" if variant != "comma" else f"{family}, {given}"
            whole = whole if family else given
            before.append({"id": i, "full_name": f"  {whole} " if place % 5 == 3 else whole})
            after.append({"id": i, "first_name": given, "last_name": family})
        return before, after

    (seen, _), (unseen, after) = draw(), draw()
    add = f"ALTER TABLE {table} ADD COLUMN first_name text, ADD COLUMN last_name text;\n"
    fill = f"UPDATE {table} SET first_name = {first}, last_name = {last};\n"
    strict = f"ALTER TABLE {table} ALTER first_name SET NOT NULL, ALTER last_name SET NOT NULL;\n"
    drop = f"ALTER TABLE {table} DROP COLUMN full_name;\n"
    naive = "split_part(full_name, ',', {})" if variant == "comma" else "split_part(full_name, ' ', {})"
    order = (2, 1) if variant == "comma" else (1, 2)
    return MigrationProblem(
        request=f"Replace {table}.full_name by two columns first_name and last_name (text, never NULL): {words}. A "
        "name that cannot be split is a first name, with an empty last name. Spaces around names are no part of them. "
        "Drop full_name.",
        schema=f"CREATE TABLE {table} (id integer PRIMARY KEY, full_name text NOT NULL);",
        seen={table: seen},
        unseen={table: unseen},
        queries=(
            holds(table, ("id", "first_name", "last_name"), after),
            typed(table, ("first_name", "text", True), ("last_name", "text", True)),
            lacks(table, "full_name"),
            refuses(f"INSERT INTO public.{table} (id, first_name) VALUES ({NEW_ID}, NULL)", NOT_NULL),
            plain(table),
        ),
        reference=add + fill + strict + drop,
        mistakes=(
            add + fill + drop,
            add + fill + strict,
            add
            + f"UPDATE {table} SET first_name = {naive.format(order[0])}, last_name = {naive.format(order[1])};\n"
            + strict
            + drop,
        ),
    )


KINDS = (
    MigrationKind(name="backfill", variants=tuple(SUMMARIES), write=backfill),
    MigrationKind(name="split name", variants=tuple(SPLITS), write=split_name),
)
"""Kinds of migration that are about columns."""

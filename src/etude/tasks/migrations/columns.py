"""Migrations of columns: new ones filled from existing data, and better types of existing ones.

Each function writes one kind of problem: it draws names and rows, the request states everything that the queries check,
and Python computes their expected answers from the unseen rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from random import Random
from types import MappingProxyType

from etude.tasks.migrations.problems import (
    CHECKED,
    FAMILY_NAMES,
    GIVEN_NAMES,
    NEW_ID,
    NO_LABEL,
    NOT_NULL,
    PAIRS,
    PEOPLE,
    THINGS,
    MigrationKind,
    MigrationProblem,
    Row,
    Rows,
    expect_answer,
    expect_columns,
    expect_error,
    expect_no_column,
    expect_ordinary_tables,
    expect_rows,
    random_dates,
    random_ids,
    shuffled,
)
from etude.types import Json, Query


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """A parent column's summary of its child rows."""

    column: str
    kind: str
    words: str
    sql: str
    """SQL expression over the children of one parent."""
    wrong: str
    """SQL expression with a plausible mistake."""
    value: Callable[[Sequence[Row]], Json]
    """The same as ``sql``, for at least one child."""
    empty: Json = None
    """Value of a parent without children; with ``None`` the column may be NULL."""


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
    """Migration: a new parent column that aggregates child rows; some parents have none."""
    parent, child, key = rng.choice(PAIRS)
    summary = SUMMARIES[variant]
    column, words = summary.column.format(child=child), summary.words.format(child=child)

    def draw() -> Rows:
        parents: list[Row] = [{"id": i, "name": rng.choice(FAMILY_NAMES)} for i in random_ids(rng, 16)]
        owners = [row["id"] for row in rng.sample(parents, 13)]
        whose = [*owners, *owners[1:9], *rng.choices(owners[1:9], k=15)]
        rows = zip(random_ids(rng, 36), whose, random_dates(rng, 36), strict=True)
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
            expect_rows(parent, ("id", "name", column), after),
            expect_columns(parent, (column, summary.kind, required)),
            expect_answer(
                f"SELECT {column} FROM public.{parent} WHERE id = {NEW_ID}",
                (summary.empty,),
                setup=f"INSERT INTO public.{parent} (id, name) VALUES ({NEW_ID}, 'new')",
            ),
            expect_rows(child, ("id", key, "amount", "made_on"), unseen[child]),
            expect_ordinary_tables(parent, child),
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
"""Variant → the rule in words, SQL for the first name, and SQL for the last name."""


def split_name(variant: str, rng: Random) -> MigrationProblem:
    """Migration: one column of names becomes two; names have extra spaces, three words, or just one."""
    table = rng.choice(PEOPLE)
    words, first, last = SPLITS[variant]

    def draw() -> tuple[list[Row], list[Row]]:
        before: list[Row] = []
        after: list[Row] = []
        for place, i in enumerate(random_ids(rng, 24)):
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
            expect_rows(table, ("id", "first_name", "last_name"), after),
            expect_columns(table, ("first_name", "text", True), ("last_name", "text", True)),
            expect_no_column(table, "full_name"),
            expect_error(f"INSERT INTO public.{table} (id, first_name) VALUES ({NEW_ID}, NULL)", NOT_NULL),
            expect_ordinary_tables(table),
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


WORK = ("tickets", "tasks", "requests", "incidents", "claims", "orders")
EVENTS = ("logins", "alarms", "deliveries", "readings", "backups", "visits")
LABELS = ("open", "active", "done", "unknown")
SYNONYMS: Mapping[str, str] = MappingProxyType({"new": "open", "wip": "active", "closed": "done", "fixed": "done"})
LATEST = 1_900_000_000
"""Upper bound of moments, in seconds since the epoch: in 2030."""


def labels(variant: str, rng: Random) -> MigrationProblem:
    """Migration: free text becomes one of four labels, as an enum or as text with a check."""
    table, column = rng.choice(WORK), rng.choice(("status", "state", "stage"))
    meanings = dict(zip(LABELS, LABELS, strict=True)) | (dict(SYNONYMS) if variant == "synonyms" else {})
    seen, unseen = (_noisy(rng, column, tuple(meanings)) for _ in range(2))
    made = "text" if variant == "check" else f"{table}_{column}"
    quoted = ", ".join(f"'{label}'" for label in LABELS)
    cases = "".join(f"WHEN '{word}' THEN '{label}' " for word, label in meanings.items())
    value = f"CASE lower(btrim({column})) {cases}ELSE 'unknown' END"
    enum = (
        f"CREATE TYPE {made} AS ENUM ({quoted});\n"
        f"ALTER TABLE {table} ALTER {column} DROP DEFAULT, ALTER {column} TYPE {made} USING ({value})::{made};\n"
    )
    check = f"UPDATE {table} SET {column} = {value};\nALTER TABLE {table} ADD CHECK ({column} IN ({quoted}));\n"
    change = check if variant == "check" else enum
    default = f"ALTER TABLE {table} ALTER {column} SET DEFAULT 'open';\n"
    also = "".join(f", {word} means {label}" for word, label in SYNONYMS.items() if word in meanings)
    return MigrationProblem(
        request=f"{table}.{column} shall be one of {', '.join(LABELS)}: "
        + ("keep it text, with a check. " if variant == "check" else f"make it an enum {made}, labels in this order. ")
        + f"Today's values differ in case and have spaces around them{also}; whatever else is there becomes unknown. "
        "It stays NOT NULL, and open stays the default for new rows.",
        schema=f"CREATE TABLE {table} (id integer PRIMARY KEY, {column} text NOT NULL DEFAULT 'open');",
        seen={table: seen},
        unseen={table: unseen},
        queries=(
            expect_answer(
                f"SELECT id, {column}::text FROM public.{table} ORDER BY id",
                *((row["id"], meanings.get(str(row[column]).strip().lower(), "unknown")) for row in unseen),
            ),
            *_label_questions(table, column, made),
        ),
        reference=change + default,
        mistakes=(
            change.replace(f"lower(btrim({column}))", f"lower({column})") + default,
            change.replace("ELSE 'unknown'", "ELSE 'open'") + default,
            check.partition("\n")[0] if variant == "check" else enum,
        ),
    )


def _noisy(rng: Random, column: str, words: Sequence[str]) -> list[Row]:
    """Rows with every word plain, in upper case and in title case with spaces, with invalid labels, and with a synonym
    that is invalid in some variants.
    """
    values = [*words, *(word.upper() for word in words), *(f" {word.title()} " for word in words)]
    values += ["n/a", "?", "", "opened", rng.choice(tuple(SYNONYMS))]
    return [
        {"id": i, column: word} for i, word in zip(random_ids(rng, len(values)), shuffled(rng, values), strict=True)
    ]


def _label_questions(table: str, column: str, made: str) -> tuple[Query, ...]:
    is_text = made == "text"
    wrong = f"INSERT INTO public.{table} (id, {column}) VALUES ({NEW_ID}, 'Open')"
    listed = "SELECT enumlabel::text FROM pg_enum WHERE enumtypid = 'public.{}'::regtype ORDER BY enumsortorder"
    return (
        expect_columns(table, (column, made if is_text else f"public.{made}", True)),
        expect_answer(
            f"SELECT {column}::text FROM public.{table} WHERE id = {NEW_ID}",
            ("open",),
            setup=f"INSERT INTO public.{table} (id) VALUES ({NEW_ID})",
        ),
        expect_error(wrong, CHECKED if is_text else NO_LABEL),
        expect_ordinary_tables(table),
        *(() if is_text else (expect_answer(listed.format(made), *((label,) for label in LABELS)),)),
    )


MOMENTS: Mapping[str, tuple[str, str, str, str]] = MappingProxyType(
    {
        "two formats": (
            "text",
            "either 2024-12-31 23:59 or 31/12/2024 23:59 (day first), both UTC",
            "CASE WHEN {0} LIKE '%/%' THEN to_timestamp({0}, 'DD/MM/YYYY HH24:MI') "
            "ELSE to_timestamp({0}, 'YYYY-MM-DD HH24:MI') END",
            "{0}::timestamptz",
        ),
        "seconds": (
            "text",
            "seconds since 1970-01-01 UTC, or nothing but spaces, which becomes NULL",
            "to_timestamp(nullif(btrim({0}), '')::bigint)",
            "to_timestamp(coalesce(nullif(btrim({0}), ''), '0')::bigint)",
        ),
        "seconds and milliseconds": (
            "bigint",
            "seconds since 1970-01-01 UTC, or milliseconds in rows where it is above 100000000000",
            "to_timestamp(CASE WHEN {0} > 100000000000 THEN {0} / 1000.0 ELSE {0} END)",
            "to_timestamp(CASE WHEN {0} > 100000000000 THEN {0} / 1000 ELSE {0} END)",
        ),
    }
)
"""Variant → type of the column, its contents in words, SQL that converts it, and SQL that converts it wrongly."""


def moments(variant: str, rng: Random) -> MigrationProblem:
    """Migration: times stored as text or numbers become timestamps."""
    table, column = rng.choice(EVENTS), rng.choice(("happened_at", "noted_at", "started_at"))
    kind, words, read, misread = (text.format(column) for text in MOMENTS[variant])

    def draw() -> tuple[list[Row], list[Row]]:
        before: list[Row] = []
        after: list[Row] = []
        for place, i in enumerate(random_ids(rng, 24)):
            old, new = _moment(variant, place, rng.randrange(1_600_000_000, LATEST))
            before.append({"id": i, column: old})
            after.append({"id": i, column: new})
        return before, after

    (seen, _), (unseen, after) = draw(), draw()
    optional = variant == "seconds"
    change = f"ALTER TABLE {table} ALTER {column} TYPE timestamptz USING {{}};\n"
    relax = f"ALTER TABLE {table} ALTER {column} DROP NOT NULL;\n" * optional
    return MigrationProblem(
        request=f"Make {table}.{column} a timestamp with time zone. It is {kind} now: {words}. "
        + ("It may be NULL afterwards." if optional else "It stays NOT NULL."),
        schema=f"CREATE TABLE {table} (id integer PRIMARY KEY, {column} {kind} NOT NULL);",
        seen={table: seen},
        unseen={table: unseen},
        queries=(
            expect_rows(table, ("id", column), after),
            expect_columns(table, (column, "timestamp with time zone", not optional)),
            *(() if optional else (expect_error(f"INSERT INTO public.{table} VALUES ({NEW_ID}, NULL)", NOT_NULL),)),
            expect_ordinary_tables(table),
        ),
        reference=relax + change.format(read),
        mistakes=(
            relax + change.format(misread),
            relax + change.format(read) + f"DELETE FROM {table} WHERE id IN (SELECT max(id) FROM {table});\n",
            relax + change.replace("timestamptz", "timestamp").format(read),
        ),
    )


def _moment(variant: str, place: int, seconds: int) -> tuple[str | int, str | None]:
    """The stored value of row number ``place``, and the timestamp as PostgreSQL prints it."""
    if variant == "two formats":
        seconds -= seconds % 60
    when = datetime.fromtimestamp(seconds, UTC)
    new = f"{when:%Y-%m-%d %H:%M:%S}+00"
    if variant == "two formats":
        return f"{when:%d/%m/%Y %H:%M}" if place % 2 else f"{when:%Y-%m-%d %H:%M}", new
    if variant == "seconds":
        return (" " * (place % 3), None) if place % 6 == 5 else (f"{seconds}", new)
    return (seconds * 1000 + 250, f"{when:%Y-%m-%d %H:%M:%S}.25+00") if place % 2 else (seconds, new)


PRICES: Mapping[str, tuple[str, str, str, str]] = MappingProxyType(
    {
        "text": (
            "text",
            "amounts such as $1,234.50, with or without the sign, the commas, the cents",
            "round(replace(replace({0}, '$', ''), ',', '')::numeric * 100)",
            "replace(replace(replace({0}, '$', ''), ',', ''), '.', '')::bigint",
        ),
        "double": (
            "double precision",
            "amounts of whole cents, kept as well as binary fractions can",
            "round({0}::numeric * 100)",
            "trunc({0} * 100)",
        ),
        "numeric": (
            "numeric(12,4)",
            "amounts with fractions of cents, of which a half and more is rounded up",
            "round({0} * 100)",
            "trunc({0} * 100)",
        ),
    }
)
"""Variant → type of the column, its contents in words, SQL for its cents, and SQL that is nearly right."""


def cents(variant: str, rng: Random) -> MigrationProblem:
    """Migration: money in text, binary or decimal fractions becomes a whole number of cents."""
    table, column = rng.choice(THINGS), rng.choice(("price", "cost", "fee"))
    kind, words, read, misread = (text.format(column) for text in PRICES[variant])

    def draw() -> tuple[list[Row], list[Row]]:
        before: list[Row] = []
        after: list[Row] = []
        for place, i in enumerate(random_ids(rng, 24)):
            old, new = _price(variant, place, rng.randrange(1, 900_000))
            before.append({"id": i, column: old})
            after.append({"id": i, f"{column}_cents": new})
        return before, after

    (seen, _), (unseen, after) = draw(), draw()
    add = f"ALTER TABLE {table} ADD COLUMN {column}_cents bigint;\nUPDATE {table} SET {column}_cents = {{}};\n"
    strict = f"ALTER TABLE {table} ALTER {column}_cents SET NOT NULL, ADD CHECK ({column}_cents >= 0);\n"
    drop = f"ALTER TABLE {table} DROP COLUMN {column};\n"
    return MigrationProblem(
        request=f"Replace {table}.{column} by {column}_cents (bigint, never NULL, never negative: add a check): the "
        f"same in cents. It is {kind} now: {words}. Drop {column}.",
        schema=f"CREATE TABLE {table} (id integer PRIMARY KEY, {column} {kind} NOT NULL);",
        seen={table: seen},
        unseen={table: unseen},
        queries=(
            expect_rows(table, ("id", f"{column}_cents"), after),
            expect_columns(table, (f"{column}_cents", "bigint", True)),
            expect_no_column(table, column),
            expect_error(f"INSERT INTO public.{table} (id, {column}_cents) VALUES ({NEW_ID}, -1)", CHECKED),
            expect_error(f"INSERT INTO public.{table} (id, {column}_cents) VALUES ({NEW_ID}, NULL)", NOT_NULL),
            expect_ordinary_tables(table),
        ),
        reference=add.format(read) + strict + drop,
        mistakes=(
            add.format(misread) + strict + drop,
            add.format(read) + drop,
            add.format(read) + strict,
        ),
    )


def _price(variant: str, place: int, amount: int) -> tuple[str | float, int]:
    """The stored value of row number ``place``, and the cents that it must become."""
    if variant == "text":
        whole, rest = divmod(amount, 100)
        shapes = (f"${whole:,}.{rest:02d}", f"{whole}.{rest:02d}", f"${whole:,}", f"{whole:,}.{rest // 10}")
        exact = (amount, amount, whole * 100, whole * 100 + rest // 10 * 10)
        return shapes[place % 4], exact[place % 4]
    if variant == "double":
        # amounts that are not exact as binary fractions: 1.1, 8.2, 19.99 …
        return (1.1, 8.2, 19.99, 4.35, 1.15, 2.51)[place % 6] if place % 2 else amount / 100, (
            (110, 820, 1999, 435, 115, 251)[place % 6] if place % 2 else amount
        )
    selected = Decimal(amount) / 100 + Decimal(("0", "0.0050", "0.0049", "0.0051")[place % 4])
    return f"{selected:.4f}", int((selected * 100).quantize(Decimal(1), ROUND_HALF_UP))


KINDS = (
    MigrationKind(name="backfill", variants=tuple(SUMMARIES), write=backfill),
    MigrationKind(name="split name", variants=tuple(SPLITS), write=split_name),
    MigrationKind(name="labels", variants=("enum", "synonyms", "check"), write=labels),
    MigrationKind(name="moments", variants=tuple(MOMENTS), write=moments),
    MigrationKind(name="cents", variants=tuple(PRICES), write=cents),
)
"""Kinds of migration of columns and their types."""

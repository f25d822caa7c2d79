"""Migrations that give a column a better type: labels, moments, cents.

Each function writes one kind of problem: names and rows are drawn, the request says all that the questions check, and
what they must be answered with is computed from the unseen rows in Python.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from random import Random
from types import MappingProxyType

from etude.tasks.migrations.problems import (
    CHECKED,
    NEW_ID,
    NO_LABEL,
    NOT_NULL,
    THINGS,
    MigrationKind,
    MigrationProblem,
    Row,
    asks,
    holds,
    lacks,
    numbers,
    plain,
    refuses,
    shuffled,
    typed,
)
from etude.types import Query

WORK = ("tickets", "tasks", "requests", "incidents", "claims", "orders")
EVENTS = ("logins", "alarms", "deliveries", "readings", "backups", "visits")
LABELS = ("open", "active", "done", "unknown")
SYNONYMS: Mapping[str, str] = MappingProxyType({"new": "open", "wip": "active", "closed": "done", "fixed": "done"})
LATEST = 1_900_000_000
"""In 2030: no moment is later, in seconds of the epoch."""


def labels(variant: str, rng: Random) -> MigrationProblem:
    """Free text becomes one of four labels: an enum, an enum where some words mean others, or text with a check."""
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
            asks(
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
    """Rows with every word plain, in another case and with a space; with what is no label; and with a synonym that
    means nothing in some variants.
    """
    values = [*words, *(word.upper() for word in words), *(f" {word.title()} " for word in words)]
    values += ["n/a", "?", "", "opened", rng.choice(tuple(SYNONYMS))]
    return [{"id": i, column: word} for i, word in zip(numbers(rng, len(values)), shuffled(rng, values), strict=True)]


def _label_questions(table: str, column: str, made: str) -> tuple[Query, ...]:
    is_text = made == "text"
    wrong = f"INSERT INTO public.{table} (id, {column}) VALUES ({NEW_ID}, 'Open')"
    listed = "SELECT enumlabel::text FROM pg_enum WHERE enumtypid = 'public.{}'::regtype ORDER BY enumsortorder"
    return (
        typed(table, (column, made if is_text else f"public.{made}", True)),
        asks(
            f"SELECT {column}::text FROM public.{table} WHERE id = {NEW_ID}",
            ("open",),
            setup=f"INSERT INTO public.{table} (id) VALUES ({NEW_ID})",
        ),
        refuses(wrong, CHECKED if is_text else NO_LABEL),
        plain(table),
        *(() if is_text else (asks(listed.format(made), *((label,) for label in LABELS)),)),
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
"""Variant → type of the column, what is in it, SQL that reads it, and SQL that misreads it."""


def moments(variant: str, rng: Random) -> MigrationProblem:
    """Moments that were kept as text or numbers become timestamps."""
    table, column = rng.choice(EVENTS), rng.choice(("happened_at", "noted_at", "started_at"))
    kind, words, read, misread = (text.format(column) for text in MOMENTS[variant])

    def draw() -> tuple[list[Row], list[Row]]:
        before: list[Row] = []
        after: list[Row] = []
        for place, i in enumerate(numbers(rng, 24)):
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
            holds(table, ("id", column), after),
            typed(table, (column, "timestamp with time zone", not optional)),
            *(() if optional else (refuses(f"INSERT INTO public.{table} VALUES ({NEW_ID}, NULL)", NOT_NULL),)),
            plain(table),
        ),
        reference=relax + change.format(read),
        mistakes=(
            relax + change.format(misread),
            relax + change.format(read) + f"DELETE FROM {table} WHERE id IN (SELECT max(id) FROM {table});\n",
            relax + change.replace("timestamptz", "timestamp").format(read),
        ),
    )


def _moment(variant: str, place: int, seconds: int) -> tuple[str | int, str | None]:
    """A value as it is kept in row number ``place``, and the same as PostgreSQL writes it."""
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
"""Variant → type of the column, what is in it, SQL for its cents, and SQL that is nearly right."""


def cents(variant: str, rng: Random) -> MigrationProblem:
    """Money in text, binary or decimal fractions becomes a whole number of cents."""
    table, column = rng.choice(THINGS), rng.choice(("price", "cost", "fee"))
    kind, words, read, misread = (text.format(column) for text in PRICES[variant])

    def draw() -> tuple[list[Row], list[Row]]:
        before: list[Row] = []
        after: list[Row] = []
        for place, i in enumerate(numbers(rng, 24)):
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
            holds(table, ("id", f"{column}_cents"), after),
            typed(table, (f"{column}_cents", "bigint", True)),
            lacks(table, column),
            refuses(f"INSERT INTO public.{table} (id, {column}_cents) VALUES ({NEW_ID}, -1)", CHECKED),
            refuses(f"INSERT INTO public.{table} (id, {column}_cents) VALUES ({NEW_ID}, NULL)", NOT_NULL),
            plain(table),
        ),
        reference=add.format(read) + strict + drop,
        mistakes=(
            add.format(misread) + strict + drop,
            add.format(read) + drop,
            add.format(read) + strict,
        ),
    )


def _price(variant: str, place: int, amount: int) -> tuple[str | float, int]:
    """An amount of cents as it is kept in row number ``place``, and what it must become."""
    if variant == "text":
        whole, rest = divmod(amount, 100)
        shapes = (f"${whole:,}.{rest:02d}", f"{whole}.{rest:02d}", f"${whole:,}", f"{whole:,}.{rest // 10}")
        exact = (amount, amount, whole * 100, whole * 100 + rest // 10 * 10)
        return shapes[place % 4], exact[place % 4]
    if variant == "double":
        # a dollar or two and such cents as are a little less in binary: 1.1, 8.2, 19.99 …
        return (1.1, 8.2, 19.99, 4.35, 1.15, 2.51)[place % 6] if place % 2 else amount / 100, (
            (110, 820, 1999, 435, 115, 251)[place % 6] if place % 2 else amount
        )
    selected = Decimal(amount) / 100 + Decimal(("0", "0.0050", "0.0049", "0.0051")[place % 4])
    return f"{selected:.4f}", int((selected * 100).quantize(Decimal(1), ROUND_HALF_UP))


KINDS = (
    MigrationKind(name="labels", variants=("enum", "synonyms", "check"), write=labels),
    MigrationKind(name="moments", variants=tuple(MOMENTS), write=moments),
    MigrationKind(name="cents", variants=tuple(PRICES), write=cents),
)
"""Kinds of migration that are about types."""

"""Migrations of whole tables: under another name, out of a list in a column, two into one.

Each function writes one kind of problem: names and rows are drawn, the request says all that the questions check, and
what they must be answered with is computed from the unseen rows in Python.
"""

from collections.abc import Mapping
from random import Random
from types import MappingProxyType

from etude.tasks.migrations.problems import (
    FOREIGN,
    NEW_ID,
    THINGS,
    UNIQUE,
    MigrationKind,
    MigrationProblem,
    Row,
    Rows,
    asks,
    constrained,
    dates,
    gone,
    holds,
    lacks,
    numbers,
    plain,
    refuses,
    shuffled,
    typed,
)
from etude.types import Json

RENAMES = (("clients", "customers"), ("goods", "products"), ("posts", "articles"), ("staff", "employees"))
"""A table's old name, and its new one."""
TAGS = ("red", "green", "blue", "old", "new", "heavy", "fragile", "spare")
INVENTORY_TABLES = ("jobs", "leases", "contracts", "invoices", "accounts")


def rename(variant: str, rng: Random) -> MigrationProblem:
    """A table gets another name, and old programs still find it by a view, through which they write, too."""
    old, new = rng.choice(RENAMES)
    column = "label" if variant == "table and column" else "title"

    def draw() -> list[Row]:
        ids, days = numbers(rng, 20), dates(rng, 20)
        return [
            {"id": i, "title": f"{old} no. {i}", "ended_on": day if place % 3 == 1 else None}
            for place, (i, day) in enumerate(zip(ids, days, strict=True))
        ]

    seen, unseen = draw(), draw()
    shown = [row for row in unseen if variant != "live rows" or row["ended_on"] is None]
    after = [{"id": row["id"], column: row["title"], "ended_on": row["ended_on"]} for row in unseen]
    only = " WHERE ended_on IS NULL" * (variant == "live rows")
    move = f"ALTER TABLE {old} RENAME TO {new};\n"
    move += f"ALTER TABLE {new} RENAME COLUMN title TO label;\n" * (variant == "table and column")
    view = f"CREATE VIEW {old} AS SELECT id, {column}{' AS title' * (column != 'title')}, ended_on FROM {new}{only};\n"
    copy = move.partition("\n")[2].join((f"CREATE TABLE {new} AS SELECT * FROM {old};\nDROP TABLE {old};\n", ""))
    worse = {
        "table": view.replace("VIEW", "MATERIALIZED VIEW"),
        "table and column": view.replace(" AS title", ""),
        "live rows": view.replace(only, ""),
    }[variant]
    return MigrationProblem(
        request=f"Rename table {old} to {new}"
        + (f", and its column title to {column}" if column != "title" else "")
        + f". Programs that know the old names go on for a while: leave a view {old} with the columns id, title and "
        f"ended_on, through which rows can be inserted"
        + (", and which shows only rows whose ended_on is NULL." if only else "."),
        schema=f"CREATE TABLE {old} (id integer PRIMARY KEY, title text NOT NULL, ended_on date);",
        seen={old: seen},
        unseen={old: unseen},
        queries=(
            holds(new, ("id", column, "ended_on"), after),
            holds(old, ("id", "title", "ended_on"), shown),
            typed(new, ("id", "integer", True), (column, "text", True), ("ended_on", "date", False)),
            typed(old, ("id", "integer", False), ("title", "text", False), ("ended_on", "date", False)),
            asks(f"SELECT relkind::text FROM pg_class WHERE oid = 'public.{old}'::regclass", ("v",)),
            asks(
                f"SELECT {column} FROM public.{new} WHERE id = {NEW_ID}",
                ("late",),
                setup=f"INSERT INTO public.{old} (id, title) VALUES ({NEW_ID}, 'late')",
            ),
            refuses(f"INSERT INTO public.{new} (id, {column}) VALUES ({unseen[0]['id']}, 'again')", UNIQUE),
            plain(new),
        ),
        reference=move + view,
        mistakes=(move, copy + view, move + worse),
    )


LISTS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "commas": ("text", "separated by commas, with spaces around some", "unnest(string_to_array({0}, ','))"),
        "array": ("text[]", "as an array", "unnest({0})"),
        "document": ("jsonb", "as a JSON array", "jsonb_array_elements_text({0})"),
    }
)
"""Variant → type of the column, how the list is written, and SQL that takes it apart."""


def join_table(variant: str, rng: Random) -> MigrationProblem:
    """A list in a column becomes rows of a table; entries come twice and may be empty."""
    table, column, links = rng.choice(THINGS), rng.choice(("tags", "marks", "words")), "{0}_{1}"
    kind, words, apart = (text.format(column) for text in LISTS[variant])
    links, key, entry = links.format(table, column), f"{table[:-1]}_id", column[:-1]

    def draw() -> list[tuple[int, list[str]]]:
        drawn = [rng.sample(TAGS, rng.randrange(1, 4)) for _ in range(18)]
        for place, tags in enumerate(drawn):
            tags += {0: [tags[0]], 1: [""], 2: [tags[-1], " "]}.get(place % 5, [])
        return list(zip(numbers(rng, 20), shuffled(rng, [*drawn, [], [""]]), strict=True))

    def write(tags: list[str], place: int) -> str:
        if variant == "commas":
            return (", " if place % 2 else ",").join(tags)
        quoted = ", ".join(f'"{tag}"' for tag in tags)
        return f"{{{quoted}}}" if variant == "array" else f"[{quoted}]"

    seen, unseen = draw(), draw()
    pairs = sorted({(i, tag.strip()) for i, tags in unseen for tag in tags if tag.strip()})
    create = (
        f"CREATE TABLE {links} ({key} integer REFERENCES {table} ON DELETE CASCADE, {entry} text, "
        f"PRIMARY KEY ({key}, {entry}));\n"
    )
    fill = f"INSERT INTO {links} SELECT DISTINCT id, btrim(e) FROM {table}, {apart} e WHERE btrim(e) <> '';\n"
    drop = f"ALTER TABLE {table} DROP COLUMN {column};\n"
    present = next(i for i, tag in pairs)
    return MigrationProblem(
        request=f"{table}.{column} is a list ({kind}, {words}). Make it a table {links}: {key} (a foreign key to "
        f"{table}, whose rows take theirs with them when they are deleted) and {entry} (text), together the primary "
        f"key. Entries that come twice count once; spaces around an entry are no part of it; empty ones are none. Drop "
        f"{table}.{column}.",
        schema=f"CREATE TABLE {table} (id integer PRIMARY KEY, {column} {kind} NOT NULL);",
        seen={table: [{"id": i, column: write(tags, place)} for place, (i, tags) in enumerate(seen)]},
        unseen={table: [{"id": i, column: write(tags, place)} for place, (i, tags) in enumerate(unseen)]},
        queries=(
            asks(f'SELECT {key}, {entry} FROM public.{links} ORDER BY {key}, {entry} COLLATE "C"', *pairs),
            holds(table, ("id",), [{"id": i} for i, _ in unseen]),
            typed(links, (key, "integer", True), (entry, "text", True)),
            lacks(table, column),
            refuses(f"INSERT INTO public.{links} VALUES ({present}, '{pairs[0][1]}')", UNIQUE),
            refuses(f"INSERT INTO public.{links} VALUES ({NEW_ID}, 'x')", FOREIGN),
            constrained(links, "f", key),
            asks(
                f"SELECT count(*) FROM public.{links} WHERE {key} = {present}",
                (0,),
                setup=f"DELETE FROM public.{table} WHERE id = {present}",
            ),
            plain(table, links),
        ),
        reference=create + fill + drop,
        mistakes=(
            create + fill.replace("btrim(e)", "e") + drop,
            create + fill.replace(" WHERE btrim(e) <> ''", "") + drop,
            create.replace(" ON DELETE CASCADE", "") + fill + drop,
        ),
    )


MERGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "current wins": ("that of {0} stays", "DO NOTHING"),
        "archive wins": ("that of {0}_archive stays", "DO UPDATE SET {1}"),
        "newer wins": (
            "the one with the later changed_on stays",
            "DO UPDATE SET {1} WHERE c.changed_on < excluded.changed_on",
        ),
    }
)
"""Variant → which of two rows with one id stays, and what is done when both are put together."""


def merge(variant: str, rng: Random) -> MigrationProblem:
    """A table and its archive become one; some ids are in both."""
    table = rng.choice(INVENTORY_TABLES)
    words, conflict = MERGES[variant]
    replace = "title = excluded.title, changed_on = excluded.changed_on, archived = true"
    words, conflict = words.format(table), conflict.format(table, replace)

    def draw() -> Rows:
        ids, days = numbers(rng, 24), dates(rng, 34)
        rows: list[Row] = [
            {"id": i, "title": f"{rng.choice(TAGS)} {i}", "changed_on": day}
            for i, day in zip([*ids, *ids[4:14]], days, strict=True)
        ]
        first: list[Row] = sorted(rows[:14], key=_by_id)
        return {table: first, f"{table}_archive": sorted(rows[14:], key=_by_id)}

    seen, unseen = draw(), draw()
    merged: dict[Json, Row] = {row["id"]: {**row, "archived": False} for row in unseen[table]}
    for row in unseen[f"{table}_archive"]:
        there = merged.get(row["id"])
        wins = {
            "current wins": False,
            "archive wins": True,
            "newer wins": there is not None and str(there["changed_on"]) < str(row["changed_on"]),
        }[variant]
        if there is None or wins:
            merged[row["id"]] = {**row, "archived": True}
    columns = "(id integer PRIMARY KEY, title text NOT NULL, changed_on date NOT NULL)"
    add = f"ALTER TABLE {table} ADD COLUMN archived boolean NOT NULL DEFAULT false;\n"
    put = (
        f"INSERT INTO {table} AS c (id, title, changed_on, archived) SELECT id, title, changed_on, true "
        f"FROM {table}_archive ON CONFLICT (id) {{}};\n"
    )
    drop = f"DROP TABLE {table}_archive;\n"
    other = "DO NOTHING" if variant != "current wins" else f"DO UPDATE SET {replace}"
    return MigrationProblem(
        request=f"Put {table}_archive into {table} and drop {table}_archive. A new column archived (boolean, never "
        f"NULL, by default false) says where a row comes from. Some ids are in both: {words}, the other one goes.",
        schema=f"CREATE TABLE {table} {columns};\nCREATE TABLE {table}_archive {columns};",
        seen=seen,
        unseen=unseen,
        queries=(
            holds(table, ("id", "title", "changed_on", "archived"), sorted(merged.values(), key=_by_id)),
            typed(table, ("archived", "boolean", True), ("id", "integer", True)),
            gone(f"{table}_archive"),
            asks(
                f"SELECT archived FROM public.{table} WHERE id = {NEW_ID}",
                (False,),
                setup=f"INSERT INTO public.{table} (id, title, changed_on) VALUES ({NEW_ID}, 'new', '2024-01-01')",
            ),
            refuses(f"INSERT INTO public.{table} VALUES ({unseen[table][0]['id']}, 'x', '2024-01-01')", UNIQUE),
            plain(table),
        ),
        reference=add + put.format(conflict) + drop,
        mistakes=(
            add + put.format(other) + drop,
            add + put.format(conflict),
            add + put.format(conflict).replace("changed_on, true ", "changed_on, false ") + drop,
        ),
    )


def _by_id(row: Row) -> int:
    return int(str(row["id"]))


KINDS = (
    MigrationKind(name="rename", variants=("table", "table and column", "live rows"), write=rename),
    MigrationKind(name="join table", variants=tuple(LISTS), write=join_table),
    MigrationKind(name="merge", variants=tuple(MERGES), write=merge),
)
"""Kinds of migration that are about tables."""

"""Migrations of keys and of whole tables: constraints against duplicates, orphans and free text; renamed, split and
merged tables.

Each function writes one kind of problem: it draws names and rows, the request states everything that the queries check,
and Python computes their expected answers from the unseen rows. Existing rows violate the new constraint and must be
repaired first, without losing the rows that belong to them.
"""

from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType

from etude.tasks.migrations.problems import (
    FOREIGN,
    NEW_ID,
    NOT_NULL,
    PAIRS,
    PEOPLE,
    THINGS,
    UNIQUE,
    MigrationKind,
    MigrationProblem,
    Row,
    Rows,
    expect_answer,
    expect_columns,
    expect_constraint,
    expect_error,
    expect_no_column,
    expect_no_relation,
    expect_ordinary_tables,
    expect_rows,
    random_dates,
    random_ids,
    shuffled,
)
from etude.types import Json

MAILBOXES = ("ada", "alan", "grace", "edsger", "barbara", "donald", "frances", "john", "niklaus", "radia")
TOPIC_NAMES = (("genre", "genres"), ("category", "categories"), ("topic", "topics"), ("subject", "subjects"))
"""A column, and the table that replaces it."""
TOPICS = ("history", "travel", "science fiction", "poetry", "cooking", "art")

SURVIVORS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "oldest": ("the lowest id stays", "email", "id"),
        "latest": ("the one with the latest seen_on stays", "email", "seen_on DESC"),
        "folded": (
            "they differ in case and in spaces around them, too, and are kept in lower case without spaces; the lowest "
            "id stays",
            "lower(btrim(email))",
            "id",
        ),
    }
)
"""Variant → which duplicate stays in words, SQL for the key of duplicates, and SQL that sorts the survivor first."""


def unique(variant: str, rng: Random) -> MigrationProblem:
    """Migration: a unique constraint on a column with duplicates; other rows refer to them."""
    people, notes = rng.choice(PEOPLE), rng.choice(("notes", "devices", "addresses", "messages"))
    words, same, first = SURVIVORS[variant]

    def draw() -> Rows:
        boxes = shuffled(rng, [*MAILBOXES, *MAILBOXES[:6], *MAILBOXES[:3]])
        if variant == "folded":
            boxes = [rng.choice((box, box.title(), box.upper(), f" {box}")) for box in boxes]
        rows = zip(random_ids(rng, len(boxes)), boxes, random_dates(rng, len(boxes)), strict=True)
        owners: list[Row] = [{"id": i, "email": f"{box}@example.org", "seen_on": day} for i, box, day in rows]
        belongings = [*(row["id"] for row in owners), *(row["id"] for row in rng.choices(owners, k=9))]
        return {
            people: owners,
            notes: [{"id": i, "owner_id": owner} for i, owner in zip(random_ids(rng, 28), belongings, strict=True)],
        }

    seen, unseen = draw(), draw()
    stays, selected = _survivors(variant, unseen[people])
    ranked = f"SELECT id, first_value(id) OVER (PARTITION BY {same} ORDER BY {first}) AS stays FROM {people}"
    point = f"UPDATE {notes} n SET owner_id = r.stays FROM ({ranked}) r WHERE r.id = n.owner_id;\n"
    delete = f"DELETE FROM {people} p USING ({ranked}) r WHERE r.id = p.id AND r.stays <> p.id;\n"
    fold = f"UPDATE {people} SET email = lower(btrim(email));\n" * (variant == "folded")
    constrain = f"ALTER TABLE {people} ADD UNIQUE (email);\n"
    other = {"id": "id DESC", "seen_on DESC": "id"}[first]
    return MigrationProblem(
        request=f"Make {people}.email unique by a constraint. Some are there several times: {words}, the others are "
        f"deleted, and what belonged to them in {notes} (owner_id) belongs to the one that stays.",
        schema=f"CREATE TABLE {people} (id integer PRIMARY KEY, email text NOT NULL, seen_on date NOT NULL);\n"
        f"CREATE TABLE {notes} (id integer PRIMARY KEY, owner_id integer NOT NULL REFERENCES {people} "
        "ON DELETE CASCADE);",
        seen=seen,
        unseen=unseen,
        queries=(
            expect_rows(people, ("id", "email", "seen_on"), selected),
            expect_rows(
                notes, ("id", "owner_id"), [{**row, "owner_id": stays[row["owner_id"]]} for row in unseen[notes]]
            ),
            expect_error(
                f"INSERT INTO public.{people} VALUES ({NEW_ID + 1}, 'new@example.org', '2024-02-01')",
                UNIQUE,
                setup=f"INSERT INTO public.{people} VALUES ({NEW_ID}, 'new@example.org', '2024-01-01')",
            ),
            expect_error(f"INSERT INTO public.{notes} VALUES ({NEW_ID}, {NEW_ID})", FOREIGN),
            expect_constraint(people, "u", "email"),
            expect_ordinary_tables(people, notes),
        ),
        reference=point + delete + fold + constrain,
        mistakes=(
            delete + fold + constrain,
            point + delete + fold,
            (point + delete).replace(f"ORDER BY {first}", f"ORDER BY {other}") + fold + constrain,
        ),
    )


def _survivors(variant: str, owners: Sequence[Row]) -> tuple[dict[Json, Json], list[Row]]:
    """The map from each row's id to the id of its survivor, and the surviving rows."""
    selected: dict[str, Row] = {}
    for row in owners:
        email = str(row["email"]).strip().lower()
        if email not in selected or (variant == "latest" and str(row["seen_on"]) > str(selected[email]["seen_on"])):
            selected[email] = {**row, "email": email}
    stays = {row["id"]: selected[str(row["email"]).strip().lower()]["id"] for row in owners}
    return stays, sorted(selected.values(), key=lambda row: int(str(row["id"])))


ORPHANS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "set null": ("get NULL", "SET NULL", "its {child} get NULL"),
        "cascade": ("are deleted", "CASCADE", "its {child} are deleted with it"),
        "placeholder": (
            "get a new row of {parent} with id 0 and name unknown",
            "RESTRICT",
            "it is refused while it has any {child}",
        ),
    }
)
"""Variant → the repair of orphans in words, the action on deletion, and that action in words."""


def foreign_key(variant: str, rng: Random) -> MigrationProblem:
    """Migration: a foreign key on a column with references to deleted rows and with NULLs."""
    parent, child, key = rng.choice(PAIRS)
    words, action, deletion = (text.format(parent=parent, child=child) for text in ORPHANS[variant])

    def draw() -> Rows:
        ids = random_ids(rng, 16)
        lost, present = ids[1::4], [i for place, i in enumerate(ids) if place % 4 != 1]
        owners = shuffled(rng, [*present, *present, *lost, *lost, None, None, None])
        return {
            parent: [{"id": i, "name": f"{parent} {i}"} for i in present],
            child: [{"id": i, key: owner} for i, owner in zip(random_ids(rng, len(owners)), owners, strict=True)],
        }

    seen, unseen = draw(), draw()
    present = {row["id"] for row in unseen[parent]}
    parents, children = list(unseen[parent]), list(unseen[child])
    orphan = f"{key} IS NOT NULL AND NOT EXISTS (SELECT FROM {parent} p WHERE p.id = {key})"
    if variant == "cascade":
        children = [row for row in children if row[key] is None or row[key] in present]
        repair = f"DELETE FROM {child} WHERE {orphan};\n"
    else:
        instead = 0 if variant == "placeholder" else None
        children = [row if row[key] in present else {**row, key: row[key] and instead} for row in children]
        repair = f"UPDATE {child} SET {key} = {'NULL' if instead is None else instead} WHERE {orphan};\n"
    if variant == "placeholder":
        parents.insert(0, {"id": 0, "name": "unknown"})
        repair = f"INSERT INTO {parent} VALUES (0, 'unknown');\n{repair}"
    constrain = f"ALTER TABLE {child} ADD FOREIGN KEY ({key}) REFERENCES {parent} ON DELETE {{}};\n"
    named = rng.choice(sorted(present, key=str))
    without = {
        "set null": [(row["id"], None if row[key] == named else row[key]) for row in children],
        "cascade": [(row["id"], row[key]) for row in children if row[key] != named],
    }
    remove = f"DELETE FROM public.{parent} WHERE id = {named}"
    listed = f"SELECT id, {key} FROM public.{child} ORDER BY id"
    return MigrationProblem(
        request=f"Make {child}.{key} a validated foreign key to {parent}.id. Some refer to rows that are gone: those "
        f"{words}. Rows of {child} without any stay as they are. When a row of {parent} is deleted later, {deletion}.",
        schema=f"CREATE TABLE {parent} (id integer PRIMARY KEY, name text NOT NULL);\n"
        f"CREATE TABLE {child} (id integer PRIMARY KEY, {key} integer);",
        seen=seen,
        unseen=unseen,
        queries=(
            expect_rows(child, ("id", key), children),
            expect_rows(parent, ("id", "name"), parents),
            expect_error(f"INSERT INTO public.{child} VALUES ({NEW_ID}, {NEW_ID})", FOREIGN),
            expect_answer(listed, *without[variant], setup=remove)
            if variant in without
            else expect_error(remove, FOREIGN),
            expect_constraint(child, "f", key),
            expect_ordinary_tables(parent, child),
        ),
        reference=repair + constrain.format(action),
        mistakes=(
            repair,
            repair.replace(f"{key} IS NOT NULL AND ", "") + constrain.format(action)
            if variant != "set null"
            else constrain.format(action).replace(";", " NOT VALID;"),
            repair + constrain.format("NO ACTION" if variant != "placeholder" else "CASCADE"),
        ),
    )


LOOKUPS: Mapping[str, tuple[str, str, bool]] = MappingProxyType(
    {
        "exact": ("Rows without any stay without.", "{0}", False),
        "folded": (
            "They differ in case and in spaces around them, which does not make them different: keep them in lower "
            "case, without the spaces. Rows without any stay without.",
            "lower(btrim({0}))",
            False,
        ),
        "required": ("Rows without any get other.", "coalesce({0}, 'other')", True),
    }
)
"""Variant → the rule for irregular rows in words, SQL for the name of a row's entry, and true if every row has one."""


def lookup(variant: str, rng: Random) -> MigrationProblem:
    """Migration: a column of repeated text becomes a lookup table and a foreign key."""
    table = rng.choice(THINGS)
    column, entries = rng.choice(TOPIC_NAMES)
    words, name, required = LOOKUPS[variant]
    name, key = name.format(column), f"{column}_id"

    def draw() -> list[Row]:
        values: list[str | None] = [*TOPICS[1:], *rng.choices(TOPICS[1:], k=12)]
        if variant == "folded":
            values = [rng.choice((str(value).upper(), f" {value}", f"{str(value).title()} ")) for value in values]
            values += [TOPICS[1], TOPICS[1].upper()]
        values += [None, None, None]
        return [{"id": i, column: v} for i, v in zip(random_ids(rng, len(values)), shuffled(rng, values), strict=True)]

    def after(value: Json) -> Json:
        if value is None:
            return "other" if required else None
        return str(value).strip().lower()

    seen, unseen = draw(), draw()
    named = sorted({str(after(row[column])) for row in unseen if after(row[column]) is not None})
    create = f"CREATE TABLE {entries} (id integer GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, "
    create += "name text NOT NULL UNIQUE);\n"
    fill = f"INSERT INTO {entries} (name) SELECT DISTINCT {name} FROM {table} WHERE {name} IS NOT NULL;\n"
    add = f"ALTER TABLE {table} ADD COLUMN {key} integer REFERENCES {entries};\n"
    point = f"UPDATE {table} t SET {key} = e.id FROM {entries} e WHERE e.name = {name};\n"
    strict = f"ALTER TABLE {table} ALTER {key} SET NOT NULL;\n" * required
    drop = f"ALTER TABLE {table} DROP COLUMN {column};\n"
    steps = (create, fill, add, point, strict, drop)
    return MigrationProblem(
        request=f"Move {table}.{column} to a table {entries} (id integer, given by the database, primary key; name "
        f"text, unique, never NULL), one row for each that is in use, to which a new column {table}.{key} refers by a "
        f"foreign key. {words} " + (f"{key} is never NULL. " if required else "") + f"Drop {table}.{column}.",
        schema=f"CREATE TABLE {table} (id integer PRIMARY KEY, {column} text);",
        seen={table: seen},
        unseen={table: unseen},
        queries=(
            expect_answer(
                f"SELECT t.id, e.name FROM public.{table} t LEFT JOIN public.{entries} e ON e.id = t.{key} "
                "ORDER BY t.id",
                *((row["id"], after(row[column])) for row in unseen),
            ),
            expect_answer(
                f'SELECT name FROM public.{entries} ORDER BY name COLLATE "C"', *((value,) for value in named)
            ),
            expect_columns(table, (key, "integer", required)),
            expect_columns(entries, ("id", "integer", True), ("name", "text", True)),
            expect_no_column(table, column),
            expect_error(f"INSERT INTO public.{entries} (name) VALUES ('{named[0]}')", UNIQUE),
            expect_constraint(entries, "u", "name"),
            expect_constraint(table, "f", key),
            expect_error(f"INSERT INTO public.{table} (id, {key}) VALUES ({NEW_ID}, {NEW_ID})", FOREIGN),
            expect_error(f"INSERT INTO public.{entries} (name) VALUES (NULL)", NOT_NULL),
            expect_ordinary_tables(table, entries),
        ),
        reference="".join(steps),
        mistakes=(
            "".join(steps[:-1]),
            "".join((create.replace(" UNIQUE", ""), *steps[1:])),
            "".join((create, fill, add.replace(f" REFERENCES {entries}", ""), point, strict, drop)),
        ),
    )


RENAMES = (("clients", "customers"), ("goods", "products"), ("posts", "articles"), ("staff", "employees"))
"""A table's old name and its new one."""
TAGS = ("red", "green", "blue", "old", "new", "heavy", "fragile", "spare")
INVENTORY_TABLES = ("jobs", "leases", "contracts", "invoices", "accounts")


def rename(variant: str, rng: Random) -> MigrationProblem:
    """Migration: a renamed table, with a writable view for old programs."""
    old, new = rng.choice(RENAMES)
    column = "label" if variant == "table and column" else "title"

    def draw() -> list[Row]:
        ids, days = random_ids(rng, 20), random_dates(rng, 20)
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
            expect_rows(new, ("id", column, "ended_on"), after),
            expect_rows(old, ("id", "title", "ended_on"), shown),
            expect_columns(new, ("id", "integer", True), (column, "text", True), ("ended_on", "date", False)),
            expect_columns(old, ("id", "integer", False), ("title", "text", False), ("ended_on", "date", False)),
            expect_answer(f"SELECT relkind::text FROM pg_class WHERE oid = 'public.{old}'::regclass", ("v",)),
            expect_answer(
                f"SELECT {column} FROM public.{new} WHERE id = {NEW_ID}",
                ("late",),
                setup=f"INSERT INTO public.{old} (id, title) VALUES ({NEW_ID}, 'late')",
            ),
            expect_error(f"INSERT INTO public.{new} (id, {column}) VALUES ({unseen[0]['id']}, 'again')", UNIQUE),
            expect_ordinary_tables(new),
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
"""Variant → type of the column, the notation of the list in words, and SQL that splits it."""


def join_table(variant: str, rng: Random) -> MigrationProblem:
    """Migration: a list in a column becomes rows of a join table; entries may be duplicate or empty."""
    table, column, links = rng.choice(THINGS), rng.choice(("tags", "marks", "words")), "{0}_{1}"
    kind, words, apart = (text.format(column) for text in LISTS[variant])
    links, key, entry = links.format(table, column), f"{table[:-1]}_id", column[:-1]

    def draw() -> list[tuple[int, list[str]]]:
        drawn = [rng.sample(TAGS, rng.randrange(1, 4)) for _ in range(18)]
        for place, tags in enumerate(drawn):
            tags += {0: [tags[0]], 1: [""], 2: [tags[-1], " "]}.get(place % 5, [])
        return list(zip(random_ids(rng, 20), shuffled(rng, [*drawn, [], [""]]), strict=True))

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
            expect_answer(f'SELECT {key}, {entry} FROM public.{links} ORDER BY {key}, {entry} COLLATE "C"', *pairs),
            expect_rows(table, ("id",), [{"id": i} for i, _ in unseen]),
            expect_columns(links, (key, "integer", True), (entry, "text", True)),
            expect_no_column(table, column),
            expect_error(f"INSERT INTO public.{links} VALUES ({present}, '{pairs[0][1]}')", UNIQUE),
            expect_error(f"INSERT INTO public.{links} VALUES ({NEW_ID}, 'x')", FOREIGN),
            expect_constraint(links, "f", key),
            expect_answer(
                f"SELECT count(*) FROM public.{links} WHERE {key} = {present}",
                (0,),
                setup=f"DELETE FROM public.{table} WHERE id = {present}",
            ),
            expect_ordinary_tables(table, links),
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
"""Variant → which of two rows with one id stays in words, and the conflict clause of the merge."""


def merge(variant: str, rng: Random) -> MigrationProblem:
    """Migration: a table and its archive become one; some ids are in both."""
    table = rng.choice(INVENTORY_TABLES)
    words, conflict = MERGES[variant]
    replace = "title = excluded.title, changed_on = excluded.changed_on, archived = true"
    words, conflict = words.format(table), conflict.format(table, replace)

    def draw() -> Rows:
        ids, days = random_ids(rng, 24), random_dates(rng, 34)
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
            expect_rows(table, ("id", "title", "changed_on", "archived"), sorted(merged.values(), key=_by_id)),
            expect_columns(table, ("archived", "boolean", True), ("id", "integer", True)),
            expect_no_relation(f"{table}_archive"),
            expect_answer(
                f"SELECT archived FROM public.{table} WHERE id = {NEW_ID}",
                (False,),
                setup=f"INSERT INTO public.{table} (id, title, changed_on) VALUES ({NEW_ID}, 'new', '2024-01-01')",
            ),
            expect_error(f"INSERT INTO public.{table} VALUES ({unseen[table][0]['id']}, 'x', '2024-01-01')", UNIQUE),
            expect_ordinary_tables(table),
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
    MigrationKind(name="unique", variants=tuple(SURVIVORS), write=unique),
    MigrationKind(name="foreign key", variants=tuple(ORPHANS), write=foreign_key),
    MigrationKind(name="lookup table", variants=tuple(LOOKUPS), write=lookup),
    MigrationKind(name="rename", variants=("table", "table and column", "live rows"), write=rename),
    MigrationKind(name="join table", variants=tuple(LISTS), write=join_table),
    MigrationKind(name="merge", variants=tuple(MERGES), write=merge),
)
"""Kinds of migration of keys and tables."""
